"""The best of some plans, all plans where there are few, and single operators moved between stages."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.costs.profile import Profile
from jaxpipe.planning.cuts.cost_models import CostModel, Layout, Plans
from jaxpipe.planning.cuts.cut_space import CutSpace, space_of
from jaxpipe.planning.cuts.layouts import Limits, all_layouts


#: Up to so many plans are all priced.
MOST_PLANS = 80_000
#: With more stages than this not all plans are listed.
MOST_STAGES = 100
#: How many moves are priced at most.
MOST_MOVES = 1000
#: Sums of the same seconds in another order differ by less than this.
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Found:
    """The best stages that were found.

    No plan that was looked at is better than ``bound``; 0 if that is not known. ``ties`` are as good, 1 if they were
    not counted. ``placements`` are those that were looked at.
    """

    seconds: float
    cuts: np.ndarray
    layout: Layout
    bound: float
    ties: int
    placements: str


def all_plans(space: CutSpace, classes: Sequence[Sequence[int]], limits: Limits) -> list[Plans] | None:
    """Return every plan; None if there are more than ``MOST_PLANS``."""
    if min(limits.totals[-1] // min(limits.group_sizes), len(space.crossing) - 1) > MOST_STAGES:
        return None
    layouts = list(itertools.islice(all_layouts(classes, limits, len(space.crossing) - 1), MOST_PLANS))
    if len(layouts) == MOST_PLANS:
        return None
    widths = [len(layout) for layout in layouts]
    if _count(space, widths) > MOST_PLANS:
        return None
    chains, cuts = {}, np.zeros((1, 1), int)
    for number in range(1, max(widths, default=0) + 1):
        ends = space.nested[cuts[:, -1], -1]
        chains[number] = np.column_stack([cuts[ends], np.full(ends.sum(), len(space.crossing) - 1)])
        rows, following = np.nonzero(space.nested[cuts[:, -1]])
        cuts = np.column_stack([cuts[rows], following])
    return [(chains[len(layout)], layout) for layout in layouts if len(chains[len(layout)])]


def _count(space: CutSpace, widths: Sequence[int]) -> float:
    """Return the number of plans with so many stages, or one above ``MOST_PLANS`` if there are more."""
    last, layouts, plans = len(space.crossing) - 1, Counter(widths), 0.0
    if space.is_chain:
        return sum(count * math.comb(last - 1, stages - 1) for stages, count in layouts.items())
    nested, ways = space.nested.astype(float), (np.arange(last + 1) == last).astype(float)
    for stages in range(1, max(widths, default=0) + 1):
        ways = nested @ ways
        plans += layouts[stages] * ways[0]
        if plans > MOST_PLANS:
            break
    return plans


def least_bytes(space: CutSpace, model: CostModel, plans: Sequence[Plans]) -> float:
    """Return the bytes of equal devices that fit one of some plans; infinite if all lack links."""
    priced = zip(plans, model.prices(space, plans), strict=True)
    held = (model.stage_bytes(space, *plan).max(1)[price < math.inf] for plan, price in priced)
    return min((float(size.min(initial=math.inf)) for size in held), default=math.inf)


def chosen(space: CutSpace, model: CostModel, plans: list[Plans], slack: float, placements: str) -> Found | None:
    """Return the best of some plans; None if none fit.

    Of plans that cost more than the best by at most ``slack``, those are taken that need the fewest bytes, or about as
    few: of the fullest device and of all messages. Of these the one is taken whose cost and slowest stage are the least
    together; of equals the one that sends least, on the fewest devices, whose stages have the most equal work.
    """
    prices = model.prices(space, plans, ROUNDING + slack)
    best = min((float(price.min()) for price in prices), default=math.inf)
    if best == math.inf:
        return None
    sent = [space.crossing[cuts[:, 1:-1]].sum(1) for cuts, _ in plans]
    sizes = [model.stage_bytes(space, *plan).max(1) + n for plan, n in zip(plans, sent, strict=True)]
    near = [price <= best * (ROUNDING + slack) for price in prices]
    least = min(float(size[alike].min(initial=math.inf)) for size, alike in zip(sizes, near, strict=True))
    if slack:
        near = [alike & (size <= least * (ROUNDING + slack)) for alike, size in zip(near, sizes, strict=True)]
    keys: list[tuple[float, float, int, float, float, tuple[tuple[int, tuple[int, ...]], ...]]] = []
    for (cuts, layout), price, alike, n in zip(plans, prices, near, sent, strict=True):
        rows = np.flatnonzero(alike)
        load = np.diff(space.seconds[cuts[rows]], axis=1) / model.rates(layout)
        longer, uneven = _rounded(price[rows] + load.max(1)), _rounded((load**2).sum(1))
        for k in np.lexsort((uneven, n[rows], longer))[:1]:
            numbers = float(longer[k]), float(n[rows[k]]), sum(map(len, layout)), float(uneven[k])
            stages = tuple(zip(cuts[rows[k], 1:].tolist(), layout, strict=True))
            keys.append((*numbers, float(price[rows[k]]), stages))
    *_, seconds, stages = min(keys)
    ends, layout = zip(*stages, strict=True)
    everything = placements == "all placements"
    ties = sum(int((price <= best * ROUNDING).sum()) for price in prices) if everything else 1
    return Found(seconds, np.array([0, *ends]), layout, best if everything else 0.0, ties, placements)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Return numbers to nine digits: sums of the same numbers in another order are equal."""
    unit = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-300))) - 8)
    return np.round(values / unit) * unit


def move_operators(
    profile: Profile, space: CutSpace, model: CostModel, cuts: np.ndarray, layout: Layout, seconds: float
) -> tuple[CutSpace, float]:
    """Move operators across cuts while the objective falls; returns a space of the new cuts alone, and their cost.

    For graphs with too many cuts to look at all of them: stages along one order of the operators are a start, from
    which an operator may go to the stage of its readers, or of what it reads.
    """
    sets = np.array([space.holds(cut) for cut in cuts])
    best = space_of(profile, sets)
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
            cost = model.objective(candidate, np.arange(len(sets)), layout)
            if cost < seconds / ROUNDING:
                best, sets, seconds, improved = candidate, moved, cost, True
                break
    return best, seconds
