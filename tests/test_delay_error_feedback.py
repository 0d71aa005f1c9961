"""Error feedback for one step of delay: against NumPy step by step, and in a pipeline with double buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.gradients import delay_error_feedback
from jaxpipe.schedules import double_buffered, one_f_one_b
from tests.support.compare import arrays, relative_l2
from tests.support.pipeline_models import case_of, pipeline_of


RATE, FIRST, SECOND, DECAY, EPSILON = 0.05, 0.9, 0.99, 0.1, 1e-8


def adamw_updates(gradients, weights_at):
    """AdamW's updates in float64, of gradients as they come: ``weights_at(t)`` are the weights of step ``t``."""
    m = v = 0.0
    for t in range(len(gradients)):
        g = gradients[t](weights_at(t - 1 if t else 0))
        m, v = FIRST * m + (1 - FIRST) * g, SECOND * v + (1 - SECOND) * g**2
        unbiased = m / (1 - FIRST ** (t + 1)), v / (1 - SECOND ** (t + 1))
        yield -RATE * (unbiased[0] / (np.sqrt(unbiased[1]) + EPSILON) + DECAY * weights_at(t))


@pytest.mark.core
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_a_plain_loop_with_late_gradients_is_the_recurrence(scale):
    rng = np.random.default_rng(0)
    start, targets = rng.normal(size=5), rng.normal(size=(12, 5))
    curvature = np.array([0.1, 0.5, 1.0, 2.0, 4.0])

    history, last = [start], None
    for update in adamw_updates([lambda w, b=b: curvature * (w - b) for b in targets], lambda t: history[t]):
        late = 0 if last is None else update - last
        history.append(history[-1] + update + scale * late)
        last = update

    adamw = optax.adamw(RATE, b1=FIRST, b2=SECOND, eps=EPSILON, weight_decay=DECAY)
    optimizer = optax.chain(adamw, delay_error_feedback(scale))
    weights = before = jnp.asarray(start, jnp.float32)
    state = optimizer.init(weights)
    for t, target in enumerate(targets):
        gradient = jnp.asarray(curvature, jnp.float32) * (before - jnp.asarray(target, jnp.float32))
        updates, state = optimizer.update(gradient, state, weights)
        before, weights = weights, optax.apply_updates(weights, updates)
        np.testing.assert_allclose(weights, history[t + 1], rtol=1e-5, atol=1e-6)


OPTIMIZERS = {
    # A large epsilon: gradients that are zero but for rounding do not become whole steps.
    "adamw": lambda: optax.adamw(1e-2, eps=1e-2),
    "muon": lambda: optax.contrib.muon(1e-2, adam_learning_rate=1e-2, eps=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_pipeline_with_double_buffers_is_a_plain_loop_with_late_gradients(name):
    """Eight micro-batches, groups of two: the gradients of the second group and later ones are one update late."""
    optimizer = optax.chain(OPTIMIZERS[name](), delay_error_feedback())
    schedule = lambda p, m: double_buffered(p, m, group=2)  # noqa: E731
    pipeline = pipeline_of("mlp", 2, 8, None, runtime="mpmd", schedule=schedule, optimizer=optimizer)
    case = case_of("mlp")
    state = pipeline.init(jax.random.key(3))
    keys = [pipeline.microbatch_key(state, j) for j in range(8)]
    trained = arrays(pipeline.parameters(pipeline.step(state, case.batch)[0]))

    weights, rest = case.start(jax.random.key(3))
    before, slots = weights, optimizer.init(weights)
    rows = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), case.batch)
    gradient = jax.jit(jax.grad(lambda *args: case.plain(*args)[0]))
    for group in range(4):
        batches = [jax.tree.map(lambda x, j=j: x[j], rows) for j in (2 * group, 2 * group + 1)]
        pair = [gradient(before, rest, keys[2 * group + k], batch) for k, batch in enumerate(batches)]
        updates, slots = optimizer.update(jax.tree.map(lambda a, b: (a + b) / 2, *pair), slots, weights)
        before, weights = weights, optax.apply_updates(weights, updates)
    wanted = arrays(case.variables(weights, rest))
    start = arrays(case.variables(*case.start(jax.random.key(3))))
    moved = [[np.asarray(x) - np.asarray(s) for x, s in zip(tree, start, strict=True)] for tree in (trained, wanted)]
    assert relative_l2(*moved) < 1e-4  # of four updates, each a small part of the weights that it is rounded with


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_both_runtimes_keep_the_last_update(runtime):
    optimizer = optax.chain(optax.sgd(2**-3), delay_error_feedback())
    pipeline = pipeline_of("mlp", 2, 4, None, runtime=runtime, schedule=one_f_one_b, optimizer=optimizer)
    plain = pipeline_of("mlp", 2, 4, None, runtime=runtime, schedule=one_f_one_b, optimizer=optax.sgd(2**-3))
    batch = case_of("mlp").batch
    weights = []
    for p in (pipeline, plain):
        state = p.init(jax.random.key(3))
        weights.append([arrays(p.parameters(state := p.step(state, batch)[0])) for _ in range(2)])
    (first, second), (plain_first, plain_second) = weights
    assert relative_l2(first, plain_first) == 0
    assert relative_l2(second, plain_second) > 1e-4
