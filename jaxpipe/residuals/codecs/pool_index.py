"""Positions of maxima in their pooling windows, in 1, 2 or 4 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax

from jaxpipe.array_types import Array
from jaxpipe.graph.codec import PACKING, Codec, SavedTensor
from jaxpipe.residuals.codecs import bits


@dataclass(frozen=True)
class PoolIndex(Codec):
    """Stores window positions below ``2**bits``, several to a byte."""

    name = "pool index"
    moves = PACKING
    bits: int = 4

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are positions in small windows."""
        return tensor.demand == "window index" and tensor.bits < 8

    def for_tensor(self, tensor: SavedTensor) -> Self | None:
        """Return the codec for the bits of the tensor's windows."""
        return replace(self, bits=tensor.bits) if self.allows(tensor) else None

    def encode(self, x: Array) -> tuple[Array]:
        """Return ``uint8`` with 8, 4 or 2 elements in each."""
        return (bits.pack(x, self.bits),)

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the positions."""
        return bits.unpack(arrays[0], shape_and_type.shape, self.bits, shape_and_type.dtype)

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of the packed positions."""
        return bits.packed_bytes(shape_and_type.shape, self.bits)
