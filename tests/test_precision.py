"""Gradients of half-precision parameters are added up in float32 and rounded once.

Expected values are plain ``jax.grad`` of every micro-batch, added up by NumPy in the pipeline's order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models as zoo
from jaxpipe.errors import PartitionError
from jaxpipe.gradients import block_sparse
from jaxpipe.schedules.asynchronous import double_buffered
from tests.support.compare import assert_same_bits
from tests.support.meshes import mesh_of
from tests.support.texts import one_line


#: One rounding to bfloat16, which has 8 significant bits.
HALF_ULP = 2.0**-9

RATE = 0.5  # a power of two: the optimizer's own product is exact


def entropy_of_rows(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def loss(model, batch):
    return entropy_of_rows(model(batch["x"]), batch["y"]).mean()


def weighted(model, batch):
    keep = (batch["y"] > 2).astype(jnp.float32)
    return (keep * entropy_of_rows(model(batch["x"]), batch["y"])).sum(), keep.sum(), {}


@functools.cache
def model_of(dtype):
    return jax.tree_util.Partial(
        zoo.mlp, jax.tree.map(lambda x: x.astype(dtype), zoo.init_mlp(jax.random.key(0), [12, 16, 16, 10]))
    )


@functools.cache
def batch_of(dtype, rows):
    x = jax.random.normal(jax.random.key(1), (rows, 12)).astype(dtype)
    return {"x": x, "y": jax.random.randint(jax.random.key(2), (rows,), 0, 10)}


def pipeline_of(dtype, rows, mesh, m, function=loss, **options):
    options = {"profile": "analytic", "optimizer": optax.sgd(RATE), **options}
    return jaxpipe.partition(model_of(dtype), mesh, batch_of(dtype, rows), loss=function, num_microbatches=m, **options)


def gradients_of(pipeline, dtype, rows):
    return pipeline.value_and_grad(pipeline.init(jax.random.key(3)), batch_of(dtype, rows))[1]


def plain_gradients(dtype, rows, count, function=loss):
    """The gradient of every micro-batch as float32 arrays, and its weight."""

    def total(model, batch):
        result = function(model, batch)
        return result[:2] if isinstance(result, tuple) else (result, jnp.float32(1))

    gradient = jax.jit(jax.grad(total, has_aux=True))
    parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch_of(dtype, rows))
    results = [gradient(model_of(dtype), jax.tree.map(lambda x, j=j: x[j], parts)) for j in range(count)]
    return [jax.tree.map(lambda g: np.asarray(g).astype(np.float32), g) for g, _ in results], sum(w for _, w in results)


def add(trees):
    return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), trees)


def rounded(sums, weight, dtype):
    return jax.tree.map(lambda g: (g / np.float32(weight)).astype(dtype), sums)


@pytest.mark.parametrize(
    ("dtype", "stages", "function"),
    [
        pytest.param(jnp.bfloat16, 1, loss, marks=pytest.mark.core),
        pytest.param(jnp.bfloat16, 2, loss, marks=pytest.mark.slow),
        (jnp.float16, 1, weighted),
        pytest.param(jnp.float16, 2, loss, marks=pytest.mark.slow),
        (jnp.bfloat16, 2, weighted),
    ],
)
@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_micro_batches_are_added_up_in_float32_and_rounded_once(dtype, stages, function, runtime):
    each, weight = plain_gradients(dtype, 32, 8, function)
    gradients = gradients_of(pipeline_of(dtype, 32, mesh_of(stages), 8, function, runtime=runtime), dtype, 32)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {np.dtype(dtype)}
    assert_same_bits(gradients, rounded(add(each), weight, dtype))


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_replicas_are_added_up_in_float32(runtime):
    each, _ = plain_gradients(jnp.bfloat16, 32, 8)
    gradients = gradients_of(pipeline_of(jnp.bfloat16, 32, mesh_of(2, 2), 4, runtime=runtime), jnp.bfloat16, 32)
    assert_same_bits(gradients, rounded(add([add(each[:4]), add(each[4:])]), 8, jnp.bfloat16))


def test_devices_that_share_a_stage_are_added_up_in_float32():
    """Each takes every other micro-batch."""
    each, _ = plain_gradients(jnp.bfloat16, 32, 8)
    gradients = gradients_of(
        pipeline_of(jnp.bfloat16, 32, mesh_of(4), 8, options=jaxpipe.PlanOptions(devices_per_stage=2)), jnp.bfloat16, 32
    )
    assert_same_bits(gradients, rounded(add([add(each[::2]), add(each[1::2])]), 8, jnp.bfloat16))


def relative_errors(gradients, exact):
    """By element, where there is a gradient to speak of."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True)
    flat = [(np.asarray(g, np.float64).ravel(), e.ravel()) for g, e in pairs]
    actual, expected = (np.concatenate(parts) for parts in zip(*flat, strict=True))
    large = np.abs(expected) > 1e-3 * np.abs(expected).max()
    assert large.sum() > 400
    return np.abs(actual - expected)[large] / np.abs(expected)[large]


