"""Stages that compute the same share one branch; nothing else does, and no result changes."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxpipe
from examples import models as zoo
from jaxpipe.runtime.spmd.stage_switch import overwrite, switch
from jaxpipe.schedules import one_f_one_b
from tests.support.compare import arrays, assert_same_bits
from tests.support.pipeline_models import Case, classifier, images, linen, pipeline_of, plain_gradients


WIDTH = 16


def branches_of(function, *operands) -> int:
    """Branches of the conditional in a program, 0 for none."""
    conditionals = [e for e in jax.make_jaxpr(function)(*operands).eqns if e.primitive.name == "cond"]
    return sum(len(e.params["branches"]) for e in conditionals)


def check(branches, expected: int, *operands) -> None:
    """So many branches are left, and each index gives what its own branch gives."""
    assert branches_of(lambda k, *xs: switch(k, branches, *xs), jnp.int32(0), *operands) == expected
    run = jax.jit(lambda k, *xs: switch(k, branches, *xs))
    for k, branch in enumerate(branches):
        assert_same_bits(run(jnp.int32(k), *operands), jax.jit(branch)(*operands))


def scaled(by):
    return lambda x: jnp.sin(x) * by


X = jnp.linspace(-1, 1, 6).reshape(2, 3)


def test_equal_branches_are_one():
    check([scaled(2.0), scaled(3.0), scaled(2.0), scaled(2.0)], 2, X)


@pytest.mark.versions
@pytest.mark.parametrize("factors", [(2.0, 3.0, 2.0), (2.0, 2.0), (2.0,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64, jnp.int32])
def test_a_branch_that_writes_over_what_it_is_given(factors, dtype):
    buffers, gradient = [X.astype(dtype), jnp.ones((3,), dtype)], [jnp.full((2, 3), 5, dtype)]

    def branch(by):
        return lambda own, arrays, turn: [own[0] * dtype(by) + arrays[0], own[1] - dtype(by)]

    @jax.jit
    def run(k, stop):
        guarded = overwrite(k, list(map(branch, factors)), buffers, gradient, unless=stop)
        return overwrite(k, list(map(branch, factors)), buffers, gradient), guarded

    for k, by in enumerate(factors):
        expected = jax.jit(branch(by))(buffers, gradient, 0)
        assert_same_bits(run(jnp.int32(k), jnp.bool_(False)), (expected, expected))
        assert_same_bits(run(jnp.int32(k), jnp.bool_(True))[1], buffers)


def test_there_is_no_conditional_if_all_are_equal():
    check([scaled(2.0) for _ in range(4)], 0, X)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 0.0, lambda x: x + -0.0),  # equal as numbers, not as bits
        (lambda x: x + np.arange(3, dtype=np.float32), lambda x: x + np.array([0, 1, 3], np.float32)),
        (lambda x: x + jnp.float32(1), lambda x: x + jnp.float32(2)),
        (lambda x: x - x.T.T * 2, lambda x: x.T.T * 2 - x),  # the same operators, joined otherwise
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdims=True)[0]),
        (lambda x: jnp.cumsum(x, 1), lambda x: jnp.cumsum(x, 1)[:, ::1] * 1),
        (lambda x: lax.reduce_precision(x, 8, 7), lambda x: lax.reduce_precision(x, 8, 8)),
        (lambda x: lax.fori_loop(0, 3, lambda _, y: y * 2, x), lambda x: lax.fori_loop(0, 3, lambda _, y: y * 3, x)),
        (lambda x: jax.checkpoint(lambda y: y * 2)(x), lambda x: jax.checkpoint(lambda y: y * 3)(x)),
        (jax.nn.relu, jax.nn.silu),
        (lambda x: x.at[jnp.array([1])].set(1), lambda x: x.at[jnp.array([1])].set(1, mode="clip")),
    ],
)
def test_branches_that_differ_anywhere_stay_apart(one, other):
    check([one, other], 2, X)


def test_calls_with_derivatives_of_their_own_are_compared_by_what_they_compute():
    check([lambda x: jax.nn.relu(squared(x)) for _ in range(2)], 0, X)


@jax.custom_vjp
def squared(x):
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


def test_what_a_branch_closes_over_is_part_of_it():
    def outer(k, a, b):
        return switch(k, [lambda: a * 2, lambda: b * 2, lambda: a * 2])

    a, b = jnp.float32(3), jnp.float32(4)
    assert branches_of(outer, jnp.int32(0), a, b) == 2
    assert [float(outer(jnp.int32(k), a, b)) for k in range(3)] == [6.0, 8.0, 6.0]


def test_numbers_that_keys_are_folded_with_are_looked_up():
    def drawn(*numbers):
        def branch(key, x):
            for n in numbers:
                x = x + jax.random.uniform(jax.random.fold_in(key, n), x.shape)
            return x

        return branch

    key = jax.random.key(5)
    check([drawn(7, 2**32 - 1), drawn(8, 2**31), drawn(7, 9)], 0, key, X)
    check([drawn(7), drawn(8), drawn(7, 9)], 2, key, X)


# In a pipeline


def deep(count: int) -> Case:
    """Dense layers that are all alike."""
    params = zoo.init_mlp(jax.random.key(0), [WIDTH] * (count + 1))
    model = jax.tree_util.Partial(zoo.mlp, params)
    batch = images(WIDTH, rows=8)

    def plain(params, state, key, batch):
        return classifier()(params, batch), state

    return Case(model, classifier(), batch, lambda _: (model, ()), plain, lambda params, _: params)


class Dropped(nn.Module):
    """Dense layers with dropout: each folds its own number into the key."""

    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dropout(0.25, deterministic=False)(jnp.tanh(nn.Dense(WIDTH)(x)))
        return x


def dropped(count: int) -> Case:
    return linen(Dropped(count), images(WIDTH, rows=8), classifier())


def lowered(pipeline: jaxpipe.Pipeline) -> str:
    """The training step before XLA has seen it."""
    return pipeline._runtime.lower_step().as_text()


def count_products(text: str) -> int:
    return len(re.findall(r"stablehlo\.dot_general", text))


def spmd_pipeline(case: Case, stages: int, **options) -> jaxpipe.Pipeline:
    options = {"schedule": one_f_one_b, "optimizer": optax.adam(1e-2), **options}
    return pipeline_of(case, stages, 4, runtime="spmd", **options)


@pytest.mark.versions
@pytest.mark.parametrize("make", [pytest.param(deep, marks=pytest.mark.slow), dropped])
def test_the_program_does_not_grow_with_stages_that_are_alike(make):
    three, five = (spmd_pipeline(make(n), n) for n in (3, 5))
    # First stage: a product and one for its weight. Middle stages, all together: one more for its input. Last: as many.
    assert [count_products(lowered(p)) for p in (three, five)] == [8, 8]
    case = make(5)
    state = five.init(jax.random.key(3))
    keys = jnp.stack([five.microbatch_key(state, j) for j in range(4)])
    (loss, _), gradient = five.value_and_grad(state, case.batch)
    expected = plain_gradients(case, *case.start(jax.random.key(3)), keys, 1, 4)
    assert float(loss) == float(expected[0])
    assert_same_bits(arrays(gradient), arrays(expected[1]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [jaxpipe.schedules.zero_bubble, jaxpipe.schedules.gpipe])
def test_sharing_branches_changes_no_bit(schedule, monkeypatch):
    """Parameters after two steps, with a conditional over all stages beside it."""

    def trained():
        case = dropped(8)
        pipeline = spmd_pipeline(case, 8, schedule=schedule)
        state = pipeline.init(jax.random.key(3))
        for _ in range(2):
            state, _ = pipeline.step(state, case.batch)
        return arrays(pipeline.parameters(state)), count_products(lowered(pipeline))

    shared, few = trained()
    for name in ("spmd.tick_loop", "spmd.update_in_place"):
        monkeypatch.setattr(f"jaxpipe.runtime.{name}.switch", lax.switch)
    apart, many = trained()
    assert few < many / 2
    assert_same_bits(shared, apart)
