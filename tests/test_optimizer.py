"""Optimizers split over stages against optax on the whole tree, fed with the same gradients."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models as zoo
from jaxpipe import PartitionError
from tests.support.compare import FUSION, assert_same_bits, relative_l2


KEY = jax.random.key(0)
BATCH = {
    "x": jax.random.normal(jax.random.key(1), (8, 6)),
    "y": jax.random.randint(jax.random.key(2), (8,), 0, 5),
}


def model():
    return jax.tree_util.Partial(zoo.mlp, zoo.init_mlp(KEY, [6, 8, 8, 8, 5]))


def loss(f, batch):
    return optax.softmax_cross_entropy_with_integer_labels(f(batch["x"]), batch["y"]).mean()


def partition(optimizer, stages, f=None, batch=BATCH, function=loss):
    mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
    return jaxpipe.partition(
        model() if f is None else f,
        mesh,
        batch,
        loss=function,
        optimizer=optimizer,
        num_microbatches=2,
        profile="analytic",
        runtime="mpmd",
    )


def kernels(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def damped(decay):
    """Divides by one plus a running mean of the gradient's norm: a state that belongs to no parameter."""

    def update(updates, state, params=None):
        state = decay * state + (1 - decay) * optax.global_norm(updates)
        return jax.tree.map(lambda u: u / (1 + state), updates), state

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def coupled():
    """Adds the mean of the first parameter's gradient to all: small values of one stage that all need."""

    def update(updates, state, params=None):
        shift = jax.tree.leaves(updates)[1].mean()
        return jax.tree.map(lambda u: u + shift, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS = {
    # Products with powers of two are exact, whatever sum a compiler contracts them with.
    "momentum": lambda: optax.sgd(2**-4, momentum=0.5),
    "adam": lambda: optax.adam(1e-2),
    "adamw, mask a function": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=kernels),
    "adamw, mask a tree": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=kernels(model())),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.4, 0.1, 3)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.04, 0.01, 3)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "running norm": lambda: optax.chain(damped(0.7), optax.sgd(0.1)),
    "two rounds": lambda: optax.chain(optax.clip_by_global_norm(0.05), damped(0.7), optax.sgd(0.1)),
    "coupled": lambda: optax.chain(coupled(), optax.sgd(0.1)),
}


@pytest.fixture(scope="module")
def gradients():
    """``gradients(stages, state)``: what a step from a state feeds its optimizer."""
    pipelines = {}

    def of(stages, state):
        if stages not in pipelines:
            pipeline = partition(optax.sgd(0.1), stages)
            pipelines[stages] = pipeline, pipeline.init(KEY)
        pipeline, initial = pipelines[stages]
        # The same parameters; the optimizer's state does not matter to a gradient.
        initial = dataclasses.replace(initial, parameters=state.parameters, step=state.step)
        return pipeline.value_and_grad(initial, BATCH)[1]

    return of


#: Those whose result has every bit of optax's. The others reduce over an array, or leave XLA a product and a sum to
#: contract between roots and quotients; both come out differently in differently fused programs.
EXACT = {"momentum", "schedule"}

#: What is not only run before a release, and of that what both ends of the version range run.
QUICK = [("momentum", 2), ("adafactor", 2), ("two rounds", 4)]
CORE = [("clipped adam", 4)]


def cases():
    for case in itertools.product(OPTIMIZERS, [2, 4]):
        mark = pytest.mark.core if case in CORE else () if case in QUICK else pytest.mark.slow
        yield pytest.param(*case, marks=mark)


@pytest.mark.parametrize(("name", "stages"), cases())
def test_three_steps_are_those_of_optax(name, stages, gradients):
    optimizer = OPTIMIZERS[name]()
    pipeline = partition(optimizer, stages)
    state = pipeline.init(KEY)
    plain = model()
    plain_state = optimizer.init(plain)

    @jax.jit
    def update(gradient, plain_state, plain):
        updates, plain_state = optimizer.update(gradient, plain_state, plain)
        return optax.apply_updates(plain, updates), plain_state

    for _ in range(3):
        gradient = gradients(stages, state)
        state, _ = pipeline.step(state, BATCH)
        plain, plain_state = update(gradient, plain_state, plain)
    trained = pipeline.parameters(state)
    assert jax.tree.structure(trained) == jax.tree.structure(plain)
    for a, b, start in zip(*map(jax.tree.leaves, (trained, plain, model())), strict=True):
        assert not np.array_equal(b, start)
        if name in EXACT:
            assert_same_bits(a, b)
        # Another last bit in the update can round the sum with the parameter the other way, once in each step.
        assert np.max(np.abs(a - b)) <= 3 * np.finfo(np.float32).eps * np.max(np.abs(b))


