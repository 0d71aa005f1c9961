"""State whose new value is another variable as it is, against plain training."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import FUSION, relative_l2
from tests.support.meshes import mesh_of
from tests.support.plain_training import train


class Places(nnx.Module):
    """State whose new value is another variable of the last stage as it is: state, or a parameter."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])
        self.mean, self.scale = nnx.Variable(jnp.zeros(8)), nnx.Variable(jnp.arange(8) / 4)
        self.mean_before, self.bias_before = nnx.Variable(jnp.ones(8)), nnx.Variable(jnp.ones(8))

    def __call__(self, x):
        x = jnp.tanh(self.layers[1](jnp.tanh(self.layers[0](x))))
        x = self.layers[2](x * self.scale[...] + self.mean[...])
        self.mean_before[...], self.bias_before[...] = self.mean[...], self.layers[2].bias[...]
        self.mean[...], self.scale[...] = self.scale[...], x.mean(0)
        return x


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_state_that_becomes_another_variable(runtime):
    model = Places(nnx.Rngs(0))
    graphdef, params, start = nnx.split(model, nnx.Param, ...)
    batch = {"x": jax.random.normal(jax.random.key(1), (12, 8))}

    def loss(model, batch):
        return jnp.square(model(batch["x"]) - 1).mean()

    def plain(params, state, batch, j):
        model = nnx.merge(graphdef, params, state, copy=True)
        value = loss(model, batch)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    optimizer = optax.sgd(0.1)
    losses, params, after = train(plain, params, start, optimizer, batch, 3, 3)
    pipeline = jaxpipe.partition(
        model,
        mesh_of(2),
        batch,
        loss=loss,
        optimizer=optimizer,
        num_microbatches=3,
        runtime=runtime,
        profile="analytic",
    )
    state = pipeline.init(jax.random.key(0))
    for expected in losses:
        state, metrics = pipeline.step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(expected, rel=FUSION)
    assert relative_l2(pipeline.parameters(state), nnx.merge_state(params, after)) < FUSION
