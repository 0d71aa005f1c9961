"""Places of arrays that wait for later work: addresses in an arena, slots in an inbox."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.schedules.table import Kind, Schedule


class Stay(NamedTuple):
    """Something of some size that takes up room from one tick to another, both included."""

    first: int
    last: int
    size: int = 1


def addresses(stays: Sequence[Stay]) -> list[int]:
    """An address for each stay, so that none overlap: in the order in which they begin, the lowest that is free.

    Example:
      >>> addresses([Stay(0, 3, 2), Stay(1, 1), Stay(2, 4), Stay(4, 5, 2)])
      [0, 2, 2, 0]
    """
    if len({stay.size for stay in stays}) == 1:
        return [stays[0].size * slot for slot in _slots(stays)]
    starts = [0] * len(stays)
    placed: list[int] = []
    for k in sorted(range(len(stays)), key=lambda k: stays[k].first):
        beside = sorted((starts[i], starts[i] + stays[i].size) for i in placed if stays[i].last >= stays[k].first)
        start = 0
        for low, high in beside:
            if low >= start + stays[k].size:
                break
            start = max(start, high)
        starts[k] = start
        placed.append(k)
    return starts


def _slots(stays: Sequence[Stay]) -> list[int]:
    """Return the places if all are of one size, in far less time; no more slots are used than stays at once."""
    slots = [0] * len(stays)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for k in sorted(range(len(stays)), key=lambda k: stays[k].first):
        while busy and busy[0][0] < stays[k].first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slots[k] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (stays[k].last, slots[k]))
    return slots


@dataclass(frozen=True)
class Inbox:
    """Slots of the messages of one direction that wait on each device; all arrive at the end of a tick."""

    slots: int  # the most messages that wait on a device at once
    direct: bool  # every message is read in the very next tick
    # by device and tick, the slot for what arrives at the tick's end; -1 for nothing needed
    landed: tuple[tuple[int, ...], ...]
    # by device and tick, the slot of the message that the tick's work needs; 0 for none
    read: tuple[tuple[int, ...], ...]


def inbox(schedule: Schedule, kind: Kind) -> Inbox:
    """Return where the messages of forward or of backward work wait; ``kind`` is what makes and what reads them.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> [inbox(one_f_one_b(4, 8, paired=paired), Kind.FORWARD).direct for paired in (True, False)]
      [True, False]
    """
    p, count = schedule.num_devices, schedule.total_stages
    landed, read = ([[empty] * len(schedule.ticks) for _ in range(p)] for empty in (-1, 0))
    when = [schedule.when(*schedule.home(s, kind)) for s in range(count)]
    direct, slots = True, 1
    for device in range(p):
        messages = []
        for target in range(device, count, p):
            source = target - 1 if kind is Kind.FORWARD else target + 1
            if 0 <= source < count:
                messages += [(when[source][j], tick) for j, tick in when[target].items()]
        places = addresses([Stay(sent + 1, tick) for sent, tick in messages])
        for (sent, tick), slot in zip(messages, places, strict=True):
            landed[device][sent], read[device][tick] = slot, slot
            direct = direct and tick == sent + 1
            slots = max(slots, slot + 1)
    return Inbox(slots, direct, tuple(map(tuple, landed)), tuple(map(tuple, read)))
