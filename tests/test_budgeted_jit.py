"""``jaxpipe.jit``: a step of one's own within a budget."""

import copy
import dataclasses
import functools
import gc
import re
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from tests.support.compare import assert_same_bits
from tests.support.plain_steps import plainly, reserved


pytestmark = pytest.mark.optimized


def assert_equal(given, expected):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(*map(numbers, (a, b)))


def numbers(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key) else x


class Blocks(nn.Module):
    depth: int = 6
    width: int = 32

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x)


DecoratedBlocks = jaxpipe.memory_encoded(Blocks)


@pytest.fixture(scope="module")
def training():
    """A Linen training step as Flax's examples write it, and its arguments."""
    net = DecoratedBlocks()
    x, y = jax.random.normal(jax.random.key(0), (1024, 32)), jnp.arange(1024) % 10
    params = net.init(jax.random.key(1), x)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3)).replace(step=jnp.int32(0))

    def step(state, x, y):
        def loss(params):
            logits = state.apply_fn({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return step, (state, x, y)


@pytest.mark.core
@pytest.mark.parametrize("share", [1.0, 0.7, 0.5])
def test_a_train_state_step_keeps_a_budget_with_the_values_of_the_plain_step(training, share):
    step, args = training
    expected, plain = plainly(step, *args, donate_argnums=0)
    budgeted = jaxpipe.jit(step, memory=int(share * plain), donate_argnums=0)
    lowered = budgeted.lower(*args)
    assert reserved(lowered.compile()) <= share * plain
    assert lowered.plan.needed_bytes == reserved(lowered.compile()) and lowered.plan.plain_bytes == plain
    assert_equal(budgeted(*jax.tree.map(jnp.copy, args)), expected)


@pytest.mark.slow
def test_larger_budgets_run_no_more_products(training):
    step, args = training
    plain = plainly(step, *args)[1]
    for shares in ((0.5, 0.6, 0.7, 0.8, 1.0), (1.0, 0.75, 0.65, 0.55, 0.45)):
        plans = [jaxpipe.jit(step, memory=int(share * plain)).lower(*args).plan for share in shares]
        products = [plan.products for plan in sorted(plans, key=lambda plan: plan.budget_bytes)]
        assert products == sorted(products, reverse=True)


def test_a_refusal_names_a_budget_that_is_kept(training):
    step, args = training
    with pytest.raises(jaxpipe.MemoryBudgetError, match="as it is") as caught:
        jaxpipe.jit(step, memory="400kB").lower(*args)
    smallest = caught.value.smallest
    assert reserved(jaxpipe.jit(step, memory=smallest).lower(*args).compile()) <= smallest
    with pytest.raises(jaxpipe.MemoryBudgetError) as nearer:  # more small levels are compiled for it
        jaxpipe.jit(step, memory=int(0.85 * smallest)).lower(*args)
    assert 0.85 * smallest < nearer.value.smallest <= smallest


def test_what_is_known_of_a_step_is_not_compiled_again(training, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path / "profiles"))
    step, args = training
    memory = int(0.5 * plainly(step, *args)[1])
    first = jaxpipe.jit(step, memory=memory).lower(*args).plan
    again = jaxpipe.jit(step, memory=memory).lower(*args).plan
    assert again.compilations == 1 < first.compilations
    assert (again.storage, again.needed_bytes) == (first.storage, first.needed_bytes)


def test_arguments_of_other_types_are_planned_as_the_first_ones(training):
    step, (state, x, y) = training
    memory = int(0.5 * plainly(step, state, x, y)[1])
    budgeted = jaxpipe.jit(step, memory=memory)
    first = budgeted.lower(state.replace(step=0), x, y).plan  # as TrainState.create has it
    second = budgeted.lower(state, x, y).plan
    assert second.storage == first.storage and second.compilations == 1
    number, weak = (budgeted.lower(state.replace(step=k), x, y) for k in (7, jnp.asarray(7)))
    assert number.plan is first and weak.plan is first  # a number is a scalar of weak type


@pytest.mark.core
def test_nnx_modules_and_optimizers_change_as_under_nnx_jit():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(8)])
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.gelu(layer(x))
            return self.dropout(self.norm(x))

    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    x = jax.random.normal(jax.random.key(0), (1024, 32))

    def trained(make, jitted):
        model = make(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        losses = [jitted(model, optimizer, x) for _ in range(3)]
        return losses, nnx.state((model, optimizer))

    plain_step, model = nnx.jit(step), Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    plain = reserved(plain_step.lower(model, optimizer, x).compile())
    expected = trained(Net, plain_step)
    budgeted = jaxpipe.jit(step, memory=int(0.8 * plain))
    assert_equal(trained(jaxpipe.memory_encoded(Net), budgeted), expected)


def test_nnx_modules_with_a_configuration_that_has_no_hash():
    @dataclasses.dataclass
    class Config:
        width: int = 32

    class Net(nnx.Module):
        def __init__(self, config, rngs):
            self.config = config
            self.layers = nnx.List([nnx.Linear(config.width, config.width, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    traced = []

    def step(model, x):
        traced.append(1)
        value, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), gradients))
        return value

    def trained(jitted):
        model = jaxpipe.memory_encoded(Net)(Config(), nnx.Rngs(0))
        return [jitted(model, jnp.ones((1024, 32))) for _ in range(3)]

    given = trained(jaxpipe.jit(step, memory="1GiB"))
    assert len(traced) == 1
    assert_equal(given, trained(nnx.jit(step)))


def test_micro_batches_in_a_scan():
    @jaxpipe.memory_encoded
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(params, batch):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch.reshape(4, -1, 64))
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, total)

    params = [jax.random.normal(jax.random.key(k), (64, 64)) / 8 for k in range(8)]
    batch = jax.random.normal(jax.random.key(9), (8192, 64))
    expected, plain = plainly(step, params, batch)
    budgeted = jaxpipe.jit(step, memory=int(0.85 * plain))
    plan = budgeted.lower(params, batch).plan
    assert plan.needed_bytes <= 0.85 * plain and plan.products > plan.plain_products
    assert_equal(budgeted(params, batch), expected)


