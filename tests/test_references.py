"""A model may keep values in references of its own (``jax.new_ref``), which are values in its program."""

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
