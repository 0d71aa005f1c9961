"""Decorated programs with scans and shard_maps: values of the plain programs, and bytes of what is stored in these."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.costs.count_products import count_products
from jaxpipe.graph.graph import equations_in
from jaxpipe.targets.building import building_for
from tests.support.compare import FUSION, relative_l2


pytestmark = pytest.mark.optimized


WIDTH, LAYERS = 32, 6


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Layers(nn.Module):
    """Blocks in a scan over their parameters, as large models have them."""

    block: type = Block

    @nn.compact
    def __call__(self, x):
        block = self.block

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return block()(x), None

        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return nn.Dense(4)(stack(name="stack")(nn.relu(nn.Dense(WIDTH)(x)), None)[0])


def layers(enc):
    net, x = enc(Layers)(), jax.random.normal(jax.random.key(0), (256, 8))
    return lambda params: jnp.sum(net.apply(params, x) ** 2), Layers().init(jax.random.key(1), x)


def nested(enc):
    net, x = enc(Layers)(enc(Block)), jax.random.normal(jax.random.key(0), (256, 8))
    return lambda params: jnp.sum(net.apply(params, x) ** 2), Layers().init(jax.random.key(1), x)


def recurrent(enc):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Bidirectional(nn.RNN(nn.GRUCell(16)), nn.RNN(nn.OptimizedLSTMCell(16)))(x)
            return nn.Dense(1)(x[:, -1])

    net, x = enc(Net)(), jax.random.normal(jax.random.key(0), (8, 12, 4))
    return lambda params: jnp.sum(net.apply(params, x) ** 2), Net().init(jax.random.key(1), x)


def scan_in_scan(enc):
    def inner(x, w):
        return jnp.tanh(x @ w), x.sum()

    def outer(carry, ws):
        x, step = carry
        x, sums = jax.lax.scan(inner, x, ws, reverse=True)
        return (x, step + 1), (sums, step)

    def loss(ws):
        (x, _), (sums, steps) = jax.lax.scan(outer, (jnp.ones((16, 8)), 0), ws)
        return jnp.sum(x**2) + jnp.sum(sums * steps[:, None])

    return enc(loss), jax.random.normal(jax.random.key(0), (3, 4, 8, 8))


def shared_weights(enc):
    """Weights that all iterations read, constants, and what comes before and after the scan, used again behind it."""
    table = jnp.linspace(0, 1, 64).reshape(8, 8)

    def loss(params):
        first = jnp.sin(params["first"])

        def body(x, k):
            return nn.relu(x @ params["shared"] + table[k % 8]) * first[0], x[0]

        x, rows = jax.lax.scan(body, first, jnp.arange(5))
        y, _ = jax.lax.scan(lambda y, row: (y * jnp.cos(row), None), first[0], rows, unroll=2)
        return jnp.sum(x * first) + jnp.sum(y)

    keys = jax.random.split(jax.random.key(0))
    return enc(loss), {
        name: jax.random.normal(key, (8, 8)) for name, key in zip(("first", "shared"), keys, strict=True)
    }


def with_state(enc):
    """Dropout and running statistics in each layer."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
            return nn.Dropout(0.2, deterministic=False)(nn.relu(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True, "dropout": True}
            x, _ = nn.scan(Layer, variable_axes=axes, split_rngs=rngs, length=LAYERS)()(x, None)
            return nn.Dense(2)(x)

    net, x, key = enc(Net)(), jax.random.normal(jax.random.key(0), (64, WIDTH)), jax.random.key(2)
    variables = Net().init({"params": key, "dropout": key}, x)

    def loss(params):
        given = {**variables, "params": params}
        y, new = net.apply(given, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.sum(y**2) + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(new))

    return loss, variables["params"]


def sharded(enc):
    """Blocks whose parameters are split over devices, and gathered where they are used."""
    x = jax.random.normal(jax.random.key(0), (256, WIDTH))

    def shard(params, x):
        for pair in params:
            up, down = (jax.lax.all_gather(w, "devices", tiled=True) for w in pair)
            x = x + nn.gelu(x @ up) @ down
        return jax.lax.pmean(jnp.mean(x**2), "devices")

    def loss(params):
        mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
        return jax.shard_map(shard, mesh=mesh, in_specs=P("devices"), out_specs=P())(params, jnp.sin(x))

    keys = jax.random.split(jax.random.key(1), LAYERS)
    shapes = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)
    return enc(loss), [[jax.random.normal(key, shape) / shape[0] ** 0.5 for shape in shapes] for key in keys]


