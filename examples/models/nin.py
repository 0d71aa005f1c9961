"""Network in Network for CIFAR, with 3x3/2 max pools and dropout.

Lin et al., "Network In Network" (2013), arXiv:1312.4400.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax


class MLPConv(nn.Module):
    """A spatial convolution followed by 1x1 convolutions, each with relu.

    Input: [batch, height, width, channels]. Output: [batch, height, width, features[-1]].
    """

    features: Sequence[int]
    kernel: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, features in enumerate(self.features):
            side = self.kernel if i == 0 else 1
            x = nn.relu(nn.Conv(features, (side, side))(x))
        return x


class NiN(nn.Module):
    """Three mlpconv blocks with dropout between them and global average pooling.

    Channels are 3, 5 or 6 times `width`.
    Dropout draws from the `dropout` stream while `train` is true.

    Input: images [batch, 32, 32, 3]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 32
    dropout_rate: float = 0.5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        w = self.width
        x = MLPConv((6 * w, 5 * w, 3 * w), 5)(x)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = MLPConv((6 * w, 6 * w, 6 * w), 5)(x)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        x = MLPConv((6 * w, 6 * w, self.num_classes), 3)(x)
        return x.mean(axis=(1, 2))
