"""The base of the two codecs that have room for a limited number of values that are not zero."""

from dataclasses import dataclass, replace
from typing import Self

from jaxpipe.graph.codec import Codec, SavedTensor


#: A sparse codec must bring the bytes down at least to this fraction, or its arithmetic is not worth it.
WORTH_PACKING = 0.8


@dataclass(frozen=True)
class SparseCodec(Codec):
    """A codec with room for ``capacity`` values; single elements are moved."""

    moves = 12.0
    capacity: int = 0

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether the tensor has, or is assumed to have, so many zeros that it is worth the work."""
        return self.for_tensor(tensor) is not None

    def for_tensor(self, tensor: SavedTensor) -> Self | None:
        """Return the codec with room for the values of a tensor."""
        if tensor.nonzeros is None:
            return None
        sized, dense = replace(self, capacity=tensor.nonzeros), tensor.shape_and_type
        return sized if sized.nbytes(dense) <= WORTH_PACKING * dense.size * dense.dtype.itemsize else None
