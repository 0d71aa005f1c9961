"""The actions of a schedule between which a stash is in other memory: a peer's, or the host's.

    device 0 of 4, 1F1B    F0  F1  F2  F3  B0  F4  B1  F5  B2 ...
    stash of 1                 leaves      returns ^
                               ^ after F1  before F4, one action ahead of B1

A stash leaves as soon as its forward pass has made it, and its way back begins ``LEAD`` actions before the one that
reads it. Both overlap with the work in between. After P. Jain et al., "Checkmate", MLSys 2020, and Q. Zhou et al.,
"MPress", HPCA 2023.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpipe.schedules.table import Kind, Schedule, StageNumber


#: The host's memory as the place of a stash; others are stages.
HOST = StageNumber(-1)

#: Actions of a device between the beginning of a stash's return and the one that reads it.
LEAD = 1


@dataclass(frozen=True)
class SwapPoints:
    """Swaps of one stage, by position in the order of its device's actions."""

    leaves: dict[int, int]  # by micro-batch, the position after which its stash leaves
    returns: dict[int, int]  # by micro-batch, the position before which it begins to return
    home: int  # the most stashes of the stage on its device at once
    away: int  # the most that are not


def swap_points(schedule: Schedule, stage: int) -> SwapPoints:
    """Return the swaps of a stage; a stash whose backward pass follows too soon stays.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> points = swap_points(one_f_one_b(4, 8), 0)
      >>> points.leaves[1], points.returns[1], points.home, points.away
      (1, 5, 2, 3)
    """
    chunk, order = schedule.chunk(stage), list(schedule.order(schedule.device(stage)))
    first: dict[int, int] = {}
    backward: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(order):
        if action.chunk != chunk:
            continue
        j = action.microbatch
        if action.kind is Kind.FORWARD:
            first[j] = position
            continue
        backward.setdefault(j, position)
        last[j] = position
    swapped = [j for j, position in backward.items() if position - LEAD - first[j] > 1]
    returns = {j: backward[j] - LEAD for j in swapped}
    stays = [(first[j], last[j]) for j in backward if j not in returns]
    stays += [(first[j], first[j]) for j in swapped]
    stays += [(returns[j], last[j]) for j in swapped]
    gone = [(first[j] + 1, returns[j] - 1) for j in swapped]
    return SwapPoints({j: first[j] for j in swapped}, returns, _most(stays), _most(gone))


def _most(intervals: Iterable[tuple[int, int]]) -> int:
    """The most intervals, ends included, that have a position in common."""
    changes = sorted(change for begin, end in intervals for change in ((begin, 1), (end + 1, -1)))
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
