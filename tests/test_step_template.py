"""Steps that are traced once, with their decorated programs as equations in whose place any storage is put."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.residuals.two_passes import StoredPasses
from jaxpipe.step.step_arguments import Call, without_values
from jaxpipe.step.step_front import PLAIN, SMALLEST
from jaxpipe.step.step_template import step_template
from jaxpipe.step.step_variants import StepVariants
from tests.support.compare import FUSION, relative_l2


W, X = (
    [jax.random.normal(jax.random.key(k), (16, 16)) for k in range(4)],
    jax.random.normal(jax.random.key(4), (64, 16)),
)


@jaxpipe.memory_encoded
def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def plainly(step, *args):
    with jaxpipe.without_encoding():
        return jax.jit(step)(*args)


def template_of(step, *args, **options):
    shapes = without_values(args)
    return step_template(Call(step, options, shapes, {}, jax.devices()[0]), {})


def by_default(program):
    return StoredPasses(program.default)


def twice(params, x):
    return jax.value_and_grad(lambda params: loss(params, x) + loss(params, x + 1))(params)


def in_turns(params, x):
    """Gradients of micro-batches, added up in a loop."""

    def turn(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

    return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), x.reshape(4, 16, 16))[0]


def under_jit(params, x):
    return jax.jit(jax.grad(loss))(params, x)


def one_of_two(params, x):
    return jax.lax.cond(x.sum() > 0, jax.grad(loss), lambda params, x: params, params, x)


def closed_over(params, x):
    return jax.grad(jaxpipe.memory_encoded(lambda params: loss.__wrapped__(params, x)))(params)


def aside(params, x):
    """A second result, without a cotangent."""
    decorated = jaxpipe.memory_encoded(lambda params: ((x @ params[0]).sum(), x @ params[1]))
    return jax.grad(decorated, has_aux=True)(params)


@pytest.mark.optimized
@pytest.mark.parametrize("step", [twice, in_turns, under_jit, one_of_two, closed_over, aside])
def test_replaced_equations_give_the_values_of_the_step(step):
    template = template_of(step, W, X)
    assert template is not None
    given, expected = jax.jit(template.with_storage(by_default))(W, X), plainly(step, W, X)
    jax.tree.map(np.testing.assert_array_equal, given, expected)


def batched(params, x):
    return jax.vmap(jax.grad(loss), (None, 0))(params, x.reshape(4, 16, 16))


def passes_in_two_loops(params, x):
    return jax.grad(lambda params: jax.lax.scan(lambda y, x: (y + loss(params, x), None), 0.0, x[None])[0])(params)


@pytest.mark.parametrize("step", [batched, passes_in_two_loops])
def test_other_steps_are_traced_anew_for_each_level(step):
    assert template_of(step, W, X) is None
    expected, plain = plainly(step, W, X), jax.jit(step).lower(W, X).compile().memory_analysis()
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(step, memory=plain.argument_size_in_bytes // 2).lower(W, X)
    smallest = jaxpipe.jit(step, memory=caught.value.smallest)
    jax.tree.map(np.testing.assert_array_equal, smallest(W, X), expected)


def test_modules_and_static_arguments():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(jnp.tanh(self.layer(x))))

    def step(net, x, power):
        decorated = jaxpipe.memory_encoded(lambda net: (net(x) ** power).mean())
        return nnx.value_and_grad(decorated)(net)

    template = template_of(step, Net(nnx.Rngs(0)), X, 2, static_argnums=2)
    expected, net = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    with jaxpipe.without_encoding():
        values = nnx.jit(step, static_argnums=2)(expected, X, 2)
    given = nnx.jit(template.with_storage(by_default), static_argnums=2)(net, X, 2)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(
        compare,
        (given, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))),
        (values, nnx.to_pure_dict(nnx.state(expected, nnx.BatchStat))),
    )
    count = nnx.state(net, nnx.RngCount)
    assert (
        jax.tree.leaves(count)
        == jax.tree.leaves(nnx.state(expected, nnx.RngCount))
        != jax.tree.leaves(nnx.state(Net(nnx.Rngs(0)), nnx.RngCount))
    )


def test_variables_by_themselves_change_as_under_nnx_jit():
    def step(net, counts, x):
        counts["steps"][...] += 1
        return nnx.grad(jaxpipe.memory_encoded(lambda net: (net(x) ** 2).mean()))(net)

    def two_steps(jit):
        net, counts = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), {"steps": nnx.Variable(jnp.int32(0))}
        return [jit(step)(net, counts, X) for _ in range(2)], counts

    counts = {"steps": nnx.Variable(jnp.int32(0))}
    template = template_of(step, nnx.Linear(16, 16, rngs=nnx.Rngs(0)), counts, X)
    given = two_steps(lambda step: nnx.jit(template.with_storage(by_default)))
    jax.tree.map(np.testing.assert_array_equal, given, two_steps(nnx.jit))
    assert given[1]["steps"][...] == 2


def test_modules_of_linen_keep_their_streams():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(16)(x))

    variables = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def step(variables, x, key):
        net = jaxpipe.memory_encoded(Net)()
        return jax.grad(lambda variables: (net.apply(variables, x, rngs={"dropout": key}) ** 2).sum())(variables)

    given = jax.jit(template_of(step, variables, X, jax.random.key(2)).with_storage(by_default))
    jax.tree.map(
        np.testing.assert_array_equal,
        given(variables, X, jax.random.key(2)),
        plainly(step, variables, X, jax.random.key(2)),
    )


def with_smallest_storage(step, *args):
    variants = StepVariants(Call(step, {}, without_values(args), {}, jax.devices()[0]))
    return variants.variant(SMALLEST).jitted(*args)


@pytest.mark.versions
def test_results_behind_barriers_are_of_weak_type_as_those_of_the_step():
    """Arrays made of numbers of Python's take the type of what they are multiplied with."""

    def step(scale, x):
        loss = jaxpipe.memory_encoded(lambda scale: (jax.nn.relu(x * scale) * jnp.sin(scale)).sum())
        return jax.grad(loss)(scale)

    args = jnp.full((8,), 0.5), jnp.full((16, 8), 1.25)
    given, expected = with_smallest_storage(step, *args), plainly(step, *args)
    np.testing.assert_array_equal(given, expected)
    assert expected.weak_type and given.weak_type


