"""Arrays that are cut along their first axis, in a flat list of arrays that are not.

leaves of the model's own layout ──split──▶ pieces that stages may hold ──join──▶ leaves
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Stacks:
    """The leaves that are cut, and the places of the cuts.

    Attributes:
      bounds: by leaf, the rows at which pieces begin, and the number of rows; None if it is not cut.

    Example:
      >>> stacks = Stacks(((0, 2, 3), None))
      >>> [x.shape for x in stacks.split([np.zeros((3, 5)), np.zeros(4)])]
      [(2, 5), (1, 5), (4,)]
    """

    bounds: tuple[tuple[int, ...] | None, ...]

    @cached_property
    def leaf_of(self) -> tuple[int, ...]:
        """The leaf of each piece."""
        return tuple(k for k, cuts in enumerate(self.bounds) for _ in range(1 if cuts is None else len(cuts) - 1))

    @cached_property
    def rows_of(self) -> tuple[slice | None, ...]:
        """The rows of each piece; None for a whole leaf."""
        rows: list[slice | None] = []
        for cuts in self.bounds:
            rows += [None] if cuts is None else [slice(a, b) for a, b in itertools.pairwise(cuts)]
        return tuple(rows)

    def cut(self, piece: int, leaf: Any) -> Any:
        """One piece of its leaf; of a random key or a tracer too."""
        rows = self.rows_of[piece]
        return leaf if rows is None else leaf[rows]

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """All pieces of all leaves."""
        return [self.cut(piece, leaves[k]) for piece, k in enumerate(self.leaf_of)]

    def shapes(self, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """``split`` for shapes."""
        pairs = zip(self.leaf_of, self.rows_of, strict=True)
        return [
            leaves[k]
            if rows is None
            else jax.ShapeDtypeStruct((rows.stop - rows.start, *leaves[k].shape[1:]), leaves[k].dtype)
            for k, rows in pairs
        ]

    def join(self, pieces: Sequence[Any]) -> list[Any]:
        """The leaves; on the host if the pieces are."""
        leaves: list[Any] = []
        for k, group in enumerate(self.groups(pieces)):
            if self.bounds[k] is None:
                leaves += group
            else:
                on_host = all(isinstance(x, np.ndarray) for x in group)
                leaves.append(np.concatenate(group) if on_host else jnp.concatenate(group))
        return leaves

    def groups(self, pieces: Sequence[Any]) -> list[list[Any]]:
        """Return what belongs to the pieces of each leaf."""
        groups: list[list[Any]] = [[] for _ in self.bounds]
        for k, x in zip(self.leaf_of, pieces, strict=True):
            groups[k].append(x)
        return groups


def uncut(count: int) -> Stacks:
    """So many leaves, none of which is cut."""
    return Stacks((None,) * count)


def groups_of_rows(length: int, rows: int) -> tuple[int, ...]:
    """Return where to cut so many rows into groups of ``rows``; the last may be smaller."""
    return (*range(0, length, rows), length)
