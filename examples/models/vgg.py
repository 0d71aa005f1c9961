"""VGG-16 for CIFAR: plain 3x3 convolutions, relu and 2x2 max pools.

Simonyan & Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (2014),
arXiv:1409.1556.
"""

import flax.linen as nn
import jax


_BLOCKS = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))  # (convolutions, channels / width)


class VGG16(nn.Module):
    """The 13 convolutions of configuration D without BatchNorm, and one dense layer as classifier.

    Input: images [batch, 32, 32, 3]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for convs, scale in _BLOCKS:
            for _ in range(convs):
                x = nn.relu(nn.Conv(scale * self.width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(self.num_classes)(x)
