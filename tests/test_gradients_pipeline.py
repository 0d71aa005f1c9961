"""The block-sparse exchange between the replicas of a pipeline's stages."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models
from jaxpipe.errors import ModelError, PartitionError
from jaxpipe.gradients import block_sparse
from tests.support.block_sparse_reference import Reference
from tests.support.compare import assert_same_bits, relative_l2


ROWS, STAGES, REPLICAS, MICROBATCHES = 16, 2, 2, 2
SIZES = [12, 24, 24, 8]


def mesh(replicas=REPLICAS):
    devices = np.array(jax.devices()[: STAGES * replicas]).reshape(replicas, STAGES)
    return jax.sharding.Mesh(devices, ("data", "stage"))


def data(step=0):
    keys = jax.random.split(jax.random.key(step))
    return jax.random.normal(keys[0], (ROWS, SIZES[0])), jax.random.randint(keys[1], (ROWS,), 0, SIZES[-1])


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


def parameters():
    return models.init_mlp(jax.random.key(0), SIZES)


def pipeline(gradient_exchange="dense", replicas=REPLICAS, optimizer=None, **options):
    optimizer = optax.sgd(0.125, momentum=0.5) if optimizer is None else optimizer
    options = {"num_microbatches": MICROBATCHES, "profile": "analytic", **options}
    model = jax.tree_util.Partial(models.mlp, parameters())
    return jaxpipe.partition(
        model, mesh(replicas), data(), loss=loss, optimizer=optimizer, gradient_exchange=gradient_exchange, **options
    )


def trained(pipe, steps=3):
    state, told = pipe.init(jax.random.key(0)), []
    for step in range(steps):
        state, metrics = pipe.step(state, data(step))
        told.append({name: float(value) for name, value in metrics.items()})
    return pipe.parameters(state), told, state


@pytest.fixture(scope="module")
def sparse():
    """A pipeline, trained for three steps."""
    pipe = pipeline(block_sparse(k=2))
    return pipe, *trained(pipe)


@pytest.fixture(scope="module")
def replica_gradients():
    """The gradient function that a replica applies to its half of the batch."""
    return jax.jit(jax.grad(lambda params, batch: loss(lambda x: models.mlp(params, x), batch)))


@pytest.mark.core
def test_parameters_are_those_of_the_method(sparse, replica_gradients):
    """The method in NumPy, on gradients of the whole undivided model."""
    expected = parameters()
    reference, velocity = Reference(2, "l2", "own"), jax.tree.map(np.zeros_like, expected)
    half = ROWS // REPLICAS
    for step in range(3):
        parts = [jax.tree.map(lambda x, r=r: x[r * half : (r + 1) * half], data(step)) for r in range(REPLICAS)]
        gradients = [jax.tree.map(np.asarray, replica_gradients(expected, part)) for part in parts]
        tree = jax.tree.structure(gradients[0])
        rows = zip(*map(jax.tree.leaves, gradients), strict=True)
        means = jax.tree.unflatten(tree, [reference(k, list(row)) for k, row in enumerate(rows)])
        velocity = jax.tree.map(lambda v, u: np.float32(0.5) * v + u, velocity, means)
        expected = jax.tree.map(lambda w, v: w - np.float32(0.125) * v, expected, velocity)
    _, actual, _, _ = sparse
    assert relative_l2(actual, expected) < 1e-6  # micro-batches are summed in another order


def test_metrics_of_a_sparse_exchange(sparse):
    pipe, _, told, state = sparse
    assert all(0 < metrics["sent_share"] < 1 and metrics["residual_norm"] > 0 for metrics in told)
    left = sum(float((np.asarray(x) ** 2).sum()) for x in state.residual)
    assert told[-1]["residual_norm"] == pytest.approx(left**0.5, rel=1e-5)
    assert "block-sparse" in str(pipe.plan) and pipe.plan.memory["residual"] == pipe.plan.memory["parameters"]


@pytest.mark.core
def test_all_blocks_train_as_a_dense_exchange_does():
    """Weights of the examples are powers of two, so that it does not matter when sums are divided."""
    dense, _, _ = trained(pipeline())
    everything, told, state = trained(pipeline(block_sparse(k=1.0)))
    assert relative_l2(everything, dense) < 1e-7  # XLA contracts momentum's product with what stands beside it
    assert all(metrics["sent_share"] == 1 for metrics in told)
    assert not any(np.asarray(x).any() for x in state.residual)


def test_consensus_and_warm_up_run_in_a_pipeline():
    pipe = pipeline(block_sparse(k=1, mode="consensus", warmup=[(2, 1.0)]))
    dense, _, _ = trained(pipeline(), steps=2)
    warm, told, state = trained(pipe, steps=2)
    assert relative_l2(warm, dense) < 1e-7 and told[-1]["residual_norm"] == 0
    _, metrics = pipe.step(state, data(2))
    assert metrics["sent_share"] < 1


def test_replicas_hold_the_same_parameters(sparse):
    _, _, _, state = sparse
    for buffer in (*state.parameters, *state.optimizer):
        rows: dict[str, list[np.ndarray]] = {}
        for shard in buffer.addressable_shards:
            rows.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for copies in rows.values():
            assert len(copies) == REPLICAS
            assert_same_bits(copies[0], copies[1])


def test_a_resumed_run_goes_on_with_its_residuals(sparse):
    pipe, _, _, _ = sparse
    _, _, expected = trained(pipe, steps=4)
    _, _, state = trained(pipe, steps=2)
    saved = jax.tree.map(lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), state)
    fresh = pipe.init(jax.random.key(0))
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved, fresh)
    for step in (2, 3):
        state, _ = pipe.step(state, data(step))
    assert_same_bits(
        jax.tree.map(jnp.asarray, pipe.parameters(state)), jax.tree.map(jnp.asarray, pipe.parameters(expected))
    )


@pytest.mark.parametrize(
    ("stages", "replicas", "options"),
    [
        (2, 2, {"k": 1}),
        pytest.param(2, 2, {"k": 0.45}, marks=pytest.mark.slow),
        (1, 4, {"k": 1, "warmup": [(5, 1.0)]}),
        (2, 2, {"k": 2, "mode": "consensus"}),
    ],
)
def test_memory_is_predicted(stages, replicas, options):
    """The gradients are most of the memory of the model."""
    devices = np.array(jax.devices()[: stages * replicas]).reshape(replicas, stages)
    model = jax.tree_util.Partial(models.mlp, models.init_mlp(jax.random.key(0), [256] * 4 + [8]))
    batch = jax.ShapeDtypeStruct((8, 256), "float32"), jax.ShapeDtypeStruct((8,), "int32")
    pipe = jaxpipe.partition(
        model,
        jax.sharding.Mesh(devices, ("data", "stage")),
        batch,
        loss=loss,
        optimizer=optax.sgd(0.1, momentum=0.9),
        num_microbatches=1,
        profile="analytic",
        gradient_exchange=block_sparse(**options),
    )
    report = pipe.memory_report()
    assert report.predicted_bytes[0] == pytest.approx(report.compiled_bytes[0], rel=0.16)


@pytest.mark.parametrize("mode", [pytest.param("own", marks=pytest.mark.core), "consensus"])
def test_an_exchange_takes_the_memory_of_its_residuals_and_messages(mode):
    """Four layers of 64 neurons in a stage: a block is a neuron's 64 weights, one goes out of each layer.

    Messages are there twice, as they are sent and as they arrive, and arrive from two replicas.
    """
    model = jax.tree_util.Partial(models.mlp, models.init_mlp(jax.random.key(0), [64] * 9))
    batch = jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((8,), "int32")

    def compiled(gradient_exchange):
        pipe = jaxpipe.partition(
            model,
            mesh(),
            batch,
            loss=loss,
            optimizer=optax.sgd(0.1, momentum=0.9),
            num_microbatches=2,
            profile="analytic",
            gradient_exchange=gradient_exchange,
        )
        return pipe.memory_report().compiled_bytes

    parameter_bytes, sent_bytes = 4 * 4 * (64 * 64 + 64), 4 * 4 * (64 + 1 + 64)
    if mode == "consensus":
        sent_bytes += 4 * 4 * (64 - 1)  # norms of all blocks, and no numbers
    most = max(compiled("dense")) + parameter_bytes + (1 + REPLICAS) * sent_bytes
    assert max(compiled(block_sparse(k=1, mode=mode))) <= most


def test_half_precision_gradients_are_kept_in_full():
    """Steps of 2**-10 beside a residual of 1 would be lost in bfloat16."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.init_mlp(jax.random.key(0), [12, 16, 8]))
    devices = np.array(jax.devices()[:2]).reshape(2, 1)
    x = data()[0].astype(jnp.bfloat16), data()[1]
    pipe = jaxpipe.partition(
        jax.tree_util.Partial(models.mlp, params),
        jax.sharding.Mesh(devices, ("data", "stage")),
        x,
        loss=loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=1,
        profile="analytic",
        gradient_exchange=block_sparse(k=1),
    )
    state, _ = pipe.step(pipe.init(jax.random.key(0)), x)
    assert {r.dtype for r in state.residual} == {np.dtype(np.float32)}
    assert pipe.plan.memory["residual"] >= 2 * pipe.plan.memory["parameters"]


