"""A loss or a gradient that is not finite: the step is left out or raises, and the stage where it began is named."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import assert_same_bits


# Some models here update their statistics in initialization already, which is from shapes alone.
pytestmark = pytest.mark.filterwarnings("ignore::jaxpipe.InitialValuesWarning")


BLOCKS = 4
ROWS = 8


class Block(nn.Module):
    """Uses its kernel on both sides of what may go wrong, so that all of it is in one stage."""

    index: int

    @nn.compact
    def __call__(self, x, batch):
        kernel = self.param("kernel", nn.initializers.orthogonal(), (6, 6))
        mean = self.variable("batch_stats", "mean", jnp.zeros, (6,))
        x = x @ kernel
        mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        here = (jnp.arange(BLOCKS) == self.index).astype(x.dtype)
        forward = (batch["forward"] * here).sum(-1, keepdims=True)
        backward = (batch["backward"] * here).sum(-1, keepdims=True)
        # sqrt(negative) is NaN; sqrt(0) is finite, and its derivative is not.
        x = jnp.sqrt((jnp.square(x) + 1.0) * (1.0 - backward) - 1e3 * forward)
        return x @ kernel.T


class Net(nn.Module):
    @nn.compact
    def __call__(self, batch):
        x = batch["x"]
        for k in range(BLOCKS):
            x = Block(k)(x, batch)
        mask = jnp.where(jnp.arange(6) < 3, 0.0, -jnp.inf)  # an infinity that does no harm
        return x * jax.nn.softmax(mask)


def batch_of(forward=None, backward=None, row=5):
    """A batch; one of its rows makes the forward or the backward pass of a block go wrong."""
    flags = np.zeros((2, ROWS, BLOCKS), np.float32)
    for k, block in enumerate((forward, backward)):
        if block is not None:
            flags[k, row, block] = 1
    x = jax.random.normal(jax.random.key(1), (ROWS, 6))
    return {"x": x, "forward": jnp.asarray(flags[0]), "backward": jnp.asarray(flags[1])}


@functools.cache
def pipeline_of(on_nonfinite, replicas=None, exchange="dense", stages=2, schedule="auto"):
    shape = (stages,) if replicas is None else (replicas, stages)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("stage",) if replicas is None else ("data", "stage"))
    return jaxpipe.partition(
        Net(),
        mesh,
        batch_of(),
        loss=lambda model, batch: jnp.square(model(batch)).mean(),
        optimizer=optax.sgd(0.1, momentum=0.9),
        num_microbatches=4 if replicas is None else 2,
        profile="analytic",
        gradient_exchange=exchange,
        options=jaxpipe.PlanOptions(on_nonfinite=on_nonfinite),
        schedule=schedule,
        runtime="mpmd",
    )


def stage_of(pipeline, block):
    return next(s for s, stage in enumerate(pipeline.plan.stages) if any(f"Block_{block}" in m for m in stage.modules))


def copied(state):
    """On the host; random keys as their data. The next step takes the memory."""
    is_key = jax.dtypes.prng_key
    return jax.tree.map(
        lambda x: np.array(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, is_key) else x), state
    )


def values(state):
    return state.parameters, state.variables, state.optimizer, state.residual, state.shared


@pytest.mark.parametrize("block", range(BLOCKS))
def test_the_operator_behind_a_forward_pass_is_named(block):
    pipeline = pipeline_of("raise")
    with pytest.raises(jaxpipe.NonFiniteError, match="The loss of step 0 is nan") as raised:
        pipeline.step(pipeline.init(jax.random.key(0)), batch_of(forward=block))
    stage = stage_of(pipeline, block)
    assert raised.value.stage == stage
    # Row 5 of 8 is in the third of four micro-batches.
    assert f"it began in stage {stage}, micro-batch 2, operator sqrt of Net/Block_{block}" in str(raised.value)


@pytest.mark.parametrize(("rows", "microbatch"), [(6, 2), (7, 0)])
def test_batches_of_other_sizes(rows, microbatch):
    """6 rows make three micro-batches, as large as planned; 7 make one."""
    pipeline, batch = pipeline_of("raise"), jax.tree.map(lambda x: x[:rows], batch_of(forward=2))
    state, stage = pipeline.init(jax.random.key(0)), stage_of(pipeline, 2)
    origin = pipeline.find_nonfinite(state, batch)
    assert (origin.stage, origin.microbatch, origin.what) == (stage, microbatch, "operator sqrt of Net/Block_2")
    with pytest.raises(jaxpipe.NonFiniteError, match=f"began in stage {stage}, micro-batch {microbatch}, ") as raised:
        pipeline.step(state, batch)
    assert raised.value.stage == stage


@pytest.mark.parametrize("block", [0, 3])
def test_the_stage_behind_a_backward_pass_is_named(block):
    pipeline = pipeline_of("raise")
    with pytest.raises(jaxpipe.NonFiniteError, match="in the backward pass") as raised:
        pipeline.step(pipeline.init(jax.random.key(0)), batch_of(backward=block))
    assert raised.value.stage == stage_of(pipeline, block)


def test_an_error_leaves_the_state_as_it_was():
    pipeline = pipeline_of("raise")
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch_of())
    before = copied(state)
    with pytest.raises(jaxpipe.NonFiniteError) as raised:
        pipeline.step(state, batch_of(forward=1))
    assert_same_bits(copied(raised.value.state), before)
    assert pipeline.step(raised.value.state, batch_of())[1]["loss"] > 0


def test_parameters_and_batches_that_are_not_finite_are_named():
    pipeline = pipeline_of("raise")
    state = pipeline.init(jax.random.key(0))
    batch = batch_of()
    batch["x"] = batch["x"].at[0, 0].set(jnp.inf)
    assert str(pipeline.find_nonfinite(state, batch)) == "stage 0, micro-batch 0, batch['x']"
    variables = pipeline.parameters(state)
    variables["params"]["Block_3"]["kernel"] = np.full((6, 6), np.nan, np.float32)
    origin = pipeline.find_nonfinite(pipeline.init(jax.random.key(0), variables=variables), batch_of())
    assert (origin.stage, origin.microbatch, origin.what) == (stage_of(pipeline, 3), 0, "parameter Block_3/kernel")
    assert pipeline.find_nonfinite(state, batch_of()) is None


@pytest.mark.parametrize(("schedule", "replicas"), [("pipedream", None), ("double_buffered", None), ("pipedream", 2)])
def test_a_skipped_step_takes_its_early_updates_back(schedule, replicas):
    """Row 5 of 8 is in the third of four micro-batches: updates before it were made with finite gradients."""
    pipeline = pipeline_of("skip", replicas, schedule=schedule)
    state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), batch_of())
    assert int(metrics["skipped"]) == 0 and not np.any(metrics["nonfinite_stages"])
    for bad in ({"forward": 1}, {"backward": 2}):
        before, skipped = copied(values(state)), int(metrics["skipped"])
        state, metrics = pipeline.step(state, batch_of(**bad))
        assert_same_bits(copied(values(state)), before)
        assert int(metrics["skipped"]) == skipped + 1 and np.any(metrics["nonfinite_stages"])
    state, metrics = pipeline.step(state, batch_of())
    assert np.isfinite(metrics["loss"]) and int(state.step) == 4


@pytest.mark.parametrize("bad", [{"forward": 1}, {"backward": 2}])
def test_a_skipped_step_changes_no_bit(bad):
    pipeline = pipeline_of("skip")
    state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), batch_of())
    assert int(metrics["skipped"]) == 0 and not np.any(metrics["nonfinite_stages"])
    before = copied(values(state))
    state, metrics = pipeline.step(state, batch_of(**bad))
    assert_same_bits(copied(values(state)), before)
    assert (int(state.step), int(metrics["skipped"])) == (2, 1)
    last = stage_of(pipeline, bad.get("backward", BLOCKS - 1))
    assert metrics["nonfinite_stages"].tolist() == [s <= last for s in range(2)]
    state, metrics = pipeline.step(state, batch_of())
    assert int(metrics["skipped"]) == 1 and np.isfinite(metrics["loss"])


def test_finite_steps_have_the_bits_of_a_pipeline_that_does_not_look():
    states = []
    for on_nonfinite in (None, "skip", "raise"):
        pipeline = pipeline_of(on_nonfinite)
        state = pipeline.init(jax.random.key(0))
        for _ in range(3):
            state, metrics = pipeline.step(state, batch_of())
        states.append(copied(values(state)))
        assert ("skipped" in metrics) == (on_nonfinite == "skip")
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


def test_residuals_are_kept_too_and_one_replica_stops_all():
    pipeline = pipeline_of("skip", 2, jaxpipe.gradients.block_sparse(k=1))
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch_of())
    assert any(np.any(x) for x in state.residual)
    before = copied(values(state))
    state, metrics = pipeline.step(state, batch_of(backward=0, row=0))
    assert_same_bits(copied(values(state)), before)
    assert int(metrics["skipped"]) == 1
    assert_same_bits(jax.tree.map(lambda x: x.addressable_shards[-1].data, state.skipped), jnp.int32(1))


def test_other_words_are_refused():
    with pytest.raises(jaxpipe.PartitionError, match="on_nonfinite='ignore'; it must be 'raise', 'skip' or None"):
        pipeline_of("ignore")