def test_two_losses():
    """A GAN's step: two decorated modules, one of them differentiated by its weights and by its input."""

    def tower(layers):
        def run(params, x):
            for k in range(layers):
                x = jnp.tanh(x @ params[k])
            return x

        return run

    generate, judge = jaxpipe.memory_encoded(tower(16)), jaxpipe.memory_encoded(tower(8))

    def step(g, d, noise, real):
        def judge_loss(d):
            return (judge(d, generate(g, noise)) - judge(d, real)).mean()

        d = jax.tree.map(lambda w, dw: w - 0.1 * dw, d, jax.grad(judge_loss)(d))
        gradients = jax.grad(lambda g: -judge(d, generate(g, noise)).mean())(g)
        return jax.tree.map(lambda w, dw: w - 0.1 * dw, g, gradients), d

    g, d = ([jax.random.normal(jax.random.key(k), (64, 64)) / 8 for k in range(n)] for n in (16, 8))
    noise, real = (jax.random.normal(jax.random.key(k), (4096, 64)) for k in (7, 8))
    expected, plain = plainly(step, g, d, noise, real)
    budgeted = jaxpipe.jit(step, memory=int(0.8 * plain))
    assert budgeted.lower(g, d, noise, real).plan.needed_bytes <= 0.8 * plain
    assert_equal(budgeted(g, d, noise, real), expected)


