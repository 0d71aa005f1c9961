"""Cuts of a chain for given devices: none of the stages takes longer than a limit, and messages take least."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.planning.cuts.cost_models import CostModel, Layout
from jaxpipe.planning.cuts.cut_space import CutSpace, cut_space, least_crossed
from jaxpipe.planning.cuts.placed_stages import Partition, cut_at, model_of


#: How close the limit of a balanced cut is to the least one, and as close as two numbers can be.
PRECISION, EXACT = 1e-7, 2.0**-52
#: How much longer than the least limit stages may be, if messages take less then.
LOOSER = 1.01
#: How many places are compared for one cut.
MOST_PLACES = 256
#: How much unequal work counts beside messages that take as long as the mean.
UNEQUAL = 1e-6


def least_number(low: float, high: float, suffices: Callable[[float], bool], precision: float = PRECISION) -> float:
    """Return the least number between two that suffices, to a share of it; infinite if the higher does not."""
    if not suffices(high):
        return math.inf
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


class Chain:
    """The cuts of a chain, and the devices of its stages, each of which may take one of several ways to store."""

    def __init__(self, space: CutSpace, model: CostModel, layout: Layout):
        """Nothing is cut yet; ``ways`` are the seconds of all operators before each cut, and by stage their bytes."""
        self.space, self.model, self.layout = space, model, layout
        self.wanted: list[int] = np.flatnonzero(space.wanted).tolist()
        self.rates: list[float] = model.rates(layout).tolist()
        self.ways = [(space.seconds + added, held) for added, held in model.ways(space, layout)]
        self.memory = model.room(layout)

    def within(self, limit: float, memory: Sequence[float] | None = None) -> list[int] | None:
        """Return cuts that make each stage as long as a limit and the memory allow; None if no cuts keep them."""
        memory = self.memory if memory is None else memory
        cuts, last = [0], len(self.space.seconds) - 1
        for s, rate in enumerate(self.rates):
            cut, room = cuts[-1], memory[s]
            end = max(
                min(bisect_right(work, work[cut] + limit * rate), bisect_right(held[s], held[s][cut] + room))
                for work, held in self.ways
            )
            end = min([end - 1, last - (len(self.rates) - 1 - s), *(k for k in self.wanted if k > cut)])
            if end <= cut:
                return None
            cuts.append(end)
        return cuts if cuts[-1] == last else None

    def least(self) -> float:
        """Return the least limit, to ``PRECISION``; infinite if there are no cuts within the memory."""
        low = min(work[-1] for work, _ in self.ways) / sum(self.rates)
        high = max(work[-1] for work, _ in self.ways) / min(self.rates)
        return least_number(low * (1 - PRECISION), high * (1 + PRECISION), lambda x: self.within(x) is not None)

    def least_memory(self) -> float:
        """Return the bytes of equal devices that hold some cuts; infinite if there are too few cuts."""
        most, count = max(float(held[-1]) for _, holds in self.ways for held in holds), len(self.rates)
        return least_number(EXACT * most, most, lambda x: self.within(math.inf, [x] * count) is not None, EXACT)

    def lightest(self, limit: float) -> list[int] | None:
        """Return cuts within a limit whose messages take least; of equals balanced ones."""
        latest = self.within(limit)
        if latest is None:
            return None
        space, count, last = self.space, len(self.rates), len(self.space.seconds) - 1
        earliest = [last] * (count + 1)
        for s in range(count - 1, -1, -1):
            behind, longest, room = earliest[s + 1], limit * self.rates[s], self.memory[s]
            first = min(
                max(bisect_left(work, work[behind] - longest), bisect_left(held[s], held[s][behind] - room))
                for work, held in self.ways
            )
            first = max([first, *(k for k in self.wanted if k < behind)])
            earliest[s] = min(max(first, s), latest[s])
        places = [self._places(*ends) for ends in zip(earliest, latest, strict=True)]
        values, chosen = np.zeros(1), []
        scale = UNEQUAL * max(float(space.crossing.mean()), 1.0)
        for s, (before, behind) in enumerate(itertools.pairwise(places)):
            loads = [
                np.where(
                    held[s][behind, None] - held[s][before] <= self.memory[s], work[behind, None] - work[before], np.inf
                )
                for work, held in self.ways
            ]
            share = np.min(loads, axis=0) / (limit * self.rates[s])
            possible = (share <= 1 + PRECISION) & space.is_stage(before[:, None], behind).T
            total = np.where(possible, values + scale * share**2, np.inf)
            chosen.append(total.argmin(1))
            values = total.min(1)
            if s + 1 < count:  # messages, as if all links were as fast as the fastest
                sent = self.model.transfer_seconds(space.crossing[behind], *self.layout[s : s + 2])
                values = values + sent * self.model.network.fastest_link
        if not np.isfinite(values[-1]):
            return None
        cuts, k = [last], 0
        for s in range(count - 1, -1, -1):
            k = int(chosen[s][k])
            cuts.append(int(places[s][k]))
        return cuts[::-1]

    def _places(self, first: int, last: int) -> np.ndarray:
        """Return the places for a cut; of many, in each part of the work that where the fewest bytes cross."""
        every = np.arange(first, last + 1)
        if len(every) <= MOST_PLACES:
            return every
        work, crossing = self.space.seconds[every], self.space.crossing[every]
        parts = np.searchsorted(np.linspace(work[0], work[-1], MOST_PLACES), work)
        wanted = [k for k in self.wanted if first <= k <= last]
        return np.unique(np.concatenate([every[least_crossed(parts, crossing)], [first, last], wanted])).astype(int)


def balanced(partition: Partition) -> Partition:
    """Return the same operators in the same order on the same devices, cut so that the longest stage is shortest."""
    space, model = cut_space(partition.profile, reorder=False, starts=partition.starts), model_of(partition)
    chain = Chain(space, model, tuple(stage.devices for stage in partition.stages))
    cuts = chain.lightest(max(chain.least() * LOOSER, 1e-300))
    return partition if cuts is None else replace(cut_at(partition, model, space, np.array(cuts), chain.layout), ties=1)
