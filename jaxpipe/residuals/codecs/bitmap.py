"""Bitmap: one bit for each element, and the values that are not zero, packed.

    0 7 0 0 3 9 0 0  ->  words 0b00110010, values 7 3 9

The smaller of the two sparse formats unless about 89 % of the elements or more are zero. The number of values is
fixed when the program is traced; their count, stored beside them, tells whether they all fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax

from jaxpipe.array_types import Array
from jaxpipe.residuals.codecs import compaction


@dataclass(frozen=True)
class Bitmap(compaction.SparseCodec):
    """Stores 1 bit for each element, and the values that are not zero."""

    name = "bitmap"

    def encode(self, x: Array) -> tuple[Array, Array, Array]:
        """Return ``uint32[2 ceil(n / 64)]`` words, ``capacity + 64`` values, their count ``int32[]``."""
        flat = lax.reshape(x, (x.size,))
        words = compaction.occupancy(flat)
        return (words, *compaction.compact(flat, words, self.capacity))

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the tensor; if it does not fit, something else."""
        words, values, _ = arrays
        return lax.reshape(compaction.expand(values, words, shape_and_type.size), shape_and_type.shape)

    def nonzeros(self, arrays: Sequence[Array]) -> Array:
        """Return how many elements are not zero, ``int32[]``."""
        return arrays[2]

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of the words, the values and the count."""
        words = 8 * -(-shape_and_type.size // compaction.BLOCK)
        return words + (self.capacity + compaction.BLOCK) * shape_and_type.dtype.itemsize + 4
