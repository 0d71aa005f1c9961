"""MLP-Mixer, at B/16 size: an image model without convolutions or attention.

Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision" (2021), arXiv:2105.01601.
"""

from collections.abc import Callable

import flax.linen as nn
import jax


class MixerBlock(nn.Module):
    """An MLP over patches and an MLP over channels, each pre-normalized, with residual.

    Input and output: [batch, patches, channels].
    """

    patches_hidden: int
    channels_hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(x.shape[1])(nn.gelu(nn.Dense(self.patches_hidden)(y)))
        x = x + y.swapaxes(1, 2)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[2])(nn.gelu(nn.Dense(self.channels_hidden)(y)))


class Mixer(nn.Module):
    """Patches, mixed along both axes in turn; their mean is classified.

    `remat` computes each block, or every `remat_every`-th, again in the backward pass, but for what `remat_policy`
    saves.

    Input: images [batch, height, width, channels], both sides divisible by `patch`.
    Output: logits [batch, num_classes].
    """

    num_classes: int = 1000
    patch: int = 16
    num_layers: int = 12
    width: int = 768
    patches_hidden: int = 384
    channels_hidden: int = 3072
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing is random
        x = nn.Conv(self.width, (self.patch, self.patch), strides=(self.patch, self.patch), padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        rematted = nn.remat(MixerBlock, policy=self.remat_policy)
        for i in range(self.num_layers):
            block = rematted if self.remat and i % self.remat_every == 0 else MixerBlock
            x = block(self.patches_hidden, self.channels_hidden, name=f"MixerBlock_{i}")(x)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x).mean(axis=1))
