"""The places where a program may be cut into stages.

A cut is a set of operators that holds, with each operator, all that it reads: a *down-set* of the graph. A stage is
what lies between two nested ones. A chain of ``n`` operators has ``n + 1`` of them, a graph with branches more, as
operators that do not depend on each other may fall on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError


#: Graphs with more down-sets than this are cut along one order of their operators.
MOST_DOWN_SETS = 2000


@dataclass(frozen=True, eq=False)
class CutSpace:
    """Every cut that is looked at, from nothing to everything, and what lies before it.

    Attributes:
      members: ``[cuts, operators]``; the operators before a cut.
      crossing: bytes that pass each cut, what is made before it and read behind it, each result once.
      seconds, forward, backward, parameters, residuals: sums over the operators before each cut.
      wanted: whether a stage must begin at each cut.
      complete: whether these are all cuts of the graph, rather than those of one order of its operators.
    """

    members: np.ndarray
    crossing: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    parameters: np.ndarray
    residuals: np.ndarray
    wanted: np.ndarray
    complete: bool

    @property
    def seconds(self) -> np.ndarray:
        """Forward and backward together."""
        return self.forward + self.backward

    @cached_property
    def nested(self) -> np.ndarray:
        """``[cuts, cuts]``: whether the operators between two cuts make a stage: no wanted cut is among them."""
        if _first_cuts(self.members) is not None:
            within = ~np.tri(len(self.members), k=-1, dtype=bool)
        else:
            # Cut i lies in cut j if no operator before i is behind j.
            within = self.members.astype(np.float32) @ (~self.members).T.astype(np.float32) == 0
        nested = within & ~np.eye(len(within), dtype=bool)
        for k in np.flatnonzero(self.wanted):
            nested &= within[k][:, None] | within[:, k]
        return nested

    @cached_property
    def is_chain(self) -> bool:
        """Return whether each cut holds the one before."""
        numbers = np.arange(len(self.crossing) - 1)
        return bool(self.nested[numbers, numbers + 1].all())

    def between(self, sums: np.ndarray) -> np.ndarray:
        """``[first cuts, last cuts]``: a sum over the operators between two cuts; only of use where ``nested``."""
        return sums[None] - sums[:, None]

    def thinned(self, count: int) -> "CutSpace":
        """About ``count`` of the cuts, evenly over the work, of neighbors those that least crosses."""
        share = self.seconds / max(float(self.seconds[-1]), np.finfo(float).tiny)
        bins = np.minimum((share * count).astype(int), count - 1)
        kept = {0, len(bins) - 1, *np.flatnonzero(self.wanted).tolist()}
        for k in np.unique(bins):
            inside = np.flatnonzero(bins == k)
            kept.add(int(inside[self.crossing[inside].argmin()]))
        rows = sorted(kept)
        return CutSpace(*(getattr(self, field.name)[rows] for field in fields(self)[:-1]), complete=False)


def cut_space(profile: Profile, *, reorder: bool = True, starts: Sequence[int] = ()) -> CutSpace:
    """All cuts of a profile's graph, if there are not too many; else those of its order.

    Without ``reorder``, stages must begin at the operators ``starts``.
    """
    if starts and reorder:
        raise PartitionError(f"starts={tuple(starts)} needs reorder=False: an operator has no place in other orders.")
    count = len(profile.names)
    sets = _down_sets(profile) if reorder else None
    complete = sets is not None
    if sets is None:
        sets = np.tri(count + 1, count, -1, dtype=bool)
    for group in profile.together:
        inside = sets[:, list(group)].sum(1)
        sets = sets[(inside == 0) | (inside == len(group))]
    if len(sets) < 2:
        raise PartitionError("profile.together leaves no operator; it must not hold two groups that need each other.")
    return space_of(profile, sets, complete=complete, starts=starts)


def space_of(profile: Profile, sets: np.ndarray, *, complete: bool = False, starts: Sequence[int] = ()) -> CutSpace:
    """The cuts that are given as sets of operators ``[cuts, operators]``."""

    first = _first_cuts(sets)

    def before(values: tuple[float, ...]) -> np.ndarray:
        if first is None:
            return sets @ np.asarray(values, np.float64)
        return np.bincount(first, values, len(sets) + 1)[:-1].cumsum()

    return CutSpace(
        members=sets,
        crossing=crossing_bytes(profile, sets),
        forward=before(profile.forward_seconds),
        backward=before(profile.backward_seconds),
        parameters=before(profile.parameter_bytes),
        residuals=before(profile.residual_bytes),
        wanted=np.isin(sets.sum(1), starts),
        complete=complete,
    )


def _first_cuts(sets: np.ndarray) -> np.ndarray | None:
    """Return, of a chain of cuts each of which holds the one before and more, the first behind each operator."""
    is_chain = (sets[:-1] <= sets[1:]).all() and (sets[:-1] != sets[1:]).any(1).all()
    return len(sets) - sets.sum(0) if is_chain else None


def crossing_bytes(profile: Profile, sets: np.ndarray) -> np.ndarray:
    """Bytes made before each cut ``[cuts, operators]`` and read behind it; each result once, however many read it."""
    readers: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], float] = {}
    for source, target, size, output in profile.edges:
        readers.setdefault((source, output), []).append(target)
        sizes[source, output] = max(size, sizes.get((source, output), 0.0))
    total, first = np.zeros(len(sets)), _first_cuts(sets)
    for (source, output), targets in readers.items():
        if first is None:
            total += sizes[source, output] * (sets[:, source] & ~sets[:, targets].all(1))
        else:
            total[first[source] : first[targets].max()] += sizes[source, output]
    return total


def _down_sets(profile: Profile) -> np.ndarray | None:
    """All down-sets, smallest first; None if there are more than ``MOST_DOWN_SETS``."""
    count = len(profile.names)
    reads: list[set[int]] = [set() for _ in range(count)]
    readers: list[set[int]] = [set() for _ in range(count)]
    for source, target, *_ in profile.edges:
        reads[target].add(source)
        readers[source].add(target)
    needs = [sum(1 << v for v in reads[k]) for k in range(count)]
    start = frozenset(k for k in range(count) if not reads[k])
    # A down-set, and the operators that may be added to it.
    level: dict[int, frozenset[int]] = {0: start}
    down_sets: list[int] = []
    while level:
        down_sets += level
        if len(down_sets) > MOST_DOWN_SETS:
            return None
        following: dict[int, frozenset[int]] = {}
        for held, ready in level.items():
            for v in ready:
                larger = held | 1 << v
                if larger not in following:
                    new = {w for w in readers[v] if needs[w] & ~larger == 0}
                    following[larger] = (ready - {v}) | new
                    if len(down_sets) + len(following) > MOST_DOWN_SETS:
                        return None
        level = following
    return np.array([[held >> k & 1 for k in range(count)] for held in down_sets], dtype=bool).reshape(
        len(down_sets), count
    )