def ring(enc):
    """Attention to rows that go around the devices, in a scan within each of several iterations of another."""

    def attend(carry, _):
        query, (rows, total) = carry
        total = total + nn.softmax(query @ rows.T) @ rows
        return (query, (jax.lax.ppermute(rows, "devices", [(k, (k + 1) % 4) for k in range(4)]), total)), None

    def shard(w, x, count):
        (_, (_, total)), _ = jax.lax.scan(attend, (x @ w, (x, jnp.zeros_like(x))), length=4)
        return x + total / count, jax.lax.psum(jnp.sum(total), "devices")

    def loss(weights):
        mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
        specs = (P(), P("devices"), P()), (P("devices"), P())
        run = jax.shard_map(shard, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
        x, sums = jax.lax.scan(lambda x, w: run(w, x, 4), jnp.linspace(-1, 1, 32 * 8).reshape(32, 8), weights)
        return jnp.sum(x**2) + jnp.sum(sums)

    return enc(loss), jax.random.normal(jax.random.key(0), (3, 8, 8)) / 8


PROGRAMS = [layers, nested, recurrent, scan_in_scan, shared_weights, with_state, sharded, ring]


def plain(target):
    return target


@pytest.mark.parametrize("codecs", ["fast", "smallest"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_the_plain_program(program, codecs):
    def encoded(target):
        return jaxpipe.memory_encoded(target, codecs=codecs)

    expected = jax.jit(jax.value_and_grad(program(plain)[0]))(program(plain)[1])
    loss, params = program(encoded)
    assert_close(jax.jit(jax.value_and_grad(loss))(params), expected)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(nested, marks=pytest.mark.core),
        *(with_state, sharded, ring),
        *(pytest.param(x, marks=pytest.mark.slow) for x in (layers, recurrent, scan_in_scan, shared_weights)),
    ],
    ids=lambda program: program.__name__,
)
def test_a_budget_keeps_the_values_of_the_plain_step(program):
    def step_of(enc):
        loss, _ = program(enc)
        return lambda params: (lambda value, grads: (value, jax.tree.map(jnp.add, params, grads)))(
            *jax.value_and_grad(loss)(params)
        )

    params = program(plain)[1]
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(step_of(jaxpipe.memory_encoded), memory=1024).lower(params)
    budgeted = jaxpipe.jit(step_of(jaxpipe.memory_encoded), memory=caught.value.smallest)
    assert_close(budgeted(params), jax.jit(step_of(plain))(params))
    assert budgeted.lower(params).plan.needed_bytes <= caught.value.smallest


@pytest.mark.core
def test_iterations_store_less_and_budgets_run_them_again():
    def step_of(enc):
        loss, _ = layers(enc)
        return lambda params: jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = layers(plain)[1]
    without, decorated = (
        reserved(jax.jit(step_of(enc)).lower(params).compile()) for enc in (plain, jaxpipe.memory_encoded)
    )
    # JAX stores several arrays of gelu's inside, four widths each, the decorated program what goes into it.
    assert decorated < 0.5 * without
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(step_of(jaxpipe.memory_encoded), memory=1024).lower(params)
    plan = jaxpipe.jit(step_of(jaxpipe.memory_encoded), memory=caught.value.smallest).lower(params).plan
    assert plan.needed_bytes < 0.7 * decorated
    assert plan.products - plan.plain_products >= LAYERS  # a product of each iteration runs again


def test_shards_store_less():
    loss, params = sharded(plain)
    encoded, _ = sharded(jaxpipe.memory_encoded)
    without, decorated = (
        jax.jit(jax.grad(function)).lower(params).compile().memory_analysis().temp_size_in_bytes
        for function in (loss, encoded)
    )
    # As of iterations: what goes into gelu, not what is inside.
    assert decorated < 0.7 * without


def test_on_a_gpu_gradients_of_weights_are_waited_for_before_devices_add_them_up():
    """XLA would put off their products, and keep what they follow from: the sums over devices wait for nothing."""
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))

    def shard(weights, x):
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jax.lax.pmean(jnp.mean(x**2), "devices")

    @jaxpipe.memory_encoded
    def loss(weights):
        x = jnp.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH)
        return jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("devices")), out_specs=P())(weights, x)

    with building_for("gpu"):
        program = jax.make_jaxpr(jax.grad(loss))([jnp.eye(WIDTH)] * LAYERS)
    joined = []
    for body in (eqn.params["jaxpr"] for eqn in equations_in(program.eqns) if eqn.primitive.name == "shard_map"):
        makers = {result: eqn for eqn in body.eqns for result in eqn.outvars}
        for eqn in body.eqns:
            if eqn.primitive.name.startswith("psum") and eqn.invars[0].aval.shape == (WIDTH, WIDTH):
                maker = makers[eqn.invars[0]]
                while maker.primitive.name == "reshape":
                    maker = makers[maker.invars[0]]
                joined.append(len(maker.invars) if maker.primitive.name == "optimization_barrier" else 0)
    # Nothing comes after the last one.
    assert len(joined) == LAYERS and sorted(joined)[1] > 1