def test_scalars_of_four_bits_are_not_what_steps_wait_for():
    def step(scale, short, x):
        loss = jaxpipe.memory_encoded(lambda scale: (jnp.tanh(x @ (short.astype(jnp.float32) * scale)) ** 2).sum())
        return jax.grad(loss)(scale)

    args = jnp.linspace(0.1, 0.2, 16), jnp.arange(256).reshape(16, 16).astype(jnp.int4), X
    assert relative_l2(with_smallest_storage(step, *args), plainly(step, *args)) < FUSION


@pytest.mark.versions
def test_keys_of_a_step_are_checked_as_those_of_the_plain_one():
    @jaxpipe.memory_encoded
    def noisy(params, x, key):
        for w, own_key in zip(params, jax.random.split(key, len(params)), strict=True):
            x = jnp.where(jax.random.bernoulli(own_key, 0.9, x.shape), jax.nn.relu(x @ w), 0)
        return (x**2).mean()

    def step(params, x, key):
        return jax.grad(noisy)(params, x, jax.random.split(key)[0])

    def twice_the_key(params, x, key):
        return jax.tree.map(jnp.add, step(params, x, key), jax.grad(noisy)(params, x, key))

    key = jax.random.key(0)
    needed = StepVariants(Call(step, {}, without_values((W, X, key)), {}, jax.devices()[0])).needs(PLAIN).bytes
    with jax.debug_key_reuse(True):
        gradients = jaxpipe.jit(step, memory=needed - 1)(W, X, key)
        with pytest.raises(jax.errors.KeyReuseError):
            jaxpipe.jit(twice_the_key, memory=2 * needed)(W, X, key)
    np.testing.assert_array_equal(jax.tree.leaves(gradients), jax.tree.leaves(plainly(step, W, X, key)))