def test_a_step_sharded_over_devices_counts_bytes_of_one(training):
    step, (state, x, y) = training
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def place(leaf):
        spec = P("data") if leaf.ndim and leaf.shape[0] % 4 == 0 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    args = jax.tree.map(place, (state, x, y))
    expected, plain = plainly(step, *args)
    budgeted = jaxpipe.jit(step, memory=int(0.7 * plain))
    assert reserved(budgeted.lower(*args).compile()) <= 0.7 * plain
    result = budgeted(*args)
    # The parts of a sum over devices are added in another order where another program gathers them.
    for a, b in zip(jax.tree.leaves(result[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_refusal_counts_bytes_of_these_shardings():
    """Arguments of the same shapes that are sharded otherwise take other bytes."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    weights, x = [jnp.eye(32)] * 4, jnp.ones((1024, 32))
    parts = jax.device_put(x, NamedSharding(mesh, P("data")))
    step, least = jax.grad(tower), []
    budgeted = jaxpipe.jit(step, memory="20kB")
    for rows in (parts, x):
        with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
            budgeted.lower(weights, rows)
        least.append(caught.value.smallest)
    assert reserved(jaxpipe.jit(step, memory=least[1]).lower(weights, x).compile()) <= least[1]
    assert least[0] < least[1]


def test_static_arguments_and_shapes(training):
    step, (state, x, y) = training

    @functools.partial(jaxpipe.jit, memory="1GiB", static_argnames="scaled", donate_argnums=0)
    def named(state, x, y, scaled=False):
        return step(state, 2 * x if scaled else x, y)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, x, y))
    assert "tensor" in named.lower(*shapes, scaled=True).as_text()
    copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    assert_equal(named(copies[0], x, y, scaled=True), plainly(step, state, 2 * x, y)[0])
    assert_equal(named(copies[1], x, y), plainly(step, state, x, y)[0])


def test_arguments_are_not_kept_on_the_device(training):
    step, args = training
    budgeted, copies = jaxpipe.jit(step, memory="1GiB"), jax.tree.map(jnp.copy, args)
    buffers = [weakref.ref(leaf) for leaf in jax.tree.leaves(copies)]
    jax.block_until_ready(budgeted(*copies))
    del copies
    gc.collect()
    assert not [buffer for buffer in buffers if buffer() is not None]


def plain_tower(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


tower = jaxpipe.memory_encoded(plain_tower)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_static_values_are_planned_apart(order):
    def step(weights, x, watched):
        gradients = jax.grad(tower)(weights, x)
        return (gradients, jnp.tile(x, (1, 8))) if watched else gradients

    args = [jnp.ones((32, 32)) / 32] * 4, jnp.ones((2048, 32))
    plain = {x: plainly(step, *args, x, static_argnums=2)[1] for x in (True, False)}
    budgeted = jaxpipe.jit(step, memory=plain[False], static_argnums=2)
    for watched in order:
        if watched:
            with pytest.raises(jaxpipe.MemoryBudgetError, match=f"{plain[True]} bytes"):
                budgeted.lower(*args, watched)
        else:
            assert budgeted.lower(*args, watched).plan.needed_bytes == plain[False]


def quantizer(clipped):
    """A quantization whose derivative is the identity, or zero far from zero: programs differ in their rules alone."""

    @jax.custom_vjp
    def quantized(x):
        return jnp.round(8 * x) / 8

    quantized.defvjp(
        lambda x: (quantized(x), jnp.abs(x) < 0.5 if clipped else None),
        lambda inside, cotangent: (cotangent if inside is None else cotangent * inside,),
    )
    return quantized


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_losses_that_differ_in_a_derivative_rule_alone(order):
    def loss_with(quantized):
        @jaxpipe.memory_encoded
        def loss(weights, x):
            for w in weights:
                x = jax.nn.gelu(quantized(x) @ quantized(w))
            return (x**2).mean()

        return loss

    first, second = (loss_with(quantizer(clipped)) for clipped in order)

    def step(weights, x):
        return jax.grad(first)(weights, x), jax.grad(second)(weights, x)

    keys = jax.random.split(jax.random.key(0), 5)
    args = [jax.random.normal(key, (32, 32)) / 6 for key in keys[1:]], jax.random.normal(keys[0], (512, 32))
    expected, plain = plainly(step, *args)
    budgeted = jaxpipe.jit(step, memory=int(0.9 * plain))
    assert_equal(budgeted(*args), expected)
    assert budgeted.lower(*args).plan.storage != "plain"
    assert not np.array_equal(expected[0][0], expected[1][0])


def test_callbacks_run_as_often_as_in_the_plain_step():
    layers = []

    @jaxpipe.memory_encoded
    def loss(weights, x):
        for k, w in enumerate(weights):
            x = jax.nn.gelu(x @ w)
            jax.debug.callback(lambda _, k=k: layers.append(k), x.sum())
        return (x**2).mean()

    def called(step, *args):
        layers.clear()
        jax.block_until_ready(step(*args))
        jax.effects_barrier()
        return sorted(layers)

    args = [jnp.eye(32)] * 4, jnp.ones((512, 32))
    budgeted = jaxpipe.jit(jax.grad(loss), memory=int(0.9 * plainly(jax.grad(loss), *args)[1]))
    assert budgeted.lower(*args).plan.storage != "plain"
    with jaxpipe.without_encoding():
        expected = called(jax.jit(jax.grad(loss)), *args)
    assert called(budgeted, *args) == expected == [0, 1, 2, 3]


def test_other_types_of_the_same_shapes_are_planned_apart():
    args = [jnp.ones((32, 32)) / 32] * 4, jnp.ones((2048, 32))
    budgeted = jaxpipe.jit(jax.value_and_grad(tower), memory="1GiB")
    for dtype in (jnp.float32, jnp.bfloat16):
        args = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), args)
        assert budgeted.lower(*args).plan.plain_bytes == plainly(jax.value_and_grad(tower), *args)[1]


def test_other_settings_of_jax_are_planned_apart():
    args = [jnp.ones((32, 32)) / 32] * 4, jnp.ones((2048, 32))
    budgeted = jaxpipe.jit(jax.value_and_grad(tower), memory="1GiB")
    for precision in ("default", "highest", "default"):
        with jax.default_matmul_precision(precision):
            expected = str(jax.make_jaxpr(jax.value_and_grad(plain_tower))(*args)).count("HIGHEST")
            assert str(budgeted.lower(*args).jaxpr).count("HIGHEST") == expected
    assert not expected


def test_a_negative_place_counts_from_the_last_argument():
    def step(weights, x, factor):
        assert isinstance(factor, int)
        return jax.grad(tower)(weights, factor * x)

    args = {"weights": [jnp.ones((32, 32)) / 32] * 4, "x": jnp.ones((8, 32)), "factor": 3}
    budgeted = jaxpipe.jit(step, memory="1GiB", static_argnums=np.int64(-1))
    expected = plainly(step, *args.values(), static_argnums=2)[0]
    assert_equal(budgeted(*args.values()), expected)
    try:
        jax.jit(step, static_argnums=-1)(**args)
    except ValueError:  # jax 0.10 counts without keyword arguments
        return
    assert_equal(budgeted(**args), expected)
    assert_equal(budgeted(args.pop("weights"), **args), expected)


def test_numbers_that_are_not_static_are_not_planned_again(training):
    step, (state, x, y) = training
    traced = []

    @functools.partial(jaxpipe.jit, memory="1GiB", static_argnames="scaled")
    def counting(state, x, y, count, scaled):
        traced.append(count)
        return step(state, 2 * x if scaled else x, y), count + 1

    for count in range(3):
        (_, value), after = counting(state, x, y, count, scaled=True)
        assert after == count + 1
    assert len(traced) == 1
    assert_equal(value, plainly(step, state, 2 * x, y)[0][1])


def test_a_method_is_bound_as_that_of_jax_jit_is(training):
    step, args = training

    class Trainer:
        factor = 2

        @functools.partial(jaxpipe.jit, memory="1GiB", static_argnums=0)
        def budgeted(self, state, x, y):
            return step(state, self.factor * x, y)

        @functools.partial(jax.jit, static_argnums=0)
        def plain(self, state, x, y):
            return step(state, self.factor * x, y)

    trainer = Trainer()
    assert_equal(trainer.budgeted(*args), trainer.plain(*args))
    assert Trainer.budgeted.lower(trainer, *args).plan.storage == "plain"


def test_undecorated_steps():
    def step(w, x):
        return jax.grad(lambda w: (jnp.tanh(x @ w) @ w).sum())(w)

    args = jnp.ones((64, 64)), jnp.ones((1024, 64))
    assert jaxpipe.jit(step, memory="1GiB").lower(*args).plan.storage == "plain"
    with pytest.raises(jaxpipe.ModelError, match="nothing in it that is differentiated is decorated"):
        jaxpipe.jit(step, memory="100kB").lower(*args)


def test_stages_and_caches_are_those_of_a_jitted_function(training):
    step, args = training
    budgeted = jaxpipe.jit(step, memory="1GiB")
    lowered = budgeted.lower(*args)
    assert budgeted.lower(*args) is lowered
    assert copy.copy(lowered).plan == lowered.plan
    compiled = budgeted.trace(*args).lower().compile()
    assert_same_bits(compiled(*args), jax.jit(step)(*args))
    budgeted.clear_cache()
    assert budgeted.lower(*args) is not lowered


def test_wrong_usage(training):
    step, args = training
    with pytest.raises(jaxpipe.MemoryBudgetError, match="memory='much' is not a size"):
        jaxpipe.jit(step, memory="much")
    with pytest.raises(jaxpipe.ModelError, match="Pass a function"):
        jaxpipe.jit(3, memory="1GiB")
    with pytest.raises(jaxpipe.ModelError, match=r"type Compiled\. Pass a function"):
        jaxpipe.jit(jax.jit(jnp.sin).lower(1.0).compile(), memory="1GiB")
    with pytest.raises(jaxpipe.ModelError, match="inside another transformation"):
        jax.jit(jaxpipe.jit(step, memory="1GiB"))(*args)
    options = {"static_argnames": "sizes"}
    for jitted in jax.jit(lambda x, sizes: x, **options), jaxpipe.jit(lambda x, sizes: x, memory="1GiB", **options):
        with pytest.raises(ValueError, match="on-hashable static argument"):
            jitted(1.0, sizes=[1, 2])


@pytest.mark.parametrize("options", [{"donate_argnum": 0}, {"donate_argnums": 9}, {"static_argnames": "states"}])
def test_wrong_options_are_found_before_a_call_as_by_jax_jit(training, options):
    step, _ = training
    with pytest.raises((TypeError, ValueError)) as expected:
        jax.jit(step, **options)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        jaxpipe.jit(step, memory="1GiB", **options)
    assert callable(jaxpipe.jit(step, memory="1GiB", in_shardings=(nnx.StateSharding({...: P()}), None, None)))


def test_the_memory_of_the_device(training, monkeypatch):
    step, args = training
    assert jaxpipe.jit(step, memory="device").lower(*args).plan.storage == "plain"
    monkeypatch.setattr("jaxpipe.costs.device_memory.memory_of", lambda device: 2 * 10**6)
    with pytest.raises(jaxpipe.MemoryBudgetError, match="memory='device'"):
        jaxpipe.jit(step, memory="device").lower(*args)


def test_a_step_is_traced_twice_however_many_levels_are_tried(training, monkeypatch, tmp_path):
    """Once as it is and once with its decorated programs as equations."""
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path / "profiles"))
    step, args = training
    traced = []

    def counting(*args):
        traced.append(1)
        return step(*args)

    budgeted = jaxpipe.jit(counting, memory=int(0.35 * plainly(step, *args)[1]))
    plan = budgeted.lower(*args).plan
    budgeted(*args)
    assert len(traced) == 2 < plan.compilations


@jax.custom_vjp
def maximum(x):
    return x.max(1)


maximum.defvjp(
    lambda x: (x.max(1), (x, x.max(1))), lambda kept, g: (jnp.where(kept[0] == kept[1][:, None], g[:, None], 0),)
)


@pytest.mark.parametrize("maximum", [lambda x: x.max(1), maximum], ids=["of JAX", "with a rule"])
def test_the_gradient_of_a_maximum_goes_to_it_with_the_least_storage(maximum):
    """Numbers that are computed again and rounded otherwise are not equal to their maximum."""

    def loss(x, scale, bias):
        return jnp.sum(maximum(jnp.tanh(x * scale + bias) * scale + x) ** 2)

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((64, 300), (300,), (300,))]
    step = jax.value_and_grad(jaxpipe.memory_encoded(loss), (0, 1, 2))
    expected, _ = plainly(step, *args)
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(step, memory="1KiB").lower(*args)
    given = jaxpipe.jit(step, memory=f"{caught.value.smallest}B")(*args)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # float32, fused otherwise


@jax.custom_vjp
def highest(y):
    """A maximum whose rule looks for it in the backward pass."""
    return y.max(1)


def highest_backward(kept, cotangent):
    y, maximum = kept
    mask = (y == maximum[:, None]).astype(y.dtype)
    return (mask * (cotangent / mask.sum(1))[:, None],)


highest.defvjp(lambda y: (y.max(1), (y, y.max(1))), highest_backward)


def thresholded(y):
    """The mean of all that reach the maximum."""
    mask = y >= y.max(1, keepdims=True)
    return jnp.where(mask, y, 0).sum(1) / mask.sum(1)


@pytest.mark.parametrize("reduce", [lambda y: y.max(1), lambda y: y.min(1), thresholded, highest])
@pytest.mark.parametrize("codecs", ["fast", "smallest"])
def test_ties_get_all_of_the_gradient(reduce, codecs):
    """Numbers that are equal but for rounding. A bias added to all moves the maximum by as much, however rounded."""

    @functools.partial(jaxpipe.memory_encoded, codecs=codecs)
    def scaled(x, scale, bias):
        centered = x - x.mean(1, keepdims=True)
        return reduce(centered * (jax.lax.rsqrt(jnp.square(centered).mean(1, keepdims=True) + 1e-6) * scale) + bias)

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 1, 4)) * (1 + 6e-8 * rng.integers(0, 2, (16, 9, 4))), jnp.float32)
    scale, bias = jnp.asarray(rng.normal(size=(2, 4)), jnp.float32)
    _, pullback = jax.jit(functools.partial(jax.vjp, scaled))(x, scale, bias)  # two programs, as stages are run
    gradient = jax.jit(pullback)(jnp.ones((16, 4)))[2]
    np.testing.assert_allclose(gradient, 16.0, rtol=1e-5)  # 144 shares are added up; a lost tie is 0.7 % or more
