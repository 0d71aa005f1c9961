"""A loss that calls its model inside transformations of JAX, with state and without."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.plain_training import gradient_of_batch


KEY = jax.random.key(0)
M = 2
X = jax.random.normal(jax.random.key(1), (8, 16))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(16)(nn.relu(nn.Dense(16)(x)))


class NetNNX(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        a, b, c = self.layers
        return c(nnx.relu(b(nnx.relu(a(x)))))


@functools.partial(jax.jit, static_argnums=0)
def policy(apply, x):
    return apply(x)


WAYS = {
    "jit": lambda f, x: jax.jit(lambda x: f(x))(x),
    "jitted helper": lambda f, x: policy(lambda x: f(x), x),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: f(x))(x),
    "vmap": lambda f, x: jax.vmap(lambda x: f(x))(x),
    "map": lambda f, x: jax.lax.map(lambda x: f(x), x),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0],
    "cond": lambda f, x: jax.lax.cond(x.sum() > 0, lambda x: f(x), lambda x: 2 * f(x), x),
    "while": lambda f, x: x + jax.lax.stop_gradient(jax.lax.fori_loop(0, 2, lambda _, x: f(x), x)) * f(x),
    "grad": lambda f, x: jax.grad(lambda x: jnp.square(f(x)).sum())(x),
    "jvp": lambda f, x: jax.jvp(lambda x: f(x), (x,), (jnp.ones_like(x),))[1],
    "vmap in jit": lambda f, x: jax.jit(lambda x: jax.vmap(f)(x))(x),
}


def partition(model, loss, stages=2, **kwargs):
    settings = {"loss": loss, "optimizer": optax.sgd(0.1), "num_microbatches": M, "profile": "analytic"} | kwargs
    return jaxpipe.partition(model, mesh_of(stages), X, **settings)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("name", WAYS)
def test_a_model_without_state(name, kind):

    def loss(model, x):
        return jnp.square(WAYS[name](model, x)).mean()

    if kind == "linen":
        # Inside vmap and map the module sees one example, and is initialized for it.
        params = Net().init(KEY, X[0] if name in ("vmap", "map", "vmap in jit") else X)["params"]
        pipeline = partition(Net(), loss)
        state = pipeline.init(KEY)
        assert_same_bits(pipeline.parameters(state)["params"], jax.tree.map(np.asarray, params))

        def plain(params, state, x, _):
            return loss(lambda x: Net().apply({"params": params}, x), x), state

    else:
        model = NetNNX(nnx.Rngs(0))
        structure, params = nnx.split(model)
        pipeline = partition(model, loss)
        state = pipeline.init(KEY)

        def plain(params, state, x, _):
            return loss(nnx.merge(structure, params), x), state

    (value, _), gradients = pipeline.value_and_grad(state, X)
    expected, gradient, _ = gradient_of_batch(plain, params, None, X, M)
    np.testing.assert_allclose(value, expected, rtol=2 * FUSION)
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(gradient)) < 2 * FUSION


class Normalized(nn.Module):
    """A critic with running statistics."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(16)(x))
        self.sow("aux", "size", jnp.square(x).mean())
        return nn.Dense(1)(nn.tanh(x))[:, 0]


@pytest.mark.core
def test_new_state_leaves_a_gradient():
    """A gradient penalty: the critic inside jax.grad, whose statistics are those of all its calls."""

    def value(f, x):
        slope = jax.grad(lambda x: f(x).sum())(x)
        return f(2 * x).mean() + jnp.square(jnp.linalg.norm(slope, axis=-1) - 1).mean()

    variables = Normalized().init(KEY, X)
    pipeline = partition(Normalized(), lambda model, x: value(model, x))
    state = pipeline.init(KEY)
    _, gradients = pipeline.value_and_grad(state, X)

    def plain(params, stats, x, _):
        def inside(x):
            out, new = Normalized().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return out.sum(), new["batch_stats"]

        slope, new = jax.grad(inside, has_aux=True)(x)
        out, new = Normalized().apply({"params": params, "batch_stats": new}, 2 * x, mutable=["batch_stats"])
        return out.mean() + jnp.square(jnp.linalg.norm(slope, axis=-1) - 1).mean(), new["batch_stats"]

    _, gradient, stats = gradient_of_batch(plain, variables["params"], variables["batch_stats"], X, M)
    assert relative_l2(gradients, gradient) < 5 * FUSION  # second derivatives: products of many rounded factors
    state, _ = pipeline.step(state, X)
    assert relative_l2(pipeline.parameters(state)["batch_stats"], stats) < FUSION


