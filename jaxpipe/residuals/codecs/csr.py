"""Compressed sparse rows: values, column numbers, row offsets.

The array is viewed as a matrix whose rows are 256 consecutive elements, the last row shorter, so that a column number
takes one byte. Three one-dimensional arrays hold the values that are not zero, their columns, and where each row
begins among them; the last offset is the number of values. After Y. Saad, "SPARSKIT: a basic tool kit for sparse
matrix computations", 1994; one-byte columns after A. Jain et al., "Gist", ISCA 2018.

    0 7 0 0 | 3 9 0 0  ->  values 7 3 9, columns 1 0 1, offsets 0 1 3        (rows of 4)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array
from jaxpipe.residuals.codecs import compaction


COLUMNS = 256


@dataclass(frozen=True)
class CSR(compaction.SparseCodec):
    """Stores values that are not zero with their columns, and row offsets."""

    name = "csr"

    def encode(self, x: Array) -> tuple[Array, Array, Array]:
        """Return ``capacity + 64`` values, as many ``uint8`` columns, and ``int32[ceil(n / 256) + 1]`` offsets."""
        flat = lax.reshape(x, (x.size,))
        words = compaction.occupancy(flat)
        values, _ = compaction.compact(flat, words, self.capacity)
        columns, _ = compaction.compact(lax.iota(jnp.int32, x.size).astype(jnp.uint8), words, self.capacity)
        missing = -words.size % (COLUMNS // compaction.WORD)
        counts = lax.population_count(lax.pad(words, jnp.uint32(0), [(0, missing, 0)]))
        rows = jnp.sum(counts.reshape(-1, COLUMNS // compaction.WORD), axis=1, dtype=jnp.int32)
        ends = jnp.cumsum(rows, dtype=jnp.int32)
        return values, columns, lax.pad(ends, jnp.int32(0), [(1, 0, 0)])

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the tensor; if it does not fit, something else."""
        values, columns, offsets = arrays
        length, size = values.size, shape_and_type.size
        # The row of the k-th value: how many rows end at or before k.
        ends = jnp.zeros(length, jnp.int32).at[offsets[1:]].add(1, mode="drop")
        place = jnp.cumsum(ends, dtype=jnp.int32) * COLUMNS + columns.astype(jnp.int32)
        number = lax.iota(jnp.int32, length)
        # No two places alike; those beyond the array are dropped.
        held = jnp.minimum(offsets[-1], length - compaction.BLOCK)
        place = jnp.where(number < held, place, size + number)
        flat = jnp.zeros(size, values.dtype).at[place].set(values, mode="drop", unique_indices=True)
        return lax.reshape(flat, shape_and_type.shape)

    def nonzeros(self, arrays: Sequence[Array]) -> Array:
        """Return how many elements are not zero, ``int32[]``."""
        return arrays[2][..., -1]

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of values and columns, and of the offsets."""
        offsets = 4 * (-(-shape_and_type.size // COLUMNS) + 1)
        return (self.capacity + compaction.BLOCK) * (shape_and_type.dtype.itemsize + 1) + offsets
