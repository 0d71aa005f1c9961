"""An encoder with post-LayerNorm blocks and a masked-language head, as in BERT.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2018),
arXiv:1810.04805.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


class BertBlock(nn.Module):
    """Self-attention and a gelu MLP, each with dropout and residual, normalized behind them.

    Input and output: [batch, length, width]. The mask is true where a position may look.
    """

    num_heads: int
    dropout_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        width = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, dropout_rate=self.dropout_rate, broadcast_dropout=False, deterministic=not train
        )
        y = nn.Dropout(self.dropout_rate, deterministic=not train)(attention(x, mask=mask))
        x = nn.LayerNorm()(x + y)
        y = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(x), approximate=False))
        return nn.LayerNorm()(x + nn.Dropout(self.dropout_rate, deterministic=not train)(y))


class Bert(nn.Module):
    """Bidirectional encoder whose output layer reuses the token embedding; token 0 is padding.

    Dropout draws from the `dropout` stream while `train` is true. `remat` computes each block, or every
    `remat_every`-th, again in the backward pass, but for what `remat_policy` saves.

    Input: integer tokens [batch, length], length at most `max_length`.
    Output: token logits [batch, length, vocab].
    """

    vocab: int = 30522
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    max_length: int = 512
    dropout_rate: float = 0.1
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width)
        x = embed(tokens) + nn.Embed(self.max_length, self.width)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(nn.LayerNorm()(x))
        mask = nn.make_attention_mask(jnp.ones_like(tokens, bool), tokens > 0)
        rematted = nn.remat(BertBlock, policy=self.remat_policy, static_argnums=(3,))
        for i in range(self.num_layers):
            block = rematted if self.remat and i % self.remat_every == 0 else BertBlock
            x = block(self.num_heads, self.dropout_rate, name=f"BertBlock_{i}")(x, mask, train)
        x = nn.LayerNorm()(nn.gelu(nn.Dense(self.width)(x), approximate=False))
        return embed.attend(x) + self.param("bias", nn.initializers.zeros, (self.vocab,))
