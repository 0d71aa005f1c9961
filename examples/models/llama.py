"""A decoder with rotary positions, grouped attention heads, gated MLPs and RMSNorm, as in Llama.

Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), arXiv:2307.09288.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp


def rotate(x: jax.Array) -> jax.Array:
    """Rotate pairs of features by angles proportional to their position.

    Input and output: [batch, length, heads, features]. Su et al., "RoFormer" (2021), arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(half) / half)
    cos, sin = (jnp.expand_dims(f(angles), 1).astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class LlamaBlock(nn.Module):
    """Causal attention with shared key and value heads and a gated MLP, each pre-normalized, with residual.

    Input and output: [batch, length, width].
    """

    num_heads: int
    num_kv_heads: int
    hidden: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        group = self.num_heads // self.num_kv_heads
        features = width // self.num_heads

        def dense(size: int, name: str) -> nn.Dense:
            return nn.Dense(size, use_bias=False, dtype=self.dtype, name=name)

        y = nn.RMSNorm(dtype=self.dtype)(x)
        q = rotate(dense(width, "q")(y).reshape(batch, length, self.num_heads, features))
        k = rotate(dense(self.num_kv_heads * features, "k")(y).reshape(batch, length, self.num_kv_heads, features))
        v = dense(self.num_kv_heads * features, "v")(y).reshape(batch, length, self.num_kv_heads, features)
        q = q.reshape(batch, length, self.num_kv_heads, group, features)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(jnp.float32) / features**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)).astype(self.dtype)
        y = jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(batch, length, width)
        x = x + dense(width, "out")(y)
        y = nn.RMSNorm(dtype=self.dtype)(x)
        return x + dense(width, "down")(nn.silu(dense(self.hidden, "gate")(y)) * dense(self.hidden, "up")(y))


class Llama(nn.Module):
    """Decoder-only language model without dropout; computes in `dtype`, with float32 parameters and logits.

    `remat` computes each block, or every `remat_every`-th, again in the backward pass, but for what `remat_policy`
    saves. `max_length` is not used: positions are rotations.

    Input: integer tokens [batch, length]. Output: next-token logits [batch, length, vocab].
    """

    vocab: int = 32000
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    num_kv_heads: int = 4
    hidden: int = 2048
    dtype: jnp.dtype = jnp.float32
    max_length: int = 0
    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    remat_every: int = 1

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        del train  # nothing is random
        x = nn.Embed(self.vocab, self.width, dtype=self.dtype)(tokens)
        rematted = nn.remat(LlamaBlock, policy=self.remat_policy)
        for i in range(self.num_layers):
            block = rematted if self.remat and i % self.remat_every == 0 else LlamaBlock
            x = block(self.num_heads, self.num_kv_heads, self.hidden, self.dtype, name=f"LlamaBlock_{i}")(x)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocab, use_bias=False, dtype=self.dtype)(x).astype(jnp.float32)
