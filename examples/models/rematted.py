"""A CNN whose blocks are rematerialised in the backward pass by `nn.remat`.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), arXiv:1604.06174.
"""

import flax.linen as nn
import jax


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with relu, then a 2x2 max pool.

    Input: [batch, height, width, channels]. Output: [batch, height / 2, width / 2, features].
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        return nn.max_pool(x, (2, 2), strides=(2, 2))


class RematCNN(nn.Module):
    """`depth` rematerialised blocks, doubling in channels, and a dense classifier.

    Input: images [batch, 32, 32, 3]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 64
    depth: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(ConvBlock)
        for level in range(self.depth):
            x = block(2**level * self.width)(x)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))
