"""Pack small integers: 1, 2 or 4 bits for each element, 8, 4 or 2 elements to a byte.

An array ``[batch, ...]`` of ``n`` elements for each example becomes ``uint8[batch, ceil(n / per_byte)]``. Byte ``j``
holds elements ``j, j + ceil(n / per_byte), ...``: packing reads a few contiguous slices and unpacking writes them,
which vectorises and fuses with the operator beside it. Examples are never mixed, so a sharded batch stays sharded.

    elements  a b c d e f g h i j k l m n o p      (one example, 1 bit each)
    byte 0    a c e g i k m o  ->  bit 0 is a, bit 7 is o
    byte 1    b d f h j l n p
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a packed array; ``bits`` is 1, 2 or 4 (8 and 16 are whole bytes and stay as they are)."""
    batch, length = _rows(shape)
    return batch * -(-length * bits // 8)


def pack(x: Any, bits: int) -> Any:
    """Pack integers or booleans below ``2**bits``; returns ``uint8[batch, bytes]``."""
    if bits >= 8:
        return x
    batch, length = _rows(x.shape)
    per_byte = 8 // bits
    width = -(-length // per_byte)
    rows = lax.reshape(x.astype(jnp.uint8), (batch, length))
    if width * per_byte != length:
        rows = jnp.pad(rows, ((0, 0), (0, width * per_byte - length)))
    packed = rows[:, :width]
    for k in range(1, per_byte):
        packed = packed | (rows[:, k * width : (k + 1) * width] << (k * bits))
    return packed


def unpack(packed: Any, shape: Sequence[int], bits: int, dtype: Any) -> Any:
    """Inverse of ``pack``: an array of ``shape`` and ``dtype``."""
    if bits >= 8:
        return packed
    batch, length = _rows(shape)
    per_byte = 8 // bits
    width = packed.shape[1]
    shifts = (jnp.arange(per_byte, dtype=jnp.uint8) * bits)[None, :, None]
    rows = lax.reshape((packed[:, None, :] >> shifts) & jnp.uint8(2**bits - 1), (batch, per_byte * width))
    rows = rows if per_byte * width == length else rows[:, :length]
    return lax.reshape(rows, tuple(shape)).astype(dtype)


def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """The array as examples of equal length: the first dimension is the batch."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
