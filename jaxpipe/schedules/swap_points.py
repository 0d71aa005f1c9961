"""The actions of a schedule between which a stash is in other memory: a peer's, or the host's.

    device 0 of 4, 1F1B    F0  F1  F2  F3  B0  F4  B1  F5  B2  F6  B3 ...
    stash of 3                         leaves              returns ^
    on its device                      x   x               x   x   x
    in other memory                        x   x   x   x   x   x   x

A stash leaves as soon as its forward pass has made it, and its way back begins ``LEAD`` actions before the one that
reads it. Both overlap with the work in between, for as long as which it is in both memories: the host waits for a copy
just before it asks for the action behind. After P. Jain et al., "Checkmate", MLSys 2020, and Q. Zhou et al.,
"MPress", HPCA 2023.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpipe.schedules.table import Kind, Schedule, StageNumber


#: The host's memory as the place of a stash; others are stages.
HOST = StageNumber(-1)

#: Actions of a device that a copy overlaps with: from the beginning of a stash's return to the one that reads it.
LEAD = 1


@dataclass(frozen=True)
class SwapPoints:
    """Swaps of one stage, by position in the order of its device's actions."""

    leaves: dict[int, int]  # by micro-batch, the position after which its stash leaves
    returns: dict[int, int]  # by micro-batch, the position before which it begins to return
    home: int  # the most stashes of the stage on its device at once
    away: int  # the most that are in other memory at once

    def missing(self, j: int) -> range:
        """Return the positions at which the stash of a micro-batch is not on its device."""
        return range(self.leaves[j] + 1 + LEAD, self.returns[j])

    def elsewhere(self, j: int) -> range:
        """Return the positions at which it is in other memory."""
        return range(self.leaves[j] + 1, self.returns[j] + LEAD + 1)


def swap_points(schedule: Schedule, stage: int) -> SwapPoints:
    """Return the swaps of a stage; a stash whose backward pass follows too soon stays.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> points = swap_points(one_f_one_b(4, 8), 0)
      >>> points.leaves[3], points.returns[3], points.home, points.away
      (3, 9, 3, 4)
    """
    chunk, order = schedule.chunk(stage), list(schedule.order(schedule.device(stage)))
    positions: dict[Kind, dict[int, int]] = {kind: {} for kind in Kind}
    for position, action in enumerate(order):
        if action.chunk == chunk:
            positions[action.kind][action.microbatch] = position
    first, backward = positions[Kind.FORWARD], positions[schedule.backward_kind]
    last = positions[Kind.BACKWARD_WEIGHT] or backward
    returns = {j: position - LEAD for j, position in backward.items()}
    every = SwapPoints(first, returns, 0, 0)
    swapped = [j for j in backward if every.missing(j)]
    spans = [(first[j], last[j]) for j in backward if j not in swapped]
    spans += [(first[j], every.missing(j).start - 1) for j in swapped]
    spans += [(returns[j], last[j]) for j in swapped]
    away = [(span.start, span.stop - 1) for span in map(every.elsewhere, swapped)]
    leaves, returns = ({j: positions[j] for j in swapped} for positions in (first, returns))
    return SwapPoints(leaves, returns, _most(spans), _most(away))


def _most(intervals: Iterable[tuple[int, int]]) -> int:
    """The most intervals, ends included, that have a position in common."""
    changes = sorted(change for begin, end in intervals for change in ((begin, 1), (end + 1, -1)))
    return max(itertools.accumulate((change for _, change in changes), initial=0))
