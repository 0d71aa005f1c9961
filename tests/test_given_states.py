"""Training states that no step has made: copied, pickled, moved and changed ones, and what pipelines say of them."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from tests.support.compare import assert_same_bits


BATCH = np.random.default_rng(0).standard_normal((8, 12), np.float32)


class Net(nn.Module):
    """Layers of one byte count, and statistics."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(12)(x))
        return nn.Dense(12)(nn.relu(nn.Dense(24)(x)))


@functools.cache
def pipeline_of(runtime):
    return jaxpipe.partition(
        Net(),
        Mesh(jax.devices()[:2], ("stage",)),
        BATCH,
        loss=lambda model, x: jnp.square(model(x) - x).mean(),
        evaluate=lambda model, x: jnp.square(model(x, train=False) - x).mean(),
        predict=lambda model, x: model(x, train=False),
        optimizer=optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 0, 10)),
        num_microbatches=2,
        profile="analytic",
        options=jaxpipe.PlanOptions(on_nonfinite="skip"),
        runtime=runtime,
    )


@functools.cache
def expected(runtime):
    """All that a pipeline says of its own state after a step, and what two more steps make of it."""
    pipeline = pipeline_of(runtime)
    state = pipeline.init(jax.random.key(0))
    state, _ = pipeline.step(state, BATCH)
    return says(pipeline, state)


def says(pipeline, state):
    """What a pipeline says of a state; at the end it trains with it."""
    told = [call(pipeline, state) for call in READING.values()]
    for _ in range(2):
        state, metrics = pipeline.step(state, BATCH)
        told.append(jax.tree.map(np.asarray, metrics))
    return [*told, pipeline.parameters(state), pipeline.optimizer_state(state)]


READING = {
    "evaluate": lambda pipeline, state: pipeline.evaluate(state, BATCH),
    "predict": lambda pipeline, state: pipeline.predict(state, BATCH),
    "value_and_grad": lambda pipeline, state: pipeline.value_and_grad(state, BATCH),
    "parameters": lambda pipeline, state: pipeline.parameters(state),
    "optimizer_state": lambda pipeline, state: pipeline.optimizer_state(state),
    "find_nonfinite": lambda pipeline, state: pipeline.find_nonfinite(state, BATCH),
    "microbatch_key": lambda pipeline, state: pipeline.microbatch_key(state, 1),
}


def in_columns(x):
    if x.ndim != 2 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.device_put(x, Format(Layout((1, 0)), x.sharding))


def last_four():
    return NamedSharding(Mesh(np.array(jax.devices()[4:8]), ("any",)), P())


WAYS = {
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "mapped": lambda state: jax.tree.map(lambda x: x, state),
    "on the host": jax.device_get,
    "on one device": lambda state: jax.device_put(state, jax.devices()[0]),
    "on the last device": lambda state: jax.device_put(state, jax.devices()[7]),
    "on other devices": lambda state: jax.device_put(state, last_four()),
    "in columns": lambda state: jax.tree.map(in_columns, state),
    "with a number": lambda state: dataclasses.replace(state, step=1, skipped=0),
}


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_state_that_was_copied_or_moved_goes_on_with_the_same_bits(way, runtime):
    pipeline = pipeline_of(runtime)
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    assert_same_bits(says(pipeline, way(state)), expected(runtime))


def test_a_state_on_the_host_begins_as_often_as_one_likes():
    pipeline = pipeline_of("mpmd")
    state = jax.device_get(pipeline.init(jax.random.key(0)))
    first, _ = pipeline.step(state, BATCH)
    second, _ = pipeline.step(state, BATCH)
    assert_same_bits(first, second)


def test_a_copy_of_a_state_does_not_lose_its_arrays_with_it():
    pipeline = pipeline_of("mpmd")
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    moved = jax.device_put(state, jax.devices()[7])
    pipeline.step(moved, BATCH)
    assert_same_bits(says(pipeline, state), expected("mpmd"))


def changed(part, k, change):
    def way(state):
        leaves = list(getattr(state, part))
        leaves[k] = change(leaves[k])
        return dataclasses.replace(state, **{part: tuple(leaves)})

    return way


