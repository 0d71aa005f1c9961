"""A schedule as the numbers that each device reads, tick by tick: stage, micro-batch, and where everything is.

What a device keeps for a later tick is in its mail or its arena: for each stage and each of ``KEPT``, one slot after
the other, of as many pages as the stage needs, and as many slots as it uses at the same time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.table import Kind, Schedule


#: What is kept of each micro-batch of a stage, by position. In the mail: messages of the stage before and of the next
#: one, from the tick after they were sent to the one that reads them. In the arena: the stash, from forward to the end
#: of backward work; and cotangents that wait for the weight part.
KEPT = ARRIVED, RETURNED, STASH, SAVED = range(4)


class TickTable(NamedTuple):
    """The work and the messages of each device in each tick, and the room that they refer to.

    Work is a row of numbers: the micro-batch, the branch (0 for none, else one more than the stage), and the first page
    of each of ``KEPT``. Of a message, the first page of where it lands, and how many are needed: none, or all.
    """

    work: np.ndarray  # ``[devices, ticks, kinds, 2 + len(KEPT)]``; kinds: forward, backward, its weight part
    landed: np.ndarray  # ``[devices, ticks, 2, 2]``, of messages forward and back
    pages: tuple[int, int]  # of the mail, and of the arena


def tick_table(schedule: Schedule, pages: Sequence[Sequence[int]]) -> TickTable:
    """Return the numbers for a schedule; ``pages`` has how many are kept, by stage and ``KEPT``.

    Each thing is read and written through a window of the largest of its kind, so that many pages are behind its first.

    Example:
      >>> from jaxpipe.schedules import gpipe
      >>> tick_table(gpipe(2, 4), [[0, 1, 2, 0], [1, 0, 3, 0]]).pages  # a message, and 4 stashes, in the second
      (1, 12)
    """
    kinds = (Kind.FORWARD, schedule.backward_kind, Kind.BACKWARD_WEIGHT)
    shape = schedule.num_devices, len(schedule.ticks)
    work, landed = np.zeros((*shape, 3, 2 + len(KEPT)), np.int32), np.zeros((*shape, 2, 2), np.int32)
    windows, most = np.max(pages, axis=0), [0, 0]
    for device in schedule.device_numbers:
        page = [0, 0]
        for s in schedule.stage_of[device]:
            forward, backward, weight = (schedule.stage_ticks(s, kind) for kind in kinds)
            arrived, returned = schedule.stage_ticks(s - 1, kinds[0]), schedule.stage_ticks(s + 1, kinds[1])
            last = weight if schedule.splits_backward else backward
            first = np.zeros((len(KEPT), schedule.num_microbatches), np.int32)
            stays = (arrived, forward), (returned, backward), (forward, last), (backward, weight)
            for what, (begin, end) in enumerate(stays):
                room, kept = what // STASH, [j for j in end if j in begin]
                # What is sent in a tick is there from the next one on.
                places = slots([(begin[j] + (what < STASH), end[j]) for j in kept])
                first[what, kept] = page[room] + pages[s][what] * np.array(places, np.int32)
                page[room] += pages[s][what] * (1 + max(places, default=-1))
                most[room] = max([most[room], *(first[what, kept] + windows[what]).tolist()])
                if what < STASH:
                    for j in kept:
                        landed[device, begin[j], what] = first[what, j], pages[s][what]
            for k, ticks in enumerate((forward, backward, weight)):
                for j, t in ticks.items():
                    work[device, t, k] = j, s + 1, *first[:, j]
    return TickTable(work, landed, (most[0], most[1]))


def slots(stays: Sequence[tuple[int, int]]) -> list[int]:
    """Return a slot for each stay, first and last tick included, so that none overlap; no more than stay at once.

    Example:
      >>> slots([(0, 3), (1, 1), (2, 4), (4, 5)])
      [0, 1, 1, 0]
    """
    numbers, ends = [0] * len(stays), []  # of each slot, the last tick of whoever had it last
    for k in sorted(range(len(stays)), key=lambda k: stays[k]):
        first, last = stays[k]
        numbers[k] = next((n for n, end in enumerate(ends) if end < first), len(ends))
        ends[numbers[k] :] = [last, *ends[numbers[k] + 1 :]]
    return numbers
