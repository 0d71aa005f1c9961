"""Models of several sizes that budgets are tested on, each as ``build(m) -> (model, batch, loss)``."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxpipe
from examples import models as zoo
from jaxpipe.array_types import PyTree
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import entropy


#: A model, a batch and a loss.
Budgeted = tuple[nn.Module | Callable[..., jax.Array], PyTree, Callable[..., jax.Array]]

KEY = jax.random.key(0)


def unet(m: int) -> Budgeted:
    x = jax.random.normal(KEY, (m * 4, 16, 16, 3))
    return zoo.UNet(width=8, depth=2), x, lambda model, x: jnp.square(model(x)[..., 0] - x[..., 0]).mean()


def mlp(m: int) -> Budgeted:
    """Return wide rows and few parameters, which need no initializer."""
    sizes = (32,) * 12 + (10,)
    batch = {"x": jax.random.normal(KEY, (m * 512, 32)), "y": jnp.arange(m * 512) % 10}
    model = jax.tree_util.Partial(zoo.mlp, zoo.init_mlp(KEY, list(sizes)))
    return model, batch, lambda model, b: entropy(model(b["x"]), b["y"])


def transformer(m: int) -> Budgeted:
    tokens = jax.random.randint(KEY, (m * 2, 16), 0, 32)
    model = zoo.Transformer(vocab=32, num_layers=2, width=32, num_heads=2, max_length=16, tied=False)
    return model, tokens, lambda model, t: entropy(model(t, train=True)[:, :-1], t[:, 1:])


def resnet(m: int) -> Budgeted:
    batch = {"x": jax.random.normal(KEY, (m * 4, 16, 16, 3)), "y": jnp.arange(m * 4) % 10}
    return zoo.ResNet18(num_classes=10, width=8), batch, lambda model, b: entropy(model(b["x"], train=True), b["y"])


def built_pipeline(
    build: Callable[[int], Budgeted], stages: int, m: int = 4, **options: Any
) -> tuple[jaxpipe.Pipeline, PyTree]:
    """Return the pipeline of a build and its batch."""
    model, batch, loss = build(m)
    options = {"optimizer": optax.sgd(0.1), "profile": "analytic", **options}
    return jaxpipe.partition(model, mesh_of(stages), batch, loss=loss, num_microbatches=m, **options), batch
