"""The places where a program may be cut into stages.

A cut is a set of operators that holds, with each operator, all that it reads: a *down-set* of the graph. A stage is
what lies between two nested ones. A chain of ``n`` operators has ``n + 1`` of them, a graph with branches more, as
operators that do not depend on each other may fall on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
      first: ``[operators]``; the first cut that holds each.
      members: ``[cuts, operators]``; the operators before a cut. None if every cut holds the one before.
      crossing: bytes that pass each cut, what is made before it and read behind it, each result once.
      forward, backward, parameters, residuals: sums over the operators before each cut.
      wanted: whether a stage must begin at each cut; at none unless each holds the one before.
      complete: whether these are all cuts of the graph, rather than those of one order of its operators.
    """

    first: np.ndarray
    members: np.ndarray | None
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

    def holds(self, cut: int) -> np.ndarray:
        """``[operators]``: whether each is before a cut."""
        return self.first <= cut if self.members is None else self.members[cut]

    def is_stage(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return whether the operators between cuts of a chain make a stage: some, and no wanted cut is among them."""
        wanted = self.wanted.cumsum()
        return (first < last) & (wanted[last - 1] == wanted[first])

    @property
    def is_chain(self) -> bool:
        """Return whether each cut holds the one before."""
        return self.members is None

    @cached_property
    def nested(self) -> np.ndarray:
        """``[cuts, cuts]``: whether the operators between two cuts make a stage."""
        if self.members is None:
            numbers = np.arange(len(self.crossing))
            return self.is_stage(numbers[:, None], numbers)
        # Cut i lies in cut j if no operator before i is behind j.
        within = self.members.astype(np.float32) @ (~self.members).T.astype(np.float32) == 0
        return within & ~np.eye(len(within), dtype=bool)

    def between(self, sums: np.ndarray) -> np.ndarray:
        """``[first cuts, last cuts]``: a sum over the operators between two cuts; only of use where ``nested``."""
        return sums[None] - sums[:, None]

    def thinned(self, count: int) -> "CutSpace":
        """About ``count`` of the cuts, evenly over the work, of neighbors those that least crosses."""
        share = self.seconds / max(float(self.seconds[-1]), np.finfo(float).tiny)
        bins = np.minimum((share * count).astype(int), count - 1)
        rows = sorted({0, len(bins) - 1, *np.flatnonzero(self.wanted).tolist(), *least_crossed(bins, self.crossing)})
        columns = {name: getattr(self, name)[rows] for name in (*_SUMS, "crossing", "wanted")}
        if self.members is None:
            return replace(self, first=np.searchsorted(rows, self.first), **columns, complete=False)
        members = self.members[rows]
        return replace(self, first=members.argmax(0), members=members, **columns, complete=False)


def least_crossed(parts: np.ndarray, crossing: np.ndarray) -> list[int]:
    """Return the cut of each part that fewest bytes cross; of equals the first."""
    order = np.lexsort((crossing, parts))
    return order[np.unique(parts[order], return_index=True)[1]].tolist()


#: Fields of ``CutSpace`` that are sums of a field of ``Profile``.
_SUMS = {
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "parameters": "parameter_bytes",
    "residuals": "residual_bytes",
}


def cut_space(profile: Profile, *, reorder: bool = True, starts: Sequence[int] = ()) -> CutSpace:
    """All cuts of a profile's graph, if there are not too many; else those of its order.

    Without ``reorder``, stages must begin at the operators ``starts``.
    """
    if starts and reorder:
        raise PartitionError(f"starts={tuple(starts)} needs reorder=False: an operator has no place in other orders.")
    allowed = np.ones(len(profile.names) + 1, bool)
    sets = _down_sets(profile) if reorder else None
    for group in profile.together:
        allowed[min(group) + 1 : max(group) + 1] = False
        if sets is not None:
            inside = sets[:, list(group)].sum(1)
            sets = sets[(inside == 0) | (inside == len(group))]
    places = np.flatnonzero(allowed)
    if len(places if sets is None else sets) < 2:
        raise PartitionError("profile.together leaves no operator; it must not hold two groups that need each other.")
    if sets is not None:
        return space_of(profile, sets, complete=True)
    first = np.searchsorted(places, np.arange(len(profile.names)), "right")
    return _chain_space(profile, first, len(places), np.isin(places, starts))


def space_of(profile: Profile, sets: np.ndarray, *, complete: bool = False) -> CutSpace:
    """The cuts that are given as sets of operators ``[cuts, operators]``."""
    first = sets.argmax(0)
    if (sets[:-1] <= sets[1:]).all() and (sets[:-1] != sets[1:]).any(1).all():
        return replace(_chain_space(profile, first, len(sets), np.zeros(len(sets), bool)), complete=complete)
    crossing = np.zeros(len(sets))
    for source, targets, size in _results(profile):
        crossing += size * (sets[:, source] & ~sets[:, targets].all(1))
    sums = {name: sets @ np.asarray(getattr(profile, field)) for name, field in _SUMS.items()}
    return CutSpace(first, sets, crossing, **sums, wanted=np.zeros(len(sets), bool), complete=complete)


def _chain_space(profile: Profile, first: np.ndarray, count: int, wanted: np.ndarray) -> CutSpace:
    """Return cuts each of which holds the one before, by the first that holds each operator."""
    crossing, numbers = np.zeros(count), first.tolist()
    for source, targets, size in _results(profile):
        crossing[numbers[source] : max(numbers[t] for t in targets)] += size
    sums = {name: np.bincount(first, getattr(profile, field), count + 1)[:-1].cumsum() for name, field in _SUMS.items()}
    return CutSpace(first, None, crossing, **sums, wanted=wanted, complete=False)


def _results(profile: Profile) -> list[tuple[int, list[int], float]]:
    """Return the operator that makes each result, those that read it, and its bytes."""
    readers: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], float] = {}
    for source, target, size, output in profile.edges:
        readers.setdefault((source, output), []).append(target)
        sizes[source, output] = max(size, sizes.get((source, output), 0.0))
    return [(source, targets, sizes[source, output]) for (source, output), targets in readers.items()]


def _down_sets(profile: Profile) -> np.ndarray | None:
    """All down-sets, smallest first; None if there are more than ``MOST_DOWN_SETS``."""
    count = len(profile.names)
    reads = [0] * count
    for source, target, *_ in profile.edges:
        reads[target] |= 1 << source
    down_sets = [0]
    for k in range(count):  # without an operator and all behind it a down-set is still one
        down_sets += [held | 1 << k for held in down_sets if reads[k] & ~held == 0]
        if len(down_sets) > MOST_DOWN_SETS:
            return None
    members = np.array([[held >> k & 1 for k in range(count)] for held in down_sets], dtype=bool)
    return members[np.lexsort([*~members.T[::-1], members.sum(1)])]
