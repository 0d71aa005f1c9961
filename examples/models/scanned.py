"""A residual MLP whose layers are one `nn.scan`, with parameters stacked over layers.

After He et al., "Deep Residual Learning for Image Recognition" (2015), arXiv:1512.03385, and
Ba et al., "Layer Normalization" (2016), arXiv:1607.06450.
"""

import flax.linen as nn
import jax


class ResidualBlock(nn.Module):
    """LayerNorm, Dense, gelu and a residual, in the carry form that `nn.scan` takes.

    Input and output: carry [batch, width].
    """

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        return x + nn.gelu(nn.Dense(self.width)(y)), None


class ScannedMLP(nn.Module):
    """Dense stem, `num_layers` scanned residual blocks and a dense classifier.

    Input: [batch, features]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    num_layers: int = 12
    width: int = 768

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(x)
        layers = nn.scan(
            ResidualBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers(self.width)(x, None)
        return nn.Dense(self.num_classes)(x)
