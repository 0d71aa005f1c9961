"""Explanations of a user's training step: bytes by cause against counts by hand, measures against the real thing."""

import dataclasses
import functools
import json
import math
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxpipe
from jaxpipe.costs.count_products import count_products
from jaxpipe.step import explain as explain_module
from jaxpipe.step import measures as measures_module
from jaxpipe.step.compiled_buffers import compile_with_buffers
from jaxpipe.targets.known import target_named
from tests.support.processes import environment


pytestmark = pytest.mark.compiles

ROWS, WIDTH, HIDDEN, CLASSES, BLOCKS = 96, 32, 64, 160, 3


def float_array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def int_array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


BATCH = {"x": float_array(ROWS, WIDTH), "y": int_array(ROWS)}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(x)))
        return nn.relu(x) if train else x


class Net(nn.Module):
    block: type = Block

    @nn.compact
    def __call__(self, x):
        for k in range(BLOCKS):
            x = self.block(name=f"Block_{k}")(x, True)
        return nn.Dense(CLASSES)(x)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_state(net):
    def make():
        variables = net.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
        return TrainState.create(apply_fn=net.apply, params=variables["params"], tx=optax.adam(1e-3))

    return jax.eval_shape(make)


def linen_step(state, batch):
    def loss(params):
        return cross_entropy(state.apply_fn({"params": params}, batch["x"]), batch["y"])

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def plain_step(weights, momentum, x, y):
    def loss(weights):
        hidden = jnp.tanh(x @ weights[0])
        return cross_entropy(hidden @ weights[1], y)

    gradients = jax.grad(loss)(weights)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum


PLAIN_ARGUMENTS = (
    [float_array(WIDTH, HIDDEN), float_array(HIDDEN, CLASSES)],
    [float_array(WIDTH, HIDDEN), float_array(HIDDEN, CLASSES)],
    float_array(ROWS, WIDTH),
    int_array(ROWS),
)


