"""Fine-tuning: single operators move between neighboring stages while that helps.

For graphs with too many cuts to look at all of them: stages found along one order of the operators are a start, from
which an operator may go to the stage of its readers, or of what it reads.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxpipe.costs.profile import Profile
from jaxpipe.planning.cuts.choose_plan import ROUNDING
from jaxpipe.planning.cuts.cost_models import CostModel, Stages
from jaxpipe.planning.cuts.cut_space import CutSpace, space_of


#: How many moves are priced at most.
MOST_MOVES = 1000


def move_operators(
    profile: Profile, space: CutSpace, model: CostModel, stages: Stages, seconds: float
) -> tuple[CutSpace, Stages, float]:
    """Move operators across cuts while the objective falls; returns a space of the new cuts, the stages, their cost."""
    cuts = [stages[0][0], *(last for _, last, _ in stages)]
    sets = np.array([space.holds(cut) for cut in cuts])
    best = space_of(profile, sets)
    chosen: Stages = tuple((k, k + 1, devices) for k, (*_, devices) in enumerate(stages))
    count, free = len(profile.names), np.ones(len(profile.names), bool)
    free[[v for group in profile.together for v in group]] = False
    sources, targets = np.array([edge[:2] for edge in profile.edges], int).reshape(-1, 2).T

    def moves(sets: np.ndarray) -> Iterator[np.ndarray]:
        for k, inside in enumerate(sets[1:-1], 1):
            needed = np.bincount(sources, inside[targets], count) > 0
            lacks = np.bincount(targets, ~inside[sources], count) > 0
            movable = np.where(inside, ~sets[k - 1] & ~needed, sets[k + 1] & ~lacks)
            for v in np.flatnonzero(free & movable):
                moved = sets.copy()
                moved[k, v] = not inside[v]
                if moved[k].sum() > moved[k - 1].sum() and moved[k + 1].sum() > moved[k].sum():
                    yield moved

    spent, improved = 0, True
    while improved and spent < MOST_MOVES:
        improved = False
        for moved in itertools.islice(moves(sets), MOST_MOVES - spent):
            spent += 1
            candidate = space_of(profile, moved)
            cost = model.objective(candidate, chosen)
            if cost < seconds / ROUNDING:
                best, sets, seconds, improved = candidate, moved, cost, True
                break
    return best, chosen, seconds
