"""Arrays that are cut along their first axis, in a flat list of arrays that are not.

leaves of the model's own layout ──split──▶ pieces that stages may hold ──join──▶ leaves
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.array_types import ArrayLike


T = TypeVar("T")

#: Arrays of one kind, or of both.
A = TypeVar("A", bound=ArrayLike)


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
        rows = [[None] if cuts is None else itertools.starmap(slice, itertools.pairwise(cuts)) for cuts in self.bounds]
        return tuple(itertools.chain.from_iterable(rows))

    def cut(self, piece: int, leaf: A) -> A:
        """One piece of its leaf; of a random key or a tracer too."""
        rows = self.rows_of[piece]
        return leaf if rows is None else cast(A, leaf[rows])

    def split(self, leaves: Sequence[A]) -> list[A]:
        """All pieces of all leaves."""
        return [self.cut(piece, leaves[k]) for piece, k in enumerate(self.leaf_of)]

    def shapes(self, leaves: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """``split`` for shapes."""
        pairs = zip((leaves[k] for k in self.leaf_of), self.rows_of, strict=True)
        return [x if r is None else x.update(shape=(r.stop - r.start, *x.shape[1:])) for x, r in pairs]

    def join(self, pieces: Sequence[A]) -> list[A]:
        """The leaves; on the host if the pieces are."""
        leaves: list[A] = []
        for k, group in enumerate(self.groups(pieces)):
            if self.bounds[k] is None:
                leaves += group
            else:
                on_host = all(isinstance(x, np.ndarray) for x in group)
                leaves.append(cast(A, np.concatenate(group) if on_host else jnp.concatenate(group)))
        return leaves

    def groups(self, pieces: Sequence[T]) -> list[list[T]]:
        """Return the values of the pieces, those of each leaf together."""
        groups: list[list[T]] = [[] for _ in self.bounds]
        for k, x in zip(self.leaf_of, pieces, strict=True):
            groups[k].append(x)
        return groups


def uncut(count: int) -> Stacks:
    """So many leaves, none of which is cut."""
    return Stacks((None,) * count)


def side_by_side(parts: Sequence[Stacks]) -> Stacks:
    """Return the leaves of several lists as one list."""
    return Stacks(tuple(cuts for stacks in parts for cuts in stacks.bounds))


def groups_of_rows(length: int, rows: int) -> tuple[int, ...]:
    """Return where to cut so many rows into groups of ``rows``; the last may be smaller."""
    return (*range(0, length, rows), length)