def bytes_of(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def xla_bytes(jitted, *args):
    """Arguments + results + temporaries - aliases, as XLA states them."""
    memory = jitted.lower(*args).compile().memory_analysis()
    assert memory is not None
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


def measure(explanation, start):
    return next(m for m in explanation.measures if m.name.startswith(start))


@functools.cache
def linen():
    return jaxpipe.explain(linen_step, linen_state(Net()), BATCH)


def test_the_parts_of_a_linen_step_are_those_counted_by_hand():
    explanation, state = linen(), linen_state(Net())
    causes = explanation.bytes_by_cause()
    parameters = 4 * (BLOCKS * (2 * WIDTH * HIDDEN + HIDDEN + WIDTH) + WIDTH * CLASSES + CLASSES)
    assert causes["parameters"] == parameters == bytes_of(state.params)
    assert causes["optimizer state"] == 2 * parameters + 4  # two moments, and the count of steps
    assert causes["batch"] == 4 * ROWS * (WIDTH + 1)
    assert causes["other arguments"] == 4  # the number of the step
    copies = causes["new state beside the old, as it is not donated"]
    assert abs(copies - 3 * parameters) <= 8  # and both numbers
    assert causes["logits and their gradient"] % (4 * ROWS * CLASSES) == 0
    assert explanation.total_bytes == sum(causes.values()) == xla_bytes(jax.jit(linen_step), state, BATCH)
    assert "not attributed" not in causes
    assert causes.get("unused between buffers", 0) < 0.01 * explanation.total_bytes  # alignment


def test_what_is_stored_is_told_by_module():
    stored = [part for part in linen().parts if part.cause == "stored for the backward pass"]
    large = [part for part in stored if part.bytes >= 4 * ROWS * WIDTH]
    assert large and all(part.name.startswith("Net/Block_") for part in large)
    assert {part.bytes for part in large} <= {4 * ROWS * WIDTH, 4 * ROWS * HIDDEN}


def test_donation_saves_what_it_says():
    explanation, arguments = linen(), (linen_state(Net()), BATCH)
    donated = xla_bytes(jax.jit(linen_step, donate_argnums=0), *arguments)
    best = measure(explanation, "donate")
    assert (best.line, best.products) == ("jax.jit(step, donate_argnums=0)", 0)
    assert (best.bytes, best.saved_bytes) == (donated, explanation.total_bytes - donated)
    assert best.saved_bytes > 0
    again = jaxpipe.explain(linen_step, *arguments, donate_argnums=0)
    assert again.total_bytes == donated and not any(m.name.startswith("donate") for m in again.measures)
    causes = again.bytes_by_cause()
    assert "new state beside the old, as it is not donated" not in causes
    # Of each block: what GELU takes, its tanh, and what it gives. XLA makes zeros of a gradient before all of these.
    assert causes["stored for the backward pass"] >= BLOCKS * 3 * 4 * ROWS * HIDDEN
    assert "at work in the forward pass" not in causes


@pytest.mark.versions
def test_wrapped_modules_need_what_the_written_lines_need():
    """XLA's bytes of the step with the decorator, or with remat, in the model's own source."""
    jitted = jax.jit(linen_step)
    plain = count_products(jitted.trace(linen_state(Net()), BATCH).jaxpr)[0]
    encoded = linen_state(jaxpipe.memory_encoded(Net)())
    remat = linen_state(Net(nn.remat(Block, static_argnums=(2,))))
    tried = dict[str, tuple[int, int]]()
    for name, state in (("decorate", encoded), ("compute", remat)):
        products = count_products(jitted.trace(state, BATCH).jaxpr)[0]
        tried[name] = (xla_bytes(jitted, state, BATCH), products - plain)
    explanation = linen()
    for name, expected in tried.items():
        if expected[0] < explanation.total_bytes:
            shown = measure(explanation, name)
            assert (shown.bytes, shown.products) == expected
        else:
            assert not any(m.name.startswith(name) for m in explanation.measures)
    if any(m.name.startswith("compute") for m in explanation.measures):
        shown = measure(explanation, "compute")
        assert shown.line == "Block = nn.remat(Block, static_argnums=(2,))  # below class Block"


def test_a_step_is_explained_again_as_the_first_time():
    """JAX has its trace already, and calls no module for it."""
    step, state = jax.jit(linen_step), linen_state(Net())
    first, second = (jaxpipe.explain(step, state, BATCH).measures for _ in range(2))
    assert first == second and any(m.name.startswith("a budget") for m in first)


@pytest.mark.parametrize("lifted", [nn.remat, nn.jit, jaxpipe.memory_encoded])
def test_measures_of_a_module_under_a_lifted_transformation(lifted):
    """Flax runs functions of its own on such modules, which are no methods to be wrapped."""
    net = lifted(Net)()
    explanation = jaxpipe.explain(linen_step, linen_state(net), BATCH)
    assert explanation.refused == ()
    assert explanation.total_bytes == xla_bytes(jax.jit(linen_step), linen_state(net), BATCH)
    remat = xla_bytes(jax.jit(linen_step), linen_state(lifted(Net)(nn.remat(Block, static_argnums=(2,)))), BATCH)
    shown = {m.bytes for m in explanation.measures if m.name.startswith("compute")}
    assert shown == ({remat} if remat < explanation.total_bytes else set())


def test_a_batch_with_the_shape_of_a_parameter_is_a_batch():
    params = {"a": jnp.ones((16, 64)), "b": jnp.ones((64, 16)), "c": jnp.ones((16, 1))}

    def loss(variables, x, y):
        a, b, c = variables["params"].values()
        return jnp.var((x @ a @ b @ c)[:, 0] - y)

    def step(variables, x, y):
        return jax.tree.map(lambda v, g: v - 0.1 * g, variables, jax.grad(loss)(variables, x, y))

    explanation = jaxpipe.explain(step, {"params": params}, jnp.ones((64, 16)), jnp.zeros(64))
    assert explanation.refused == ()
    causes = explanation.bytes_by_cause()
    assert (causes["parameters"], causes["batch"]) == (4 * (16 * 64 + 64 * 16 + 16), 4 * (64 * 16 + 64))


def test_measures_come_with_what_costs_nothing_first():
    measures = linen().measures
    assert linen().refused == ()
    assert measures and all(m.saved_bytes > 0 for m in measures)
    assert measures[0].products == 0 and not measures[0].is_estimated and measures[0].devices == 1
    alone = [m for m in measures if m.devices == 1 and not m.is_estimated]
    again = [m.saved_bytes / m.products for m in alone if m.products]
    assert again == sorted(again, reverse=True)


def test_a_plain_function_has_state_by_shape():
    explanation = jaxpipe.explain(plain_step, *PLAIN_ARGUMENTS)
    causes = explanation.bytes_by_cause()
    weights = 4 * (WIDTH * HIDDEN + HIDDEN * CLASSES)
    assert causes["parameters"] + causes.get("optimizer state", 0) == 2 * weights
    assert causes["batch"] == 4 * ROWS * (WIDTH + 1)
    assert measure(explanation, "donate").line == "jax.jit(step, donate_argnums=(0, 1))"
    assert explanation.products == 5  # two forward, two by the weights, one by the hidden layer
    assert explanation.batch == ROWS


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_half_the_batch_needs_what_a_step_with_added_gradients_needs(donated):
    def step_of(optimizer, rows):
        params = {f"w{k}": float_array(128, 128) for k in range(6)}

        def step(params, state, x):
            def loss(params, x):
                for w in params.values():
                    x = jnp.tanh(x @ w) + x
                return jnp.mean(x**2)

            updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        return step, params, jax.eval_shape(optimizer.init, params), float_array(rows, 128)

    optimizer = optax.adam(1e-3)
    shown = measure(jaxpipe.explain(*step_of(optimizer, 1024), donate_argnums=donated), "half")
    half, *args = step_of(optax.MultiSteps(optimizer, 2), 512)
    # What XLA copies for the condition of donated arrays is more than the estimate by a part of the parameters.
    assert shown.bytes == pytest.approx(xla_bytes(jax.jit(half, donate_argnums=donated), *args), rel=0.03)


def test_complex_parameters_are_parameters():
    def step(params, x):
        gradients = jax.grad(lambda params: jnp.abs(x @ params["w"]).sum())(params)
        return {"w": params["w"] - 0.1 * gradients["w"].conj()}

    complex_array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.complex64)
    explanation = jaxpipe.explain(step, {"w": complex_array((16, 8))}, complex_array((4, 16)))
    assert (explanation.bytes_by_cause()["parameters"], explanation.batch) == (16 * 8 * 8, 4)


