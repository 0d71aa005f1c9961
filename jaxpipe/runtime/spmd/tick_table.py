"""A schedule as the numbers that each device reads, tick by tick: stage, micro-batch, and where everything is.

A device has a place for each stash, from forward to the end of backward work, for cotangents that wait for the weight
part, and for each message, from the tick after it was sent to the one that reads it.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.array_types import ArrayLike
from jaxpipe.schedules import Kind, Schedule


class Work(NamedTuple):
    """One kind of work, ``[devices, ticks]`` or a device's part of it."""

    microbatch: ArrayLike  # -1 for none
    branch: ArrayLike  # 0 for none, else one more than the stage
    stash: ArrayLike  # first page in the arena
    saved: ArrayLike  # first page of the cotangents that wait for the weight part
    message: ArrayLike  # slot of the inbox


class Row(NamedTuple):
    """The work of every device in each tick, ``[devices, ticks]``, or of one device in one tick.

    ``backward`` is work as a whole, or its input part where it is split; messages land in slots, -1: none.
    """

    forward: Work
    backward: Work
    weight: Work
    landed: Sequence[ArrayLike]  # of messages forward and back


class TickTable(NamedTuple):
    """The numbers of a schedule, and the room that they refer to."""

    rows: Row
    arena_pages: int  # each thing is read and written through a window of the largest of its kind
    inbox_slots: tuple[int, int]  # for messages forward and back


def tick_table(schedule: Schedule, stash_pages: Sequence[int], saved_pages: Sequence[int]) -> TickTable:
    """Return the numbers for a schedule; stashes and waiting cotangents take so many pages, by stage."""
    stashes: dict[tuple[int, int], int] = {}  # by stage and micro-batch
    saved: dict[tuple[int, int], int] = {}
    last = Kind.BACKWARD_WEIGHT if schedule.splits_backward else Kind.BACKWARD
    for device in schedule.device_numbers:
        page = 0
        for s in range(device, schedule.total_stages, schedule.num_devices):
            kinds = Kind.FORWARD, schedule.backward_kind, last
            forward, split, used = (schedule.when(*schedule.home(s, kind)) for kind in kinds)
            for firsts, begins, pages in ((stashes, forward, stash_pages[s]), (saved, split, saved_pages[s])):
                places = slots([(begins[j], used[j]) for j in used])
                firsts.update({(s, j): page + pages * slot for j, slot in zip(used, places, strict=True)})
                page += pages * (1 + max(places, default=-1))

    def work(kind: Kind, message: np.ndarray) -> Work:
        microbatch, branch, stash, waiting = (np.full(message.shape, empty, np.int32) for empty in (-1, 0, 0, 0))
        for t, tick in enumerate(schedule.ticks):
            for device, actions in enumerate(tick):
                for action in (a for a in actions if a.kind is kind):
                    key = schedule.stage(device, action.chunk), action.microbatch
                    microbatch[device, t], branch[device, t] = action.microbatch, key[0] + 1
                    stash[device, t], waiting[device, t] = stashes.get(key, 0), saved.get(key, 0)
        return Work(microbatch, branch, stash, waiting, message)

    (ahead, landed_ahead, read_ahead), (back, landed_back, read_back) = (
        inbox(schedule, kind) for kind in (Kind.FORWARD, schedule.backward_kind)
    )
    rows = Row(
        forward=work(Kind.FORWARD, read_ahead),
        backward=work(schedule.backward_kind, read_back),
        weight=work(Kind.BACKWARD_WEIGHT, np.zeros_like(read_back)),
        landed=[landed_ahead, landed_back],
    )
    windows = (stashes, stash_pages), (saved, saved_pages)
    ends = (first + max(pages) for firsts, pages in windows for first in firsts.values())
    return TickTable(rows, max(ends, default=0), (ahead, back))


def slots(stays: Sequence[tuple[int, int]]) -> list[int]:
    """Return a slot for each stay, first and last tick included, so that none overlap; no more than stay at once.

    Example:
      >>> slots([(0, 3), (1, 1), (2, 4), (4, 5)])
      [0, 1, 1, 0]
    """
    numbers = [0] * len(stays)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for k in sorted(range(len(stays)), key=lambda k: stays[k]):
        first, last = stays[k]
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        numbers[k] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, numbers[k]))
    return numbers


def inbox(schedule: Schedule, kind: Kind) -> tuple[int, np.ndarray, np.ndarray]:
    """Return where messages wait that work of a kind makes and reads: how many slots a device needs for them;
    by device and tick, the slot of what arrives at its end (-1 for nothing needed), and of what its work reads.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> inbox(one_f_one_b(4, 8), Kind.FORWARD)[0]
      1
    """
    shape = schedule.num_devices, len(schedule.ticks)
    landed, read, most = np.full(shape, -1, np.int32), np.zeros(shape, np.int32), 1
    when = [schedule.when(*schedule.home(s, kind)) for s in range(schedule.total_stages)]
    for device in schedule.device_numbers:
        messages = []
        for target in range(device, schedule.total_stages, schedule.num_devices):
            source = target - 1 if kind is Kind.FORWARD else target + 1
            if 0 <= source < schedule.total_stages:
                messages += [(when[source][j], tick) for j, tick in when[target].items()]
        places = slots([(sent + 1, tick) for sent, tick in messages])
        for (sent, tick), slot in zip(messages, places, strict=True):
            landed[device, sent] = read[device, tick] = slot
        most = max(most, 1 + max(places, default=0))
    return most, landed, read
