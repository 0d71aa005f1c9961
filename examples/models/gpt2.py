"""GPT-2 small as it was released, with attention written out and one projection for queries, keys and values.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


class CausalAttention(nn.Module):
    """Every position attends to itself and those before it.

    Input and output: [batch, length, width].
    """

    num_heads: int
    dropout_rate: float
    output_scale: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        batch, length, width = x.shape
        qkv = nn.Dense(3 * width, kernel_init=nn.initializers.normal(0.02))(x)
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(heads[-1]).astype(x.dtype)
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min))
        weights = nn.Dropout(self.dropout_rate, deterministic=not train)(weights)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return nn.Dense(width, kernel_init=nn.initializers.normal(self.output_scale))(y)


class GPT2Block(nn.Module):
    """Attention and a gelu MLP, each pre-normalized, with dropout and residual.

    Input and output: [batch, length, width].
    """

    num_heads: int
    dropout_rate: float
    output_scale: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(epsilon=1e-5)(x)
        y = CausalAttention(self.num_heads, self.dropout_rate, self.output_scale)(y, train=train)
        x = x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)
        y = nn.LayerNorm(epsilon=1e-5)(x)
        y = nn.gelu(nn.Dense(4 * width, kernel_init=nn.initializers.normal(0.02))(y))
        y = nn.Dense(width, kernel_init=nn.initializers.normal(self.output_scale))(y)
        return x + nn.Dropout(self.dropout_rate, deterministic=not train)(y)


class GPT2(nn.Module):
    """Decoder with learned positions, whose output layer is the token embedding.

    Dropout draws from the `dropout` stream while `train` is true. `remat` computes each block, or every
    `remat_every`-th, again in the backward pass, but for what `remat_policy` saves. `scanned` blocks are one `nn.scan`,
    in which `remat` is of each.

    Input: integer tokens [batch, length], length at most `max_length`.
    Output: next-token logits [batch, length, vocab].
    """

    vocab: int = 50257
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    max_length: int = 1024
    dropout_rate: float = 0.1
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab, self.width, embedding_init=init)
        positions = nn.Embed(self.max_length, self.width, embedding_init=init)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        output_scale = 0.02 / (2 * self.num_layers) ** 0.5
        rematted = nn.remat(GPT2Block, policy=self.remat_policy, static_argnums=(2,))
        if self.scanned:
            block = rematted if self.remat else GPT2Block
            scan = nn.scan(
                lambda block, x, _: (block(x, train), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.num_layers,
            )
            x, _ = scan(block(self.num_heads, self.dropout_rate, output_scale, name="blocks"), x, None)
        else:
            for i in range(self.num_layers):
                block = rematted if self.remat and i % self.remat_every == 0 else GPT2Block
                x = block(self.num_heads, self.dropout_rate, output_scale, name=f"GPT2Block_{i}")(x, train)
        return embed.attend(nn.LayerNorm(epsilon=1e-5)(x))
