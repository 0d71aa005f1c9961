"""Positions along an axis, in 8 or 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax

from jaxpipe.array_types import Array
from jaxpipe.graph.codec import PACKING, Codec, SavedTensor


@dataclass(frozen=True)
class Index(Codec):
    """Stores positions along an axis of at most ``2**bits`` elements."""

    name = "index"
    moves = PACKING
    bits: int = 16

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are positions along an axis that is not too long."""
        return tensor.demand == "index" and tensor.bits in (8, 16)

    def for_tensor(self, tensor: SavedTensor) -> Self | None:
        """Return the codec for the bits of the tensor's positions."""
        return replace(self, bits=tensor.bits) if self.allows(tensor) else None

    def encode(self, x: Array) -> tuple[Array]:
        """Return the positions as ``uint8`` or ``uint16``."""
        return (x.astype(f"uint{self.bits}"),)

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the positions."""
        return arrays[0].astype(shape_and_type.dtype)

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return one byte or two for each element."""
        return shape_and_type.size * self.bits // 8
