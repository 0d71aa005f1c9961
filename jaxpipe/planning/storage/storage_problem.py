"""Choices for the tensors that a backward pass needs, and their costs: data and its simulation.

A backward pass is a row of events. Each reads some items; an item is stored in one of several forms, or computed
again from other items when it is first needed, and then kept until it is last read:

    event         0    1    2    3    4            d and b are stored, c is computed again from b in event 1
    reads         d    c    b    a    -            and a from nothing in event 3
    in memory    d b  c b   b    a
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

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
      uses: the events that read it, ascending, each once.
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
        """The seconds and the position of its fastest form; what is not read is not stored.

        Of equals the smallest, and stored rather than computed again: a view of what else could be given up.
        """
        if not self.uses:
            return 0.0, NOT_STORED
        forms = [(option.seconds, option.bytes, position) for position, option in enumerate(self.options)]
        if self.seconds is not None:
            forms.append((self.seconds, self.bytes, len(forms)))
        seconds, _, position = min(forms)
        return seconds, position if position < len(self.options) else NOT_STORED


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

    @cached_property
    def base_bytes(self) -> np.ndarray:
        """The bytes that every event needs besides, as an array."""
        return np.array(self.base, np.int64)

    @cached_property
    def first_uses(self) -> list[int]:
        """The first event that reads each item; their number for none."""
        return [min(item.uses, default=len(self.base)) for item in self.items]

    @cached_property
    def last_uses(self) -> list[int]:
        """The last event that reads each item; -1 for none."""
        return [max(item.uses, default=-1) for item in self.items]

    @cached_property
    def dependents(self) -> list[list[int]]:
        """The items that are computed from each item."""
        dependents: list[list[int]] = [[] for _ in self.items]
        for k, item in enumerate(self.items):
            for source in item.sources:
                dependents[source].append(k)
        return dependents


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


def possible(problem: Problem, choice: Sequence[int]) -> tuple[int, ...]:
    """Return the choice with all that is needed and cannot be computed again stored, each in its fastest form.

    As what a collective returns, for what is computed from it.
    """
    items, choice = problem.items, list(choice)
    needed = [bool(item.uses) for item in items]
    for k in range(len(items) - 1, -1, -1):  # who is computed from an item comes before it
        if not needed[k] or choice[k] != NOT_STORED:
            continue
        if items[k].seconds is None:
            options = items[k].options
            choice[k] = min(range(len(options)), key=lambda o, of=options: (of[o].seconds, of[o].bytes))
        else:
            for source in items[k].sources:
                needed[source] = True
    return tuple(choice)


@dataclass(eq=False)
class Outcome:
    """A choice and its walk through the events: what it costs, and what it comes to after changes.

    Attributes:
      problem: the problem.
      choice: one option (its position) or ``NOT_STORED`` for each item.
      first, last: by item, the events between which it is there, computed again or not; -1 as the last for none.
      change: bytes that come and go, by event, and after the last one.
      item_seconds, link_seconds: by item.
      stash_bytes: what is stored for one micro-batch.
      held_bytes: the bytes of all stashes that are there all the time.
      swapped_bytes: of one stash, in other memory between the passes.
    """

    problem: Problem
    choice: tuple[int, ...]
    first: list[int]
    last: list[int]
    change: np.ndarray
    item_seconds: np.ndarray
    link_seconds: np.ndarray
    stash_bytes: int
    held_bytes: int
    swapped_bytes: int

    def changed(self, options: Mapping[int, int]) -> "Outcome | None":
        """Return the outcome after some items have other options; None if an item that is needed can not be had.

        Only those items are looked at, and others that are there for longer or shorter because of them.
        """
        problem, choice, first, last = self.problem, list(self.choice), self.first.copy(), self.last.copy()
        for k, option in options.items():
            choice[k] = option
        affected, later = list[int](), sorted(-k for k in options)
        while later:  # who is computed from an item comes before it
            k = -heapq.heappop(later)
            if affected and affected[-1] == k:
                continue
            begin, end = problem.first_uses[k], problem.last_uses[k]
            for d in problem.dependents[k]:
                if choice[d] == NOT_STORED and last[d] >= 0:
                    begin, end = min(begin, first[d]), max(end, first[d])
            if k not in options and (begin, end) == (first[k], last[k]):
                continue
            affected.append(k)
            first[k], last[k] = begin, end
            if choice[k] == NOT_STORED and end >= 0 and problem.items[k].seconds is None:
                return None
            if NOT_STORED in (choice[k], self.choice[k]):
                for source in problem.items[k].sources:
                    if source not in options:
                        heapq.heappush(later, -source)
        arrays = self.change.copy(), self.item_seconds.copy(), self.link_seconds.copy()
        sizes = self.stash_bytes, self.held_bytes, self.swapped_bytes
        outcome = Outcome(problem, self.choice, self.first, self.last, *arrays, *sizes)
        outcome._add(affected, -1)
        outcome.choice, outcome.first, outcome.last = tuple(choice), first, last
        outcome._add(affected)
        return outcome

    def _add(self, items: Iterable[int], sign: int = 1) -> None:
        """Add what items cost, or take it off again."""
        problem, choice, first, last, change = self.problem, self.choice, self.first, self.last, self.change
        for k in items:
            item, begin, end, chosen = problem.items[k], first[k], last[k], choice[k]
            if chosen == NOT_STORED:
                self.item_seconds[k], self.link_seconds[k] = item.seconds or 0.0 if end >= 0 else 0.0, 0.0
                alive = ((begin, item.bytes),)
            else:
                option = item.options[chosen]
                self.item_seconds[k], self.link_seconds[k] = option.seconds, option.link_seconds
                self.stash_bytes += sign * option.bytes
                self.held_bytes += sign * option.bytes * (problem.held if option.held is None else option.held)
                self.swapped_bytes += sign * option.bytes * (option.held is not None)
                alive = ((0, option.bytes * problem.frees), (begin, option.unpacked_bytes))
            for start, size in alive:
                if size and end >= 0:
                    change[start] += sign * size
                    change[end + 1] -= sign * size

    def tidied(self) -> "Outcome":
        """Return the outcome without what is stored for nobody."""
        tidy = self.changed({k: NOT_STORED for k, event in enumerate(self.last) if event < 0})
        assert tidy is not None
        return tidy

    @cached_property
    def bytes(self) -> np.ndarray:
        """The bytes in memory, by event."""
        return self.problem.base_bytes + self.change[:-1].cumsum() + self.held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at once."""
        return int(self.bytes.max(initial=0))

    def fits(self) -> bool:
        """Return whether the limits of the problem hold."""
        return self.swapped_bytes <= self.problem.most_swapped and self.peak_bytes <= self.problem.capacity

    def excess(self) -> tuple[float, float]:
        """Return by how much the capacity is exceeded, and by how much in all events together."""
        over = np.maximum(self.bytes - self.problem.capacity, 0)
        return over.max(initial=0).item(), over.sum().item()

    @cached_property
    def seconds(self) -> float:
        """Seconds of encoding, decoding and computing again, and of swaps beyond the work that they overlap with."""
        late = max(0.0, _in_turn(self.link_seconds) - self.problem.overlap) if self.swapped_bytes else 0.0
        return _in_turn(self.item_seconds) + late

    @property
    def computed(self) -> list[int]:
        """The items that are computed again, the last first."""
        return [k for k, chosen in enumerate(self.choice) if chosen == NOT_STORED < self.last[k]][::-1]


def outcome_of(problem: Problem, choice: Sequence[int]) -> Outcome | None:
    """Return what a choice costs: one option (its position) or ``NOT_STORED`` for each item.

    Nothing here knows of the solvers; their answers are checked by it.

    Returns:
      None if an item that is needed can not be had.
    """
    count, events = len(problem.items), len(problem.base)
    change, seconds, link_seconds = np.zeros(events + 1, np.int64), np.zeros(count), np.zeros(count)
    unread = [events] * count, [-1] * count
    nothing = Outcome(problem, (NOT_STORED,) * count, *unread, change, seconds, link_seconds, 0, 0, 0)
    return nothing.changed(dict(enumerate(choice)))


def _in_turn(seconds: np.ndarray) -> float:
    """Return a sum from the last one to the first: equal costs have equal sums, on every processor."""
    return float(np.add.accumulate(seconds[::-1])[-1]) if len(seconds) else 0.0
