"""AlexNet for CIFAR, with overlapping 3x3/2 max pools.

Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks" (2012).
"""

import flax.linen as nn
import jax


class AlexNet(nn.Module):
    """Five convolutions and three dense layers, with a stride-1 5x5 stem and without LRN.

    Channels are 3, 8, 12, 12 and 8 times `width`, the hidden dense layers 128 times.
    Dropout draws from the `dropout` stream while `train` is true.

    Input: images [batch, 32, 32, 3]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 32
    dropout_rate: float = 0.5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.relu(nn.Conv(3 * self.width, (5, 5))(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = nn.relu(nn.Conv(8 * self.width, (5, 5))(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = nn.relu(nn.Conv(12 * self.width, (3, 3))(x))
        x = nn.relu(nn.Conv(12 * self.width, (3, 3))(x))
        x = nn.relu(nn.Conv(8 * self.width, (3, 3))(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
            x = nn.relu(nn.Dense(128 * self.width)(x))
        return nn.Dense(self.num_classes)(x)
