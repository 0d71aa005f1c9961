"""U-Net for dense prediction, with padded convolutions.

Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015),
arXiv:1505.04597.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class DoubleConv(nn.Module):
    """Two 3x3 convolutions, each followed by relu, with BatchNorm between them if `norm`.

    Input: [batch, height, width, channels]. Output: [batch, height, width, features].
    """

    features: int
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        for _ in range(2):
            x = nn.Conv(self.features, (3, 3), use_bias=not self.norm)(x)
            if self.norm:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
        return x


class UNet(nn.Module):
    """Encoder and decoder of `depth` levels, joined by concatenated skip connections.

    With `norm`, training updates the `batch_stats` collection, which the caller makes mutable.

    Input: images [batch, height, width, channels], both sides divisible by `2**depth`.
    Output: per-pixel logits [batch, height, width, num_classes].
    """

    num_classes: int = 2
    width: int = 64
    depth: int = 4
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        skips: list[jax.Array] = []
        for level in range(self.depth):
            x = DoubleConv(2**level * self.width, self.norm)(x, train=train)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = DoubleConv(2**self.depth * self.width, self.norm)(x, train=train)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(2**level * self.width, (2, 2), strides=(2, 2))(x)
            x = jnp.concatenate([skips[level], x], axis=-1)
            x = DoubleConv(2**level * self.width, self.norm)(x, train=train)
        return nn.Conv(self.num_classes, (1, 1))(x)
