"""Blocks of gradients in 2 bits to an element.

    a sign, and whether the element is large for its block   2 bits each, four to a byte
    the scale of the block                                   a float32, whose bytes come first

The two magnitudes are those with which a normal distribution loses least, 12 % of its energy: J. Max, "Quantizing for
minimum distortion", 1960. The scale is the one of least squares, so that what is lost is never more than what was
there, whatever its distribution: error feedback needs no more.
"""

import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array


#: Magnitudes for a standard deviation of 1, and what is large.
SMALL, LARGE, THRESHOLD = 0.4528, 1.5104, 0.9816


def code_bytes(size: int) -> int:
    """Return the bytes of a block of some elements.

    Example:
      >>> code_bytes(128)
      36
    """
    return 4 + -(-size // 4)


def encode(blocks: Array) -> Array:
    """Return ``uint8[..., code_bytes(size)]`` for ``[..., size]``; a block that is not finite is none when decoded.

    Example:
      >>> encode(jnp.array([[-1.0, 1.0, 4.0, -4.0]])).shape
      (1, 5)
    """
    x = blocks.astype(jnp.float32)
    is_large = jnp.abs(x) > THRESHOLD * jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
    codes = (x < 0).astype(jnp.uint8) + 2 * is_large.astype(jnp.uint8)
    levels = _levels(codes)
    scale = jnp.sum(x * levels, -1) / jnp.sum(jnp.square(levels), -1)
    padded = jnp.pad(codes, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)]).reshape(*x.shape[:-1], -1, 4)
    packed = jnp.sum(padded << jnp.array([0, 2, 4, 6], jnp.uint8), -1, dtype=jnp.uint8)
    return jnp.concatenate([lax.bitcast_convert_type(scale, jnp.uint8), packed], -1)


def decode(codes: Array, size: int) -> Array:
    """Return ``float32[..., size]`` of what ``encode`` gave for blocks of that size.

    Example:
      >>> decode(encode(jnp.array([-1.0, 1.0, 4.0, -4.0])), 4).round(1).tolist()
      [-1.2..., 1.2..., 3.9..., -3.9...]
    """
    scale = lax.bitcast_convert_type(codes[..., :4], jnp.float32)
    unpacked = (codes[..., 4:, None] >> jnp.array([0, 2, 4, 6], jnp.uint8)) & 3
    return scale[..., None] * _levels(unpacked.reshape(*codes.shape[:-1], -1)[..., :size])


def _levels(codes: Array) -> Array:
    """The values that codes stand for in a block of scale 1."""
    return jnp.where(codes >= 2, LARGE, SMALL) * jnp.where(codes % 2 == 1, -1.0, 1.0)
