"""A relu multilayer perceptron as two plain functions over a parameter list.

Rumelhart et al., "Learning Representations by Back-Propagating Errors" (1986).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


Params = list[dict[str, jax.Array]]


def init_mlp(key: jax.Array, sizes: Sequence[int]) -> Params:
    """He-initialized layers mapping `sizes[i]` to `sizes[i + 1]` features."""
    init = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"kernel": init(k, (n_in, n_out)), "bias": jnp.zeros(n_out)}
        for k, n_in, n_out in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Apply the layers with relu between them: [batch, sizes[0]] to [batch, sizes[-1]]."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]
