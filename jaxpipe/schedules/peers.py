"""Which peers keep whose stashes: the level to which memory can be evened out, and the fastest way to do that.

At a level, every stage that holds more sends its stashes away, for as few ticks as is enough, and every other has what
it does not hold as free memory. Stages that send, those with most first, look for a set of peers whose free memory
takes their slices, which are in proportion to the links' bandwidths. No stage does both. So what is possible at a level
is so at every higher one; with stashes of unequal size a lower level may be missed. The memory of a stage's own host
counts as one more peer, whose room is no device's: with it, levels can be below what all devices have together.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpipe.schedules.swaps import HOST, Slice, Swaps, kept_by_host, most, slice_pages, stays, swap_table
from jaxpipe.schedules.table import Kind, Schedule
from jaxpipe.schedules.transport import ROUNDING, transport


#: Most peers that a stage's stashes are sliced for, the host among them.
MOST_PEERS = 4

#: How many sets of peers are tried for a level at most; what is not found by then counts as impossible.
MOST_TRIALS = 2000


@dataclass(frozen=True)
class Links:
    """Direct links between the devices of stages; of several replicas the slowest.

    Attributes:
      bandwidth: ``[stages][stages]``, in pages of the arena per second; 0 where there is no link.
      latency: the same, in seconds.
      host_pages: the room that each device has in the memory of its host; 0 if stashes must not go there.
      host_bandwidth: by stage, as ``bandwidth``, but for a page there and one back; needed if there is room.
      host_latency: the same, in seconds.
    """

    bandwidth: tuple[tuple[float, ...], ...]
    latency: tuple[tuple[float, ...], ...]
    host_pages: int = 0
    host_bandwidth: tuple[float, ...] = ()
    host_latency: tuple[float, ...] = ()

    @classmethod
    def equal(cls, num_stages: int) -> "Links":
        """Links that are all alike, a page in a second."""
        return cls(((1.0,) * num_stages,) * num_stages, ((0.0,) * num_stages,) * num_stages)

    @property
    def without_host(self) -> "Links":
        """Those between devices alone."""
        return Links(self.bandwidth, self.latency)

    def slices(self, stage: int) -> list[Slice]:
        """Everything that can keep a stage's stashes, peers first."""
        found = [Slice(t, *link) for t, link in enumerate(zip(self.bandwidth[stage], self.latency[stage], strict=True))]
        if self.host_pages:
            found.append(Slice(HOST, self.host_bandwidth[stage], self.host_latency[stage]))
        return [one for one in found if one.target != stage and one.bandwidth > 0]


def balance(
    schedule: Schedule,
    sizes: Sequence[int] | None = None,
    links: Links | None = None,
    room: int | None = None,
) -> Swaps | None:
    """The swaps with which every device reserves least, and of several the fastest; None if none makes it less.

    Args:
      schedule: the table; there is no swap for one of which ``can_swap`` is false.
      sizes: by stage, pages of one stash; left out: one each.
      links: left out: all alike.
      room: pages that an arena may have; of swaps with no more, the fastest are taken. If there are none, as
        without it.

    Example:
      >>> from dataclasses import replace
      >>> from jaxpipe.schedules import one_f_one_b
      >>> schedule = one_f_one_b(4, 16)
      >>> schedule.in_flight(0), balance(schedule).slots
      (7, 4.0)
      >>> links = replace(Links.equal(4), host_pages=100, host_bandwidth=(1.0,) * 4, host_latency=(0.0,) * 4)
      >>> balance(schedule, links=links).slots
      2.0
    """
    p = schedule.num_stages
    if not can_swap(schedule):
        return None
    search = _Search(schedule, tuple(sizes or (1,) * p), links or Links.equal(p))
    level = room
    while level is not None and (found := search.fastest(level)) is not None:
        # Messages as large as their round's largest may need more than slices.
        over = transport(found, search.sizes).arena - (room or 0)
        if over <= 0:
            return found
        level -= over
    least = search.lowest()
    found = None if least is None else search.fastest(least)
    return found if found is not None and transport(found, search.sizes).arena < search.usual else None


def can_swap(schedule: Schedule) -> bool:
    """Whether stashes can go to peers: with several stages, one on each device, and whole backward passes."""
    whole = schedule.has_backward and not schedule.splits_backward
    return schedule.num_stages > 1 and schedule.num_chunks == 1 and whole


@dataclass(frozen=True)
class _Option:
    """A set of peers for a stage."""

    seconds: float
    slices: tuple[Slice, ...]
    pages: tuple[int, ...]