def test_the_sum_of_many_micro_batches_is_as_exact_as_one_rounding():
    each, _ = plain_gradients(jnp.bfloat16, 128, 64)
    exact = jax.tree.map(lambda g: g / 64, add([jax.tree.map(np.float64, g) for g in each]))
    wide = gradients_of(pipeline_of(jnp.bfloat16, 128, mesh_of(2), 64), jnp.bfloat16, 128)
    # Sums of 64 numbers in float32 that cancel to a thousandth of the largest are right to 64 * 2**-24 * 1000 at worst.
    assert relative_errors(wide, exact).max() < HALF_ULP + 64 * 2.0**-24 * 1000
    narrow = pipeline_of(jnp.bfloat16, 128, mesh_of(2), 64, options=jaxpipe.PlanOptions(gradient_dtype="bfloat16"))
    assert relative_errors(gradients_of(narrow, jnp.bfloat16, 128), exact).max() > 8 * HALF_ULP


def test_the_optimizer_gets_what_was_rounded_and_the_norm_is_that():
    each, _ = plain_gradients(jnp.bfloat16, 32, 8)
    mean = rounded(add(each), 8, jnp.bfloat16)
    pipeline = pipeline_of(jnp.bfloat16, 32, mesh_of(2), 8)
    state, metrics = pipeline.step(pipeline.init(jax.random.key(3)), batch_of(jnp.bfloat16, 32))
    updates, _ = optax.sgd(RATE).update(mean, optax.sgd(RATE).init(model_of(jnp.bfloat16)))
    assert_same_bits(pipeline.parameters(state), optax.apply_updates(model_of(jnp.bfloat16), updates))
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(mean)))
    assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-6)  # sums of squares in float32


def test_updates_on_the_way_have_gradients_rounded_once():
    """In bfloat16, 256 + 1 is 256; the mean of 256, 1, 1 and 2 is 65."""
    rows = jnp.array([[256.0], [1.0], [1.0], [2.0]], jnp.bfloat16)
    model = jax.tree_util.Partial(lambda w, x: x * w, jnp.zeros((1,), jnp.bfloat16))
    for gradient_dtype, mean in ((None, 65), ("bfloat16", 64.5)):
        pipeline = jaxpipe.partition(
            model,
            mesh_of(1),
            rows,
            loss=lambda f, x: f(x).astype(jnp.float32).mean(),
            optimizer=optax.sgd(1.0),
            num_microbatches=4,
            schedule=functools.partial(double_buffered, group=4),
            profile="analytic",
            options=jaxpipe.PlanOptions(gradient_dtype=gradient_dtype),
        )
        state, _ = pipeline.step(pipeline.init(jax.random.key(0)), rows)
        assert np.float32(pipeline.parameters(state).args[0]) == -mean


def tied(parameters, tokens):
    """Logits of a network whose output layer is its embedding."""
    x = jax.nn.relu(parameters["table"][tokens] @ parameters["up"])
    return x @ parameters["down"] @ parameters["table"].T


def test_the_uses_of_a_tied_parameter_are_added_up_in_float32():
    """All numbers are small integers, so that nothing but the sums is rounded."""
    rng = np.random.default_rng(0)
    signs = {name: rng.integers(-1, 2, shape) for name, shape in {"table": (16, 8), "up": (8, 128)}.items()}
    signs["down"] = rng.integers(-1, 2, (128, 8)) * (rng.random((128, 8)) < 0.05)
    signs["up"] *= rng.random((8, 128)) < 0.05
    tokens = jnp.asarray(rng.integers(0, 16, (64, 4)))
    half, single = (jax.tree.map(lambda x, d=d: jnp.asarray(x, d), signs) for d in (jnp.bfloat16, jnp.float32))

    def total(model, rows):
        return (model(rows).astype(jnp.float32).sum(), 1.0, {})

    model = jax.tree_util.Partial(tied, half)
    options = {"loss": total, "optimizer": optax.sgd(RATE), "num_microbatches": 8, "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh_of(2), tokens, **options, runtime="spmd")
    assert "shared" in pipeline.plan.memory  # the two uses are in two stages
    gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(3)), tokens)[1].args[0]
    gradient = jax.grad(lambda parameters, rows: tied(parameters, rows).sum())
    each = [jax.tree.map(np.asarray, gradient(single, rows)) for rows in tokens.reshape(8, 8, 4)]
    assert max(np.abs(g).max() for tree in each for g in jax.tree.leaves(tree)) <= 256
    expected = rounded(add(each), 8, jnp.bfloat16)
    assert (8 * np.float32(expected["table"]) != add(each)["table"]).any()  # sums that bfloat16 does not hold
    assert_same_bits(gradients, expected)


