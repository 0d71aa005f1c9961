"""Codecs of small integers, masks and positions, which are packed.

An element takes 1, 2 or 4 bits, 8, 4 or 2 elements a byte; 8 and 16 bits are whole bytes.
Elements are packed along one axis: the first after the batch axis that a byte's number of elements divides. Byte
``j`` then holds elements ``j, j + width, j + 2 width, ...`` of that axis, where ``width`` is its packed length.
Packing reads a few contiguous slices, unpacking needs no index arithmetic inside a row; both vectorize and fuse
with the operator beside them. Examples are never mixed, so a sharded batch stays sharded. If no axis fits, each
example is packed as one row.

    elements  a b c d e f g h i j k l m n o p      (one example, 1 bit each)
    byte 0    a c e g i k m o  ->  bit 0 is a, bit 7 is o
    byte 1    b d f h j l n p
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, DType
from jaxpipe.graph.codec import PACKING, Codec, SavedTensor


def packed_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of a packed array."""
    if bits >= 8:
        return math.prod(shape) * bits // 8
    view, axis = _view(shape, 8 // bits)
    return math.prod(view) // max(1, view[axis]) * -(-view[axis] * bits // 8)


def pack(x: Array, bits: int) -> Array:
    """Pack integers or booleans below ``2**bits`` into ``uint8``, or ``uint16`` for 16 bits."""
    if bits >= 8:
        return x.astype(f"uint{bits}")
    per_byte = 8 // bits
    view, axis = _view(x.shape, per_byte)
    rows = lax.reshape(x.astype(jnp.uint8), view)
    width = -(-view[axis] // per_byte)
    missing = width * per_byte - view[axis]
    if missing:
        rows = lax.pad(rows, np.uint8(0), [(0, missing if k == axis else 0, 0) for k in range(len(view))])
    packed = lax.slice_in_dim(rows, 0, width, axis=axis)
    for k in range(1, per_byte):
        packed = packed | (lax.slice_in_dim(rows, k * width, (k + 1) * width, axis=axis) << (k * bits))
    return packed


def unpack(packed: Array, shape: Sequence[int], bits: int, dtype: DType) -> Array:
    """Inverse of ``pack``: an array of ``shape`` and ``dtype``."""
    if bits >= 8:
        return packed.astype(dtype)
    per_byte = 8 // bits
    view, axis = _view(shape, per_byte)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    shifts = shifts.reshape([per_byte if k == axis else 1 for k in range(len(view) + 1)])
    fields = (lax.expand_dims(packed, [axis]) >> shifts) & np.uint8(2**bits - 1)
    padded = [packed.shape[axis] * per_byte if k == axis else n for k, n in enumerate(view)]
    rows = lax.slice_in_dim(lax.reshape(fields, padded), 0, view[axis], axis=axis)
    return lax.reshape(rows, tuple(shape)).astype(dtype)


def _view(shape: Sequence[int], per_byte: int) -> tuple[tuple[int, ...], int]:
    """The shape to pack in, and the axis to pack along."""
    for axis, length in enumerate(shape):
        if axis > 0 and length % per_byte == 0:
            return tuple(shape), axis
    return ((shape[0], math.prod(shape[1:])), 1) if len(shape) > 1 else ((math.prod(shape),), 0)


@dataclass(frozen=True)
class PackedCodec(Codec):
    """A codec for integers below ``2**bits``."""

    moves = PACKING
    bits: int = 1

    def for_tensor(self, tensor: SavedTensor) -> Self | None:
        """Return the codec for as many bits as an element of the tensor needs."""
        return replace(self, bits=tensor.bits) if self.allows(tensor) else None

    def encode(self, x: Array) -> tuple[Array]:
        """Return one packed array."""
        return (pack(x, self.bits),)

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the integers, or booleans."""
        return unpack(arrays[0], shape_and_type.shape, self.bits, shape_and_type.dtype)

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return ``packed_bytes``."""
        return packed_bytes(shape_and_type.shape, self.bits)


@dataclass(frozen=True)
class Mask(PackedCodec):
    """Stores booleans in 1 bit."""

    name = "mask"

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are booleans."""
        return tensor.dtype == np.bool_


@dataclass(frozen=True)
class PoolIndex(PackedCodec):
    """Stores positions of maxima in their pooling windows, in 1, 2 or 4 bits."""

    name = "pool index"

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are such positions."""
        return tensor.demand == "window index" and tensor.bits < 8


@dataclass(frozen=True)
class Index(PackedCodec):
    """Stores positions along an axis of at most ``2**bits`` elements, in 8 or 16 bits."""

    name = "index"

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are such positions."""
        return tensor.demand == "index" and tensor.bits in (8, 16)
