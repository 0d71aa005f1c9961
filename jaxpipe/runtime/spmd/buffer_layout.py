"""The layout of each device's arrays in buffers that have the same shape on every device.

One program runs on all devices, so what they hold must look alike. Arrays of one size and type that several devices
have share a buffer, and each sees its own array in it, without a copy. What fits nowhere is packed, one after the
other, into one buffer for each type.
"""

import functools
import math
import operator
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
    """The place of every array of every device."""

    avals: tuple[tuple[Shaped, ...], ...]  # by device
    # by device, for each array its buffer and the offset in it, in elements
    places: tuple[tuple[tuple[int, int], ...], ...]
    buffers: tuple[jax.ShapeDtypeStruct, ...]  # vectors

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return sum(buffer.size * buffer.dtype.itemsize for buffer in self.buffers)

    def with_dtypes(self, of: Callable[[DType], DType]) -> "Layout":
        """Return the layout of arrays of other types in the same places; ``of`` maps a type to another."""

        def mapped(avals: Sequence[Shaped]) -> tuple[jax.ShapeDtypeStruct, ...]:
            return tuple(jax.ShapeDtypeStruct(a.shape, of(a.dtype)) for a in avals)

        return replace(self, avals=tuple(map(mapped, self.avals)), buffers=mapped(self.buffers))

    def get(self, device: int, n: int, buffers: Sequence[Array]) -> Array:
        """The ``n``-th array of a device; of host buffers a view."""
        aval, (k, offset) = self.avals[device][n], self.places[device][n]
        return buffers[k][offset : offset + math.prod(aval.shape)].reshape(aval.shape)

    def read(self, device: int, buffers: Sequence[Array]) -> list[Array]:
        """A device's arrays."""
        return [self.get(device, n, buffers) for n in range(len(self.avals[device]))]

    def put(self, device: int, n: int, buffers: Sequence[Array], value: Array) -> list[Array]:
        """Buffers with another value of the ``n``-th array of a device, and the rest as it was."""
        k, offset = self.places[device][n]
        new = lax.dynamic_update_slice(buffers[k], value.reshape(-1), (offset,))
        return [*buffers[:k], new, *buffers[k + 1 :]]

    def write(self, device: int, values: Sequence[ArrayLike], xp: Any = jnp) -> list[Array]:
        """Buffers with a device's arrays in them, and zeros where it has none; made by JAX or by NumPy."""
        pieces: list[list[Array]] = [[] for _ in self.buffers]
        for value, (k, _) in zip(values, self.places[device], strict=True):
            pieces[k].append(xp.asarray(value).reshape(-1))
        for buffer, flat in zip(self.buffers, pieces, strict=True):
            missing = buffer.size - sum(x.size for x in flat)
            if missing or not flat:
                flat.append(xp.zeros((missing,), buffer.dtype))
        return [flat[0] if len(flat) == 1 else xp.concatenate(flat) for flat in pieces]


def lay_out(avals: Sequence[Sequence[Shaped]]) -> Layout:
    """Give every array of every device a place.

    A buffer of its own has each array of a size and type, or only those that all devices have: what takes fewer bytes.

    Example:
      >>> import jax
      >>> a, b = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((5,), "float32")
      >>> [buffer.shape for buffer in lay_out([[a, a], [a, b]]).buffers]
      [(6,), (6,)]
    """
    kinds = [[(math.prod(a.shape), np.dtype(a.dtype)) for a in arrays] for arrays in avals]
    counts = [Counter(here) for here in kinds]
    candidates = [_buffers(counts, functools.reduce(join, counts)) for join in (operator.or_, operator.and_)]
    whole, buffers = min(candidates, key=lambda candidate: sum(n * dtype.itemsize for n, dtype in candidate[1]))
    count = whole.total()
    first = {kind: k for k, kind in reversed(list(enumerate(buffers[:count])))}
    rest = {dtype: count + k for k, (_, dtype) in enumerate(buffers[count:])}
    places = []
    for here in kinds:
        used: Counter[tuple[int, DType]] = Counter()
        filled: Counter[DType] = Counter()
        place = []
        for size, dtype in here:
            if used[size, dtype] < whole[size, dtype]:
                place.append((first[size, dtype] + used[size, dtype], 0))
                used[size, dtype] += 1
            else:
                place.append((rest[dtype], filled[dtype]))
                filled[dtype] += size
        places.append(tuple(place))
    shapes = tuple(jax.ShapeDtypeStruct((length,), dtype) for length, dtype in buffers)
    return Layout(tuple(map(tuple, avals)), tuple(places), shapes)


def _buffers(
    counts: Sequence[Counter[tuple[int, DType]]], whole: Counter[tuple[int, DType]]
) -> tuple[Counter[tuple[int, DType]], list[tuple[int, DType]]]:
    """Return the arrays that have a buffer of their own, and all buffers, those of the rest behind."""
    packed: dict[DType, int] = {}
    for count in counts:
        left: Counter[DType] = Counter()
        for (size, dtype), n in (count - whole).items():
            left[dtype] += size * n
        packed |= {dtype: max(length, packed.get(dtype, 0)) for dtype, length in left.items()}
    return whole, [*whole.elements(), *((length, dtype) for dtype, length in packed.items())]
