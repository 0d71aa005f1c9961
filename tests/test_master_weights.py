"""Float32 master weights: the reference keeps them by itself, and rounds them to get the parameters.

Models compute in float32, with parameters of 16 bits: whether XLA rounds between two operators is not the question.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models as zoo
from jaxpipe.errors import PartitionError
from jaxpipe.gradients import MasterWeightsState, master_weights
from jaxpipe.schedules.asynchronous import double_buffered
from tests.support.compare import assert_same_bits


SIZES = [12, 16, 16, 16, 10]
ROWS, MICROBATCHES = 32, 8


def narrow(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def parameters_of(dtype):
    return narrow(zoo.init_mlp(jax.random.key(0), SIZES), dtype)


def batch_of(seed=1):
    x, y = jax.random.split(jax.random.key(seed))
    return {"x": jax.random.normal(x, (ROWS, SIZES[0])), "y": jax.random.randint(y, (ROWS,), 0, 10)}


def network(parameters, x):
    return zoo.mlp(narrow(parameters, jnp.float32), x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@jax.jit
def gradient_of(parameters, batch):
    return jax.grad(lambda p: loss(functools.partial(network, p), batch))(parameters)


def steps_of(dtype, optimizer, steps, microbatches=1, replicas=1):
    """Plain steps with float32 masters, operator by operator; yields parameters and masters after each."""
    masters = narrow(parameters_of(dtype), jnp.float32)
    state = optimizer.init(masters)
    for step in range(steps):
        batch = batch_of(step)
        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        each = [
            gradient_of(narrow(masters, dtype), jax.tree.map(lambda x, j=j: x[j], parts)) for j in range(microbatches)
        ]
        wide = [jax.tree.map(lambda g: np.asarray(g).astype(np.float32), g) for g in each]
        share = microbatches // replicas
        sums = [functools.reduce(add, wide[r * share : (r + 1) * share]) for r in range(replicas)]
        mean = jax.tree.map(lambda g: jnp.asarray(g / np.float32(microbatches)), functools.reduce(add, sums))
        updates, state = optimizer.update(mean, state, masters)
        masters = optax.apply_updates(masters, updates)
        yield narrow(masters, dtype), masters


def add(a, b):
    return jax.tree.map(np.add, a, b)


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(2.0**-4, momentum=0.5),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.4, 0.1, 3)),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(2.0**-4)),
}


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_become_the_rounded_masters(dtype):
    """Whatever they were before, up to 4096 times as large."""
    rng = np.random.default_rng(0)
    exponents = np.arange(-12, 9)
    old = rng.uniform(1, 2, (len(exponents), 1 << 15)) * rng.choice([-1, 1], (len(exponents), 1 << 15))
    new = rng.uniform(1, 2, old.shape) * rng.choice([-1, 1], old.shape) * 2.0 ** exponents[:, None]
    new[:, 0], new[:, 1] = 0, -0.0
    parameters, masters = jnp.asarray(old, dtype), jnp.asarray(new, jnp.float32)
    optimizer = master_weights(optax.set_to_zero())
    state = optimizer.init(parameters)._replace(masters=masters)

    def step(parameters, state):
        updates, state = optimizer.update(jnp.zeros_like(parameters), state, parameters)
        return optax.apply_updates(parameters, updates), state

    for run in (step, jax.jit(step)):
        renewed, after = run(parameters, state)
        expected = np.asarray(masters).astype(dtype)
        assert renewed.dtype == dtype
        np.testing.assert_array_equal(np.asarray(renewed), expected)  # 0 for -0.0, which a sum of two is not
        assert_same_bits(after.masters + 0, masters + 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_hundred_steps_have_the_bits_of_float32_masters(name, dtype):
    inner = OPTIMIZERS[name]()
    optimizer = master_weights(inner)
    parameters = parameters_of(dtype)
    state = optimizer.init(parameters)
    lost = 0
    for step, (expected, masters) in enumerate(steps_of(dtype, inner, 100)):
        before = parameters
        updates, state = optimizer.update(gradient_of(parameters, batch_of(step)), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        assert_same_bits((parameters, state.masters), (expected, masters))
        pairs = zip(*map(jax.tree.leaves, (before, parameters)), strict=True)
        lost += sum(int((a == b).sum()) for a, b in pairs)
    assert lost > 10_000  # steps too small for the parameter's type, which the masters have added up


def pipeline_of(dtype, optimizer, stages=2, replicas=1, **options):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: stages * replicas]).reshape(replicas, stages), ("data", "stage"))
    return jaxpipe.partition(
        jax.tree_util.Partial(network, parameters_of(dtype)),
        mesh,
        batch_of(),
        loss=loss,
        optimizer=optimizer,
        num_microbatches=MICROBATCHES // replicas,
        profile="analytic",
        **options,
    )


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["momentum", pytest.param("schedule", marks=pytest.mark.slow)])
def test_a_pipeline_gives_it_float32_sums_of_micro_batches_and_replicas(name, stages, replicas, runtime):
    inner, dtype = OPTIMIZERS[name](), jnp.bfloat16
    pipeline = pipeline_of(dtype, master_weights(inner), stages, replicas, runtime=runtime)
    state = pipeline.init(jax.random.key(3))
    for step, (expected, _) in enumerate(steps_of(dtype, inner, 4, MICROBATCHES, replicas)):
        state, _ = pipeline.step(state, batch_of(step))
        assert_same_bits(pipeline.parameters(state).args[0], expected)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_the_optimizer_component_has_masters_and_float32_moments(runtime):
    pipeline = pipeline_of(jnp.bfloat16, master_weights(optax.adam(1e-3)), stages=1, runtime=runtime)
    size = sum(rows * columns + columns for rows, columns in itertools.pairwise(SIZES))
    assert pipeline.plan.memory["parameters"] == 2 * size
    assert pipeline.plan.memory["optimizer"] == pytest.approx(3 * 4 * size, abs=4)  # and a count
    compiled = pipeline.memory_report()
    plain = pipeline_of(jnp.bfloat16, optax.adam(1e-3), stages=1, runtime=runtime).memory_report()
    more = compiled.compiled_bytes[0] - plain.compiled_bytes[0]
    assert more >= (3 * 4 - 2 * 2) * size


def test_masters_split_over_replicas_give_the_same_bits():
    optimizer = master_weights(optax.adamw(1e-3))
    states, sizes = [], []
    for options in (None, jaxpipe.PlanOptions(zero=1)):
        pipeline = pipeline_of(jnp.bfloat16, optimizer, 2, 2, options=options)
        state = pipeline.init(jax.random.key(3))
        for seed in range(3):
            state, _ = pipeline.step(state, batch_of(seed))
        states.append(pipeline.parameters(state))
        sizes.append(pipeline.plan.memory["optimizer"])
    assert_same_bits(*states)
    assert sizes[1] < 0.55 * sizes[0]


def test_updates_during_a_step_take_float32_means():
    """The mean of 256, 1, 1 and 1 is 64.75, which has 9 bits; bfloat16 holds 8."""
    rows = jnp.array([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16)
    pipeline = jaxpipe.partition(
        jax.tree_util.Partial(lambda w, x: x * w, jnp.zeros((1,), jnp.bfloat16)),
        jax.sharding.Mesh(jax.devices()[:1], ("stage",)),
        rows,
        loss=lambda f, x: f(x).astype(jnp.float32).mean(),
        optimizer=master_weights(optax.sgd(1.0)),
        num_microbatches=4,
        schedule=functools.partial(double_buffered, group=4),
        profile="analytic",
    )
    state = pipeline.init(jax.random.key(0))
    for _ in range(3):
        state, _ = pipeline.step(state, rows)
    assert np.float32(pipeline.parameters(state).args[0]) == -194  # -194.25 rounded; three times -65 is -195


def test_a_parameter_of_32_bits_has_no_copy():
    tree = {"narrow": jnp.ones(3, jnp.bfloat16), "wide": jnp.ones(5)}
    optimizer = master_weights(optax.trace(0.5))
    state = optimizer.init(tree)
    assert isinstance(state, MasterWeightsState)
    assert [x.shape for x in jax.tree.leaves(state.masters)] == [(3,)]
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, tree), state, tree)
    assert {x.dtype.name for x in jax.tree.leaves((updates, state))} == {"float32"}
    assert_same_bits(optax.apply_updates(tree, updates)["wide"], jnp.full(5, 2.0))


def test_parameters_are_needed():
    optimizer = master_weights(optax.sgd(0.1))
    w = jnp.ones(1, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"update\(updates, state, params\) needs the parameters"):
        optimizer.update(w, optimizer.init(w))


def test_a_state_outside_that_would_become_float32_is_refused():
    optimizer = optax.chain(optax.trace(0.5), master_weights(optax.sgd(0.1)))
    with pytest.raises(PartitionError, match=r"type bfloat16 that is float32.*master_weights\(optax.chain"):
        pipeline_of(jnp.bfloat16, optimizer)
