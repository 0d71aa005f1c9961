"""Bitmap: one bit for each element, and the values that are not zero, packed.

    0 7 0 0 3 9 0 0  ->  words 0b00110010, values 7 3 9

The smaller of the two sparse formats unless about 89 % of the elements or more are zero. The number of values is
fixed when the program is traced; their count, stored beside them, tells whether they all fit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax import lax

from jaxpipe.array_types import Array
from jaxpipe.residuals.codecs import compaction


def encode(x: Array, capacity: int) -> tuple[Array, Array, Array]:
    """Return ``uint32[2 ceil(n / 64)]`` words of ``n`` elements, ``capacity + 64`` values, their count ``int32[]``."""
    flat = lax.reshape(x, (x.size,))
    words = compaction.occupancy(flat)
    return (words, *compaction.compact(flat, words, capacity))


def decode(parts: Sequence[Array], shape: Sequence[int]) -> Array:
    """Inverse of ``encode`` if the values fit the capacity."""
    words, values, _ = parts
    return lax.reshape(compaction.expand(values, words, math.prod(shape)), tuple(shape))


def count(parts: Sequence[Array]) -> Array:
    """Return how many elements are not zero, ``int32[]``: more than the capacity if they do not fit."""
    return parts[2]


def stored_bytes(size: int, itemsize: int, capacity: int) -> int:
    """Bytes of an encoded array of ``size`` elements."""
    return 8 * -(-size // compaction.BLOCK) + (capacity + compaction.BLOCK) * itemsize + 4


@dataclass(frozen=True)
class Bitmap(compaction.SparseCodec):
    """Stores 1 bit for each element, and the values that are not zero."""

    name = "bitmap"
    functions = compaction.SparseFunctions(encode, decode, count, stored_bytes)
