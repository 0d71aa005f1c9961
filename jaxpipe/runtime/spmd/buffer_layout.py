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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, DType, Shaped


class Place(NamedTuple):
    """The shape of an array, the number of its buffer, and the offset in that, in elements."""

    shape: tuple[int, ...]
    buffer: int
    offset: int

    def get(self, buffers: Sequence[Array]) -> Array:
        """Return the array; of host buffers a view."""
        return buffers[self.buffer][self.offset : self.offset + math.prod(self.shape)].reshape(self.shape)

    def put(self, buffers: Sequence[Array], value: Array) -> list[Array]:
        """Return buffers with another value of the array, and the rest as it was."""
        k = self.buffer
        new = lax.dynamic_update_slice(buffers[k], value.reshape(-1), (self.offset,))
        return [*buffers[:k], new, *buffers[k + 1 :]]


@dataclass(frozen=True, eq=False)
class BufferLayout:
    """The place of every array of every device; arrays have names, such as the numbers of tensors."""

    places: tuple[Mapping[Any, Place], ...]  # by device, those in the same buffer one after the other
    buffers: tuple[jax.ShapeDtypeStruct, ...]  # vectors

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return sum(buffer.size * buffer.dtype.itemsize for buffer in self.buffers)

    def with_dtypes(self, of: Callable[[DType], DType]) -> "BufferLayout":
        """Return the layout of arrays of other types in the same places; ``of`` maps a type to another."""
        return replace(self, buffers=tuple(jax.ShapeDtypeStruct(x.shape, of(x.dtype)) for x in self.buffers))

    def read(self, device: int, buffers: Sequence[Array]) -> dict[Any, Array]:
        """A device's arrays."""
        return {name: place.get(buffers) for name, place in self.places[device].items()}

    def put(self, device: int, buffers: Sequence[Array], values: Mapping[Any, Array]) -> list[Array]:
        """Buffers with other values of some of a device's arrays, and the rest as it was."""
        for name, value in values.items():
            buffers = self.places[device][name].put(buffers, value)
        return list(buffers)

    def write(self, device: int, values: Mapping[Any, ArrayLike], xp: Any = jnp) -> list[Array]:
        """Buffers with those of a device's arrays that are given, and zeros elsewhere; made by JAX or by NumPy."""
        pieces: list[list[Array]] = [[] for _ in self.buffers]
        for name, (shape, k, _) in self.places[device].items():
            value = xp.asarray(values[name]) if name in values else xp.zeros(shape, self.buffers[k].dtype)
            pieces[k].append(value.reshape(-1))
        for buffer, flat in zip(self.buffers, pieces, strict=True):
            missing = buffer.size - sum(x.size for x in flat)
            if missing or not flat:
                flat.append(xp.zeros((missing,), buffer.dtype))
        return [flat[0] if len(flat) == 1 else xp.concatenate(flat) for flat in pieces]


def lay_out(avals: Sequence[Mapping[Any, Shaped]]) -> BufferLayout:
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


def _kind(aval: Shaped) -> tuple[DType, int]:
    return np.dtype(aval.dtype), math.prod(aval.shape)


def _placed(avals: Sequence[Mapping[Any, Shaped]], whole: Counter[tuple[DType, int]]) -> BufferLayout:
    """Return the layout in which so many arrays of each type and size have buffers of their own."""
    # The elements of each buffer: of a type and a size and which of several it is; of what is packed, of a type.
    lengths: dict[tuple[Any, ...], int] = {(*kind, k): kind[1] for kind, count in whole.items() for k in range(count)}
    numbers, places = {buffer: k for k, buffer in enumerate(lengths)}, []
    for arrays in avals:
        seen, used = Counter[Any](), Counter[Any]()  # arrays of each kind, elements of each buffer
        place = {}
        for name, aval in arrays.items():
            dtype, size = kind = _kind(aval)
            buffer = (*kind, seen[kind]) if seen[kind] < whole[kind] else (dtype,)
            place[name] = Place(aval.shape, numbers.setdefault(buffer, len(numbers)), used[buffer])
            seen[kind] += 1
            used[buffer] += size
            lengths[buffer] = max(lengths.get(buffer, 0), used[buffer])
        places.append(place)
    buffers = (jax.ShapeDtypeStruct((length,), buffer[0]) for buffer, length in lengths.items())
    return BufferLayout(tuple(places), tuple(buffers))