def test_a_state_of_another_exchange_is_refused(sparse):
    pipe, _, _, _ = sparse
    dense = pipeline()
    with pytest.raises(ModelError, match="residuals of a gradient exchange"):
        pipe.step(dense.init(jax.random.key(0)), data())


def test_a_mask_of_the_model_selects_what_an_optimizer_decays():
    """Beside the exchange, which comes first: kernels lose 2**-3 * 2**-4 of themselves, vectors nothing."""
    mask = jax.tree.map(lambda x: x.ndim > 1, jax.tree_util.Partial(models.mlp, parameters()))
    decay = optax.masked(optax.add_decayed_weights(2**-4), mask)
    plain, decayed = (
        trained(pipeline(block_sparse(k=1), optimizer=optimizer), steps=1)[0]
        for optimizer in (optax.sgd(2**-3), optax.chain(decay, optax.sgd(2**-3)))
    )
    for start, without, after in zip(*map(jax.tree.leaves, (parameters(), plain, decayed)), strict=True):
        expected = without - 2**-7 * np.asarray(start) if start.ndim > 1 else without
        # The decay is added to the gradient before it is scaled: float32 rounding.
        np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-7)


def test_stages_without_replicas_exchange_nothing():
    alone = pipeline(block_sparse(k=1), replicas=1)
    updated, told, state = trained(alone, steps=1)
    dense, _, _ = trained(pipeline(replicas=1), steps=1)
    assert_same_bits(jax.tree.map(jnp.asarray, updated), jax.tree.map(jnp.asarray, dense))
    assert state.residual == () and "sent_share" not in told[0]


