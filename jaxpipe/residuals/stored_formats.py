"""One stored tensor and the arrays that it is stored as.

    tensor --encode--> parts (one array, or several for the sparse formats) --decode--> tensor

The stash of a stage is a list with the parts of each stored tensor.
"""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.graph.graph import Tensor, itemsize
from jaxpipe.residuals.codecs import bitmap, bits, csr


class Storage(enum.Enum):
    """The ways in which the backward pass gets a tensor."""

    KEEP = "keep"  # stored as it is
    MASK = "mask"  # stored, 1 bit for each boolean
    POOL_INDEX = "pool index"  # stored, 1, 2 or 4 bits for each window position
    INDEX = "index"  # stored, 8 or 16 bits for each position along an axis
    BITMAP = "bitmap"  # stored, 1 bit for each element and the values that are not zero
    CSR = "csr"  # stored, the values that are not zero with their columns, and row offsets
    ALIAS = "alias"  # a view of what is stored: no bytes, no work
    RECOMPUTE = "recompute"  # computed again from what is stored

    @property
    def is_stored(self) -> bool:
        """Return whether the tensor is part of the stash."""
        return self not in (Storage.ALIAS, Storage.RECOMPUTE)

    @property
    def is_sparse(self) -> bool:
        """Return whether the stash has room for a limited number of values."""
        return self in _SPARSE


_SPARSE = {Storage.BITMAP: bitmap, Storage.CSR: csr}


@dataclass(frozen=True)
class Form:
    """The form of one tensor: its storage, and for the sparse ones the number of values there is room for."""

    storage: Storage
    capacity: int | None = None

    def __post_init__(self) -> None:
        if (self.capacity is not None) != self.storage.is_sparse:
            raise ValueError(f"{self.storage} {'needs a' if self.storage.is_sparse else 'has no'} capacity.")


def encode(value: Any, tensor: Tensor, form: Form) -> tuple[Any, ...]:
    """The parts of a tensor."""
    if form.capacity is not None:
        return _SPARSE[form.storage].encode(value, form.capacity)
    if form.storage is Storage.INDEX:
        return (value.astype(f"uint{tensor.bits}"),)
    return (value if form.storage is Storage.KEEP else bits.pack(value, tensor.bits),)


def decode(parts: Sequence[Any], tensor: Tensor, form: Form) -> Any:
    """The tensor; of a sparse one that has overflowed, something else."""
    if form.storage.is_sparse:
        return _SPARSE[form.storage].decode(parts, tensor.shape)
    (part,) = parts
    if form.storage is Storage.INDEX:
        return part.astype(tensor.dtype)
    return part if form.storage is Storage.KEEP else bits.unpack(part, tensor.shape, tensor.bits, tensor.dtype)


def has_overflowed(parts: Sequence[Any], form: Form) -> Any:
    """Return whether a sparse tensor had more values than there is room for, ``bool[]``."""
    return _SPARSE[form.storage].count(parts) > form.capacity


@functools.lru_cache(maxsize=4096)  # a search for storage asks for the same shapes thousands of times
def part_avals(tensor: Tensor, form: Form) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each part."""
    return jax.eval_shape(lambda x: encode(x, tensor, form), jax.ShapeDtypeStruct(tensor.shape, tensor.dtype))


def stored_bytes(tensor: Tensor, form: Form) -> int:
    """Bytes of one stored tensor."""
    if form.capacity is not None:
        return _SPARSE[form.storage].stored_bytes(tensor.size, itemsize(tensor.dtype), form.capacity)
    if form.storage is Storage.INDEX:
        return tensor.size * tensor.bits // 8
    if form.storage is Storage.KEEP or tensor.bits >= 8:
        return tensor.bytes
    return bits.packed_bytes(tensor.shape, tensor.bits)
