"""GoogLeNet's inception blocks for CIFAR.

Szegedy et al., "Going Deeper with Convolutions" (2014), arXiv:1409.4842.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


# Channels of the (1x1, 3x3 reduction, 3x3, 5x5 reduction, 5x5, pool projection) convolutions.
Channels = tuple[int, int, int, int, int, int]

GOOGLENET_STAGES: tuple[tuple[Channels, ...], ...] = (
    (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
    ),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    (
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    ),
)


class InceptionBlock(nn.Module):
    """Parallel 1x1, 3x3, 5x5 and max-pool branches, concatenated over channels.

    Input: [batch, height, width, channels]. Output: the same with the branches' channels summed.
    """

    channels: Channels

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        pointwise, reduce3, three, reduce5, five, project = self.channels
        a = nn.relu(nn.Conv(pointwise, (1, 1))(x))
        b = nn.relu(nn.Conv(reduce3, (1, 1))(x))
        b = nn.relu(nn.Conv(three, (3, 3))(b))
        c = nn.relu(nn.Conv(reduce5, (1, 1))(x))
        c = nn.relu(nn.Conv(five, (5, 5))(c))
        d = nn.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        d = nn.relu(nn.Conv(project, (1, 1))(d))
        return jnp.concatenate([a, b, c, d], axis=-1)


class Inception(nn.Module):
    """GoogLeNet with a 3x3 stem and without auxiliary classifiers, LRN and dropout.

    The channels in `stages` are those at `width=64` and scale with `width`, a multiple of 8.

    Input: images [batch, 32, 32, 3]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 64
    stages: tuple[tuple[Channels, ...], ...] = GOOGLENET_STAGES

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(3 * self.width, (3, 3))(x))
        for i, stage in enumerate(self.stages):
            if i > 0:
                x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for pointwise, reduce3, three, reduce5, five, project in stage:
                scaled = (
                    pointwise * self.width // 64,
                    reduce3 * self.width // 64,
                    three * self.width // 64,
                    reduce5 * self.width // 64,
                    five * self.width // 64,
                    project * self.width // 64,
                )
                x = InceptionBlock(scaled)(x)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))
