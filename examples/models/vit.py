"""Vision Transformer, at ViT-B/16 size.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (2020),
arXiv:2010.11929.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from .transformer import Block


class ViT(nn.Module):
    """Encoder of patches with a class token and learned positions; the class token is classified.

    Dropout, if there is any, draws from the `dropout` stream while `train` is true. `remat` computes each block, or
    every `remat_every`-th, again in the backward pass, but for what `remat_policy` saves.

    Input: images [batch, height, width, channels], both sides divisible by `patch`.
    Output: logits [batch, num_classes].
    """

    num_classes: int = 1000
    patch: int = 16
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    dropout_rate: float = 0.0
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        side = (self.patch, self.patch)
        x = nn.Conv(self.width, side, strides=side, padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, self.width)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        rematted = nn.remat(Block, policy=self.remat_policy, static_argnums=(3,))
        for i in range(self.num_layers):
            block = rematted if self.remat and i % self.remat_every == 0 else Block
            x = block(self.num_heads, self.dropout_rate, name=f"Block_{i}")(x, None, train)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x)[:, 0])
