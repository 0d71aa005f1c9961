"""A small BatchNorm CNN for 8x8 digits, in Linen (`cnn_nnx.py` is the same network in NNX).

After LeCun et al., "Gradient-Based Learning Applied to Document Recognition" (1998).
"""

import flax.linen as nn
import jax


class DigitsCNN(nn.Module):
    """Two convolution, BatchNorm, relu and max-pool stages, then a dense classifier.

    Training updates the `batch_stats` collection, which the caller makes mutable.

    Input: images [batch, 8, 8, 1]. Output: logits [batch, num_classes].
    """

    num_classes: int = 10
    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        for features in (self.width, 2 * self.width):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(4 * self.width)(x))
        return nn.Dense(self.num_classes)(x)
