"""Blocks of gradients in few bits to an element.

    2 bits     a sign, and whether the element is large for its block; a scale for each block
    1/2 bit    of eight neighbors the place and the sign of the largest one; a scale for all blocks

A code takes ``[..., k, size]``, ``k`` blocks of ``size`` elements, and makes ``uint8[..., bytes(k, size)]`` of it. What
is not finite makes all that share its scale so.

Scales are float32, and stand before what they belong to. They are those of least squares, so that what is lost is never
more than what was there, whatever its distribution: error feedback needs no more.

The two magnitudes are those with which a normal distribution loses least, 12 % of its energy: J. Max, "Quantizing for
minimum distortion", 1960. Of eight normal numbers the largest one has 40 % of the energy, for a quarter of the bits.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array


#: Magnitudes for a standard deviation of 1, and what is large.
SMALL, LARGE, THRESHOLD = 0.4528, 1.5104, 0.9816


class SignAndMagnitude:
    """A sign and one of two magnitudes for each element.

    Example:
      >>> code, x = SignAndMagnitude(), jnp.array([[-1.0, 1.0, 4.0, -4.0]])
      >>> code.bytes(1, 4), code.decode(code.encode(x), 1, 4).round(1).tolist()
      (5, [[-1.2..., 1.2..., 3.9..., -3.9...]])
    """

    def bytes(self, k: int, size: int) -> int:
        """Return the bytes of a scale and a quarter for each element, by block."""
        return k * (4 + -(-size // 4))

    def encode(self, blocks: Array) -> Array:
        """Return the codes of blocks, one after the other."""
        x = blocks.astype(jnp.float32)
        is_large = jnp.abs(x) > THRESHOLD * jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
        codes = (x < 0).astype(jnp.uint8) + 2 * is_large.astype(jnp.uint8)
        levels = _levels(codes)
        scale = jnp.sum(x * levels, -1) / jnp.sum(jnp.square(levels), -1)
        codes = jnp.concatenate([lax.bitcast_convert_type(scale, jnp.uint8), _packed(codes, 2)], -1)
        return codes.reshape(*x.shape[:-2], -1)

    def decode(self, codes: Array, k: int, size: int) -> Array:
        """Return the blocks of codes."""
        codes = codes.reshape(*codes.shape[:-1], k, -1)
        scale = lax.bitcast_convert_type(codes[..., :4], jnp.float32)
        return scale[..., None] * _levels(_unpacked(codes[..., 4:], 2)[..., :size])


class LargestOfEight:
    """The place and the sign of the largest of each eight neighbors, and one scale.

    Example:
      >>> code, x = LargestOfEight(), jnp.array([[1.0, -3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 5.0]])
      >>> code.bytes(1, 9), code.decode(code.encode(x), 1, 9).astype(int).tolist()
      (5, [[0, -4, 0, 0, 0, 0, 0, 0, 4]])
    """

    def bytes(self, k: int, size: int) -> int:
        """Return the bytes of a scale and half of one for each eight elements."""
        return 4 + -(-k * size // 16)

    def encode(self, blocks: Array) -> Array:
        """Return the code of all blocks together."""
        x = blocks.astype(jnp.float32).reshape(*blocks.shape[:-2], -1)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])
        groups = x.reshape(*x.shape[:-1], -1, 8)
        place = jnp.argmax(jnp.abs(groups), -1)
        largest = jnp.take_along_axis(groups, place[..., None], -1)[..., 0]
        scale = jnp.mean(jnp.abs(largest), -1)
        codes = place.astype(jnp.uint8) + 8 * (largest < 0).astype(jnp.uint8)
        return jnp.concatenate([lax.bitcast_convert_type(scale, jnp.uint8), _packed(codes, 4)], -1)

    def decode(self, codes: Array, k: int, size: int) -> Array:
        """Return the blocks of a code, zero but for the largest elements."""
        scale = lax.bitcast_convert_type(codes[..., :4], jnp.float32)[..., None]
        groups = _unpacked(codes[..., 4:], 4)
        elements = jax.nn.one_hot(groups % 8, 8) * jnp.where(groups >= 8, -scale, scale)[..., None]
        return elements.reshape(*codes.shape[:-1], -1)[..., : k * size].reshape(*codes.shape[:-1], k, size)


ValueCode: TypeAlias = SignAndMagnitude | LargestOfEight

#: By the bits of an element.
CODES: dict[float, ValueCode] = {2: SignAndMagnitude(), 0.5: LargestOfEight()}


def _levels(codes: Array) -> Array:
    """The values that codes of 2 bits stand for in a block of scale 1, ``float32``."""
    return jnp.where(codes >= 2, jnp.float32(LARGE), jnp.float32(SMALL)) * jnp.where(codes % 2 == 1, -1.0, 1.0)


def _packed(codes: Array, bits: int) -> Array:
    """Codes of some bits along the last axis, as many to a byte as it holds."""
    n = 8 // bits
    padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % n)])
    parts = padded.reshape(*codes.shape[:-1], -1, n) << jnp.arange(0, 8, bits, dtype=jnp.uint8)
    return jnp.sum(parts, -1, dtype=jnp.uint8)


def _unpacked(packed: Array, bits: int) -> Array:
    """The codes, with those that the last byte was filled with."""
    codes = (packed[..., None] >> jnp.arange(0, 8, bits, dtype=jnp.uint8)) & (2**bits - 1)
    return codes.reshape(*packed.shape[:-1], -1)
