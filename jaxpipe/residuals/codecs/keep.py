"""A tensor as it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxpipe.array_types import Array
from jaxpipe.graph.codec import Codec, SavedTensor


@dataclass(frozen=True)
class Keep(Codec):
    """Stores a tensor as it is."""

    name = "keep"
    moves = 0.0

    def allows(self, tensor: SavedTensor) -> bool:
        """Return True."""
        return True

    def encode(self, x: Array) -> tuple[Array]:
        """Return the tensor."""
        return (x,)

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the tensor."""
        return arrays[0]

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of the tensor."""
        return shape_and_type.size * shape_and_type.dtype.itemsize


KEEP: Codec = Keep()