def test_an_inference_function_is_told_nothing_of_gradients():
    params = jax.eval_shape(Net().init, jax.random.key(0), BATCH["x"])
    explanation = jaxpipe.explain(Net().apply, params, BATCH["x"])
    assert explanation.batch == ROWS and explanation.bytes_by_cause()["parameters"]
    assert not any("half" in m.name or "budget" in m.name for m in explanation.measures) and not explanation.refused


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_step(model, optimizer, x, y):
    value, gradients = nnx.value_and_grad(lambda model: cross_entropy(model(x), y))(model)
    optimizer.update(model, gradients)
    return value


def nnx_arguments(cls=NNXNet):
    model = cls(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), BATCH["x"], BATCH["y"]


@pytest.mark.slow
def test_an_nnx_step_is_compiled_by_nnx():
    arguments = nnx_arguments()
    parameters = nnx.state(arguments[0], nnx.Param)
    explanation = jaxpipe.explain(nnx_step, *arguments)
    causes = explanation.bytes_by_cause()
    assert explanation.refused == ()
    assert explanation.total_bytes == xla_bytes(nnx.jit(nnx_step), *arguments)
    assert causes["parameters"] == bytes_of(parameters)
    assert causes["optimizer state"] == 2 * bytes_of(parameters) + 8  # moments, counts of steps of Adam and of NNX
    assert causes["other state"] <= 2 * 4 * BLOCKS * WIDTH  # running mean and variance; what is not used is dropped
    assert any(part.name.startswith("NNXNet/blocks/0/up/") for part in explanation.parts)
    donated = xla_bytes(nnx.jit(nnx_step, donate_argnums=(0, 1)), *arguments)
    shown = measure(explanation, "donate")
    assert (shown.line, shown.bytes) == ("nnx.jit(step, donate_argnums=(0, 1))", donated)


class TiedNNXNet(NNXNet):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.last = self.blocks[0]


