"""Decorated programs on a target that keeps all they save on its chip: they are JAX's own, in any transformation."""

import contextlib
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.targets import register
from jaxpipe.targets.cpu import CPU
from tests.support.compare import assert_same_bits


@pytest.fixture(autouse=True)
def roomy_chip():
    register(replace(CPU, rates=replace(CPU.rates, on_chip=1 << 40)))
    with contextlib.ExitStack() as stack:
        stack.callback(register, CPU)
        yield


def net(w, x):
    x = jax.nn.relu(x @ w)
    return jnp.tanh(x @ w), (x > 0).sum()


W, X = jax.random.normal(jax.random.key(0), (2, 8, 8)), jax.random.normal(jax.random.key(1), (4, 8))


def in_scan(function):
    def loss(w, x):
        x, counts = jax.lax.scan(lambda x, w: function(w, x), x, w)
        return jnp.square(x).sum(), counts

    return loss


def in_vmap(function):
    def loss(w, x):
        w = jax.lax.stop_gradient(w[0])  # gradients by what all examples share are added up in another order
        y, counts = jax.vmap(function, (None, 0))(w, x)
        return jnp.square(y).sum(), counts

    return loss


def in_checkpoint(function):
    def loss(w, x):
        y, count = jax.checkpoint(function)(w[0], x)
        return jnp.square(y).sum(), count

    return loss


def in_branches(function):
    def loss(w, x):
        y, count = jax.lax.cond(x[0, 0] > 0, function, lambda w, x: (x, jnp.int32(0)), w[0], x)
        return jnp.square(y).sum(), count

    return loss


@pytest.mark.parametrize("transformed", [in_scan, in_vmap, in_checkpoint, in_branches])
def test_functions_in_transformations_have_plain_gradients(transformed):
    plain, decorated = (
        jax.jit(jax.value_and_grad(transformed(f), (0, 1), has_aux=True))(W, X)
        for f in (net, jaxpipe.memory_encoded(net))
    )
    assert_same_bits(plain, decorated)


def test_the_program_is_that_of_plain_jax():
    @jaxpipe.memory_encoded
    def loss(w, x):
        return net(w, x)[0].sum()

    texts = [str(jax.make_jaxpr(jax.grad(f))(W[0], X)) for f in (loss, lambda w, x: net(w, x)[0].sum())]
    assert all("optimization_barrier" not in text and text.count("dot_general") == 5 for text in texts)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dropout(0.5, deterministic=not train)(nn.relu(x))


def test_linen_modules_keep_state_and_streams():
    variables = Linen().init(jax.random.key(0), X, False)

    def gradient(model):
        def loss(params):
            y, state = model.apply(
                {**variables, "params": params}, X, True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)}
            )
            return jnp.square(y).sum(), state

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    assert_same_bits(gradient(Linen()), gradient(jaxpipe.memory_encoded(Linen)()))


def test_nnx_modules_keep_state():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.norm(self.linear(x)))

    def gradient(cls):
        model = cls(nnx.Rngs(0))
        value = nnx.jit(nnx.value_and_grad(lambda model: jnp.square(model(X)).sum()))(model)
        return value, nnx.state(model)

    plain, decorated = gradient(Net), gradient(jaxpipe.memory_encoded(Net))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(decorated), strict=True):
        np.testing.assert_array_equal(a, b)