def test_checkpoints_written_by_hand_need_no_less():
    def step_of(enc, block):
        net, x = enc(Layers)(block), jax.random.normal(jax.random.key(0), (256, 8))
        return jax.grad(lambda params: jnp.sum(net.apply(params, x) ** 2))

    params = layers(plain)[1]
    written = jax.jit(step_of(plain, nn.remat(Block, prevent_cse=False))).lower(renamed(params)).compile()
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(step_of(jaxpipe.memory_encoded, Block), memory=1024).lower(params)
    # A level whose estimate is a few percent above the smallest one's is not compiled.
    assert caught.value.smallest <= 1.05 * reserved(written)


def reserved(compiled):
    """The bytes that XLA states."""
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes


def renamed(params):
    """Parameters as ``nn.remat`` names their module."""
    stack = params["params"]["stack"]
    return {"params": params["params"] | {"stack": {"CheckpointBlock_0": stack["Block_0"]}}}


def test_codecs_are_chosen_by_module_within_a_scan():
    net, x = Layers(), jnp.ones((64, 8))
    params = net.init(jax.random.key(1), x)

    def stored(codecs):
        encoded = jaxpipe.memory_encoded(Layers, codecs=codecs)()
        step = jax.jit(jax.grad(lambda params: jnp.sum(encoded.apply(params, x) ** 2)))
        return step.lower(params).compile().memory_analysis().temp_size_in_bytes

    assert stored({"*": "fast"}) == stored("fast") < stored({"*/Block_0": set(), "*": "fast"})
    with pytest.warns(jaxpipe.CodecWarning, match="no module fits the pattern 'Block_1'"):
        stored({"Block_1": "smallest", "*": "fast"})


def test_an_evaluation_runs_the_plain_program():
    net, x = Layers(), jax.random.normal(jax.random.key(0), (16, 8))
    params = net.init(jax.random.key(1), x)
    outputs = [jax.jit(kind().apply)(params, x) for kind in (Layers, jaxpipe.memory_encoded(Layers))]
    np.testing.assert_array_equal(*outputs)


def test_training_with_optax_as_plainly():
    tx, x = optax.adam(1e-2), jax.random.normal(jax.random.key(0), (64, 8))
    params = Layers().init(jax.random.key(1), x)

    def train(net):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(lambda p: jnp.mean((net.apply(p, x) - 1) ** 2))(params)
            updates, state = tx.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        return jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), length=20)[1])(params)

    # Adam divides by small numbers: what XLA rounds otherwise grows.
    np.testing.assert_allclose(train(jaxpipe.memory_encoded(Layers)()), train(Layers()), rtol=1e-4)


