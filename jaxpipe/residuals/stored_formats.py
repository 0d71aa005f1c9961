"""One stored tensor and the arrays that it is stored as.

    tensor --encode--> parts (one array, or several for the sparse formats) --decode--> tensor

The stash of a stage is a list with the parts of each stored tensor.
"""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxpipe.array_types import Array
from jaxpipe.graph.graph import Tensor, itemsize
from jaxpipe.residuals.codecs import bitmap, bits, csr


class Format(enum.Enum):
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
        return self not in (Format.ALIAS, Format.RECOMPUTE)

    @property
    def is_sparse(self) -> bool:
        """Return whether the stash has room for a limited number of values."""
        return self in _SPARSE


_SPARSE = {Format.BITMAP: bitmap, Format.CSR: csr}


@dataclass(frozen=True)
class SavedFormat:
    """The format in which one tensor is saved, and for a sparse one its capacity in values."""

    format: Format
    capacity: int | None = None

    def __post_init__(self) -> None:
        if (self.capacity is not None) != self.format.is_sparse:
            raise ValueError(f"{self.format} {'needs a' if self.format.is_sparse else 'has no'} capacity.")


def encode(value: Array, tensor: Tensor, fmt: SavedFormat) -> tuple[Array, ...]:
    """The parts of a tensor."""
    if fmt.capacity is not None:
        return _SPARSE[fmt.format].encode(value, fmt.capacity)
    if fmt.format is Format.INDEX:
        return (value.astype(f"uint{tensor.bits}"),)
    return (value if fmt.format is Format.KEEP else bits.pack(value, tensor.bits),)


def decode(parts: Sequence[Array], tensor: Tensor, fmt: SavedFormat) -> Array:
    """The tensor; of a sparse one that has overflowed, something else."""
    if fmt.format.is_sparse:
        return _SPARSE[fmt.format].decode(parts, tensor.shape)
    (part,) = parts
    if fmt.format is Format.INDEX:
        return part.astype(tensor.dtype)
    return part if fmt.format is Format.KEEP else bits.unpack(part, tensor.shape, tensor.bits, tensor.dtype)


def has_overflowed(parts: Sequence[Array], fmt: SavedFormat) -> Array:
    """Return whether a sparse tensor had more values than there is room for, ``bool[]``."""
    return _SPARSE[fmt.format].count(parts) > fmt.capacity


@functools.lru_cache(maxsize=4096)  # a search for storage asks for the same shapes thousands of times
def part_avals(tensor: Tensor, fmt: SavedFormat) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each part."""
    return jax.eval_shape(lambda x: encode(x, tensor, fmt), jax.ShapeDtypeStruct(tensor.shape, tensor.dtype))


def stored_bytes(tensor: Tensor, fmt: SavedFormat) -> int:
    """Bytes of one stored tensor."""
    if fmt.capacity is not None:
        return _SPARSE[fmt.format].stored_bytes(tensor.size, itemsize(tensor.dtype), fmt.capacity)
    if fmt.format is Format.INDEX:
        return tensor.size * tensor.bits // 8
    if fmt.format is Format.KEEP or tensor.bits >= 8:
        return tensor.bytes
    return bits.packed_bytes(tensor.shape, tensor.bits)
