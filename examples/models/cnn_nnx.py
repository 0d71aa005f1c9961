"""A small BatchNorm CNN for 8x8 digits, in NNX (`cnn_linen.py` is the same network in Linen).

After LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998).
"""

import jax
from flax import nnx


class DigitsCNN(nnx.Module):
    """Two convolution, BatchNorm, relu and max-pool stages, then a dense classifier.

    A positive `dropout_rate` adds dropout before the last layer.
    `train()` and `eval()` switch the mode of BatchNorm and dropout.

    Input: images [batch, 8, 8, 1]. Output: logits [batch, num_classes].
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        width: int = 32,
        num_classes: int = 10,
        dropout_rate: float = 0.0,
    ) -> None:
        self.conv1 = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(2 * 2 * 2 * width, 4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs) if dropout_rate > 0 else None
        self.out = nnx.Linear(4 * width, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.hidden(x))
        if self.dropout is not None:
            x = self.dropout(x)
        return self.out(x)
