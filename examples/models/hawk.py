"""A language model of gated linear recurrences and gated MLPs, without attention, as in Hawk.

De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention" (2024), arXiv:2402.19427.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


#: The factor of the exponent of a recurrence's decay.
SHARPNESS = 8.0


class GatedRecurrence(nn.Module):
    """A linear recurrence over the rows of a sequence; how much it keeps and takes in follows from its input.

    Input and output: [batch, length, width].
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        keeps, takes = (nn.sigmoid(nn.Dense(width, name=name)(x)) for name in ("recurrence_gate", "input_gate"))
        rate = self.param("rate", nn.initializers.uniform(1.0), (width,))
        log_decay = -SHARPNESS * nn.softplus(rate) * keeps
        taken = jnp.sqrt(-jnp.expm1(2 * log_decay)) * takes * x

        def step(carry: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            carry = row[0] * carry + row[1]
            return carry, carry

        rows = tuple(jnp.swapaxes(of, 0, 1) for of in (jnp.exp(log_decay), taken))
        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), rows)[1], 0, 1)


class HawkBlock(nn.Module):
    """A gated recurrence behind a short convolution and a gated MLP, each pre-normalized, with residual.

    Input and output: [batch, length, width].
    """

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.RMSNorm()(x)
        gate = nn.gelu(nn.Dense(width, name="gate")(y))
        y = nn.Conv(width, (4,), padding="CAUSAL", feature_group_count=width)(nn.Dense(width, name="branch")(y))
        x = x + nn.Dense(width, name="out")(gate * GatedRecurrence()(y))
        y = nn.RMSNorm()(x)
        y = nn.gelu(nn.Dense(self.hidden, name="mlp_gate")(y)) * nn.Dense(self.hidden, name="up")(y)
        return x + nn.Dense(width, name="down")(y)


class Hawk(nn.Module):
    """Decoder-only language model without dropout and without positions.

    `remat` computes each block, or every `remat_every`-th, again in the backward pass, but for what `remat_policy`
    saves. `max_length` is not used.

    Input: integer tokens [batch, length]. Output: next-token logits [batch, length, vocab].
    """

    vocab: int = 32000
    num_layers: int = 12
    width: int = 768
    hidden: int = 2304
    max_length: int = 0
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing is random
        x = nn.Embed(self.vocab, self.width)(tokens)
        rematted = nn.remat(HawkBlock, policy=self.remat_policy)
        for i in range(self.num_layers):
            block = rematted if self.remat and i % self.remat_every == 0 else HawkBlock
            x = block(self.hidden, name=f"HawkBlock_{i}")(x)
        return nn.Dense(self.vocab, use_bias=False)(nn.RMSNorm()(x))