def assert_close(given, expected):
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        # XLA fuses other operators, and then rounds otherwise.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * float(jnp.abs(b).max()))


class Recurrent(nn.Module):
    """A gated linear recurrence, as state space models have it."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        decay, value, gate = nn.sigmoid(nn.Dense(WIDTH)(h)), nn.Dense(WIDTH)(h), nn.gelu(nn.Dense(WIDTH)(h))

        def step(carry, row):
            carry = row[0] * carry + row[1]
            return carry, carry

        rows = jnp.swapaxes(decay, 0, 1), jnp.swapaxes((1 - decay) * value, 0, 1)
        y = jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), rows)[1], 0, 1)
        return x + nn.Dense(WIDTH)(y * gate)


class Recurrences(nn.Module):
    block: type = Recurrent

    @nn.compact
    def __call__(self, x):
        for k in range(4):
            x = self.block(name=f"Recurrent_{k}")(x)
        return x


@pytest.mark.parametrize("decorated", ["loss", *(pytest.param(x, marks=pytest.mark.slow) for x in ("model", "blocks"))])
def test_small_budgets_of_recurrences_are_not_above_flax_s_remat(decorated):
    """A larger budget runs no more products, and gradients are those of the plain step."""
    x = jax.random.normal(jax.random.key(0), (8, 64, WIDTH))
    params = Recurrences().init(jax.random.key(1), x)

    def step_of(net, wrap=lambda loss: loss):
        return jax.grad(wrap(lambda params, x: (net.apply(params, x) ** 2).mean()))

    def compiled(step):
        sizes = step.compile().memory_analysis()
        return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes

    plain = jax.jit(step_of(Recurrences())).lower(params, x)
    remat = jax.jit(step_of(Recurrences(nn.remat(Recurrent))))
    budget, most = compiled(remat.lower(params, x)), compiled(plain)
    encoded = {
        "loss": step_of(Recurrences(), jaxpipe.memory_encoded),
        "model": step_of(jaxpipe.memory_encoded(Recurrences)()),
        "blocks": step_of(Recurrences(jaxpipe.memory_encoded(Recurrent))),
    }[decorated]
    plans = []
    for memory in (budget, (budget + most) // 2):
        step = jaxpipe.jit(encoded, memory=memory)
        assert_close(step(params, x), plain.compile()(params, x))
        plans.append(step.lower(params, x).plan)
    assert plans[1].products <= plans[0].products <= count_products(remat.trace(params, x).jaxpr.jaxpr)[0]
    with pytest.raises(jaxpipe.MemoryBudgetError) as refused:
        jaxpipe.jit(encoded, memory=budget // 8).lower(params, x)
    assert refused.value.smallest <= budget
    assert jaxpipe.jit(encoded, memory=refused.value.smallest).lower(params, x).plan.products >= plans[0].products


def test_whole_numbers_that_a_scan_stacks():
    """Metrics and keys of chunks, which the loss puts together behind the scan."""
    x, labels = jax.random.normal(jax.random.key(0), (3, 5, 8)), jnp.arange(15).reshape(3, 5) % 4

    def chunk(weight, x, labels):
        logits = x @ weight
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (logits.argmax(-1) == labels).sum(), logits > 0, jax.random.key(labels[0])

    def combined(loss, hits, positive, keys):
        return loss.mean() + jax.vmap(jax.random.uniform)(keys).sum(), {"hits": hits.sum(), "rate": positive.mean()}

    def loss(weight, enc, outer):
        part, whole = enc(chunk), enc(combined)
        return outer(lambda weight: whole(*jax.lax.map(lambda rows: part(weight, *rows), (x, labels))))(weight)

    weight = jax.random.normal(jax.random.key(1), (8, 4))
    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 2))
    expected = run(weight, lambda f: f, lambda f: f)
    for enc, outer in ((jaxpipe.memory_encoded, lambda f: f), (lambda f: f, jaxpipe.memory_encoded)):
        assert relative_l2(run(weight, enc, outer), expected) < FUSION
