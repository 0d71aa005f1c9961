"""A chain of four square layers on two stages, for trials of what interrupts a pipeline's calls."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe


#: Batches in turn, by the number of the step.
BATCHES = [np.random.default_rng(k).standard_normal((8, 16), np.float32) for k in range(7)]


def _apply(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in "abcd":
        x = jnp.tanh(x @ weights[name])
    return x


def chain_of_squares(**options: Any) -> jaxpipe.Pipeline:
    weights = {name: jax.random.normal(jax.random.key(k), (16, 16)) / 4 for k, name in enumerate("abcd")}
    return jaxpipe.partition(
        jax.tree_util.Partial(_apply, weights),
        jax.sharding.Mesh(jax.devices()[:2], ("stage",)),
        BATCHES[0],
        loss=lambda model, x: jnp.square(model(x) - x).mean(),
        evaluate=lambda model, x: jnp.square(model(x) - x).mean(),
        predict=lambda model, x: model(x),
        num_microbatches=2,
        profile="analytic",
        **options,
    )
