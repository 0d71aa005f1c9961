"""An MLP with a user-written `jax.custom_vjp` activation, a numerically stable softplus.

Dugas et al., "Incorporating Second-Order Functional Knowledge for Better Option Pricing" (2000).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


@jax.custom_vjp
def softplus(x: jax.Array) -> jax.Array:
    """`log(1 + exp(x))` without overflow, elementwise on any shape."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _softplus_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return softplus(x), x


def _softplus_bwd(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (g * jax.nn.sigmoid(x),)


softplus.defvjp(_softplus_fwd, _softplus_bwd)


class SoftplusMLP(nn.Module):
    """`depth` hidden dense layers with the custom softplus, then a dense classifier.

    Input: [batch, features]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 256
    depth: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.depth):
            x = softplus(nn.Dense(self.width)(x))
        return nn.Dense(self.num_classes)(x)
