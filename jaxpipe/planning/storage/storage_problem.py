"""Choices for the tensors that a backward pass needs, and their costs: data and its simulation.

A backward pass is a row of events. Each reads some items; an item is stored in one of several forms, or computed
again from other items when it is first needed, and then kept until it is last read:

    event         0    1    2    3    4            d and b are stored, c is computed again from b in event 1
    reads         d    c    b    a    -            and a from nothing in event 3
    in memory    d b  c b   b    a
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxpipe.options import Solver


#: The choice of an item that is not stored.
NOT_STORED = -1


@dataclass(frozen=True)
class Option:
    """One form in which an item may be stored.

    Attributes:
      name: of the storage.
      bytes: that it takes between the passes.
      seconds: to encode and decode it.
      unpacked_bytes: that it takes besides, from its first to its last reading.
      held: how many times it is on the device all the time, if it is in other memory between the passes.
      link_seconds: to send it; as long to fetch it, in the other direction of the links.
    """

    name: str
    bytes: int
    seconds: float = 0.0
    unpacked_bytes: int = 0
    held: int | None = None
    link_seconds: float = 0.0


@dataclass(frozen=True)
class Item:
    """A tensor that may be stored.

    Attributes:
      name: for people; equal work has equal answers, whatever its names.
      options: the forms it may be stored in; none if it is always computed again.
      uses: the events that read it, ascending.
      bytes: that it takes while it is there without being stored.
      sources: the items that it is computed from.
      seconds: to compute it again from them; None if that is not possible.
    """

    name: str = field(compare=False)
    options: tuple[Option, ...]
    uses: tuple[int, ...]
    bytes: int
    sources: tuple[int, ...] = ()
    seconds: float | None = None

    @property
    def fastest(self) -> tuple[float, int]:
        """The seconds and the position of its fastest form, the smallest of equals; what is not read is not stored."""
        if not self.uses:
            return 0.0, NOT_STORED
        forms = [(option.seconds, option.bytes, position) for position, option in enumerate(self.options)]
        if self.seconds is not None:
            forms.append((self.seconds, self.bytes, NOT_STORED))
        seconds, _, position = min(forms)
        return seconds, position


@dataclass(frozen=True)
class Problem:
    """A stage's choices under a budget.

    In an event there are in memory: ``held`` times the whole stash, those stored items that are still to be read (if
    ``frees``), those that were computed again or unpacked and are still to be read, and the event's own ``base`` bytes.

    Attributes:
      items: each reads only items before it.
      base: bytes that every event needs besides.
      capacity: bytes in memory at most.
      held: how many times the stash is there all the time: other micro-batches in flight, a copy out of an arena.
      frees: whether the stash of the micro-batch at work is given back piece by piece.
      most_swapped: bytes of one stash at most that are in other memory between the passes.
      overlap: seconds of a micro-batch's work, with which sends overlap.
    """

    items: tuple[Item, ...]
    base: tuple[int, ...]
    capacity: float
    held: int = 0
    frees: bool = True
    most_swapped: float = math.inf
    overlap: float = 0.0

    def __post_init__(self) -> None:
        for k, item in enumerate(self.items):
            if any(source >= k for source in item.sources):
                raise ValueError(f"item {k} ({item.name}) has sources {item.sources}; they must come before it.")
            if list(item.uses) != sorted(set(item.uses)) or any(not 0 <= e < len(self.base) for e in item.uses):
                raise ValueError(f"item {k} ({item.name}) has uses {item.uses} of {len(self.base)} events.")
            if item.seconds is None and not item.options:
                raise ValueError(f"item {k} ({item.name}) can neither be stored nor computed again.")

    @cached_property
    def first_uses(self) -> list[int]:
        """The first event that reads each item; their number for none."""
        return [min(item.uses, default=len(self.base)) for item in self.items]

    @cached_property
    def last_uses(self) -> list[int]:
        """The last event that reads each item; -1 for none."""
        return [max(item.uses, default=-1) for item in self.items]


@dataclass(frozen=True)
class Outcome:
    """The seconds and bytes of a choice.

    Attributes:
      seconds: of encoding, decoding and computing again, and of swaps beyond the work that they overlap with.
      stash_bytes: what is stored for one micro-batch.
      swapped_bytes: of these, in other memory between the passes.
      bytes: in memory, by event.
      computed: the event in which each item that is computed again is so.
      last: the last event that reads each item, computed again or not; -1 for none.
    """

    seconds: float
    stash_bytes: int
    bytes: tuple[int, ...]
    computed: dict[int, int]
    last: tuple[int, ...]
    swapped_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at once."""
        return max(self.bytes, default=0)

    def fits(self, problem: Problem) -> bool:
        """Return whether the limits of a problem hold."""
        return self.swapped_bytes <= problem.most_swapped and self.peak_bytes <= problem.capacity