# Parameters in the order of their paths: BatchNorm_0/bias, scale, Dense_0/bias, kernel [12, 12], Dense_1/bias, kernel
# [12, 24], Dense_2/bias, kernel [24, 12].
REFUSED = {
    "transposed": (changed("parameters", 5, jnp.transpose), r"parameters\[5\] \(.*Dense_1/kernel\) .* \(24, 12\)"),
    "flattened": (changed("parameters", 3, jnp.ravel), r"parameters\[3\] \(.*Dense_0/kernel\) has shape \(144,\)"),
    "another type": (
        changed("parameters", 3, lambda x: x.view(jnp.int32)),
        r"Dense_0/kernel\) has shape \(12, 12\) and dtype int32; this plan has shape \(12, 12\) and dtype float32",
    ),
    "a narrow type": (changed("parameters", 0, lambda x: x.astype(jnp.bfloat16)), r"bias\) .* dtype bfloat16"),
    "statistics": (changed("variables", 0, lambda x: x[:3]), r"state\.variables\[0\] \(.*mean\) has shape \(3,\)"),
    "a moment": (changed("optimizer", 3, jnp.ravel), r"state\.optimizer\[3\] \(.*mu.*kernel.*\) has shape \(144,\)"),
    "a text": (changed("parameters", 0, lambda _: "x"), r"parameters\[0\] .* is of type str; it must be an array"),
    "no array": (changed("parameters", 0, lambda _: None), r"state\.parameters is of type tuple"),
    "fewer": (
        lambda state: dataclasses.replace(state, parameters=state.parameters[1:]),
        r"state\.parameters is a tuple of 7 arrays; this plan has a tuple of 8 arrays",
    ),
    "a dictionary": (
        lambda state: dataclasses.replace(state, parameters={"w": state.parameters[0]}),
        r"state\.parameters is of type dict; this plan has a tuple of 8 arrays",
    ),
    "an old key": (
        lambda state: dataclasses.replace(state, key=jax.random.PRNGKey(0)),
        r"state\.key has shape \(2,\) and dtype uint32",
    ),
    "a float": (lambda state: dataclasses.replace(state, step=1.5), r"state\.step has shape \(\) and dtype float32"),
}


@pytest.mark.parametrize(("way", "text"), REFUSED.values(), ids=REFUSED)
def test_a_changed_state_is_refused_by_name_and_costs_nothing(way, text):
    pipeline = pipeline_of("mpmd")
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    wrong = way(state)
    reading = [call for name, call in READING.items() if name != "microbatch_key"]  # which reads the key alone
    for call in (*reading, lambda pipeline, state: pipeline.step(state, BATCH)):
        with pytest.raises(jaxpipe.ModelError, match=text + r".*pass them to init\(key, variables="):
            call(pipeline, wrong)
    assert_same_bits(says(pipeline, state), expected("mpmd"))


def test_one_program_refuses_the_buffers_of_another_shape():
    pipeline = pipeline_of("spmd")
    state = pipeline.init(jax.random.key(0))
    with pytest.raises(jaxpipe.ModelError, match=r"state\.parameters\[0\] has shape .* and dtype float32"):
        pipeline.step(dataclasses.replace(state, parameters=tuple(x[:-1] for x in state.parameters)), BATCH)
    pipeline.step(state, BATCH)


def test_steps_look_at_no_array_of_a_state_that_they_know(monkeypatch):
    pipeline = pipeline_of("mpmd")
    state = pipeline.init(jax.random.key(0))
    copied = jax.tree.map(jnp.copy, state)
    looks = []
    look = jaxpipe.runtime.check_state.fitted
    monkeypatch.setattr("jaxpipe.runtime.check_state.fitted", lambda *given: looks.append(1) or look(*given))
    for _ in range(2):
        state, _ = pipeline.step(state, BATCH)
        pipeline.evaluate(state, BATCH)
    assert not looks
    for _ in range(3):
        pipeline.evaluate(copied, BATCH)
    assert looks == [1]


@pytest.mark.parametrize("copying", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_pipeline_that_is_copied_says_what_to_do(copying):
    with pytest.raises(jaxpipe.ModelError, match=r"cannot be pickled or copied.*Call jaxpipe\.partition"):
        copying(pipeline_of("mpmd"))


# Metrics


def weights_as_metrics(model, x):
    y = model(x)
    variables = model.variables
    mean = variables["batch_stats"]["BatchNorm_0"]["mean"]
    return jnp.square(y - x).mean(), {"bias": variables["params"]["Dense_0"]["bias"], "mean": mean}


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 2)], ids=str)
def test_metrics_and_predictions_are_kept_over_later_steps(runtime, shape):
    """Learning rates by the schedule itself; parameters and statistics that a function returns as they are."""
    rate = optax.linear_schedule(0.04, 0.01, 3)
    pipeline = jaxpipe.partition(
        Net(),
        Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("data", "stage")[-len(shape) :]),
        BATCH,
        loss=weights_as_metrics,
        evaluate=lambda model, x: weights_as_metrics(lambda_of(model), x),
        predict=lambda model, x: model(x, train=False),
        optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=rate),
        num_microbatches=1,
        profile="analytic",
        options=jaxpipe.PlanOptions(on_nonfinite="skip"),
        runtime=runtime,
    )
    state, kept, copies = pipeline.init(jax.random.key(0)), [], []
    for k in range(4):
        batch = np.full_like(BATCH, np.nan) if k == 2 else BATCH
        told = [pipeline.evaluate(state, batch), pipeline.predict(state, batch), pipeline.value_and_grad(state, batch)]
        state, metrics = pipeline.step(state, batch)
        kept.append([*told, metrics])
        copies.append(jax.tree.map(np.array, kept[-1]))
    assert_same_bits(jax.tree.map(np.asarray, kept), copies)
    assert [float(told[-1]["learning_rate"]) for told in kept[:2]] == pytest.approx([float(rate(0)), float(rate(1))])
    assert [int(told[-1]["skipped"]) for told in kept] == [0, 0, 1, 1]


def lambda_of(model):
    """The model in the mode for evaluation, with its variables."""

    class Evaluated:
        variables = property(lambda _: model.variables)

        def __call__(self, x):
            return model(x, train=False)

    return Evaluated()