@pytest.mark.parametrize("optimizer", [nnx.Optimizer, pytest.param(nnx.ModelAndOptimizer, marks=pytest.mark.slow)])
def test_variables_that_nnx_modules_share_are_counted_once(optimizer):
    def step(model, optimizer, batch):
        value, gradients = nnx.value_and_grad(lambda model: (model.last(model(batch)[:, :WIDTH]) ** 2).mean())(model)
        optimizer.update(*([] if isinstance(optimizer, nnx.ModelAndOptimizer) else [model]), gradients)
        return value

    model = TiedNNXNet(nnx.Rngs(0))
    arguments = model, optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param), BATCH["x"]
    explanation = jaxpipe.explain(step, *arguments)
    causes, size = explanation.bytes_by_cause(), bytes_of(nnx.state(model, nnx.Param))
    assert explanation.refused == () and explanation.batch == ROWS
    assert explanation.total_bytes == xla_bytes(nnx.jit(step), *arguments)
    assert causes["parameters"] == size and size <= causes["optimizer state"] < size + 16  # and counts of steps
    assert causes["batch"] == bytes_of(BATCH["x"])


@pytest.mark.versions
def test_nnx_modules_need_what_a_decorated_class_needs():
    plain = jaxpipe.explain(nnx.jit(nnx_step), *nnx_arguments())
    encoded = xla_bytes(nnx.jit(nnx_step), *nnx_arguments(jaxpipe.memory_encoded(NNXNet)))
    shown = [m.bytes for m in plain.measures if m.name.startswith("decorate")]
    assert shown == ([encoded] if encoded < plain.total_bytes else [])


def test_sharding_divides_the_state():
    shown = measure(linen(), "shard over 8")
    state = bytes_of(linen_state(Net()))
    assert shown.devices == 8 and shown.bytes < linen().total_bytes - state


def test_the_largest_batch_fits_and_little_more_would_not(monkeypatch):
    room = 6 * jaxpipe.explain(plain_step, *PLAIN_ARGUMENTS).total_bytes
    target = explain_module.target_device

    def with_memory(*given):
        return dataclasses.replace(target(*given), memory=2 * room, others=(), target=target_named("H100"))

    monkeypatch.setattr(explain_module, "target_device", with_memory)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    explanation = jaxpipe.explain(plain_step, *PLAIN_ARGUMENTS)
    batch = explanation.largest_batch
    assert batch is not None
    needed = [
        xla_bytes(jax.jit(plain_step), *PLAIN_ARGUMENTS[:2], float_array(rows, WIDTH), int_array(rows))
        for rows in (batch, round(1.05 * batch))
    ]
    assert needed[0] <= room < needed[1]
    assert f"The largest batch that fits, as the step is: {batch}." in str(explanation)
    assert "JAX takes 0.50 of the" in str(explanation)


def test_it_prints_as_one_screen_html_and_json():
    explanation = linen()
    text = str(explanation)
    assert len(text.splitlines()) <= 48 and max(map(len, text.splitlines())) <= 80
    for shown in ("at the peak on cpu, a batch of 96", "optimizer state", "jax.jit(step, donate_argnums=0)"):
        assert shown in text
    assert "<table" in explanation._repr_html_()
    read = json.loads(explanation.to_json())
    assert read["total_bytes"] == explanation.total_bytes == sum(part["bytes"] for part in read["parts"])
    assert [m["line"] for m in read["measures"]] == [m.line for m in explanation.measures]


def test_a_measure_that_the_step_does_not_allow_is_told():
    def forward_mode(weights, x):
        net = Net()

        def loss(weights):
            return jnp.sum(jnp.asarray(net.apply({"params": weights}, x)))

        _, slope = jax.jvp(loss, (weights,), (weights,))
        return jax.tree.map(lambda w: w - slope, weights)

    weights = linen_state(Net()).params
    explanation = jaxpipe.explain(forward_mode, weights, BATCH["x"])
    refused, also = explanation.refused
    assert refused.startswith("decorate the model (DifferentiationError: Forward-mode")
    assert also.startswith("a budget (DifferentiationError: Forward-mode")
    assert "Not possible with this step: decorate the model" in str(explanation)


def test_arguments_may_be_sharded_and_static():
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    weights = jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32, sharding=rows)
    x = jax.ShapeDtypeStruct((ROWS, HIDDEN), jnp.float32, sharding=rows)

    def step(weights, x, scale, train, count):
        assert train
        gradient = jax.grad(lambda w: scale * sum(jnp.tanh(x @ w).sum() for _ in range(count)))(weights)
        return weights - gradient

    jitted = jax.jit(step, static_argnums=(3, 4))
    explanation = jaxpipe.explain(jitted, weights, x, 0.5, True, 2)
    causes = explanation.bytes_by_cause()
    assert explanation.device == "8 x cpu" and explanation.batch == ROWS
    assert causes["parameters"] == 4 * HIDDEN * WIDTH // 8 and causes["batch"] == 4 * ROWS * HIDDEN // 8
    assert explanation.total_bytes == xla_bytes(jitted, weights, x, 0.5, True, 2)


