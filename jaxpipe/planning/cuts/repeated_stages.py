"""Plans whose inner stages are alike, for programs that repeat themselves: layer after layer, cut at the same places.

Stages that compute the same are compiled once (``jaxpipe.runtime.stage_switch``), and a search that moves one cut at a
time seldom gets from one such plan to another.
"""

from collections.abc import Iterator

import numpy as np

from jaxpipe.planning.cuts.cost_models import Stages
from jaxpipe.planning.cuts.cut_space import CutSpace


#: How many plans are worth a price.
MOST_PLANS = 256
#: Sums of the same numbers, from different places of a program, differ by less than this part of all.
ROUNDING = 1e-9


def repeated_plans(space: CutSpace, like: Stages) -> list[Stages]:
    """Plans on the same devices as another whose stages, but for the first and the last, cost the same in all.

    They are those with the least work in the slowest stage, at most ``MOST_PLANS``; none for a space that is not of one
    order of the operators, or of fewer than four stages.
    """
    count, inner = len(space.crossing), len(like) - 2
    if inner < 2 or not space.nested[np.arange(count - 1), np.arange(1, count)].all():
        return []
    priced_cuts = []
    for distance in range(1, (count - 2) // inner + 1):
        for first in _repetitions(space, distance, inner):
            cuts = [0, *range(first, first + inner * distance + 1, distance), count - 1]
            priced_cuts.append((float(np.diff(space.seconds[cuts]).max()), cuts))
    priced_cuts.sort()
    groups = [devices for *_, devices in like]
    return [tuple(zip(cuts, cuts[1:], groups, strict=False)) for _, cuts in priced_cuts[:MOST_PLANS]]


def _repetitions(space: CutSpace, distance: int, times: int) -> Iterator[int]:
    """The cuts behind which the same comes so many times, each time ``distance`` cuts further.

    What is stored is left aside: where layers are alike, it may still alternate in a plan for the whole program.
    """
    sums = np.stack([space.forward, space.backward, space.parameters])
    steps = np.concatenate([np.diff(sums), space.crossing[None, 1:]])
    unit = ROUNDING * np.maximum(np.concatenate([sums[:, -1], space.crossing.max(keepdims=True)]), 1e-300)
    differs = (np.abs(steps[:, distance:] - steps[:, :-distance]) > unit[:, None]).any(0)
    before = np.append(0, np.cumsum(differs))
    length = (times - 1) * distance
    starts = np.arange(1, len(space.crossing) - 1 - times * distance)
    same = before[starts + length] == before[starts]
    same &= np.abs(space.crossing[starts] - space.crossing[starts + distance]) <= unit[-1]
    yield from starts[same].tolist()
