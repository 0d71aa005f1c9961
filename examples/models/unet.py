"""U-Net for dense prediction, with padded convolutions.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015),
arXiv:1505.04597.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each followed by relu.

    Input: [batch, height, width, channels]. Output: [batch, height, width, features].
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        return x


class UNet(nn.Module):
    """Encoder and decoder of `depth` levels, joined by concatenated skip connections.

    Input: images [batch, height, width, channels], both sides divisible by `2**depth`.
    Output: per-pixel logits [batch, height, width, num_classes].
    """

    num_classes: int = 2
    width: int = 64
    depth: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        skips: list[jax.Array] = []
        for level in range(self.depth):
            x = DoubleConv(2**level * self.width)(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = DoubleConv(2**self.depth * self.width)(x)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(2**level * self.width, (2, 2), strides=(2, 2))(x)
            x = jnp.concatenate([skips[level], x], axis=-1)
            x = DoubleConv(2**level * self.width)(x)
        return nn.Conv(self.num_classes, (1, 1))(x)
