"""Booleans in 1 bit."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxpipe.array_types import Array
from jaxpipe.graph.codec import PACKING, Codec, SavedTensor
from jaxpipe.residuals.codecs import bits


@dataclass(frozen=True)
class Mask(Codec):
    """Stores booleans in 1 bit."""

    name = "mask"
    moves = PACKING

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are booleans."""
        return tensor.dtype == np.bool_

    def encode(self, x: Array) -> tuple[Array]:
        """Return ``uint8`` with 8 elements in each."""
        return (bits.pack(x, 1),)

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the booleans."""
        return bits.unpack(arrays[0], shape_and_type.shape, 1, shape_and_type.dtype)

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return an eighth of the number of elements, rounded up along the packed axis."""
        return bits.packed_bytes(shape_and_type.shape, 1)
