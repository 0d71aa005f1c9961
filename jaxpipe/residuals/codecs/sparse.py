"""Codecs for maps with many zeros: the elements that are not zero are moved to the front, and where they were is kept.

Where they are is kept as words of 32 bits: bit ``i`` of word ``w`` tells whether element ``32 w + i`` of the flattened
array is something else than +0.0. "Not zero" means a bit pattern that is not zero, so that -0.0 and NaN survive.

    elements  0 7 0 0 3 9 0 0   ->  words 0b00110010   values 7 3 9 _ _

An element's place is the number of set bits before it: a running sum over words (1/32 of the elements) plus a
population count inside the word, both cheap. What costs is moving the elements. On a GPU that is one scatter and
one gather, each fused with the counting. XLA:CPU runs a scatter one element at a time, so there the
elements of a block of 64 are gathered to the block's front, by arithmetic on its two words, and written there as a
whole, one block after the other, each over the unused tail of the one before; and the same way back. The array of
values is one block longer than its capacity, so that any block can be written and read as a whole. A loop over the
blocks takes few kernels to compile, and knows in the end how many values there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array
from jaxpipe.graph.codec import Codec, SavedTensor
from jaxpipe.targets.building import current


WORD = 32
BLOCK = 64

#: Elements in a row of ``CSR``.
COLUMNS = 256

#: A sparse codec must bring the bytes down at least to this fraction, or its arithmetic is not worth it.
WORTH_PACKING = 0.8

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def is_occupied(x: Array) -> Array:
    """Return whether elements are something else than +0.0, by their bits."""
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]) != 0


def occupancy(flat: Array) -> Array:
    """``uint32[ceil(n / 64) * 2]``: one bit for each element of ``flat``, set where it is not zero."""
    missing = -flat.size % BLOCK
    occupied = is_occupied(flat)
    if missing:
        occupied = lax.pad(occupied, False, [(0, missing, 0)])
    bits = lax.reshape(occupied, (occupied.size // WORD, WORD)).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)


def compact(flat: Array, words: Array, capacity: int) -> tuple[Array, Array]:
    """``capacity + 64`` values, and how many elements of ``flat`` have their bit set, ``int32[]``.

    The first ``capacity`` values are the first of those elements, as far as there are so many.
    """
    if current().serial_scatter:
        return _compact_by_blocks(flat, words, capacity)
    return _compact_by_scatter(flat, words, capacity)


def expand(values: Array, words: Array, size: int) -> Array:
    """``size`` elements: the values where a bit is set, zero elsewhere. Inverse of ``compact``."""
    if current().serial_scatter:
        return _expand_by_blocks(values, words, size)
    return _expand_by_gather(values, words, size)


def _compact_by_scatter(flat: Array, words: Array, capacity: int) -> tuple[Array, Array]:
    counts = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    place, occupied = _in_order(words, ends - counts, flat.size)
    beyond = capacity + BLOCK + lax.iota(jnp.int32, flat.size)  # no two alike, all dropped
    place = jnp.where(occupied, place, beyond)
    values = jnp.zeros(capacity + BLOCK, flat.dtype).at[place].set(flat, mode="drop", unique_indices=True)
    return values, ends[-1] if words.size else jnp.int32(0)


def _expand_by_gather(values: Array, words: Array, size: int) -> Array:
    counts = lax.population_count(words).astype(jnp.int32)
    place, occupied = _in_order(words, jnp.cumsum(counts, dtype=jnp.int32) - counts, size)
    return jnp.where(occupied, values.at[place].get(mode="clip"), jnp.zeros((), values.dtype))


def _in_order(words: Array, before: Array, size: int) -> tuple[Array, Array]:
    """For each element, how many bits are set before it, ``before`` its word included, and whether its own is."""
    bit = jnp.arange(WORD, dtype=jnp.uint32)
    below = lax.population_count(words[:, None] & ((jnp.uint32(1) << bit) - jnp.uint32(1))).astype(jnp.int32)
    occupied = (words[:, None] >> bit) & jnp.uint32(1) != 0
    return (before[:, None] + below).reshape(-1)[:size], occupied.reshape(-1)[:size]


def _compact_by_blocks(flat: Array, words: Array, capacity: int) -> tuple[Array, Array]:
    blocks = lax.pad(flat, jnp.zeros((), flat.dtype), [(0, -flat.size % BLOCK, 0)]).reshape(-1, BLOCK)

    def move(k: Array, low: Array, high: Array, start: Array, values: Array) -> Array:
        block = lax.dynamic_index_in_dim(blocks, k, keepdims=False)
        return lax.dynamic_update_slice(values, block.at[_sources(low, high)].get(mode="promise_in_bounds"), (start,))

    return _for_each_block(move, words, jnp.zeros(capacity + BLOCK, flat.dtype))


def _expand_by_blocks(values: Array, words: Array, size: int) -> Array:
    def move(k: Array, low: Array, high: Array, start: Array, elements: Array) -> Array:
        place, occupied = _targets(low, high)
        front = lax.dynamic_slice(values, (start,), (BLOCK,))
        block = jnp.where(occupied, front.at[place].get(mode="promise_in_bounds"), jnp.zeros((), values.dtype))
        return lax.dynamic_update_slice(elements, block, (BLOCK * k,))

    elements, _ = _for_each_block(move, words, jnp.zeros(words.size * WORD, values.dtype))
    return elements[:size]


def _for_each_block(move: Callable[..., Array], words: Array, empty: Array) -> tuple[Array, Array]:
    """The array that ``move(block, its low word, its high word, set bits before it, array)`` fills; and all set bits.

    A running sum over all blocks is quick to run, but as slow to compile as all the rest.
    """
    if not words.size:
        return empty, jnp.int32(0)

    def step(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        array, start = carry
        low, high = lax.dynamic_slice(words, (2 * k,), (2,))
        return move(k, low, high, start, array), start + lax.population_count(low) + lax.population_count(high)

    # Unsigned numbers all along: a signed index would be checked for being negative.
    start, empty = (_compat.vary_as(x, words) for x in (jnp.uint32(0), empty))
    array, count = lax.fori_loop(jnp.uint32(0), jnp.uint32(words.size // 2), step, (empty, start))
    return array, count.astype(jnp.int32)


def _sources(low: Array, high: Array) -> Array:
    """The positions of a block's set bits in order, ``uint32[64]``; what follows them means nothing."""
    wanted = lax.iota(jnp.uint32, BLOCK)
    in_low = lax.population_count(low)
    second = wanted >= in_low
    word = jnp.where(second, high, low)
    wanted = jnp.where(second, wanted - in_low, wanted)
    position = jnp.where(second, jnp.uint32(WORD), jnp.uint32(0))
    # The position of the k-th set bit by bisection: does the lower half hold more than k?
    for width in (16, 8, 4, 2, 1):
        below = lax.population_count(word & jnp.uint32((1 << width) - 1))
        above = wanted >= below
        wanted = jnp.where(above, wanted - below, wanted)
        position = jnp.where(above, position + jnp.uint32(width), position)
        word = jnp.where(above, word >> width, word)
    return jnp.minimum(position, BLOCK - 1)


