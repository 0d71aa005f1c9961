"""A classifier of images whose convolutions are normalized group by group.

Wu and He, "Group Normalization" (2018), arXiv:1803.08494.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax


class NormalizedConv(nn.Module):
    """A 3x3 convolution, group normalization and gelu.

    Input: [batch, height, width, channels]. Output: [batch, height / stride, width / stride, features].
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (3, 3), strides=(self.stride, self.stride))(x)
        return nn.gelu(nn.GroupNorm(num_groups=32)(x))


class GroupNormCNN(nn.Module):
    """Blocks of one convolution, with half of the pixels in each direction where the width grows.

    `remat` computes each block, or every `remat_every`-th, again in the backward pass, but for what `remat_policy`
    saves.

    Input: images [batch, height, width, channels]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    widths: Sequence[int] = (64, 64, 128, 128, 256, 256)
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rematted = nn.remat(NormalizedConv, policy=self.remat_policy)
        for i, width in enumerate(self.widths):
            block = rematted if self.remat and i % self.remat_every == 0 else NormalizedConv
            x = block(width, 2 if i and width > self.widths[i - 1] else 1, name=f"NormalizedConv_{i}")(x)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))
