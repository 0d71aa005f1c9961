"""The search for stages that make a step short, as ``jaxpipe.planning.cuts.cost_models.Synchronous`` counts it."""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxpipe.planning.cuts.cost_models import Stages, Synchronous
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.planning.cuts.repeated_stages import repeated_plans
from jaxpipe.planning.cuts.search_cuts import ROUNDING, Counts, Search


#: How much more than beside a stage a link counts, in further plans to begin with.
WEIGHTS = (4.0, 16.0)
#: With more cuts than this no attempt is made to look at all plans.
FEW_CUTS = 40
#: How many partial plans are looked at to show that none is better.
MOST_NODES = 20_000


@dataclass(frozen=True)
class Found:
    """The best stages that were found.

    No plan is faster than ``bound``: the best price, if all plans were looked at, or else what the slowest stage needs
    for all micro-batches. ``ties`` are as fast; 1 if not all were looked at.
    """

    seconds: float
    stages: Stages
    bound: float
    ties: int


def shortest_step(search: Search, model: Synchronous, slack: float = 0.0) -> Found | None:
    """Stages with a short step; the shortest of all that the search covers, if branch and bound gets through.

    Plans whose costliest stage or link is cheap are the seeds, links counting more or less, and plans whose stages are
    alike; cuts are then moved one by one while the step gets shorter; at last branch and bound either finds a better
    plan, proves that no better one exists, or gives up. Of plans that are as good, one whose stages are alike is taken.
    """
    least = search.least()
    if least == math.inf:
        return None
    seeds = [search.lightest(least)]
    for weight in WEIGHTS:
        weighted = replace(search, model=replace(model, weight=weight))
        seeds.append(weighted.lightest(weighted.least()))
    known = [stages for stages in dict.fromkeys(seeds) if stages]
    known = [(model.objective(search.space, stages), stages) for stages in known]
    _, like = min(known, key=lambda plan: plan[0])
    alike = [stages for stages in repeated_plans(search.space, like) if search.fits(stages)]
    repeated = sorted((model.objective(search.space, stages), stages) for stages in alike)
    known += repeated[:1]
    shifted = [shift_cuts(search, *plan) for plan in known]
    best = min(shifted, key=lambda plan: plan[0])
    tree = _BranchAndBound(search, model, best)
    proven = len(search.space.crossing) <= FEW_CUTS and tree.run()
    seconds, stages = tree.best
    bound = seconds if proven else step_bound(search, model, least)
    space = search.space
    for price, other in (*known, *shifted, *repeated):
        if price <= tree.best[0] * (1 + slack) and sent(space, other) < sent(space, stages):
            seconds, stages = price, other
    least_sent = sent(space, stages)
    ties = [plan for plan in repeated if plan[0] <= seconds * ROUNDING and sent(space, plan[1]) <= least_sent]
    if ties:
        seconds, stages = min(ties, key=lambda plan: sent(space, plan[1]))
    return Found(seconds, stages, bound, tree.ties if proven else 1)


def step_bound(search: Search, model: Synchronous, least: float) -> float:
    """The least time of a step, if no plan has a costliest stage or link below ``least``.

    What is slowest happens for every micro-batch, and in front of the first round or behind the last one all others
    have their turn once; unless some only work forward, while another is at its backward pass.
    """
    if model.frozen:
        return model.m * least
    sizes = search.limits.group_sizes
    once = float(search.space.seconds[-1]) / (max(model.network.speed) * max(sizes))
    return model.m * least + min(sizes) * max(0.0, once - least)


def sent(space: CutSpace, stages: Stages) -> float:
    """Bytes that cross all cuts."""
    return float(sum(space.crossing[last] for _, last, _ in stages))


def shift_cuts(search: Search, seconds: float, stages: Stages) -> tuple[float, Stages]:
    """Move one cut at a time to a neighboring one while that makes the step shorter."""
    space = search.space
    improved = True
    while improved:
        improved = False
        for k in range(len(stages) - 1):
            first, cut, group = stages[k]
            _, last, group_behind = stages[k + 1]
            for other in _neighbors(space, first, cut, last):
                moved = (*stages[:k], (first, other, group), (other, last, group_behind), *stages[k + 2 :])
                shorter = search.model.objective(space, moved)
                if shorter < seconds / ROUNDING and search.fits(moved):
                    stages, seconds, improved = moved, shorter, True
                    break
    return seconds, stages


def _neighbors(space: CutSpace, first: int, cut: int, last: int) -> list[int]:
    """Cuts between two others, those nearest to a third first."""
    between = np.flatnonzero(space.nested[first] & space.nested[:, last])
    distance = np.abs(space.seconds[between] - space.seconds[cut])
    return [int(c) for c in between[np.argsort(distance, kind="stable")][:9] if c != cut]


class _BranchAndBound:
    """Every plan, from the last stage to the first, unless it cannot be better than the best so far."""

    def __init__(self, search: Search, model: Synchronous, best: tuple[float, Stages]):
        self.search, self.model, self.best = search, model, best
        self.nodes, self.ties = 0, 0

    def run(self) -> bool:
        """Return whether all plans were looked at."""
        try:
            self._extend(len(self.search.space.crossing) - 1, (0,) * len(self.search.classes), (), 0.0, (0.0, 0.0, 0.0))
        except _GaveUp:
            return False
        return True

    def _extend(
        self, cut: int, used: Counts, behind: Stages, total: float, slowest: tuple[float, float, float]
    ) -> None:
        """Put every possible stage in front of those that begin at a cut.

        ``total`` is the sum of their seconds, ``slowest`` those of the slowest: forward, backward, and both.
        """
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise _GaveUp
        search, space, most, m = self.search, self.search.space, self.search.limits.num_devices, self.model.m
        size = min(search.limits.group_sizes)  # of a round, at least
        if cut == 0:
            if most in (None, sum(used)):
                self._compare(behind)
            return
        for group, taken in search.next_groups(used):
            if most is not None and sum(used) + group.size > most:
                continue
            exchange = self.model.exchange_seconds(space, ((0, cut, group.devices), *behind)) if behind else 0.0
            if exchange == math.inf:
                continue
            rate = group.size * self.model.slowest(group)
            f, b = ((sums[cut] - sums) / rate for sums in (space.forward, space.backward))
            forward, backward, both = map(np.maximum, slowest, (f, b, f + b))
            if self.model.frozen:
                least = m * both + m * exchange
            else:
                least = size * (total + f + b) + (m - size) * (forward + backward) + m * exchange
            possible = np.isfinite(search.stage(group, (slice(None), np.array([cut])))[:, 0])
            for first in np.flatnonzero(possible & (least <= self.best[0] * ROUNDING))[::-1]:
                stages = ((int(first), cut, group.devices), *behind)
                longest = float(forward[first]), float(backward[first]), float(both[first])
                together = tuple(u + t for u, t in zip(used, taken, strict=True))
                self._extend(int(first), together, stages, total + float(f[first] + b[first]), longest)

    def _compare(self, stages: Stages) -> None:
        seconds = self.model.objective(self.search.space, stages)
        if seconds < self.best[0] / ROUNDING:
            self.best, self.ties = (seconds, stages), 1
        elif seconds <= self.best[0] * ROUNDING:
            self.ties += 1


class _GaveUp(Exception):
    """Too many plans."""