@pytest.mark.core
def test_the_learning_rate_of_each_step():
    pipeline = partition(OPTIMIZERS["injected"](), 2)
    state, seen = pipeline.init(KEY), []
    for _ in range(3):
        state, metrics = pipeline.step(state, BATCH)
        seen.append(float(metrics["learning_rate"]))
    jax.random.bits(KEY)  # was copied: steps donate the state, not the caller's key
    # float32 of three steps from 0.04 to 0.01; the schedule's own rounding is below one part in a million.
    assert seen == pytest.approx([0.04, 0.03, 0.02], rel=1e-6)


def test_a_first_state_that_is_made_of_all_parameters():
    """The first distance of DoG is a share of their norm; a stage has its own parameters only."""
    optimizer = optax.contrib.dog(init_step=("heuristic", 0.1))
    pipeline, start = partition(optimizer, 2), model()
    with pytest.raises(PartitionError, match=r"first state .* made of \S+, .*optimizer_state=optimizer\.init\(param"):
        pipeline.init(KEY)
    state = pipeline.init(KEY, variables=start, optimizer_state=optimizer.init(start))
    gradient = pipeline.value_and_grad(state, BATCH)[1]
    updates, _ = optimizer.update(gradient, optimizer.init(start), start)
    trained = pipeline.parameters(pipeline.step(state, BATCH)[0])
    assert relative_l2(trained, optax.apply_updates(start, updates)) < FUSION


# What cannot be split


SIDE = 80  # 6400 numbers are too many to exchange


def two_weights(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def refused(optimizer, side=SIDE):
    f = jax.tree_util.Partial(two_weights, {"a": jnp.ones((side, side)), "b": jnp.ones((side, side))})
    return partition(optimizer, 2, f, jax.ShapeDtypeStruct((4, side), jnp.float32), lambda f, x: f(x).mean())


def stateless(update):
    return optax.GradientTransformation(
        lambda params: optax.EmptyState(), lambda updates, state, params=None: (update(updates), state)
    )


def on_dict(change):
    """A change of ``{"a": ..., "b": ...}`` as one of the Partial around it."""

    def update(updates):
        leaves, treedef = jax.tree.flatten(updates)
        return jax.tree.unflatten(treedef, change(*leaves))

    return stateless(update)


@pytest.mark.core
def test_large_values_of_two_stages_may_not_meet():
    message = (
        r"optimizer: add(_any)? of on_dict combines large values of several stages \(\(80, 80\) of stage 0, \(80, 80\) "
        r"of stage 1\)\. Stages exchange at most 4096 numbers at once .*Use one that works parameter by parameter"
    )
    with pytest.raises(PartitionError, match=message):
        refused(on_dict(lambda a, b: [a + b, b]))
    # Of 64 x 64 = 4096 numbers it is allowed.
    assert len(refused(on_dict(lambda a, b: [a + b, b]), 64).plan.stages) == 2


def test_a_gradient_may_not_move_to_another_parameter():
    def swapped(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates)
        return updates, jax.tree.unflatten(treedef, leaves[::-1])

    optimizer = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), swapped)
    with pytest.raises(PartitionError, match=r"the new value of .*'a'\], in stage 0, is made in stage 1.*moves whole"):
        refused(optimizer)


@pytest.mark.core
def test_a_large_state_of_no_parameter():
    optimizer = optax.GradientTransformation(
        lambda params: jnp.zeros((SIDE, SIDE)),
        lambda updates, state, params=None: (updates, state + jax.tree.leaves(updates)[0]),
    )
    message = r"a state of shape \(80, 80\) belongs to no parameter, but is made of values of stage 0.*at most 4096"
    with pytest.raises(PartitionError, match=message):
        refused(optimizer)
