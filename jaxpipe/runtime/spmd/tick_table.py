"""A schedule as the numbers that each device reads, tick by tick: stage, micro-batch, and where everything is.

What a device keeps for a later tick is in its mail or its arena, with a table each: for each stage and each of
``KEPT``, one slot after the other, of as many pages as the stage needs, and as many slots as it uses at the same time.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.table import Kind, Schedule


#: What is kept of each micro-batch of a stage, by position: messages of the stage before and of the next one, from the
#: tick after they were sent to the one that reads them; the stash, from forward to the end of backward work; and
#: cotangents that wait for the weight part.
KEPT = ARRIVED, RETURNED, STASH, SAVED = range(4)


class TickTable(NamedTuple):
    """The work and the messages of each device in each tick, and the room that they refer to.

    Work is a row of numbers: the micro-batch, the branch (0 for none, else one more than the stage), and the first page
    of each of ``KEPT``. Of a message, the first page of where it lands, and how many are needed: none, or all.
    """

    work: np.ndarray  # ``[kinds, devices, ticks, 2 + len(KEPT)]``; kinds: forward, backward, its weight part
    landed: np.ndarray  # ``[2, devices, ticks, 2]``, of messages forward and back
    pages: int


def tick_table(schedule: Schedule, pages: Sequence[Sequence[int]]) -> TickTable:
    """Return the numbers for a schedule; ``pages`` has how many are kept, by stage and ``KEPT``.

    Each thing is read and written through a window of the largest of its kind, so that many pages are behind its first.

    Example:
      >>> from jaxpipe.schedules import gpipe
      >>> tick_table(gpipe(2, 4), [[0, 1, 2, 0], [1, 0, 3, 0]]).pages  # 4 stashes and a message in the second
      13
    """
    kinds = (Kind.FORWARD, schedule.backward_kind, Kind.BACKWARD_WEIGHT)
    shape = schedule.num_devices, len(schedule.ticks)
    work, landed = np.zeros((3, *shape, 2 + len(KEPT)), np.int32), np.zeros((2, *shape, 2), np.int32)
    windows, most = np.max(pages, axis=0), 0
    for device in schedule.device_numbers:
        page = 0
        for s in schedule.stage_of[device]:
            forward, backward, weight = (schedule.stage_ticks(s, kind) for kind in kinds)
            arrived, returned = (
                {j: t + 1 for j, t in schedule.stage_ticks(source, kind).items()}
                for source, kind in ((s - 1, kinds[0]), (s + 1, kinds[1]))
            )
            last = weight if schedule.splits_backward else backward
            first = np.zeros((len(KEPT), schedule.num_microbatches), np.int32)
            stays = (arrived, forward), (returned, backward), (forward, last), (backward, weight)
            for what, (begin, end) in enumerate(stays):
                kept = [j for j in end if j in begin]
                places = slots([(begin[j], end[j]) for j in kept])
                first[what, kept] = page + pages[s][what] * np.array(places, np.int32)
                page += pages[s][what] * (1 + max(places, default=-1))
                most = max([most, *(first[what, kept] + windows[what])])
                if what in (ARRIVED, RETURNED):
                    for j in kept:
                        landed[what, device, begin[j] - 1] = first[what, j], pages[s][what]
            for k, ticks in enumerate((forward, backward, weight)):
                for j, t in ticks.items():
                    work[k, device, t] = j, s + 1, *first[:, j]
    return TickTable(work, landed, int(most))


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