class _Search:
    """Levels in pages, and whether peers can be found for them."""

    def __init__(self, schedule: Schedule, sizes: tuple[int, ...], links: Links):
        self.schedule, self.sizes, self.links = schedule, sizes, links
        self.stages = range(len(sizes))
        own: list[list[int]] = []
        guests: list[list[int]] = []
        hosted: list[list[int]] = []
        for s in self.stages:
            starts, ends = schedule.when(s, Kind.FORWARD), schedule.when(s, Kind.BACKWARD)
            longest = max((end - starts[j] for j, end in ends.items()), default=0)
            places = [stays(schedule, s, away) for away in range(max(1, longest))]
            own.append([most(here) for here, _ in places])
            guests.append([most(there) for _, there in places])
            hosted.append([most(kept_by_host(there)) for _, there in places])
        self.own, self.guests, self.hosted = own, guests, hosted

    @cached_property
    def usual(self) -> int:
        """Pages of an arena without swaps."""
        held = [(n[0] - 1) * size for n, size in zip(self.own, self.sizes, strict=True)]
        return max(held) + max(self.sizes)

    @cached_property
    def options(self) -> list[list[_Option]]:
        """For each stage the sets of peers, the fastest first; of equals the one with fewer."""
        found = []
        for s, size in enumerate(self.sizes):
            peers = self.links.slices(s)
            options = []
            for count in range(1, min(len(peers), MOST_PEERS) + 1):
                for slices in itertools.combinations(peers, count):
                    pages = slice_pages(size, slices)
                    if all(pages):
                        took = max(one.seconds(n) for one, n in zip(slices, pages, strict=True))
                        options.append(_Option(took, slices, pages))
            found.append(sorted(options, key=lambda option: (option.seconds, len(option.slices))))
        return found

    def lowest(self) -> int | None:
        """The lowest level that peers are found for; None if none is below that without swaps."""
        held = sum(n[0] * size for n, size in zip(self.own, self.sizes, strict=True))
        mean = 0 if self.links.host_pages else -(-held // len(self.sizes))
        lowest = max(mean, *self.sizes, 1)
        if lowest >= self.usual:
            return None
        level = _least(lowest, self.usual, lambda level: self._assigned(level, math.inf) is not None)
        return level if level < self.usual else None

    def fastest(self, level: int) -> Swaps | None:
        """The fastest swaps within a level; None if there are none, or if nothing has to move."""
        ticks = self._ticks(level)
        if ticks is None or not any(ticks) or self._assigned(level, math.inf) is None:
            return None
        times = sorted({option.seconds for s in self.stages if ticks[s] for option in self.options[s]})
        slowest = _least(0, len(times) - 1, lambda k: self._assigned(level, times[k]) is not None)
        chosen = self._assigned(level, times[slowest])
        assert chosen is not None
        return swap_table(self.schedule, ticks, [chosen[s].slices if s in chosen else () for s in self.stages])

    def _ticks(self, level: int) -> tuple[int, ...] | None:
        """For how few ticks the stashes of each stage must be away; None if no number is enough."""
        found = []
        for counts, size in zip(self.own, self.sizes, strict=True):
            # The last one through a window as large as the largest stash.
            last = max(self.sizes) - size
            enough = [away for away, count in enumerate(counts) if count * size + last <= level]
            if not enough:
                return None
            found.append(enough[0])
        return tuple(found)

    def _assigned(self, level: int, slowest: float) -> dict[int, _Option] | None:
        """Peers for every stage that lends, such that all slices fit what is free and none takes longer."""
        ticks = self._ticks(level)
        if ticks is None:
            return None
        guests = [self.guests[s][away] for s, away in enumerate(ticks)]
        free = [0 if away else level - self.own[s][0] * self.sizes[s] for s, away in enumerate(ticks)]
        lenders = sorted((s for s in self.stages if ticks[s]), key=lambda s: -guests[s] * self.sizes[s])
        # All have as many slots in their host's memory as any needs, of the largest slice, and one to spare. A page is
        # left: smaller stashes that are chosen later may be sliced otherwise, by one.
        most_hosted = self.links.host_pages // (1 + max((self.hosted[s][ticks[s]] for s in lenders), default=0)) - 1
        trials = itertools.count()
        chosen: dict[int, _Option] = {}

        def assign(k: int) -> bool:
            if k == len(lenders):
                return True
            s = lenders[k]
            for option in self.options[s]:
                if option.seconds > slowest * ROUNDING or next(trials) > MOST_TRIALS:
                    return False
                parts = list(zip(option.slices, option.pages, strict=True))
                needed = [(one.target, guests[s] * n) for one, n in parts if one.target != HOST]
                hosted = max((n for one, n in parts if one.target == HOST), default=0)
                if (not hosted or hosted <= most_hosted) and all(n <= free[t] for t, n in needed):
                    for t, n in needed:
                        free[t] -= n
                    chosen[s] = option
                    if assign(k + 1):
                        return True
                    for t, n in needed:
                        free[t] += n
            return False

        return chosen if assign(0) else None


def _least(low: int, high: int, possible: Callable[[int], bool]) -> int:
    """The least number for which something is possible, if it then is for all that are larger; ``high`` at most."""
    return low + bisect.bisect_left(range(low, high), True, key=possible)
