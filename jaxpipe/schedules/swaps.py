"""Stashes that spend some ticks in a peer's memory, as transport rows beside a schedule.

Early stages hold more micro-batches than late ones, but every device reserves as much as the one that holds most. So
stage ``s`` and stage ``p - 1 - s`` share: the fuller one sends each stash to the other in the tick in which it is made,
and has it back ``away`` ticks later, in time for its backward pass. In each tick at most one stash goes each way.

    1f1b, 4 stages, steady state        stage 0  1  2  3       together
    in flight without                         7  5  3  1             16
    with                                      4  4  4  4             16

The pairing is that of T. Kim et al., "BPipe", ICML 2023.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.schedules.table import Kind, Schedule


@dataclass(frozen=True)
class Move:
    """One stash on its way, after the backward work of a tick.

    Attributes:
      tick: it is at the target from the next tick on.
      stage, microbatch: whose stash it is.
      source, target: stages whose devices it moves between.
      source_slot, target_slot: where it is there, among the device's own slots or among those for guests.
    """

    tick: int
    stage: int
    microbatch: int
    source: int
    target: int
    source_slot: int
    target_slot: int


@dataclass(frozen=True)
class Swaps:
    """Where every stash is in every tick.

    Attributes:
      own, guests: by device, the slots for its own stage's stashes and for those of its peer.
      moves: in the order of ticks.
      written, read: by stage, the slot of each micro-batch when its forward pass writes it, and when its backward
        pass reads it; both on its own device.
    """

    own: tuple[int, ...]
    guests: tuple[int, ...]
    moves: tuple[Move, ...]
    written: tuple[dict[int, int], ...]
    read: tuple[dict[int, int], ...]

    def away(self, stage: int) -> int:
        """The most stashes of a stage that are on its peer at the same time."""
        return max((self.away_in(stage, m.tick + 1) for m in self.moves), default=0)

    def away_in(self, stage: int, tick: int) -> int:
        """How many stashes of a stage are on its peer in a tick."""
        earlier = [m for m in self.moves if m.stage == stage and m.tick < tick]
        return sum((m.source == stage) - (m.target == stage) for m in earlier)

    @property
    def slots(self) -> int:
        """The most stashes that a device has room for."""
        return max(map(sum, zip(self.own, self.guests, strict=True)))

    def moved(self, device: int) -> int | None:
        """The stage whose stashes a device and its peer exchange; None if they exchange nothing."""
        return next((m.stage for m in self.moves if device in (m.source, m.target)), None)

    def address(self, device: int, stage: int, slot: int, sizes: Sequence[int]) -> int:
        """Where a slot begins on a device: its own come first. ``sizes`` are those of each stage's stash."""
        return slot * sizes[stage] + (0 if device == stage else self.own[device] * sizes[device])

    def arena(self, sizes: Sequence[int]) -> int:
        """The size of every device's arena, if it is read and written through a window of the largest stash."""
        ends = [
            self.address(device, stage, count - 1, sizes) + max(sizes)
            for device in range(len(self.own))
            for stage, count in ((device, self.own[device]), (peer(device, len(self.own)), self.guests[device]))
            if count
        ]
        return max(ends, default=0)

    def columns(self, device: int, num_ticks: int, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """For each tick the address of what a device sends to its peer, and that for what arrives; -1 for none."""
        sent, landed = [-1] * num_ticks, [-1] * num_ticks
        for m in self.moves:
            if m.source == device:
                sent[m.tick] = self.address(device, m.stage, m.source_slot, sizes)
            if m.target == device:
                landed[m.tick] = self.address(device, m.stage, m.target_slot, sizes)
        return sent, landed


def peer(stage: int, num_stages: int) -> int:
    """The stage with which another shares its memory."""
    return num_stages - 1 - stage


def balance(schedule: Schedule) -> Swaps | None:
    """Swaps with which every device needs the fewest slots; None if no swap makes them fewer.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> schedule = one_f_one_b(4, 16)
      >>> schedule.in_flight(0), balance(schedule).slots
      (7, 4)
    """
    p = schedule.num_stages
    usual = max(schedule.in_flight(s) for s in range(p))
    stays: list[list[tuple[int, int, int, int]]] = [[] for _ in range(p)]
    for s in range(p):
        other = peer(s, p)
        if schedule.in_flight(s) < schedule.in_flight(other) or (s > other):
            continue
        options = [_stays(schedule, s, other, away) for away in range(len(schedule.ticks))]
        best = min(options, key=lambda pair: (max(map(_most, pair)), sum(map(len, pair))))
        stays[s] = best[0]
        if other != s:
            stays[other] = best[1]
    swaps = _described(stays)
    return swaps if swaps.slots < usual else None


def _stays(
    schedule: Schedule, s: int, other: int, away: int
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
    """``(first tick, last tick, stage, micro-batch)`` of what is on each of two devices, ``s`` sending to ``other``."""
    here: list[tuple[int, int, int, int]] = []
    there: list[tuple[int, int, int, int]] = []
    starts, ends = schedule.when(s, Kind.FORWARD), schedule.when(s, Kind.BACKWARD)
    for j, start in starts.items():
        if other != s and 0 < away < ends[j] - start:
            here += [(start, start, s, j), (start + away + 1, ends[j], s, j)]
            there.append((start + 1, start + away, s, j))
        else:
            here.append((start, ends[j], s, j))
    if other != s:
        starts, ends = schedule.when(other, Kind.FORWARD), schedule.when(other, Kind.BACKWARD)
        there += [(start, ends[j], other, j) for j, start in starts.items()]
    return here, there


def _most(stays: list[tuple[int, int, int, int]]) -> int:
    """How many stashes are there at once."""
    return max((sum(a <= t <= b for a, b, *_ in stays) for t in {a for a, *_ in stays}), default=0)


def _slots(stays: list[tuple[int, int, int, int]]) -> dict[tuple[int, int, int, int], int]:
    """The lowest slot that is free for each stay."""
    taken: dict[tuple[int, int, int, int], int] = {}
    for stay in sorted(stays):
        busy = {slot for (_, last, *_), slot in taken.items() if last >= stay[0]}
        taken[stay] = next(k for k in range(len(stays)) if k not in busy)
    return taken


def _described(stays: list[list[tuple[int, int, int, int]]]) -> Swaps:
    where: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    counts = []
    for device, here in enumerate(stays):
        for guests in (False, True):
            places = _slots([stay for stay in here if (stay[2] != device) == guests])
            counts.append(max(places.values(), default=-1) + 1)
            for (first, _, s, j), slot in places.items():
                where.setdefault((s, j), []).append((first, device, slot))
    moves, written, read = [], [{} for _ in stays], [{} for _ in stays]
    for (s, j), path in where.items():
        path.sort()
        written[s][j], read[s][j] = path[0][2], path[-1][2]
        for (_, source, source_slot), (first, target, target_slot) in itertools.pairwise(path):
            moves.append(Move(first - 1, s, j, source, target, source_slot, target_slot))
    moves.sort(key=lambda m: (m.tick, m.source))
    return Swaps(tuple(counts[::2]), tuple(counts[1::2]), tuple(moves), tuple(written), tuple(read))