def _targets(low: Array, high: Array) -> tuple[Array, Array]:
    """For each element of a block, how many bits are set before it, ``uint32[64]``, and whether its own is."""
    element = lax.iota(jnp.uint32, BLOCK)
    bit = element & jnp.uint32(WORD - 1)
    second = element >= WORD
    word = jnp.where(second, high, low)
    below = lax.population_count(word & ((jnp.uint32(1) << bit) - jnp.uint32(1)))
    place = below + jnp.where(second, lax.population_count(low), jnp.uint32(0))
    return place, (word >> bit) & jnp.uint32(1) != 0


@dataclass(frozen=True)
class SparseCodec(Codec):
    """A codec with room for ``capacity`` values; single elements are moved."""

    moves = 12.0
    capacity: int = 0

    def for_tensor(self, tensor: SavedTensor) -> Self | None:
        """Return the codec with room for the values of a tensor, if that is worth the work."""
        if tensor.nonzeros is None:
            return None
        sized, dense = replace(self, capacity=tensor.nonzeros), tensor.shape_and_type
        return sized if sized.nbytes(dense) <= WORTH_PACKING * dense.size * dense.dtype.itemsize else None

    def fits(self, arrays: Sequence[Array]) -> Array:
        """Return whether there are no more values than there is room for."""
        return self.nonzeros(arrays) <= self.capacity

    def nonzeros(self, arrays: Sequence[Array]) -> Array:
        """Return how many elements are not zero, ``int32[]``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bitmap(SparseCodec):
    """Stores 1 bit for each element, and the values that are not zero, packed.

        0 7 0 0 3 9 0 0  ->  words 0b00110010, values 7 3 9

    The smaller of the two sparse formats unless about 89 % of the elements or more are zero. The number of values is
    fixed when the program is traced; their count, stored beside them, tells whether they all fit.
    """

    name = "bitmap"

    def encode(self, x: Array) -> tuple[Array, Array, Array]:
        """Return ``uint32[2 ceil(n / 64)]`` words, ``capacity + 64`` values, their count ``int32[]``."""
        flat = lax.reshape(x, (x.size,))
        words = occupancy(flat)
        return (words, *compact(flat, words, self.capacity))

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the tensor; if it does not fit, something else."""
        words, values, _ = arrays
        return lax.reshape(expand(values, words, shape_and_type.size), shape_and_type.shape)

    def nonzeros(self, arrays: Sequence[Array]) -> Array:
        """Return how many elements are not zero, ``int32[]``."""
        return arrays[2]

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of the words, the values and the count."""
        words = 8 * -(-shape_and_type.size // BLOCK)
        return words + (self.capacity + BLOCK) * shape_and_type.dtype.itemsize + 4


@dataclass(frozen=True)
class CSR(SparseCodec):
    """Stores values that are not zero with their columns, and row offsets: compressed sparse rows.

        0 7 0 0 | 3 9 0 0  ->  values 7 3 9, columns 1 0 1, offsets 0 1 3        (rows of 4)

    The array is viewed as a matrix whose rows are 256 consecutive elements, the last row shorter, so that a column
    number takes one byte. Three one-dimensional arrays hold the values that are not zero, their columns, and where each
    row begins among them; the last offset is the number of values. After Y. Saad, "SPARSKIT: a basic tool kit for
    sparse matrix computations", 1994; one-byte columns after A. Jain et al., "Gist", ISCA 2018.
    """

    name = "csr"

    def encode(self, x: Array) -> tuple[Array, Array, Array]:
        """Return ``capacity + 64`` values, as many ``uint8`` columns, and ``int32[ceil(n / 256) + 1]`` offsets."""
        flat = lax.reshape(x, (x.size,))
        words = occupancy(flat)
        values, _ = compact(flat, words, self.capacity)
        columns, _ = compact(lax.iota(jnp.int32, x.size).astype(jnp.uint8), words, self.capacity)
        missing = -words.size % (COLUMNS // WORD)
        counts = lax.population_count(lax.pad(words, jnp.uint32(0), [(0, missing, 0)]))
        rows = jnp.sum(counts.reshape(-1, COLUMNS // WORD), axis=1, dtype=jnp.int32)
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
        held = jnp.minimum(offsets[-1], length - BLOCK)
        place = jnp.where(number < held, place, size + number)
        flat = jnp.zeros(size, values.dtype).at[place].set(values, mode="drop", unique_indices=True)
        return lax.reshape(flat, shape_and_type.shape)

    def nonzeros(self, arrays: Sequence[Array]) -> Array:
        """Return how many elements are not zero, ``int32[]``."""
        return arrays[2][..., -1]

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of values and columns, and of the offsets."""
        offsets = 4 * (-(-shape_and_type.size // COLUMNS) + 1)
        return (self.capacity + BLOCK) * (shape_and_type.dtype.itemsize + 1) + offsets
