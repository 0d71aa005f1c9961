"""Cost models: what stages on groups of devices cost. They know nothing of the search.

The library's own is here, a step of 1F1B on devices that run free, with the seconds of many plans at once; those that
others have published are in ``jaxpipe.planning.cuts.published``.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.planning.dispatch_timeline import CALL_SECONDS, SEND_SECONDS


#: The devices of each stage, first to last.
Layout = tuple[tuple[int, ...], ...]
#: Rows of cuts ``[plans, stages + 1]`` with the devices of their stages.
Plans = tuple[np.ndarray, Layout]
#: A way to store: the seconds that it adds, and by stage the bytes on each device, of all operators before each cut.
Way = tuple[np.ndarray, Sequence[np.ndarray]]
#: How many plans are priced at a time, those with the least bounds first.
PRICED_AT_ONCE = 32


@dataclass(frozen=True)
class CostModel(ABC):
    """Prices stages on groups of devices; each has a copy of the parameters and a share of the micro-batches."""

    network: Network
    num_microbatches: int | None = None
    memory: tuple[float, ...] = ()  # bytes of each device; without a limit if left out

    name = ""
    parameter_copies = 1  # that a device keeps: their gradients count as one

    @abstractmethod
    def prices(self, space: CutSpace, plans: Sequence[Plans], within: float = math.inf) -> list[np.ndarray]:
        """Return the cost of each row of cuts on the devices of a layout.

        It is infinite where a stage does not fit the memory, or a link is missing; and it may be where it is more than
        ``within`` times the least.
        """

    def objective(self, space: CutSpace, cuts: np.ndarray, layout: Layout) -> float:
        """Return the cost of the stages between some cuts."""
        return float(self.prices(space, [(cuts[None], layout)])[0][0])

    def transfer_seconds(self, count: np.ndarray, sources: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Time to send bytes over the slowest of all links from some devices to others; nothing takes none."""
        key = tuple(sources), tuple(targets)
        if key not in self._links:
            places = np.ix_(sources, targets)
            kinds = np.stack([self.network.bandwidth[places], self.network.latency[places]], -1).reshape(-1, 2)
            self._links[key] = np.unique(kinds, axis=0)
        slowest = np.zeros_like(count)
        for bandwidth, latency in self._links[key].tolist():
            slowest = np.maximum(slowest, latency + count / bandwidth if bandwidth else np.inf)
        return np.where(count > 0, slowest, 0.0)

    @cached_property
    def _links(self) -> dict[Layout, np.ndarray]:
        """A cache of the bandwidth and latency of each kind of link between two groups."""
        return {}

    def memory_bytes(self, residuals: np.ndarray, parameters: np.ndarray, in_flight: int | np.ndarray) -> np.ndarray:
        """Return the bytes that stages hold on each of their devices."""
        return residuals * in_flight + self.parameter_copies * parameters

    def stage_bytes(self, space: CutSpace, cuts: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the bytes on each device of each stage, for each row of cuts ``[plans, stages + 1]``."""
        residuals, parameters = (np.diff(sums[cuts], axis=1) for sums in (space.residuals, space.parameters))
        return self.memory_bytes(residuals, parameters, np.array(self.in_flight(layout)))

    def fits(self, space: CutSpace, cuts: np.ndarray, layout: Layout) -> np.ndarray:
        """Return whether all stages of each row of cuts have the memory they need."""
        return np.all(self.stage_bytes(space, cuts, layout) <= self.room(layout), axis=1)

    def ways(self, space: CutSpace, layout: Layout) -> Sequence[Way]:
        """Return the ways in which stages may store what they need: one, unless a model knows others."""
        holds = [self.memory_bytes(space.residuals, space.parameters, n) for n in self.in_flight(layout)]
        return ((np.zeros(len(space.crossing)), holds),)

    def room(self, layout: Sequence[Sequence[int]]) -> list[float]:
        """Return the bytes that every device of each stage has."""
        return [min(self.memory[d] for d in devices) if self.memory else math.inf for devices in layout]

    def rates(self, layout: Layout) -> np.ndarray:
        """Return how fast the devices of each stage are together, as the slowest of them is."""
        return np.array([len(devices) * self.slowest(devices) for devices in layout])

    def in_flight(self, layout: Sequence[Sequence[int]]) -> list[int]:
        """Micro-batches that each replica of a stage holds at a time, in a pipeline that is kept full."""
        sizes = [len(devices) for devices in layout][::-1]
        return [math.ceil(left / size) for left, size in zip(itertools.accumulate(sizes), sizes, strict=True)][::-1]

    def slowest(self, devices: Sequence[int]) -> float:
        """Speed of the slowest of some devices."""
        return min(self.network.speed[d] for d in devices)


class Timelines(NamedTuple):
    """The work of some plans with as many stages.

    Attributes:
      forward, backward: ``[plans, stages]``, seconds of one micro-batch.
      ways: ``[plans, stages - 1]``, seconds of a message between each stage and the next, in either direction.
      trained: ``[plans, stages]``; stages without backward work leave it out.
      besides: seconds of each plan that follow the pipeline's.
      num_microbatches: of a step.
    """

    forward: np.ndarray
    backward: np.ndarray
    ways: np.ndarray
    trained: np.ndarray
    besides: np.ndarray
    num_microbatches: int

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of a step of some plans, as ``Schedule.simulate`` has them for ``one_f_one_b``.

        Example:
          >>> work = np.ones((1, 4)), 2 * np.ones((1, 4)), np.zeros((1, 3)), np.ones((1, 4), bool), np.zeros(1)
          >>> Timelines(*work, 16).seconds(np.arange(1))
          array([57.])
        """
        forward, backward, trained = (x[rows].T.copy() for x in (self.forward, self.backward, self.trained))
        stages, plans = forward.shape
        ahead = np.vstack([self.ways[rows].T, np.zeros((1, plans))])
        back, everywhere, free = np.roll(ahead, 1, axis=0), trained.all(), np.zeros((stages, plans))
        # When the last message has come from the stage before, and from the one behind; a row besides for no stage.
        before, behind = np.zeros((2, stages + 1, plans))
        for ahead_now, back_now in _steps(stages, self.num_microbatches):
            if len(ahead_now):
                ends = np.maximum(free[ahead_now], before[ahead_now]) + forward[ahead_now]
                free[ahead_now] = ends
                before[ahead_now + 1] = ends + ahead[ahead_now]
            if len(back_now):
                ends = np.maximum(free[back_now], behind[back_now + 1]) + backward[back_now]
                free[back_now] = ends if everywhere else np.where(trained[back_now], ends, free[back_now])
                behind[back_now] = ends + back[back_now]
        return free.max(0) + self.besides[rows]

    def bounds(self) -> np.ndarray:
        """Return a lower bound of the seconds of a step, for each plan.

        A stage waits for its first message, does all its work, and what it sends back last goes on to the first stage.
        And it keeps no more micro-batches than there are stages from it on, each for the round trip behind it.
        """
        m, (plans, stages) = self.num_microbatches, self.forward.shape
        none = np.zeros((plans, 1))
        backward = np.where(self.trained, self.backward, 0.0)
        back = np.where(self.trained[:, :-1], self.ways, 0.0)
        begins = np.hstack([none, np.cumsum(self.forward[:, :-1] + self.ways, axis=1)])
        follows = np.hstack([none, np.cumsum(backward[:, :-1] + back, axis=1)])
        busy = begins + m * (self.forward + backward) + follows
        trips = np.hstack([self.ways + back, none]) + self.forward + backward
        trips = np.cumsum(trips[:, ::-1], axis=1)[:, ::-1]
        kept = stages - np.arange(stages)
        waits = begins + ((m - 1) // kept + 1) * trips + (m - 1) % kept * self.forward + follows
        return np.maximum(busy, np.where(self.trained, waits, 0.0)).max(1) + self.besides


def shortest(timelines: Sequence[Timelines], within: float) -> list[np.ndarray]:
    """Return the seconds of all plans; infinite for some that take more than ``within`` times the shortest."""
    bounds = [timeline.bounds() for timeline in timelines]
    seconds = [np.full(len(bound), np.inf) for bound in bounds]
    least = math.inf
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k].min(initial=math.inf)):
        order = bounds[k].argsort(kind="stable")
        size = PRICED_AT_ONCE if within < math.inf else len(order)
        while len(order) and bounds[k][order[0]] <= least * within:
            rows, order, size = order[:size], order[size:], 2 * size
            seconds[k][rows] = timelines[k].seconds(rows)
            least = min(least, float(seconds[k][rows].min()))
    return seconds


