"""A causal decoder-only language model with pre-LayerNorm blocks, at GPT-2 small size.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    """Self-attention and a gelu MLP, each pre-normalized, with dropout and residual.

    Input and output: [batch, length, width]. The mask, if there is one, is true where a position may look.
    """

    num_heads: int
    dropout_rate: float

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, train: bool) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            self.num_heads,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=False,
            deterministic=not train,
        )(y, mask=mask)
        x = x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)
        y = nn.LayerNorm()(x)
        y = nn.gelu(nn.Dense(4 * width)(y))
        y = nn.Dense(width)(y)
        return x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)


class Transformer(nn.Module):
    """Decoder with learned positions, whose output layer reuses the token embedding if `tied`.

    Dropout draws from the `dropout` stream while `train` is true.

    Input: integer tokens [batch, length], length at most `max_length`.
    Output: next-token logits [batch, length, vocab].
    """

    vocab: int = 50257
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    max_length: int = 1024
    dropout_rate: float = 0.1
    tied: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab, self.width, embedding_init=init)
        positions = nn.Embed(self.max_length, self.width, embedding_init=init)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.num_layers):
            x = Block(self.num_heads, self.dropout_rate)(x, mask, train=train)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocab, use_bias=False)(x)
