"""Gradient blocks: which parts of a gradient are sent or kept as one.

    convolution kernel [3, 3, in, out]   one filter            out blocks of 9 in elements
    dense kernel [in, out]               one neuron's fan-in   out blocks of in elements
    bias [out]                           one element           out blocks of 1 element

In Flax the axis that numbers filters and neurons is the last one, which is the default. Where it is another, a rule
by parameter path says so: 0 for embedding tables, ``(0, -1)`` for kernels that are stacked layer by layer, of which
every layer has a choice of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.array_types import Array, DType, PyTree, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.block_numbers import number_bytes
from jaxpipe.gradients.value_codes import CODES, ValueCode
from jaxpipe.graph.allowed_codecs import fits


#: How many blocks are sent of a gradient: a number, or a fraction of all. Or patterns of paths with one for each.
Count = int | float | Mapping[str, int | float]

#: The axis that numbers blocks, axes of stacked layers before it, or "whole"; by pattern of paths.
BlockRules = Mapping[str, int | Sequence[int] | str]


@dataclass(frozen=True)
class Blocks:
    """The blocks of one gradient."""

    path: str
    shape: tuple[int, ...]
    dtype: DType
    stacked: tuple[int, ...]  # axes that number layers
    axis: int | None  # that numbers blocks; None if the gradient is sent whole
    k: int  # blocks that are sent of each layer
    bits: float | None = None  # of ``CODES``, if not as many to an element as its type has

    @property
    def is_whole(self) -> bool:
        """Return whether all of it is sent."""
        return self.axis is None

    @property
    def layers(self) -> int:
        """Choices of ``k`` blocks."""
        return math.prod(self.shape[a] for a in self.stacked)

    @property
    def count(self) -> int:
        """Blocks of a layer."""
        return 1 if self.axis is None else self.shape[self.axis]

    @property
    def size(self) -> int:
        """Elements of a block."""
        return math.prod(self.shape) // max(1, self.layers * self.count)

    @property
    def indices(self) -> int:
        """Block numbers that are sent."""
        return 0 if self.is_whole else self.layers * self.k

    @property
    def number_bytes(self) -> int:
        """Bytes of these numbers."""
        return 0 if self.is_whole else self.layers * number_bytes(self.count, self.k)

    @property
    def values(self) -> int:
        """Elements that are sent."""
        return math.prod(self.shape) if self.is_whole else self.indices * self.size

    @property
    def code(self) -> ValueCode | None:
        """The code of its values; None if they go as they are."""
        return None if self.is_whole or self.bits is None else CODES[self.bits]

    @property
    def wire_dtype(self) -> DType:
        """The type of what is sent."""
        return self.dtype if self.code is None else np.dtype(np.uint8)

    @property
    def wire_size(self) -> int:
        """Elements of that type."""
        return self.values if self.code is None else self.layers * self.code.bytes(self.k, self.size)

    def wire_bytes(self, mode: str) -> int:
        """Bytes of the values that are sent: what goes by gathers has its own type."""
        is_reduced = self.is_whole or mode == "consensus"
        return self.wire_size * (reduced_itemsize(self.dtype) if is_reduced else self.wire_dtype.itemsize)

    def to_blocks(self, x: Array) -> Array:
        """``[layers, count, size]``: the elements of each block side by side."""
        return jnp.transpose(x, self._order).reshape(self.layers, self.count, self.size)

    def from_blocks(self, blocks: Array) -> Array:
        """Inverse of ``to_blocks``."""
        shape = [self.shape[a] for a in self._order]
        return jnp.transpose(blocks.reshape(shape), np.argsort(self._order).tolist())

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.numbered, *self.inside)

    @property
    def numbered(self) -> tuple[int, ...]:
        """The axes that number layers and blocks."""
        assert self.axis is not None
        return (*self.stacked, self.axis)

    @property
    def inside(self) -> tuple[int, ...]:
        """The axes of one block."""
        return tuple(a for a in range(len(self.shape)) if a not in self.numbered)


def reduced_itemsize(dtype: jax.typing.DTypeLike) -> int:
    """Bytes of an element in an all-reduce, which adds up in 32 bits or more."""
    return max(4, np.dtype(dtype).itemsize)


def find_blocks(
    tree: PyTree,
    k: Count,
    dense_1d: bool,
    rules: BlockRules,
    mode: Literal["own", "consensus"] = "own",
    bits: float | None = None,
) -> tuple[Blocks, ...]:
    """The blocks of each leaf of a tree of arrays or shapes.

    A leaf is sent whole if it has no axes; one axis, with ``dense_1d`` and no rule for it; or if its ``k`` blocks, with
    their numbers or, by consensus, the norms of all, take no fewer bytes than all of it.

    Raises:
      PartitionError: if ``k`` or a rule does not fit a leaf, or a pattern fits none.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    for name, patterns in (("k", k if isinstance(k, Mapping) else {}), ("blocks", rules)):
        unused = [p for p in patterns if not any(fits(path, p) for path in paths)]
        if unused:
            raise PartitionError(
                f"{name}: the pattern {unused[0]!r} fits no parameter. There are {', '.join(paths[:8])}"
                f"{', ...' if len(paths) > 8 else ''}; patterns are those of a shell."
            )
    pairs = zip(paths, leaves, strict=True)
    return tuple(_blocks(path, leaf, k, dense_1d, rules, mode, bits) for path, (_, leaf) in pairs)


