"""The layout of each device's arrays in buffers that have the same shape on every device.

One program runs on all devices, so what they hold must look alike. Arrays of one size and type that several devices
have share a buffer, and each sees its own array in it, without a copy. What fits nowhere is packed, one after the
other, into one buffer for each type.
"""

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, DType, Shaped, TensorNumber


class Place(NamedTuple):
    """The shape of an array, the number of its buffer, and the offset in that, in elements."""

    aval: Shaped
    buffer: int
    offset: int


@dataclass(frozen=True, eq=False)
class BufferLayout:
    """The place of every array of every device; arrays have the numbers of tensors."""

    places: tuple[Mapping[TensorNumber, Place], ...]  # by device
    buffers: tuple[jax.ShapeDtypeStruct, ...]  # vectors

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return sum(buffer.size * buffer.dtype.itemsize for buffer in self.buffers)

    def with_dtypes(self, of: Callable[[DType], DType]) -> "BufferLayout":
        """Return the layout of arrays of other types in the same places; ``of`` maps a type to another."""

        def mapped(a: Shaped) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, of(a.dtype))

        places = ({n: x._replace(aval=mapped(x.aval)) for n, x in held.items()} for held in self.places)
        return BufferLayout(tuple(places), tuple(map(mapped, self.buffers)))

    def numbered(self, tensors: Sequence[Sequence[TensorNumber]]) -> "BufferLayout":
        """Return the layout with other numbers for the arrays of each device."""
        pairs = zip(tensors, self.places, strict=True)
        return BufferLayout(tuple(dict(zip(ns, held.values(), strict=True)) for ns, held in pairs), self.buffers)

    def joined(self, other: "BufferLayout") -> "BufferLayout":
        """Return the layout with the buffers of another one behind; what a device has in both, it has here."""
        count = len(self.buffers)
        moved = ({n: x._replace(buffer=count + x.buffer) for n, x in held.items()} for held in other.places)
        places = tuple({**behind, **first} for behind, first in zip(moved, self.places, strict=True))
        return BufferLayout(places, (*self.buffers, *other.buffers))

    def get(self, device: int, n: TensorNumber, buffers: Sequence[Array]) -> Array:
        """An array of a device; of host buffers a view."""
        aval, k, offset = self.places[device][n]
        return buffers[k][offset : offset + math.prod(aval.shape)].reshape(aval.shape)

    def read(self, device: int, buffers: Sequence[Array]) -> dict[TensorNumber, Array]:
        """A device's arrays."""
        return {n: self.get(device, n, buffers) for n in self.places[device]}

    def put(self, device: int, n: TensorNumber, buffers: Sequence[Array], value: Array) -> list[Array]:
        """Buffers with another value of an array of a device, and the rest as it was."""
        _, k, offset = self.places[device][n]
        new = lax.dynamic_update_slice(buffers[k], value.reshape(-1), (offset,))
        return [*buffers[:k], new, *buffers[k + 1 :]]

    def write(self, device: int, values: Mapping[TensorNumber, ArrayLike], xp: Any = jnp) -> list[Array]:
        """Buffers with those of a device's arrays that are given, and zeros elsewhere; made by JAX or by NumPy."""
        pieces: list[list[Array]] = [[] for _ in self.buffers]
        for n, (aval, k, _) in sorted(self.places[device].items(), key=lambda item: item[1][1:]):
            pieces[k].append((xp.asarray(values[n]) if n in values else xp.zeros(aval.shape, aval.dtype)).reshape(-1))
        for buffer, flat in zip(self.buffers, pieces, strict=True):
            missing = buffer.size - sum(x.size for x in flat)
            if missing or not flat:
                flat.append(xp.zeros((missing,), buffer.dtype))
        return [flat[0] if len(flat) == 1 else xp.concatenate(flat) for flat in pieces]


def lay_out(avals: Sequence[Mapping[TensorNumber, Shaped]]) -> BufferLayout:
    """Give every array of every device a place.

    A buffer of its own has each array of a size and type, or only those that all devices have: what takes fewer bytes.

    Example:
      >>> import jax
      >>> a, b = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((5,), "float32")
      >>> [buffer.shape for buffer in lay_out([{0: a, 1: a}, {2: a, 3: b}]).buffers]
      [(6,), (6,)]
    """
    counts = [Counter(map(_kind, arrays.values())) for arrays in avals]
    candidates = (_placed(avals, functools.reduce(join, counts)) for join in (operator.or_, operator.and_))
    return min(candidates, key=lambda layout: layout.bytes)


def _kind(aval: Shaped) -> tuple[int, DType]:
    return math.prod(aval.shape), np.dtype(aval.dtype)


def _placed(avals: Sequence[Mapping[TensorNumber, Shaped]], whole: Counter[tuple[int, DType]]) -> BufferLayout:
    """Return the layout in which so many arrays of each size and type have buffers of their own."""
    shapes = list(whole.elements())
    first = {kind: k for k, kind in reversed(list(enumerate(shapes)))}
    packed: dict[DType, int] = {}  # the elements of what is packed, by type
    places = []
    for arrays in avals:
        used: Counter[tuple[int, DType] | DType] = Counter()  # buffers of their own, and elements of what is packed
        place = {}
        for n, aval in arrays.items():
            size, dtype = kind = _kind(aval)
            if used[kind] < whole[kind]:
                place[n] = Place(aval, first[kind] + used[kind], 0)
                used[kind] += 1
            else:
                packed[dtype] = max(packed.get(dtype, 0), used[dtype] + size)
                place[n] = Place(aval, len(shapes) + list(packed).index(dtype), used[dtype])
                used[dtype] += size
        places.append(place)
    buffers = (*shapes, *((length, dtype) for dtype, length in packed.items()))
    return BufferLayout(tuple(places), tuple(jax.ShapeDtypeStruct((n,), dtype) for n, dtype in buffers))
