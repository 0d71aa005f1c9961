"""The numbers of the blocks that are sent, in the fewest bytes of fixed length.

    3 17 18 of 24 blocks    a byte each: 3 bytes    a bit for each block: 3 bytes

Numbers ascend. Which code it is depends on the shape alone: a byte, two or four for a number, or a map of bits.
"""

import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array


def number_bytes(count: int, k: int) -> int:
    """Return the bytes of ``k`` numbers below ``count``.

    Example:
      >>> number_bytes(128, 1), number_bytes(128, 32), number_bytes(50257, 3)
      (1, 16, 6)
    """
    return min(k * _width(count), -(-count // 8))


def encode(numbers: Array, count: int) -> Array:
    """Return ``uint8[..., number_bytes(count, k)]`` of ascending numbers ``int32[..., k]`` below ``count``."""
    *rows, k = numbers.shape
    width = _width(count)
    if number_bytes(count, k) == k * width:
        return lax.bitcast_convert_type(numbers.astype(f"uint{8 * width}"), jnp.uint8).reshape(*rows, k * width)
    flat = numbers.reshape(-1, k)
    nothing = _compat.vary_as(jnp.zeros((len(flat), -(-count // 8) * 8), jnp.uint8), flat)
    bits = nothing.at[jnp.arange(len(flat))[:, None], flat].set(1)
    return jnp.sum(bits.reshape(*rows, -1, 8) << jnp.arange(8, dtype=jnp.uint8), -1, dtype=jnp.uint8)


def decode(codes: Array, count: int, k: int) -> Array:
    """Return the ``k`` numbers, ``int32[..., k]``.

    Example:
      >>> numbers = jnp.array([[0, 7, 9], [3, 4, 8]])
      >>> encode(numbers, 10).tolist(), decode(encode(numbers, 10), 10, 3).tolist()
      ([[129, 2], [24, 1]], [[0, 7, 9], [3, 4, 8]])
    """
    rows, width = codes.shape[:-1], _width(count)
    if codes.shape[-1] != k * width:
        bits = (codes[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        return lax.top_k(bits.reshape(*rows, -1), k)[1]  # of equals, the first
    wide = codes if width == 1 else lax.bitcast_convert_type(codes.reshape(*rows, k, width), f"uint{8 * width}")
    return wide.astype(jnp.int32)


def _width(count: int) -> int:
    """The bytes of a number."""
    return next(width for width in (1, 2, 4) if count <= 256**width)