def _blocks(
    path: str, leaf: Shaped, k: Count, dense_1d: bool, rules: BlockRules, mode: str, bits: float | None
) -> Blocks:
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if bits is not None and dtype.kind == "c":
        raise PartitionError(f"bits={bits} for {path} of type {dtype}; only real numbers have a code. Leave out bits.")
    whole = Blocks(path, shape, dtype, (), None, 1)
    rule = next((rules[p] for p in rules if fits(path, p)), None)
    if rule == "whole" or not math.prod(shape) or not shape or (rule is None and len(shape) == 1 and dense_1d):
        return whole
    *stacked, axis = _axes(path, shape, -1 if rule is None else rule)
    wanted = k if not isinstance(k, Mapping) else next((k[p] for p in k if fits(path, p)), 1)
    blocks = Blocks(path, shape, dtype, tuple(stacked), axis, _number(path, wanted, shape[axis]), bits)
    told = blocks.number_bytes if mode == "own" else 4 * blocks.layers * blocks.count
    return blocks if told + blocks.wire_bytes(mode) < whole.wire_bytes(mode) else whole


def _axes(path: str, shape: tuple[int, ...], rule: int | Sequence[int] | str) -> list[int]:
    axes = [rule] if isinstance(rule, int) else list(rule) if isinstance(rule, (tuple, list)) else [None]
    if not axes or not all(isinstance(a, int) and -len(shape) <= a < len(shape) for a in axes):
        raise PartitionError(
            f"blocks: {rule!r} for {path} of shape {shape}; it must be the axis that numbers blocks, axes of stacked "
            "layers and then that axis, or 'whole'."
        )
    axes = [a % len(shape) for a in axes]
    if len(set(axes)) < len(axes):
        raise PartitionError(f"blocks: {rule!r} for {path} of shape {shape} names an axis twice.")
    return axes


def _number(path: str, k: int | float, count: int) -> int:
    """Return how many of ``count`` blocks ``k`` stands for."""
    value = k.item() if isinstance(k, np.generic) else k
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not is_count and not (isinstance(value, float) and 0 < value <= 1):
        raise PartitionError(
            f"k={k!r} for {path}; it must be a number of blocks, 1 or more, or a fraction of them: a float above 0.0 "
            "and no more than 1.0."
        )
    return min(count, int(value)) if is_count else max(1, math.ceil(value * count - 1e-9))
