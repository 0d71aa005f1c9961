"""OverFeat's fast model: an ImageNet network with large kernels and dense layers.

Sermanet et al., "OverFeat: Integrated Recognition, Localization and Detection using Convolutional Networks" (2013),
arXiv:1312.6229.
"""

import flax.linen as nn
import jax


class OverFeat(nn.Module):
    """Five convolutions, three of them with 2x2 max pools, and three dense layers.

    Channels are 3, 8, 16, 32 and 32 times `width`, the hidden dense layers 96 and 128 times.
    Dropout draws from the `dropout` stream while `train` is true.

    Input: images [batch, 231, 231, 3], or of other sides from 71. Output: logits [batch, num_classes].
    """

    num_classes: int = 1000
    width: int = 32
    dropout_rate: float = 0.5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        w = self.width
        x = nn.relu(nn.Conv(3 * w, (11, 11), strides=(4, 4), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(8 * w, (5, 5), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16 * w, (3, 3))(x))
        x = nn.relu(nn.Conv(32 * w, (3, 3))(x))
        x = nn.relu(nn.Conv(32 * w, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for features in (96 * w, 128 * w):
            x = nn.relu(nn.Dense(features)(x))
            x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)