@pytest.mark.parametrize("name", ["jit", "checkpoint", "vmap", "scan", "cond"])
def test_new_state_that_jax_cannot_return_is_refused_by_name(name):
    def loss(model, x):
        return jnp.square(WAYS[name](lambda x: jnp.broadcast_to(model(jnp.atleast_2d(x)).mean(), x.shape), x)).mean()

    with pytest.raises(jaxpipe.ModelError, match=r"changes batch_stats/BatchNorm_0/mean.*Call the model outside"):
        partition(Normalized(), loss)


@pytest.mark.parametrize("name", ["jit", "checkpoint", "map", "cond"])
def test_a_call_that_leaves_state_as_it_is(name):
    def value(f, x):
        return jnp.square(WAYS[name](lambda x: jnp.broadcast_to(f(jnp.atleast_2d(x)).mean(), x.shape), x)).mean()

    variables = Normalized().init(KEY, X)
    del variables["aux"]
    pipeline = partition(Normalized(), lambda model, x: value(lambda x: model(x, train=False), x))
    state = pipeline.init(KEY)
    made = pipeline.parameters(state)
    assert jax.tree.structure(made) == jax.tree.structure(variables)
    _, gradients = pipeline.value_and_grad(state, X)

    def plain(params, stats, x, _):
        return value(lambda x: Normalized().apply({"params": params, "batch_stats": stats}, x, train=False), x), stats

    _, gradient, _ = gradient_of_batch(plain, variables["params"], variables["batch_stats"], X, M)
    assert relative_l2(gradients, gradient) < 2 * FUSION


def test_values_sown_inside():
    def inside(model, x):
        def call(x):
            out = model(x, train=False)
            return out, model.variables["aux"]["size"][0]

        return jax.jit(call)(x)

    def loss(model, x):
        out, size = inside(model, x)
        return out.mean() + size

    variables = Normalized().init(KEY, X)
    pipeline = partition(Normalized(), loss)
    _, gradients = pipeline.value_and_grad(pipeline.init(KEY), X)

    def plain(params, stats, x, _):
        given = {"params": params, "batch_stats": stats}
        out, new = Normalized().apply(given, x, train=False, mutable=["aux"])
        return out.mean() + new["aux"]["size"][0], stats

    _, gradient, _ = gradient_of_batch(plain, variables["params"], variables["batch_stats"], X, M)
    assert relative_l2(gradients, gradient) < 2 * FUSION

    def reads_outside(model, x):
        return jax.jit(lambda x: model(x, train=False))(x).mean() + model.variables["aux"]["size"][0]

    with pytest.raises(jaxpipe.ModelError, match=r"reads aux/size/0.*sown in there"):
        partition(Normalized(), reads_outside)


def test_a_loss_that_is_one_checkpoint_is_told_why_it_is_in_one_stage():
    model, batch = nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(4)]), jnp.ones((4, 8))

    def loss(model, x):
        return jax.checkpoint(lambda x: jnp.square(model(x)).mean())(x)

    with pytest.raises(jaxpipe.PartitionError, match=r"2 stages, but .* put it around parts of the model"):
        jaxpipe.partition(model, mesh_of(2), batch, loss=loss, optimizer=optax.sgd(0.1), profile="analytic")
