"""Move the elements of an array that are not zero to its front, and back.

Where they are is kept as words of 32 bits: bit ``i`` of word ``w`` tells whether element ``32 w + i`` of the flattened
array is something else than +0.0. "Not zero" means a bit pattern that is not zero, so that -0.0 and NaN survive.

    elements  0 7 0 0 3 9 0 0   ->  words 0b00110010   values 7 3 9 _ _

An element's place is the number of set bits before it: a running sum over words (1/32 of the elements) plus a
population count inside the word, both cheap. What costs is moving the elements. On a GPU that is one scatter and
one gather, each fused with the counting. XLA:CPU runs a scatter one element at a time, so there the
elements of a block of 64 are gathered to the block's front, by arithmetic on its two words, and written there as a
whole, one block after the other, each over the unused tail of the one before; and the same way back. A loop over the
blocks takes a few kernels to compile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat


WORD = 32
BLOCK = 64

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def to_integers(x: Any) -> Any:
    """The bits of an array of numbers, as unsigned integers of the same width."""
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])


def occupancy(flat: Any) -> Any:
    """``uint32[ceil(n / 64) * 2]``: one bit for each element of ``flat``, set where it is not zero."""
    missing = -flat.size % BLOCK
    occupied = to_integers(flat) != 0
    if missing:
        occupied = lax.pad(occupied, False, [(0, missing, 0)])
    bits = lax.reshape(occupied, (occupied.size // WORD, WORD)).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)


def count(words: Any) -> Any:
    """The number of set bits, over the last axis."""
    return jnp.sum(lax.population_count(words), axis=-1, dtype=jnp.int32)


def compact(flat: Any, words: Any, capacity: int) -> Any:
    """The first ``capacity`` elements of ``flat`` whose bit is set; what follows them means nothing."""
    if jax.default_backend() == "cpu":
        return _compact_by_blocks(flat, words, capacity)
    return _compact_by_scatter(flat, words, capacity)


def expand(values: Any, words: Any, size: int) -> Any:
    """``size`` elements: the values where a bit is set, zero elsewhere. Inverse of ``compact``."""
    if jax.default_backend() == "cpu":
        return _expand_by_blocks(values, words, size)
    return _expand_by_gather(values, words, size)


def _compact_by_scatter(flat: Any, words: Any, capacity: int) -> Any:
    place = _rank(words, _running_count(words)).reshape(-1)[: flat.size]
    beyond = capacity + lax.iota(jnp.int32, flat.size)  # no two alike, all dropped
    place = jnp.where(_bits(words).reshape(-1)[: flat.size], place, beyond)
    return jnp.zeros(capacity, flat.dtype).at[place].set(flat, mode="drop", unique_indices=True)


def _expand_by_gather(values: Any, words: Any, size: int) -> Any:
    place = _rank(words, _running_count(words)).reshape(-1)[:size]
    return jnp.where(_bits(words).reshape(-1)[:size], values.at[place].get(mode="clip"), jnp.zeros((), values.dtype))


def _compact_by_blocks(flat: Any, words: Any, capacity: int) -> Any:
    blocks = lax.pad(flat, jnp.zeros((), flat.dtype), [(0, -flat.size % BLOCK, 0)]).reshape(-1, BLOCK)
    pairs, sources = words.reshape(-1, BLOCK // WORD), _sources(words)

    def move(k: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        start, values = carry
        front = blocks[k].at[sources[k]].get(mode="promise_in_bounds")
        return start + count(pairs[k]), lax.dynamic_update_slice(values, front, (start,))

    return _for_each_block(move, words, jnp.zeros(capacity + BLOCK, flat.dtype))[:capacity]


def _expand_by_blocks(values: Any, words: Any, size: int) -> Any:
    padded = lax.pad(values, jnp.zeros((), values.dtype), [(0, BLOCK, 0)])
    pairs = words.reshape(-1, BLOCK // WORD)

    def move(k: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        start, blocks = carry
        pair = pairs[k]
        front = lax.dynamic_slice(padded, (start,), (BLOCK,))
        place = _rank(pair, _running_count(pair)).reshape(-1)
        elements = front.at[place].get(mode="promise_in_bounds")
        block = jnp.where(_bits(pair).reshape(-1), elements, jnp.zeros((), values.dtype))
        return start + count(pair), lax.dynamic_update_slice(blocks, block, (BLOCK * k,))

    return _for_each_block(move, words, jnp.zeros(words.size * WORD, values.dtype))[:size]


def _for_each_block(move: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]], words: Any, empty: Any) -> Any:
    """The array that ``move`` fills block by block, the first item of the carry being the number of values before.

    A running sum over all blocks is quick to run, but as slow to compile as all the rest.
    """
    start, empty = (_compat.vary_as(x, words) for x in (jnp.int32(0), empty))
    return lax.fori_loop(0, words.size // (BLOCK // WORD), move, (start, empty))[1]


def _sources(words: Any) -> Any:
    """For each block, the positions of its set bits in order: ``uint8[blocks, 64]``."""
    low, high = (words.reshape(-1, 2)[:, k : k + 1] for k in (0, 1))
    wanted = jnp.arange(BLOCK, dtype=jnp.uint32)[None, :]
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
    return jnp.minimum(position, BLOCK - 1).astype(jnp.uint8)


def _running_count(words: Any) -> Any:
    """How many bits are set before each word."""
    counts = lax.population_count(words).astype(jnp.int32)
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def _rank(words: Any, before: Any) -> Any:
    """``int32[words, 32]``: ``before`` its word, plus the set bits of the word below the element."""
    below = (jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)) - jnp.uint32(1)
    return before[:, None] + lax.population_count(words[:, None] & below).astype(jnp.int32)


def _bits(words: Any) -> Any:
    """``bool[words, 32]``."""
    return ((words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & jnp.uint32(1)) != 0