def test_a_mesh_in_the_context_says_on_which_devices():
    def step(weights, x):
        return weights - jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)

    arguments, spec = (float_array(HIDDEN, WIDTH), float_array(ROWS, HIDDEN)), jax.sharding.PartitionSpec
    options = {"in_shardings": (spec(), spec("data"))}
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        explanation = jaxpipe.explain(step, *arguments, **options)
        assert explanation.total_bytes == xla_bytes(jax.jit(step, **options), *arguments)
    assert explanation.bytes_by_cause()["batch"] == 4 * ROWS * HIDDEN // 8


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_random_key_is_no_batch(make):
    def step(weights, key, x):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return weights - jax.grad(lambda w: jnp.tanh(jnp.where(kept, x, 0) @ w).sum())(weights)

    explanation = jaxpipe.explain(step, float_array(HIDDEN, WIDTH), make(0), float_array(ROWS, HIDDEN))
    assert explanation.batch == ROWS
    assert explanation.bytes_by_cause()["batch"] == 4 * ROWS * HIDDEN


def test_places_count_static_arguments():
    """A static number has the shape and type of the number behind it."""

    def step(weights, power, count, x):
        def loss(weights):
            return (functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x) ** power).sum()

        return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights)), count + 1

    weights, x = [float_array(WIDTH, WIDTH)] * 4, float_array(8, WIDTH)
    explanation = jaxpipe.explain(step, weights, 3, int_array(), x, static_argnums=1)
    inputs = {part.name: part.bytes for part in explanation.parts if part.cause in ("parameters", "batch")}
    assert inputs == {f"weights[{k}]": 4 * WIDTH * WIDTH for k in range(4)} | {"x": 4 * 8 * WIDTH}
    assert {part.name for part in explanation.parts if part.cause == "other arguments"} == {"count"}
    assert measure(explanation, "donate").line == "jax.jit(step, donate_argnums=(0, 2))"


def test_a_budget_is_kept_as_the_line_is_written():
    def step(state, mode, batch):
        assert mode == "train"
        return linen_step(state, batch)

    options = {"donate_argnums": 0, "static_argnums": 1}
    explanation = jaxpipe.explain(step, linen_state(Net()), "train", BATCH, **options)
    assert explanation.refused == ()
    shown = measure(explanation, "a budget")
    written = re.fullmatch(r"step = jaxpipe.jit\(step, memory=(\d+), donate_argnums=0\)  # .*", shown.line)
    assert written is not None
    decorated = jaxpipe.jit(step, memory=int(written[1]), **options)
    plan = decorated.lower(linen_state(jaxpipe.memory_encoded(Net)()), "train", BATCH).plan
    assert plan.needed_bytes == shown.bytes <= int(written[1])


def test_what_a_call_hands_back_as_it_is_need_not_be_donated():
    @jax.jit
    def inner(frozen, weights, x):
        return frozen, weights - jax.grad(lambda w: jnp.tanh(x @ w @ frozen).sum())(weights)

    def step(frozen, weights, x):
        return inner(frozen, weights, x)

    arguments = float_array(WIDTH, WIDTH), float_array(WIDTH, WIDTH), float_array(ROWS, WIDTH)
    for function in (step, inner):
        line = measure(jaxpipe.explain(function, *arguments), "donate").line
        assert line.endswith("(step, donate_argnums=1)")


def test_arguments_that_are_not_used_take_nothing():
    """JAX drops them from the program, so that the others have other numbers there."""

    def step(unused, weights, x):
        return weights - jax.grad(lambda w: jnp.tanh(x @ w).sum())(weights)

    weights, x = float_array(HIDDEN, WIDTH), float_array(ROWS, HIDDEN)
    explanation = jaxpipe.explain(step, {"a": float_array(7), "b": float_array(9)}, weights, x)
    causes = explanation.bytes_by_cause()
    assert causes["parameters"] == 4 * HIDDEN * WIDTH and causes["batch"] == 4 * ROWS * HIDDEN
    assert {part.name for part in explanation.parts if part.cause in ("parameters", "batch")} == {"weights", "x"}


