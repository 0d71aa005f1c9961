"""A schedule as the numbers that each device reads, tick by tick: stage, micro-batch, and where everything is."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpipe.array_types import ArrayLike
from jaxpipe.schedules import Kind, Schedule
from jaxpipe.schedules.allocate import Inbox, Stay, addresses


class Work(NamedTuple):
    """One kind of work, ``[devices, ticks]`` or a device's part of it."""

    microbatch: ArrayLike  # -1 for none
    branch: ArrayLike  # 0 for none, else one more than the stage
    stash: ArrayLike  # first page in the arena
    message: ArrayLike  # slot of the inbox
    saved: ArrayLike  # first page of the cotangents that wait for the weight part


class Row(NamedTuple):
    """The work of every device in each tick, ``[devices, ticks]``, or of one device in one tick.

    ``backward`` is work as a whole, or its input part where it is split; messages land in slots, -1: none.
    """

    forward: Work
    backward: Work
    weight: Work
    landed: Sequence[ArrayLike]  # of messages forward and back


class Arena(NamedTuple):
    """First pages of what waits, by stage and micro-batch."""

    stashes: dict[tuple[int, int], int]
    saved: dict[tuple[int, int], int]


def arena(schedule: Schedule, stash_pages: Sequence[int], saved_pages: Sequence[int]) -> Arena:
    """A place for every stash from forward to the end of backward work, and for cotangents that wait in between."""
    stashes, saved = {}, {}
    last = Kind.BACKWARD_WEIGHT if schedule.splits_backward else Kind.BACKWARD
    for device in range(schedule.num_devices):
        keys, stays = [], []
        for s in range(device, schedule.total_stages, schedule.num_devices):
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


def tick_table(schedule: Schedule, places: Arena, ahead: Inbox, back: Inbox) -> Row:
    """Return the numbers for a schedule whose stashes and messages have their places."""
    shape = schedule.num_devices, len(schedule.ticks)

    def work(kind: Kind, box: Inbox | None) -> Work:
        microbatch, branch, stash, saved = (np.full(shape, empty, np.int32) for empty in (-1, 0, 0, 0))
        for t, tick in enumerate(schedule.ticks):
            for device, actions in enumerate(tick):
                for action in (a for a in actions if a.kind is kind):
                    key = schedule.stage(device, action.chunk), action.microbatch
                    microbatch[device, t], branch[device, t] = action.microbatch, key[0] + 1
                    stash[device, t], saved[device, t] = places.stashes.get(key, 0), places.saved.get(key, 0)
        message = np.zeros(shape, np.int32) if box is None else np.asarray(box.read, np.int32)
        return Work(microbatch, branch, stash, message, saved)

    return Row(
        forward=work(Kind.FORWARD, ahead),
        backward=work(schedule.backward_kind, back),
        weight=work(Kind.BACKWARD_WEIGHT, None),
        landed=[np.asarray(box.landed, np.int32) for box in (ahead, back)],
    )
