"""Stashes that spend some ticks in peers' memory, or their host's, as transport rows beside a schedule.

Early stages hold more micro-batches than late ones, but every device reserves as much as the one that holds most. So
a stage that holds much lends: each of its stashes is cut into slices, one for every peer that has room, which leave in
the tick in which the stash is made, over direct links at once, and are back some ticks later, in time for its
backward pass. In each tick at most one stash of a stage leaves and one comes back.

    1f1b, 4 stages, steady state        stage 0  1  2  3       together
    in flight without                         7  5  3  1             16
    with                                      4  4  4  4             16

The memory of a device's own host is one more place for a slice (``HOST``); no device has to reserve anything for what
is there, so that the table above could come down to two stashes on each device.

Pairs of an early and a late stage are from T. Kim et al., "BPipe", ICML 2023; slices in proportion to the bandwidth of
several links from Q. Zhou et al., "MPress", HPCA 2023. Which peers are best is for ``jaxpipe.schedules.peers``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.schedules.places import Stay, addresses
from jaxpipe.schedules.table import Kind, Schedule


#: The target of slices that are in the memory of the host, that of the stage's own device.
HOST = -1


@dataclass(frozen=True)
class Slice:
    """The part of each stash of a stage that one peer keeps, or the host; its share is that of its bandwidth.

    Attributes:
      target: the stage on whose device it is, or ``HOST``.
      bandwidth: of the direct link, in pages of the arena per second.
      latency: of the link, in seconds.
    """

    target: int
    bandwidth: float = 1.0
    latency: float = 0.0

    def seconds(self, pages: int) -> float:
        """What it takes to send some pages there, or back."""
        return self.latency + pages / self.bandwidth


@dataclass(frozen=True)
class Move:
    """One slice of a stash on its way, after the backward work of a tick.

    Attributes:
      tick: it is at the target from the next tick on.
      stage, microbatch: whose stash it is.
      piece: which slice, as a position in the stage's ``Swaps.slices``.
      source, target: stages whose devices it moves between, or ``HOST``.
      source_slot, target_slot: where it is there: among the slots of the stage's own device, or among those that the
        peer or the host has for this slice.
    """

    tick: int
    stage: int
    microbatch: int
    piece: int
    source: int
    target: int
    source_slot: int
    target_slot: int


@dataclass(frozen=True)
class Swaps:
    """Where every stash is in every tick.

    Attributes:
      ticks: by stage, for how many ticks its stashes are away; 0 if they stay.
      slices: by stage, what goes where.
      own: by device, the slots for its own stage's stashes.
      guests: by stage, the slots that each of its peers has for its slice.
      hosted: by stage, those that the host has, if a slice is there.
      moves: in the order of ticks.
      written, read: by stage, the slot of each micro-batch when its forward pass writes it, and when its backward
        pass reads it; both on its own device.
    """

    ticks: tuple[int, ...]
    slices: tuple[tuple[Slice, ...], ...]
    own: tuple[int, ...]
    guests: tuple[int, ...]
    hosted: tuple[int, ...]
    moves: tuple[Move, ...]
    written: tuple[dict[int, int], ...]
    read: tuple[dict[int, int], ...]

    def away_in(self, stage: int, tick: int) -> int:
        """How many stashes of a stage are away in a tick."""
        earlier = [m for m in self.moves if m.stage == stage and m.tick < tick and m.piece == 0]
        return sum((m.source == stage) - (m.target == stage) for m in earlier)

    @property
    def slots(self) -> float:
        """How many stashes, slices as fractions of one, a device has room for where it is most; all of one size."""
        room = list(map(float, self.own))
        for slices, count in zip(self.slices, self.guests, strict=True):
            total = sum(one.bandwidth for one in slices)
            for one in slices:
                if one.target != HOST:
                    room[one.target] += count * one.bandwidth / total
        return max(room)


def swap_table(schedule: Schedule, ticks: Sequence[int], slices: Sequence[Sequence[Slice]]) -> Swaps:
    """The swaps in which every stash of a stage is away for some ticks; one whose interval is too short stays.

    Args:
      schedule: with one chunk on each device and whole backward passes.
      ticks: by stage; 0 for a stage whose stashes stay.
      slices: by stage; none for a stage whose stashes stay.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> swaps = swap_table(one_f_one_b(2, 4), (1, 0), ([Slice(1)], []))
      >>> swaps.own, swaps.guests, len(swaps.moves)
      ((2, 1), (1, 0), 8)
    """
    own, guests, hosted, moves = [], [], [], []
    written: list[dict[int, int]] = []
    read: list[dict[int, int]] = []
    for s, (away, parts) in enumerate(zip(ticks, slices, strict=True)):
        here, there = stays(schedule, s, away if parts else 0)
        own.append(most(here))
        guests.append(most(there))
        after = kept_by_host(there)
        hosted.append(most(after) if any(part.target == HOST for part in parts) else 0)
        written.append({})
        read.append({})
        for (j, _), slot in zip(here, _slots(here), strict=True):
            written[s].setdefault(j, slot)
            read[s][j] = slot
        for (j, stay), guest, host in zip(there, _slots(there), _slots(after), strict=True):
            for k, part in enumerate(parts):
                slot = host if part.target == HOST else guest
                moves.append(Move(stay.first - 1, s, j, k, s, part.target, written[s][j], slot))
                moves.append(Move(stay.last, s, j, k, part.target, s, slot, read[s][j]))
    moves.sort(key=lambda m: (m.tick, m.source, m.stage, m.piece))
    found = tuple(map(tuple, slices))
    counts = tuple(own), tuple(guests), tuple(hosted)
    return Swaps(tuple(ticks), found, *counts, tuple(moves), tuple(written), tuple(read))


#: A micro-batch, and how long its stash is in one place.
Visit = tuple[int, Stay]


def stays(schedule: Schedule, stage: int, away: int) -> tuple[list[Visit], list[Visit]]:
    """Where the stashes of a stage are, at home and with its peers or the host, if they are away for some ticks."""
    here: list[Visit] = []
    there: list[Visit] = []
    starts, ends = schedule.when(stage, Kind.FORWARD), schedule.when(stage, Kind.BACKWARD)
    for j, start in starts.items():
        if j not in ends:  # a frozen stage keeps nothing
            continue
        if 0 < away < ends[j] - start:
            here += [(j, Stay(start, start)), (j, Stay(start + away + 1, ends[j]))]
            there.append((j, Stay(start + 1, start + away)))
        else:
            here.append((j, Stay(start, ends[j])))
    return here, there


def kept_by_host(there: Sequence[Visit]) -> list[Visit]:
    """The same for the host, into whose memory a stash goes before, in the same tick, another is read out of it."""
    return [(j, Stay(stay.first - 1, stay.last)) for j, stay in there]


def most(found: Sequence[Visit]) -> int:
    """How many stashes are in one place at once."""
    return 1 + max(_slots(found), default=-1)


def _slots(found: Sequence[Visit]) -> list[int]:
    return addresses([stay for _, stay in found])


def slice_pages(pages: int, slices: Sequence[Slice]) -> tuple[int, ...]:
    """The pages of each slice: in proportion to bandwidths, by the largest remainder.

    Example:
      >>> slice_pages(100, [Slice(2, bandwidth=2.0), Slice(3, bandwidth=1.0)])
      (67, 33)
    """
    total = sum(one.bandwidth for one in slices)
    quotas = [pages * one.bandwidth / total for one in slices]
    found = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(slices)), key=lambda k: (found[k] - quotas[k], k))
    for k in by_remainder[: pages - sum(found)]:
        found[k] += 1
    return tuple(found)
