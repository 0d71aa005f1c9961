"""ResNet-18 for CIFAR and ResNet-50 for ImageNet, with BatchNorm.

He et al., "Deep Residual Learning for Image Recognition" (2015), arXiv:1512.03385.
"""

from collections.abc import Callable

import flax.linen as nn
import jax


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, projected by a 1x1 convolution on a shape change.

    Input: [batch, height, width, channels].
    Output: [batch, height / stride, width / stride, features].
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        y = nn.relu(y)
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """Residual network of basic blocks with a 3x3 stem and no stem pool.

    Stage `i` has `stage_sizes[i]` blocks of `2**i * width` channels.
    Training updates the `batch_stats` collection, which the caller makes mutable.

    Input: images [batch, 32, 32, 3]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 64
    stage_sizes: tuple[int, ...] = (2, 2, 2, 2)

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        for stage, blocks in enumerate(self.stage_sizes):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = BasicBlock(2**stage * self.width, stride)(x, train=train)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut, projected by a 1x1 convolution on a shape change.

    The stride is that of the 3x3 convolution, as it is in most implementations.

    Input: [batch, height, width, channels].
    Output: [batch, height / stride, width / stride, 4 * features].
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.Conv(self.features, (1, 1), use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        y = nn.relu(y)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        y = nn.relu(y)
        y = nn.Conv(4 * self.features, (1, 1), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        if x.shape != y.shape:
            x = nn.Conv(4 * self.features, (1, 1), strides, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Residual network of bottleneck blocks with a 7x7 stem of stride 2 and an overlapping 3x3/2 max pool.

    Stage `i` has `stage_sizes[i]` blocks of `4 * 2**i * width` channels.
    Training updates the `batch_stats` collection, which the caller makes mutable. `remat` computes each block, or
    every `remat_every`-th, again in the backward pass, but for what `remat_policy` saves.

    Input: images [batch, 224, 224, 3], or of other sides from 32. Output: logits [batch, num_classes].
    """

    num_classes: int = 1000
    width: int = 64
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        rematted = nn.remat(BottleneckBlock, policy=self.remat_policy, static_argnums=(2,))
        strides = [2 if stage and i == 0 else 1 for stage, count in enumerate(self.stage_sizes) for i in range(count)]
        widths = [2**stage * self.width for stage, count in enumerate(self.stage_sizes) for _ in range(count)]
        for i, (width, stride) in enumerate(zip(widths, strides, strict=True)):
            block = rematted if self.remat and i % self.remat_every == 0 else BottleneckBlock
            x = block(width, stride, name=f"BottleneckBlock_{i}")(x, train)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))
