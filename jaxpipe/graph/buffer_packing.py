"""The bytes that XLA reserves for buffers of which each is needed for some time: places without overlap.

XLA decides on all places before anything runs. Gaps between buffers that live at the same time stay empty, so that it
reserves more than is ever alive at once, by up to a fifth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


#: Buffers below this part of what is alive at the worst moment fill gaps; they are counted as alive, not placed.
SMALL = 1e-3


@dataclass(eq=False)
class Buffer:
    """Bytes that are needed from operator ``start`` to ``end``, and at an earlier moment ``before`` (-1: at none)."""

    start: int
    end: int
    bytes: int
    before: int = -1


def in_memory(buffers: Sequence[Buffer], room: float) -> list[Buffer]:
    """Return the buffers that are not kept beside the memory, where at any moment there is room for so many bytes.

    Those that are needed for the shortest time are kept there first.
    """
    if not room:
        return list(buffers)
    taken = np.zeros(max((buffer.end for buffer in buffers), default=0) + 1)
    rest = []
    for buffer in sorted(buffers, key=lambda buffer: (buffer.end - buffer.start, buffer.bytes)):
        time = slice(buffer.start, buffer.end + 1)
        if buffer.bytes + taken[time].max() > room:
            rest.append(buffer)
        else:
            taken[time] += buffer.bytes
    return rest


def alive_bytes(buffers: Sequence[Buffer]) -> int:
    """The most bytes that are needed at once."""
    if not buffers:
        return 0
    change = np.zeros(max(buffer.end for buffer in buffers) + 2, np.int64)
    times = [(buffer.start, buffer.end, buffer.bytes) for buffer in buffers]
    times += [(buffer.before, buffer.before, buffer.bytes) for buffer in buffers if buffer.before >= 0]
    for start, end, size in times:
        change[start] += size
        change[end + 1] -= size
    return int(np.cumsum(change).max())


def reserved_bytes(buffers: Sequence[Buffer]) -> int:
    """The bytes that hold all buffers, each in its place for all its time, as XLA finds places.

    That is best fit: large buffers first, each in the smallest gap between those that live at the same time. The same
    with long-lived buffers first is tried, too.
    """
    least = SMALL * alive_bytes(buffers)
    large = [buffer for buffer in buffers if buffer.bytes >= least]
    small = [buffer for buffer in buffers if buffer.bytes < least]
    by_size = sorted(large, key=lambda buffer: (-buffer.bytes, buffer.start - buffer.end))
    by_time = sorted(large, key=lambda buffer: (buffer.start - buffer.end, -buffer.bytes))
    return min(_best_fit(by_size), _best_fit(by_time)) + alive_bytes(small)


def _best_fit(buffers: Sequence[Buffer]) -> int:
    starts, ends, befores = (np.array([getattr(b, name) for b in buffers], int) for name in ("start", "end", "before"))
    first, behind = np.zeros((2, len(buffers)), int)
    for k, buffer in enumerate(buffers):
        together = (starts[:k] <= buffer.end) & (ends[:k] >= buffer.start)
        together |= (buffer.start <= befores[:k]) & (befores[:k] <= buffer.end)
        if buffer.before >= 0:
            together |= (starts[:k] <= buffer.before) & (ends[:k] >= buffer.before) | (befores[:k] == buffer.before)
        beside = np.flatnonzero(together)
        beside = beside[np.argsort(first[beside], kind="stable")]
        # Where each of them begins, and how far those before it reach.
        reached = np.maximum.accumulate(np.append(0, behind[beside]))[:-1]
        gaps = first[beside] - reached
        fitting = np.flatnonzero(gaps >= buffer.bytes)
        first[k] = reached[fitting[np.argmin(gaps[fitting])]] if len(fitting) else behind[beside].max(initial=0)
        behind[k] = first[k] + buffer.bytes
    return int(behind.max(initial=0))