def test_blocks_and_whole_gradients_of_an_exchange_are_added_up_in_float32():
    """All is sent, by consensus in one all-reduce, of four replicas; each sends what bfloat16 holds of its own."""
    each, _ = plain_gradients(jnp.bfloat16, 32, 8)
    exchange = block_sparse(k=1.0, mode="consensus", dense_1d=True)
    pipeline = pipeline_of(jnp.bfloat16, 32, mesh_of(1, 4), 2, gradient_exchange=exchange, optimizer=optax.sgd(RATE))
    state, _ = pipeline.step(pipeline.init(jax.random.key(3)), batch_of(jnp.bfloat16, 32))
    sums = [add(each[2 * r : 2 * r + 2]) for r in range(4)]
    sent = [jax.tree.map(lambda g: np.float32(g), rounded(total, 2, jnp.bfloat16)) for total in sums]
    updates = jax.tree.map(lambda g: -RATE * jnp.asarray(g), rounded(add(sent), 4, jnp.bfloat16))
    expected = optax.apply_updates(model_of(jnp.bfloat16), updates)
    # The all-reduce of four has no fixed order: a sum may be rounded to its other neighbor.
    for actual, wanted in zip(*map(jax.tree.leaves, (pipeline.parameters(state), expected)), strict=True):
        np.testing.assert_allclose(np.float32(actual), np.float32(wanted), rtol=2 * HALF_ULP, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "ratio", "text"),
    [
        (jnp.bfloat16, None, 2, "gradients of bfloat16 parameters are added up in float32"),
        (jnp.float16, "bfloat16", 1, None),
        (jnp.bfloat16, jnp.bfloat16, 1, None),
        (jnp.float32, None, 1, None),
    ],
)
def test_the_plan_counts_the_bytes_of_the_sums_and_says_their_type(dtype, gradient_dtype, ratio, text):
    plan = pipeline_of(dtype, 32, mesh_of(2), 8, options=jaxpipe.PlanOptions(gradient_dtype=gradient_dtype)).plan
    assert plan.memory["gradients"] == ratio * plan.memory["parameters"]
    assert ("added up in" in one_line(plan)) == (text is not None)
    assert text is None or text in one_line(plan)
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan


def test_a_state_is_taken_by_a_pipeline_that_adds_up_otherwise():
    wide, narrow = (
        pipeline_of(jnp.bfloat16, 32, mesh_of(2), 8, options=jaxpipe.PlanOptions(gradient_dtype=d))
        for d in (None, "bfloat16")
    )
    assert wide.plan.identity == narrow.plan.identity


@pytest.mark.parametrize(
    ("gradient_dtype", "message"),
    [
        (jnp.int32, r"gradient_dtype=int32 holds no fractions; it must be a floating-point type of at least 16 bits"),
        ("half a float", r"gradient_dtype='half a float' names no type; it must be"),
        (3, r"gradient_dtype=3 names no type"),
        (jnp.float8_e4m3fn, r"gradient_dtype=float8_e4m3fn has 8 bits.*Leave it out for float32"),
        (jnp.complex64, r"gradient_dtype=complex64"),
        (jnp.float64, r"gradient_dtype=float64, but JAX has no arrays.*jax_enable_x64"),
        (jnp.bfloat16, r"gradient_dtype=bfloat16, but all parameters are float32; .*Leave gradient_dtype out"),
    ],
)
def test_types_that_are_none_for_sums_are_refused(gradient_dtype, message):
    with pytest.raises(PartitionError, match=message):
        pipeline_of(jnp.float32, 32, mesh_of(2), 8, options=jaxpipe.PlanOptions(gradient_dtype=gradient_dtype))