@cache
def _steps(stages: int, num_microbatches: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return the stages that work forward, and backward, in each tick of 1F1B if all work takes one tick.

    In this order every action comes behind what it needs, and no stage works forward twice before the next one has
    used the first result.
    """
    last, numbers = num_microbatches - 1, np.arange(stages)
    steps = []
    for tick in range(2 * (num_microbatches + stages - 1)):
        since = tick - numbers
        first = (since >= 0) & (since <= last) & (tick < stages)
        steady = (since % 2 == 0) & (since // 2 >= stages - numbers) & (since // 2 <= last)
        since = tick - (2 * stages - 1 - numbers)
        back = (since >= 0) & (since % 2 == 0) & (since // 2 <= last)
        steps.append((np.flatnonzero(first | steady), np.flatnonzero(back)))
    return tuple(steps)


@dataclass(frozen=True)
class Synchronous(CostModel):
    """A whole step of 1F1B on devices that run free, as stage programs do (``jaxpipe.planning.dispatch_timeline``).

    The micro-batches of a step go through in rounds (``jaxpipe.schedules.replicas``), each of as many as the numbers of
    devices of all stages divide. A device works through its part of a round one by one; every call takes
    ``CALL_SECONDS`` of it, every message ``SEND_SECONDS`` besides its way. At the end of a step replicas add up their
    gradients. A replica holds its parameters, their gradients, and the micro-batches in flight.

    Attributes:
      frozen: whether parameters are frozen, so that stages without backward work are left out of it.
    """

    name = "synchronous"
    parameter_copies = 2
    frozen: bool = False

    @property
    def m(self) -> int:
        """Micro-batches of a step, of all replicas together."""
        return self.num_microbatches or 1

    def prices(self, space: CutSpace, plans: Sequence[Plans], within: float = math.inf) -> list[np.ndarray]:
        alike: dict[tuple[int, int], list[int]] = {}  # simulated together: as many stages, as many rounds
        every = [self._timelines(space, *plan) for plan in plans]
        for k, x in enumerate(every):
            alike.setdefault((x.forward.shape[1], x.num_microbatches), []).append(k)
        joined = []
        for (_, rounds), numbers in alike.items():
            parts = zip(*(every[k][:-1] for k in numbers), strict=True)
            joined.append(Timelines._make([*map(np.concatenate, parts), rounds]))
        prices: list[np.ndarray] = [np.zeros(0)] * len(plans)
        for numbers, seconds in zip(alike.values(), shortest(joined, within), strict=True):
            ends = np.cumsum([len(every[k].forward) for k in numbers])[:-1]
            for k, part in zip(numbers, np.split(seconds, ends), strict=True):
                prices[k] = part
        return prices

    def likely(self, space: CutSpace, cuts: np.ndarray, layout: Layout, most: int) -> np.ndarray:
        """Return the rows of cuts with the least bounds, so many at most."""
        if len(cuts) <= most:
            return cuts
        return cuts[self._timelines(space, cuts, layout).bounds().argsort(kind="stable")[:most]]

    def added(self, space: CutSpace, cuts: np.ndarray, layout: Layout) -> np.ndarray:
        """Return the seconds that storage adds to each stage of each row of cuts; infinite where it does not fit."""
        return np.where(self.fits(space, cuts, layout)[:, None], 0.0, np.inf)

    def _timelines(self, space: CutSpace, cuts: np.ndarray, layout: Layout) -> Timelines:
        sizes = np.array([len(devices) for devices in layout])
        together = math.lcm(*sizes.tolist())  # micro-batches of a round
        each, rates = together // sizes, self.rates(layout) / together

        def between(sums: np.ndarray) -> np.ndarray:
            return np.maximum(np.diff(sums[cuts], axis=1), 0.0)

        forward, backward = between(space.forward) / rates, between(space.backward) / rates
        trained = np.logical_or.accumulate(backward > 0, axis=1) if self.frozen else np.ones(cuts.shape, bool)[:, 1:]
        trained[:, -1] = True
        besides = np.zeros(len(cuts))
        parameters = between(space.parameters)
        for k, devices in enumerate(layout):
            if len(devices) > 1:
                link = self.network.slowest_link(devices)
                besides = np.maximum(besides, link.all_reduce_seconds(parameters[:, k], len(devices)))
        added = self.added(space, cuts, layout)
        besides = np.where(np.isfinite(added).all(1), besides, np.inf)
        backward += np.where(np.isfinite(added), added, 0.0) / rates
        ways = np.full((len(cuts), len(layout) - 1), SEND_SECONDS)
        for k, (before, behind) in enumerate(itertools.pairwise(layout)):
            ways[:, k] += self.transfer_seconds(space.crossing[cuts[:, k + 1]], before, behind)
        ways *= np.maximum(each[:-1], each[1:])
        forward += CALL_SECONDS * each
        backward[:, :-1] += CALL_SECONDS * each[:-1]
        return Timelines(forward, backward, ways, trained, besides, math.ceil(self.m / together))

    def in_flight(self, layout: Sequence[Sequence[int]]) -> list[int]:
        pairs = zip(super().in_flight(layout), layout, strict=True)
        return [min(count, math.ceil(self.m / len(devices))) for count, devices in pairs]


@dataclass(frozen=True, eq=False)
class Stored(Synchronous):
    """A whole step, too, of stages that store in the fastest of some ways that is within their memory."""

    known: Sequence[Way] = ()

    def ways(self, space: CutSpace, layout: Layout) -> Sequence[Way]:
        return self.known

    def added(self, space: CutSpace, cuts: np.ndarray, layout: Layout) -> np.ndarray:
        stages, behind, before, added = np.arange(len(layout)), cuts[:, 1:], cuts[:, :-1], []
        for seconds, holds in self.known:
            held = np.array(holds)[stages, behind] - np.array(holds)[stages, before]
            added.append(np.where(held <= self.room(layout), seconds[behind] - seconds[before], np.inf))
        return np.min(added, axis=0)
