"""A schedule as the numbers that each device reads, tick by tick: stage, micro-batch, and where everything is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules import Kind, Schedule
from jaxpipe.schedules.allocate import Inbox, Stay, addresses, inbox


class Work(NamedTuple):
    """One kind of work, ``[devices, ticks]`` or a device's part of it.

    Attributes:
      microbatch: -1 for none.
      branch: 0 for none, else one more than the stage.
      stash: first page of the stash in the arena.
      message: slot of the inbox with what a neighbor sent.
      saved: first page of the cotangents that wait for the weight part of the backward work.
    """

    microbatch: np.ndarray
    branch: np.ndarray
    stash: np.ndarray
    message: np.ndarray
    saved: np.ndarray


class Columns(NamedTuple):
    """The work of every device in each tick, ``[devices, ticks]``.

    Attributes:
      forward, backward, weight: work; ``backward`` as a whole, or its input part where it is split.
      forward_inbox, backward_inbox: where messages wait.
    """

    forward: Work
    backward: Work
    weight: Work
    forward_inbox: Inbox
    backward_inbox: Inbox


class Arena(NamedTuple):
    """First pages of what waits, by stage and micro-batch.

    Attributes:
      stashes: of what forward work stores for backward work.
      saved: of the cotangents that wait for the weight part of the backward work.
    """

    stashes: dict[tuple[int, int], int]
    saved: dict[tuple[int, int], int]


def arena(schedule: Schedule, stash_pages: Sequence[int], saved_pages: Sequence[int]) -> Arena:
    """A place for every stash from forward to the end of backward work, and for cotangents that wait in between.

    Args:
      stash_pages, saved_pages: by stage.
    """
    stashes, saved = {}, {}
    last = Kind.BACKWARD_WEIGHT if schedule.splits_backward else Kind.BACKWARD
    for device in range(schedule.num_stages):
        keys, stays = [], []
        for s in range(device, schedule.total_stages, schedule.num_stages):
            kinds = Kind.FORWARD, schedule.backward_kind, last
            forward, split, used = (schedule.when(*schedule.home(s, kind)) for kind in kinds)
            for j in used:
                keys.append((stashes, (s, j)))
                stays.append(Stay(forward[j], used[j], stash_pages[s]))
                if schedule.splits_backward:
                    keys.append((saved, (s, j)))
                    stays.append(Stay(split[j], used[j], saved_pages[s]))
        for (kept, key), address in zip(keys, addresses(stays), strict=True):
            kept[key] = address
    return Arena(stashes, saved)


def columns(schedule: Schedule, places: Arena) -> Columns:
    """The numbers for a schedule whose stashes have their places."""
    shape = schedule.num_stages, len(schedule.ticks)

    def work(kind: Kind, box: Inbox | None) -> Work:
        microbatch, branch, stash, saved = (np.full(shape, empty, np.int32) for empty in (-1, 0, 0, 0))
        for t, tick in enumerate(schedule.ticks):
            for device, actions in enumerate(tick):
                for action in (a for a in actions if a.kind is kind):
                    key = action.chunk * schedule.num_stages + device, action.microbatch
                    microbatch[device, t], branch[device, t] = action.microbatch, key[0] + 1
                    stash[device, t], saved[device, t] = places.stashes.get(key, 0), places.saved.get(key, 0)
        message = np.zeros(shape, np.int32) if box is None else np.asarray(box.read, np.int32)
        return Work(microbatch, branch, stash, message, saved)

    forward_inbox, backward_inbox = inbox(schedule, Kind.FORWARD), inbox(schedule, schedule.backward_kind)
    return Columns(
        forward=work(Kind.FORWARD, forward_inbox),
        backward=work(schedule.backward_kind, backward_inbox),
        weight=work(Kind.BACKWARD_WEIGHT, None),
        forward_inbox=forward_inbox,
        backward_inbox=backward_inbox,
    )
