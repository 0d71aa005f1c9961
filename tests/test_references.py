"""References (``jax.new_ref``): those of a model are values in its program; those from outside are read and written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import FUSION, relative_l2
from tests.support.meshes import mesh_of


X = jax.random.normal(jax.random.key(0), (16, 8))
PARAMS = {name: jax.random.normal(jax.random.key(k), (8, 8)) / 3 for k, name in enumerate("abc", 1)}


def rewritten(params, x):
    kept = jax.new_ref(jax.nn.relu(x @ params["a"]))
    kept[...] = jnp.sin(kept[...]) * 2
    kept[:, 0] = x[:, 0]
    return jax.nn.relu(jax.nn.relu(kept[...] @ params["b"]) @ params["c"])


def added_in_a_scan(params, x):
    total = jax.new_ref(jnp.zeros_like(x))

    def layer(x, w):
        y = jnp.tanh(x @ w)
        total[...] += jax.nn.relu(y)
        return y, None

    last, _ = jax.lax.scan(layer, x, jnp.stack([params["a"], params["b"]]))
    return (total[...] + last) @ params["c"]


def rewritten_plainly(params, x):
    kept = jnp.sin(jax.nn.relu(x @ params["a"])) * 2
    kept = kept.at[:, 0].set(x[:, 0])
    return jax.nn.relu(jax.nn.relu(kept @ params["b"]) @ params["c"])


def added_plainly(params, x):
    first = jnp.tanh(x @ params["a"])
    last = jnp.tanh(first @ params["b"])
    return (jax.nn.relu(first) + jax.nn.relu(last) + last) @ params["c"]


FUNCTIONS = [(rewritten, rewritten_plainly), (added_in_a_scan, added_plainly)]


def loss(model, x):
    return jnp.square(model(x)).mean()


def loss_of(function):
    return lambda params: loss(lambda x: function(params, x), X)


@pytest.mark.parametrize(("function", "plain"), FUNCTIONS)
def test_gradients_are_those_of_values(function, plain):
    got = jax.jit(jax.grad(jaxpipe.memory_encoded(loss_of(function))))(PARAMS)
    assert relative_l2(got, jax.jit(jax.grad(loss_of(plain)))(PARAMS)) < 3 * FUSION


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize(("function", "plain"), FUNCTIONS)
def test_they_train_in_stages(function, plain, runtime):
    options = {"loss": loss, "optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic"}
    model = jax.tree_util.Partial(function, PARAMS)
    pipeline = jaxpipe.partition(model, mesh_of(2), X, runtime=runtime, **options)
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), X)
    expected = jax.value_and_grad(loss_of(plain))(PARAMS)
    np.testing.assert_allclose(value, expected[0], rtol=FUSION)
    assert relative_l2(gradients.args[0], expected[1]) < 3 * FUSION


def read_before_and_after(params, x, seen):
    before = seen[...]
    hidden = jnp.tanh(x @ params["a"] + before) * jnp.sin(before)
    seen[...] = 0.9 * before + jax.lax.stop_gradient(hidden.mean(0))
    return jnp.square((jax.nn.relu(hidden @ params["b"]) * seen[...]) @ params["c"]).mean()


def written_in_a_scan(params, x, seen):
    def layer(x, w):
        y = jax.nn.gelu(jnp.tanh(x @ w + seen[...]))
        seen[...] += jax.lax.stop_gradient(y.mean(0))
        return y, None

    return jnp.square(jax.lax.scan(layer, x, jnp.stack(list(params.values())))[0]).mean()


def counted_in_branches(params, x, seen):
    def some():
        seen[0] += 1

    hidden = jax.nn.gelu(x @ params["a"])
    jax.lax.cond(jax.lax.stop_gradient(hidden.mean()) > seen[1], some, lambda: None)
    return jnp.square(jax.nn.gelu(hidden @ params["b"]) * seen[0]).mean()


OUTSIDE = [read_before_and_after, written_in_a_scan, counted_in_branches]


def two_steps(loss, jit=jax.jit):
    """Loss and gradients of two steps, and what is in the reference then."""
    seen = jax.new_ref(jnp.linspace(0.5, 1, 8))
    step = jit(lambda params, x, seen: jax.value_and_grad(loss)(params, x, seen))
    return [step(PARAMS, ROWS, seen) for _ in range(2)], seen[...]


ROWS = jnp.tile(X, (64, 1))


@pytest.mark.parametrize("function", OUTSIDE)
def test_a_decorated_function_writes_what_is_outside(function):
    assert relative_l2(two_steps(jaxpipe.memory_encoded(function)), two_steps(function)) < FUSION


@pytest.mark.parametrize("function", OUTSIDE)
def test_a_budget_writes_once_what_is_outside(function):
    decorated = jaxpipe.memory_encoded(function)

    def within(memory):
        return functools.partial(jaxpipe.jit, memory=memory)

    with pytest.raises(jaxpipe.MemoryBudgetError) as error:
        two_steps(decorated, within("1B"))
    assert relative_l2(two_steps(decorated, within(error.value.smallest)), two_steps(function)) < FUSION


def test_a_gradient_through_what_is_outside_is_refused():
    @jaxpipe.memory_encoded
    def write(params, seen):
        seen[...] = jnp.tanh(seen[...] @ params["a"])

    @jaxpipe.memory_encoded
    def read(params, seen):
        return jnp.tanh(seen[...] @ params["a"]).sum()

    def through(params, x):
        seen = jax.new_ref(x)
        write(params, seen)
        return seen[...].sum()

    for loss in (through, lambda params, x: read(params, jax.new_ref(x @ params["b"]))):
        with pytest.raises(jaxpipe.DifferentiationError, match="made in the function which is differentiated"):
            jax.jit(jax.grad(loss))(PARAMS, X)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_stages_refuse_what_is_outside(runtime):
    seen = jax.new_ref(jnp.ones(8))
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic", "runtime": runtime}

    def model(params, x):
        seen[...] += 1
        return jax.nn.relu(x @ params["a"]) @ params["b"]

    with pytest.raises(jaxpipe.PartitionError, match=r"a reference \(jax\.new_ref\) that was made outside"):
        jaxpipe.partition(jax.tree_util.Partial(model, PARAMS), mesh_of(2), X, loss=loss, **options)
    held = {**PARAMS, "a": jax.new_ref(PARAMS["a"])}
    with pytest.raises(jaxpipe.ModelError, match=r"variable 0/0/a is a value of type Ref; .*with ref\[\.\.\.\]"):
        jaxpipe.partition(jax.tree_util.Partial(model, held), mesh_of(2), X, loss=loss, **options)