@dataclass(frozen=True)
class SolverOptions:
    """Settings of a solver.

    Attributes:
      solver: the name of a mixed-integer solver that cvxpy finds, or a solver of the caller's own.
      time_limit: seconds, for HiGHS itself and through SciPy, and a solver of one's own; others are not limited. At 0
        no solver is asked.
      gap: relative difference from the bound at which to stop.
      slack: the same in seconds; HiGHS alone can be told.
      least_peak: make the peak as low as can be, whatever it costs, instead of keeping to the capacity.
    """

    solver: str | Solver = "HIGHS"
    time_limit: float = 10.0
    gap: float = 0.0
    slack: float = 0.0
    least_peak: bool = False


@dataclass(frozen=True)
class Solution:
    """An answer of a solver.

    Attributes:
      choice: by item; None if there was none.
      optimal: whether it is proven to be the best, within the requested gap or slack.
      infeasible: whether it is proven that no choice fits.
      bound: no choice has fewer seconds, or a lower peak if that was wanted.
    """

    choice: tuple[int, ...] | None = None
    optimal: bool = False
    infeasible: bool = False
    bound: float | None = None


def outcome_of(problem: Problem, choice: Sequence[int]) -> Outcome | None:
    """Walk through the events with one option (its position) or ``NOT_STORED`` for each item.

    Nothing here knows of the solvers; their answers are checked by it.

    Returns:
      None if an item that is needed can not be had.
    """
    events, frees, most_held = len(problem.base), problem.frees, problem.held
    first, last = problem.first_uses.copy(), problem.last_uses.copy()
    computed: dict[int, int] = {}
    change = [0] * (events + 1)
    seconds = link_seconds = 0.0
    stash = held = swapped = 0
    k = len(first)
    for item in reversed(problem.items):  # who is computed from an item comes behind it
        k -= 1
        begin, end, chosen = first[k], last[k], choice[k]
        if chosen == NOT_STORED:
            if end < 0:
                continue
            if item.seconds is None:
                return None
            computed[k] = begin
            seconds += item.seconds
            change[begin] += item.bytes
            change[end + 1] -= item.bytes
            for source in item.sources:
                if begin < first[source]:
                    first[source] = begin
                if begin > last[source]:
                    last[source] = begin
            continue
        option = item.options[chosen]
        size = option.bytes
        seconds += option.seconds
        stash += size
        if option.held is not None:
            held += size * option.held
            swapped += size
            link_seconds += option.link_seconds
        else:
            held += size * most_held
        if frees:
            change[0] += size
            change[end + 1] -= size
        if option.unpacked_bytes and end >= 0:
            change[begin] += option.unpacked_bytes
            change[end + 1] -= option.unpacked_bytes
    seconds += max(0.0, link_seconds - problem.overlap)
    total = []
    for base, here in zip(problem.base, change, strict=False):
        held += here
        total.append(base + held)
    return Outcome(seconds, stash, tuple(total), computed, tuple(last), swapped)
