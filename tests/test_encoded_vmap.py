"""``jax.vmap`` of decorated functions: an output that all examples share has one cotangent, whoever maps what."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpipe
from tests.support.compare import FUSION, relative_l2


#: Sums over examples and over uses of a weight are taken in another order, of float32, with terms that cancel.
ORDER = 20 * FUSION

KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHT = 0.3 * jax.random.normal(KEYS[0], (6, 6))
ROWS = jax.random.normal(KEYS[1], (5, 6))
TABLE = jax.random.normal(KEYS[2], (4, 5, 6))


def decay(w, x):
    """The loss of an example, and what depends on parameters alone."""
    return jnp.square(jnp.tanh(x @ w)).mean(), jnp.tanh(w @ w).sum()


def mean_over_axis(w, x):
    hidden = jnp.tanh(x @ w)
    return jnp.square(hidden - jax.lax.pmean(hidden, "rows")).mean(), jax.lax.pmean(hidden, "rows").var()


def gathered(w, x):
    return x.sum(), jax.lax.all_gather(jnp.tanh(x @ w), "rows").var()


def in_shards(w, x):
    """Half of the product of an example on each of two devices."""
    mesh = jax.make_mesh((2,), ("half",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def half(w, x):
        return jnp.square(jax.lax.psum(jnp.tanh(x) @ w, "half")).mean()

    return jax.shard_map(half, mesh=mesh, in_specs=P("half"), out_specs=P())(w, x), jnp.tanh(w @ w).sum()


def under_jit(w, x):
    return jax.jit(decay)(w, x)


def mapped(function, out=0):
    return jax.vmap(function, in_axes=(None, 0), out_axes=(0, out), axis_name="rows")


def scanned(function):
    return lambda w, x: jax.tree.map(jnp.sum, jax.lax.scan(lambda c, x: (c, function(w, x)), 0.0, TABLE[:2, 0] + x)[1])


def branch(function):
    return lambda w, x: jax.lax.cond(w[0, 0] > 9, lambda w, x: (x.sum(), w.sum()), function, w, x)


def total(results):
    each, shared = results
    return each.mean() + 3 * shared.mean()


PROGRAMS = {
    "grad of vmap": lambda f: jax.grad(lambda w: total(mapped(f)(w, ROWS))),
    "shared results": lambda f: jax.grad(lambda w: total(mapped(f, None)(w, ROWS))),
    "vmap of grad": lambda f: (
        lambda w: jax.vmap(jax.grad(lambda w, x: total(f(w, x))), in_axes=(None, 0), axis_name="rows")(w, ROWS)
    ),
    "two calls of vmap": lambda f: jax.grad(lambda w: total(jax.vmap(mapped(f), in_axes=(None, 0))(w, TABLE))),
    "grad between them": lambda f: (
        lambda w: jax.vmap(jax.grad(lambda w, x: total(mapped(f)(w, x))), in_axes=(None, 0))(w, TABLE)
    ),
    "parameters mapped": lambda f: jax.grad(
        lambda w: total(jax.vmap(mapped(f), in_axes=(0, None))(jnp.stack([w, 2 * w]), ROWS))
    ),
    "in a scan": lambda f: jax.grad(
        lambda w: jax.lax.scan(lambda sum_, x: (sum_ + total(mapped(f)(w, x)), None), 0.0, TABLE)[0]
    ),
    "in a checkpoint": lambda f: jax.grad(jax.checkpoint(lambda w: total(mapped(f)(w, ROWS)))),
    "around jit": lambda f: jax.grad(lambda w: total(mapped(jax.jit(f))(w, ROWS))),
    "around jit, shared results": lambda f: jax.grad(lambda w: total(mapped(jax.jit(f), None)(w, ROWS))),
    "around a checkpoint": lambda f: jax.grad(lambda w: total(mapped(jax.checkpoint(f))(w, ROWS))),
    "around a scan": lambda f: jax.grad(lambda w: total(mapped(scanned(f))(w, ROWS))),
    "around a branch": lambda f: jax.grad(lambda w: total(mapped(branch(f))(w, ROWS))),
    "around jit of vmap": lambda f: jax.grad(
        lambda w: total(jax.vmap(jax.jit(mapped(f)), in_axes=(None, 0))(w, TABLE))
    ),
    "around jit of vmap of jit": lambda f: jax.grad(
        lambda w: total(jax.vmap(jax.jit(mapped(jax.jit(f))), in_axes=(None, 0))(w, TABLE))
    ),
    "around jit of grad": lambda f: (
        lambda w: jax.vmap(jax.jit(jax.grad(lambda w, x: total(f(w, x)))), in_axes=(None, 0), axis_name="rows")(w, ROWS)
    ),
    "around grad of jit": lambda f: (
        lambda w: jax.vmap(jax.grad(lambda w, x: total(jax.jit(f)(w, x))), in_axes=(None, 0), axis_name="rows")(w, ROWS)
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("function", [decay, mean_over_axis, gathered, under_jit, in_shards])
def test_what_examples_share_counts_once(function, program):
    expected = PROGRAMS[program](function)(WEIGHT)
    for compiled in (lambda f: f, jax.jit):
        actual = compiled(PROGRAMS[program](jaxpipe.memory_encoded(function)))(WEIGHT)
        assert relative_l2(actual, expected) < ORDER


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["called", "compiled"])
def test_a_pullback_that_is_mapped_by_itself(compiled):
    """What one ``vmap`` returns and another one calls: every example has the cotangent that is passed."""

    def run(function):
        pull = jax.vmap(compiled(lambda x: jax.vjp(function, WEIGHT, x)[1]))(ROWS)
        return jax.vmap(lambda pull: pull((jnp.float32(1), jnp.float32(2))))(pull)

    assert relative_l2(run(jaxpipe.memory_encoded(decay)), run(decay)) < ORDER


def test_a_compiled_pullback_in_the_vmap_that_calls_it():
    """Every example has the gradient of what all share, though its cotangent is mapped as its output is."""

    def run(function):
        def each(x):
            y, pull = jax.jit(lambda x: jax.vjp(function, WEIGHT, x))(x)
            return pull(2 * y)

        return jax.vmap(each)(ROWS)

    assert (
        relative_l2(run(jaxpipe.memory_encoded(lambda w, x: decay(w, x)[0])), run(lambda w, x: decay(w, x)[0])) < ORDER
    )


def test_one_compiled_function_mapped_by_two():
    """JAX keeps what it has traced of it for the second one."""

    def run(function):
        function = jax.jit(function)
        return [jax.grad(lambda w, rows=rows: total(mapped(function)(w, rows)))(WEIGHT) for rows in (ROWS, ROWS[:3])]

    assert relative_l2(run(jaxpipe.memory_encoded(decay)), run(decay)) < ORDER


def test_what_no_example_enters_is_computed_once():
    """A decorated function of parameters alone takes a ``vmap`` around it for nothing, as plain code does."""

    def operations(weight):
        step = jax.grad(lambda w: jax.vmap(lambda x: jnp.square(x @ weight(w)).sum())(ROWS).mean())
        return jax.jit(step).lower(WEIGHT).compile().cost_analysis()["flops"]

    def weight(w):
        return jnp.tanh(w @ w)

    assert operations(jaxpipe.memory_encoded(weight)) < 1.5 * operations(weight)


def test_a_mean_of_the_examples_themselves():
    """Nothing is stored for it."""

    def gradient(function):
        return jax.grad(lambda x: jax.vmap(function, axis_name="rows")(x).sum())(ROWS)

    def mean(x):
        return jax.lax.pmean(3 * x, "rows")

    assert relative_l2(gradient(jaxpipe.memory_encoded(mean)), gradient(mean)) < ORDER


def test_a_module_with_a_temperature():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(8)(x)), jnp.exp(self.param("temperature", nn.initializers.ones, ()))

    def loss(variables, net):
        features, temperature = jax.vmap(net.apply, in_axes=(None, 0))(variables, ROWS)
        return (features * temperature[:, None]).mean() + jnp.square(temperature).mean()

    variables = Net().init(KEYS[0], ROWS[0])
    expected = jax.grad(loss)(variables, Net())
    actual = jax.grad(loss)(variables, jaxpipe.memory_encoded(Net)())
    assert relative_l2(actual, expected) < ORDER
