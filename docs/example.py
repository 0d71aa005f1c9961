"""The model, batch and pipeline that the code on these pages uses."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn  # noqa: F401  # for the pages
from flax import nnx

import jaxpipe


class Block(nnx.Module):
    def __init__(self, features, rngs):
        self.norm = nnx.LayerNorm(features, rngs=rngs)
        self.inner = nnx.Linear(features, 2 * features, rngs=rngs)
        self.outer = nnx.Linear(2 * features, features, rngs=rngs)

    def __call__(self, x):
        return x + self.outer(nnx.gelu(self.inner(self.norm(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List(Block(64, rngs) for _ in range(4))
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


model = Net(nnx.Rngs(0))
batch = {"x": jax.random.normal(jax.random.key(0), (64, 64)), "y": jnp.arange(64) % 10}
optimizer = optax.adam(1e-3)
mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
options = {"loss": loss, "optimizer": optimizer, "num_microbatches": 8, "runtime": "mpmd"}
pipeline = jaxpipe.partition(model, mesh, batch, **options)
state = pipeline.init(jax.random.key(1))