def test_a_scalar_of_weak_type_leaves_the_type_of_what_it_scales():
    arguments = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    step = jax.jit(lambda weights, scale: weights * scale)
    assert jaxpipe.explain(step, *arguments).total_bytes == xla_bytes(step, *arguments)


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (2.0, "needs 0.50 of the device's memory; JAX takes 0.75 of the .*: it fits."),
        (1.25, "needs 0.80 of the device's memory; JAX takes 0.75 .* XLA_CLIENT_MEM_FRACTION=0.81 "),
        (0.8, "needs 1.2[56] times the device's memory, whatever the pool"),
    ],
)
def test_the_share_of_the_pool_is_told(memory, text):
    explanation = linen()
    of_gpus = {"pool_fraction": 0.75, "pool_variables": target_named("H100").pool_variables}
    other = dataclasses.replace(explanation, memory=int(memory * explanation.total_bytes), **of_gpus)
    assert re.search(text, " ".join(str(other).split()))


def test_without_a_record_totals_are_told(monkeypatch):
    monkeypatch.setattr(
        measures_module, "compile_with_buffers", lambda lowered: (compile_with_buffers(lowered)[0], None)
    )
    explanation = jaxpipe.explain(plain_step, *PLAIN_ARGUMENTS)
    memory = jax.jit(plain_step).lower(*PLAIN_ARGUMENTS).compile().memory_analysis()
    assert memory is not None
    assert explanation.bytes_by_cause() == {
        "not attributed": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
    }


@pytest.mark.core
@pytest.mark.parametrize(
    ("step", "args", "options", "error", "message"),
    [
        (3, (1,), {}, jaxpipe.ModelError, "was given 3 .* as a step. Pass the function"),
        (Net(), (1,), {}, jaxpipe.ModelError, "as a step. Pass the function"),
        (
            jax.jit(jnp.sin).lower(1.0).compile(),
            (1.0,),
            {},
            jaxpipe.ModelError,
            "Compiled as a step. Pass the function",
        ),
        (jax.jit(jnp.sin).trace(1.0), (1.0,), {}, jaxpipe.ModelError, "Traced as a step. Pass the function"),
        (plain_step, (), {}, TypeError, "missing 4 required"),
        (lambda: 1.0, (), {}, jaxpipe.ModelError, "no array among the arguments"),
        (jax.jit(plain_step), PLAIN_ARGUMENTS, {"donate_argnums": 0}, jaxpipe.ModelError, "donate_argnums besides"),
        (plain_step, PLAIN_ARGUMENTS, {"scale": 2.0}, jaxpipe.ModelError, r"given scale= besides.*partial\(step"),
        (jaxpipe.jit(plain_step, memory="1GB"), PLAIN_ARGUMENTS, {}, jaxpipe.ModelError, "has a budget already"),
        (plain_step, PLAIN_ARGUMENTS, {"device": "H1000"}, jaxpipe.PartitionError, "device='H1000': no such device"),
        (plain_step, PLAIN_ARGUMENTS, {"device": 3}, jaxpipe.PartitionError, "device=3; .*must be a jax.Device"),
    ],
)
def test_wrong_usage_is_refused(step, args, options, error, message):
    with pytest.raises(error, match=message):
        jaxpipe.explain(step, *args, **options)


TWICE = """
import jax, jax.numpy as jnp
from jaxpipe.step.compiled_buffers import compile_with_buffers
program = jax.jit(jax.grad(lambda x: jnp.sin(x @ x).sum())).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
for _ in range(2):
    print(sum(len(allocation.events) for allocation in compile_with_buffers(program)[1]))
"""


def test_a_program_that_jax_has_on_disk_is_told_apart_as_well(tmp_path):
    """In processes, as JAX asks but once whether there is a folder."""
    command = [sys.executable, "-c", TWICE]
    kept = environment(JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    runs = [subprocess.run(command, env=kept, text=True, capture_output=True, check=True).stdout for _ in range(2)]
    assert list(tmp_path.iterdir())
    assert len(set("".join(runs).split())) == 1 and int(runs[0].split()[0]) > 0
