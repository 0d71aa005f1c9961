"""The layout of each stage's arrays in buffers that have the same shape on every device.

One program runs on all devices, so what stages hold must look alike. Arrays of one size and type that several
stages have share a buffer, and each stage sees its own array in it, without a copy. What fits nowhere is packed,
one after the other, into one buffer for each type.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, DType, Shaped


@dataclass(frozen=True)
class Layout:
    """The place of every array of every stage."""

    avals: tuple[tuple[Shaped, ...], ...]
    # by stage, for each array its buffer and the offset in it, in elements
    places: tuple[tuple[tuple[int, int], ...], ...]
    buffers: tuple[tuple[int, DType], ...]  # length and dtype

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return _bytes(self.buffers)

    def with_dtypes(self, of: Callable[[DType], DType]) -> "Layout":
        """Return the layout of arrays of other types in the same places; ``of`` maps a type to another."""
        avals = [tuple(jax.ShapeDtypeStruct(a.shape, of(a.dtype)) for a in stage) for stage in self.avals]
        buffers = [(length, np.dtype(of(dtype))) for length, dtype in self.buffers]
        return replace(self, avals=tuple(avals), buffers=tuple(buffers))

    def read(self, stage: int, buffers: Sequence[Array]) -> list[Array]:
        """A stage's arrays out of its device's buffers; of host buffers views."""
        return [self.get(stage, n, buffers) for n in range(len(self.avals[stage]))]

    def get(self, stage: int, n: int, buffers: Sequence[Array]) -> Array:
        """The ``n``-th array of a stage."""
        aval, (k, offset) = self.avals[stage][n], self.places[stage][n]
        flat = buffers[k]
        if not self.is_whole(stage, n):
            flat = flat[offset : offset + math.prod(aval.shape)]
        return flat.reshape(aval.shape)

    def is_whole(self, stage: int, n: int) -> bool:
        """Return whether the ``n``-th array of a stage has a buffer for itself."""
        return self.buffers[self.places[stage][n][0]][0] == math.prod(self.avals[stage][n].shape)

    def put(self, stage: int, n: int, buffers: Sequence[Array], value: ArrayLike) -> list[Array]:
        """Buffers with another value of the ``n``-th array of a stage, and the rest as it was."""
        k, offset = self.places[stage][n]
        flat = lax.reshape(jnp.asarray(value), (math.prod(jnp.shape(value)),))
        new = flat if self.is_whole(stage, n) else lax.dynamic_update_slice(buffers[k], flat, (offset,))
        return [*buffers[:k], new, *buffers[k + 1 :]]

    def write(self, stage: int, values: Sequence[ArrayLike], xp: Any = jnp) -> list[Array]:
        """Buffers with a stage's arrays in them, and zeros where it has none; made by NumPy or by JAX."""
        pieces: list[list[tuple[int, Array]]] = [[] for _ in self.buffers]
        for value, (k, offset) in zip(values, self.places[stage], strict=True):
            pieces[k].append((offset, xp.asarray(value).reshape(-1)))
        buffers = []
        for (length, dtype), parts in zip(self.buffers, pieces, strict=True):
            flat = [x for _, x in sorted(parts, key=lambda part: part[0])]
            missing = length - sum(x.size for x in flat)
            if missing or not flat:
                flat.append(xp.zeros((missing,), dtype))
            buffers.append(flat[0] if len(flat) == 1 else xp.concatenate(flat))
        return buffers


def lay_out(avals: Sequence[Sequence[Shaped]]) -> Layout:
    """Give every array of every stage a place.

    Buffers are shared by arrays of equal size and dtype. How many stages must share a buffer for it to be worth
    having is chosen so that a device reserves the fewest bytes; of equals, the one that packs least.

    Example:
      >>> import jax
      >>> a, b = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((5,), "float32")
      >>> lay_out([[a, a], [a, b]]).buffers
      ((6, dtype('float32')), (6, dtype('float32')))
    """
    kinds = [[(math.prod(a.shape), np.dtype(a.dtype)) for a in stage] for stage in avals]
    counts = [Counter(stage) for stage in kinds]
    candidates = [_buffers(counts, sharers) for sharers in range(1, len(avals) + 1)]
    whole, packed = min(candidates, key=lambda candidate: _bytes([*candidate[0].elements(), *candidate[1]]))
    buffers = [*whole.elements(), *packed]
    first: dict[tuple[int, DType], int] = {}
    for k, kind in enumerate(whole.elements()):
        first.setdefault(kind, k)
    rest = {dtype: len(buffers) - len(packed) + k for k, (_, dtype) in enumerate(packed)}
    places = []
    for stage in kinds:
        used: Counter[tuple[int, DType]] = Counter()
        filled: Counter[DType] = Counter()
        here = []
        for size, dtype in stage:
            if used[size, dtype] < whole[size, dtype]:
                here.append((first[size, dtype] + used[size, dtype], 0))
                used[size, dtype] += 1
            else:
                here.append((rest[dtype], filled[dtype]))
                filled[dtype] += size
        places.append(tuple(here))
    return Layout(tuple(map(tuple, avals)), tuple(places), tuple(buffers))


def _buffers(
    counts: Sequence[Counter[tuple[int, DType]]], sharers: int
) -> tuple[Counter[tuple[int, DType]], list[tuple[int, DType]]]:
    """Return how many arrays of each kind have a buffer, as at least ``sharers`` stages use it; buffers of the rest."""
    every = dict.fromkeys(kind for count in counts for kind in count)
    whole = Counter({kind: sorted((count[kind] for count in counts), reverse=True)[sharers - 1] for kind in every})
    packed: dict[DType, int] = {}
    for count in counts:
        left: Counter[DType] = Counter()
        for (size, dtype), n in (count - whole).items():
            left[dtype] += size * n
        packed |= {dtype: max(length, packed.get(dtype, 0)) for dtype, length in left.items()}
    return whole, [(length, dtype) for dtype, length in packed.items()]


def _bytes(buffers: Sequence[tuple[int, DType]]) -> int:
    return sum(length * np.dtype(dtype).itemsize for length, dtype in buffers)