def test_a_first_moment_beside_residuals_is_warned_about():
    with pytest.warns(UserWarning, match=r"has a first moment \(.*\.mu.*optax.adamw\(rate, b1=0.0\)"):
        pipeline(block_sparse(k=1), optimizer=optax.adam(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pipeline(block_sparse(k=1))
        pipeline(block_sparse(k=1), optimizer=optax.adam(1e-3, b1=0.0))


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_adam_with_first_moments_for_residuals_in_two_bits(runtime, replica_gradients):
    """The method in NumPy; Adam's large epsilon keeps gradients that are rounding from becoming whole steps."""
    adam, rate = optax.adam(2**-6, b1=0.0, b2=0.99, eps=1e-2), 2**-6
    pipe = pipeline(block_sparse(k=2, bits=2, decay=0.9), optimizer=adam, runtime=runtime)
    actual, _, _ = trained(pipe)
    expected, reference, half = parameters(), Reference(2, "l2", "own", 0.9, 2), ROWS // REPLICAS
    squares = jax.tree.map(np.zeros_like, expected)
    for step in range(3):
        parts = [jax.tree.map(lambda x, r=r: x[r * half : (r + 1) * half], data(step)) for r in range(REPLICAS)]
        gradients = [jax.tree.map(np.asarray, replica_gradients(expected, part)) for part in parts]
        rows = zip(*map(jax.tree.leaves, gradients), strict=True)
        tree = jax.tree.structure(expected)
        means = jax.tree.unflatten(tree, [reference(k, list(row)) for k, row in enumerate(rows)])
        squares = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, squares, means)
        unbiased = 1 - 0.99 ** (step + 1)
        expected = jax.tree.map(
            lambda w, g, v, c=unbiased: (w - rate * g / (np.sqrt(v / c) + 1e-2)).astype(np.float32),
            *(expected, means, squares),
        )
    start = jax.tree.leaves(parameters())
    moved = [[np.asarray(a) - b for a, b in zip(jax.tree.leaves(x), start, strict=True)] for x in (actual, expected)]
    assert relative_l2(*moved) < 1e-4


@pytest.mark.parametrize(
    ("gradient_exchange", "error", "message"),
    [
        ("sparse", PartitionError, "gradient_exchange='sparse'; it must be 'dense', "),
        (optax.sgd(0.1), PartitionError, "must be 'dense', "),
        (block_sparse("model"), PartitionError, "axis_name='model', but replicas are along the mesh axis 'data'"),
        (block_sparse(k={"conv": 2}), PartitionError, "'conv' fits no parameter"),
    ],
)
def test_bad_exchanges(gradient_exchange, error, message):
    with pytest.raises(error, match=message):
        pipeline(gradient_exchange)
