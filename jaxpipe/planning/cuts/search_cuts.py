"""The search: a dynamic program over cuts and the devices that are left.

From the last stage to the first, the best way to run all that lies behind a cut is kept for every set of devices
that it may use and every group that its first stage may have. Devices that cannot be told apart are counted, not
named; with them the search is exact for the network as it is. A network with too many different devices is searched
along one order of them: each stage then takes the next ones.
"""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts.cost_models import CostModel, DeviceGroup, Stages
from jaxpipe.planning.cuts.cut_space import Block, CutSpace


#: How many cuts give a first bound, where there are many more.
FEW_CUTS = 128
#: Sums of the same seconds in another order differ by less than this.
ROUNDING = 1 + 1e-9

#: Elementary steps that a search over all sets of devices may take; with more, devices are searched in orders.
MOST_WORK = 3e9

#: How many devices of each class.
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """The devices and limits of a search: sizes of groups, the number of devices in all, bytes by device.

    ``widths`` are the numbers of devices of the stages, first to last, if they are given.
    """

    group_sizes: tuple[int, ...]
    num_devices: int | None
    memory: tuple[float, ...]
    widths: tuple[int, ...] | None = None

    def sizes(self, count: int) -> tuple[int, ...]:
        """Return how many devices a stage may have, if it and all stages behind it have ``count``."""
        if self.widths is None:
            return self.group_sizes
        return tuple(width for k, width in enumerate(self.widths) if sum(self.widths[k:]) == count)


@dataclass(frozen=True)
class Found:
    """The best stages that were found.

    No plan that was looked at is better than ``bound``; 0 if that is not known. ``ties`` are as good, 1 if they were
    not counted. ``placements`` are those that were looked at.
    """

    seconds: float
    stages: Stages
    bound: float
    ties: int
    placements: str


def device_classes(network: Network, memory: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Devices that may be exchanged for one another without changing any cost, together."""
    links = np.stack([network.bandwidth, network.latency])

    def alike(a: int, b: int) -> bool:
        differs = (links[:, a] != links[:, b]).any(0)
        differs[[a, b]] = False
        return network.speed[a] == network.speed[b] and memory[a] == memory[b] and not differs.any()

    classes: list[list[int]] = []
    for device in range(network.num_devices):
        home = next((group for group in classes if alike(group[0], device)), None)
        if home is None:
            classes.append([device])
        else:
            home.append(device)
    return tuple(map(tuple, classes))


def is_small(classes: Sequence[Sequence[int]], space: CutSpace, limits: Limits) -> bool:
    """Return whether all sets of devices can be searched."""
    return len(classes) == 1 or work(classes, len(space.crossing), limits) <= MOST_WORK


def work(classes: Sequence[Sequence[int]], cuts: int, limits: Limits) -> float:
    """Elementary steps of a search, to tell beforehand whether it is affordable; a link costs at least 5000."""
    if limits.group_sizes == (1,):
        states = math.prod(len(group) + 1 for group in classes) * len(classes)
        return float(states) * (cuts**2 + len(classes) * cuts)
    pairs = math.prod(math.comb(len(group) + 2, 2) for group in classes)
    triples = math.prod(math.comb(len(group) + 3, 3) for group in classes)
    return float(pairs) * cuts**2 + float(triples) * (cuts + 5000)


@dataclass(frozen=True, eq=False)
class Search:
    """One search space: cuts, a model, and devices in classes; a stage takes the last ones of a class that are left."""

    space: CutSpace
    model: CostModel
    classes: Sequence[Sequence[int]]
    limits: Limits

    def least(self) -> float:
        """The least possible cost of the costliest stage or link; infinite if nothing fits the memory."""
        bound = math.inf
        if len(self.space.crossing) > 2 * FEW_CUTS:
            bound = replace(self, space=self.space.thinned(FEW_CUTS)).least() * ROUNDING
        return self._run(_Slowest(self, bound))[0]

    def lightest(self, limit: float) -> Stages | None:
        """Stages none of which costs more than ``limit``, and that send the fewest bytes in all."""
        return self._run(_Lightest(self, limit * ROUNDING))[1] if limit < math.inf else None

    def ties(self, limit: float) -> int:
        """Return how many ways there are to stay within ``limit``, exchanges of like devices not counted."""
        return int(self._run(_Ways(self, limit * ROUNDING))[0])

    def least_memory(self) -> float:
        """The smallest memory of equal devices for which there is a plan at all; infinite if links are missing."""
        return self._run(_Memory(self, math.inf))[0]

    def stage(self, group: DeviceGroup, block: Block, memory: float | None = None) -> np.ndarray:
        """Cost of a stage on a group, infinite where it does not fit the memory or is none."""
        possible = self.space.nested[block[0]][:, block[1]]
        memory = min(self.limits.memory[d] for d in group.devices) if memory is None else memory
        if memory < math.inf:
            possible = possible & (self.memory(group, block) <= memory)
        return np.where(possible, self.model.stage_seconds(self.space, group, block), np.inf)

    def memory(self, group: DeviceGroup, block: Block) -> np.ndarray:
        """Bytes that a stage holds on each device of a group."""
        space = self.space
        residuals, parameters = (space.between(sums, block) for sums in (space.residuals, space.parameters))
        return self.model.memory_bytes(residuals, parameters, group)

    def _window(self, used: Counts, bound: float) -> slice | np.ndarray:
        """The cuts in front of which and behind which no more lies than the devices there can do within a bound."""
        if bound == math.inf:
            return slice(None)
        speed = np.asarray(self.model.network.speed)
        taken = np.isin(np.arange(len(speed)), self._devices(used, used))
        behind, before = (float(speed[mask].sum()) * bound * ROUNDING for mask in (taken, ~taken))
        work = self.space.seconds
        fits = (work[-1] - work <= behind) & (work <= before)
        cuts = np.flatnonzero(fits)
        if len(cuts) and cuts[-1] - cuts[0] + 1 == len(cuts):
            return slice(int(cuts[0]), int(cuts[-1]) + 1)
        return cuts

    def _devices(self, used: Counts, taken: Counts) -> tuple[int, ...]:
        """A group's devices: the last ones of each class that those behind it have left."""
        return tuple(
            device
            for group, u, t in zip(self.classes, used, taken, strict=True)
            for device in group[len(group) - u : len(group) - u + t]
        )

    def _groups(self, used: Counts) -> Iterator[Counts]:
        """Return what the first stage of a suffix may take of the devices it uses."""
        return self._parts(used, self.limits.sizes(sum(used)))

    def _parts(self, given: Counts, sizes: Sequence[int]) -> Iterator[Counts]:
        """Yield the numbers of devices of each kind that a stage may have."""
        if tuple(sizes) == (1,):
            for k, u in enumerate(given):
                if u:
                    yield (*(0,) * k, 1, *(0,) * (len(given) - k - 1))
            return
        for taken in itertools.product(*(range(u + 1) for u in given)):
            if sum(taken) in sizes:
                yield taken

    def _group(self, used: Counts, taken: Counts) -> DeviceGroup:
        return DeviceGroup(self._devices(used, taken), sum(used) - sum(taken))

    def _run(self, rule: "_Rule") -> tuple[float, Stages]:
        """The rule's value for the whole program, and the stages that have it, if it remembers them."""
        count = len(self.space.crossing)
        most = self.limits.num_devices
        values: dict[Counts, dict[Counts, np.ndarray]] = {(0,) * len(self.classes): {}}
        back: dict[tuple[Counts, Counts], _Step] = {}
        ends: list[tuple[float, Counts, Counts]] = []
        states = itertools.product(*(range(len(group) + 1) for group in self.classes))
        for used in sorted(states, key=sum):
            if not sum(used) or (most is not None and sum(used) > most):
                continue
            values[used] = {}
            first = self._window(used, rule.bound)
            for taken in self._groups(used):
                rest = tuple(u - t for u, t in zip(used, taken, strict=True))
                group = DeviceGroup(self._devices(used, taken), sum(rest))
                after = list(values[rest])
                if any(rest):
                    ways = (
                        (values[rest][t], self.model.link_seconds(self.space.crossing, group, self._group(rest, t)))
                        for t in after
                    )
                    behind, chosen = rule.across(ways) if after else (None, None)
                else:
                    behind, chosen = np.full(count, rule.nothing), None
                    behind[-1] = rule.done
                if behind is None or np.all(behind == rule.nothing):
                    continue
                last = self._window(rest, rule.bound) if any(rest) else slice(count - 1, count)
                value = np.full(count, rule.nothing)
                value[first], reached = rule.through(group, (first, last), behind[last])
                if np.all(value == rule.nothing):
                    continue
                values[used][taken] = value
                if reached is not None:
                    cuts = np.arange(count)
                    ended = np.zeros(count, np.int64)
                    ended[first] = cuts[last][reached]
                    back[used, taken] = _Step(ended, chosen, after)
                if most in (None, sum(used)) and value[0] != rule.nothing:
                    ends.append((float(value[0]), used, taken))
        if not ends:
            return rule.nothing, ()
        total, used, taken = rule.choose(ends)
        return total, self._backtrack(back, used, taken) if back else ()

    def _backtrack(self, back: dict[tuple[Counts, Counts], "_Step"], used: Counts, taken: Counts) -> Stages:
        stages = []
        cut, last = 0, len(self.space.crossing) - 1
        while cut != last:
            step = back[used, taken]
            end = int(step.ended[cut])
            stages.append((cut, end, self._devices(used, taken)))
            cut = end
            if step.chosen is not None:
                rest = tuple(u - t for u, t in zip(used, taken, strict=True))
                used, taken = rest, step.after[int(step.chosen[cut])]
        return tuple(stages)


@dataclass(frozen=True, eq=False)
class _Step:
    """The end of the stage that begins at each cut, and the group of ``after`` that comes behind a cut."""

    ended: np.ndarray
    chosen: np.ndarray | None
    after: list[Counts]


class _Rule(ABC):
    """The step from values of stages behind a cut to values of one stage more; nothing may cost over a bound."""

    nothing, done = np.inf, 0.0

    def __init__(self, search: Search, bound: float):
        self.search, self.bound = search, bound

    @abstractmethod
    def across(self, ways: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray | None]:
        """Join the values behind each cut with the links over it; the best, and which way it was."""

    @abstractmethod
    def through(self, group: DeviceGroup, block: Block, behind: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Put a stage in front; the best value for each cut it may begin at, and where it ends."""

    def choose(self, ends: list[tuple[float, Counts, Counts]]) -> tuple[float, Counts, Counts]:
        # Of equals the one with the fewest devices.
        return min(ends, key=lambda end: (end[0], sum(end[1])))


class _Slowest(_Rule):
    """The costliest stage or link."""

    def across(self, ways: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray | None]:
        return functools.reduce(np.minimum, (np.maximum(value, link) for value, link in ways)), None

    def through(self, group: DeviceGroup, block: Block, behind: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        cost = self.cost(group, block)
        best = np.maximum(cost, behind[None, :], out=cost).min(1, initial=np.inf)
        return np.where(best <= self.bound, best, np.inf), None

    def cost(self, group: DeviceGroup, block: Block) -> np.ndarray:
        return self.search.stage(group, block)


class _Memory(_Slowest):
    """Memory in the place of time, without a limit; a link that is missing is still missing."""

    def across(self, ways: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray | None]:
        return functools.reduce(np.minimum, (np.where(link < np.inf, value, np.inf) for value, link in ways)), None

    def cost(self, group: DeviceGroup, block: Block) -> np.ndarray:
        possible = self.search.stage(group, block, math.inf) < np.inf
        return np.where(possible, self.search.memory(group, block), np.inf)


class _Lightest(_Rule):
    """The bytes that are sent in all."""

    def across(self, ways: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray | None]:
        joined = np.stack([np.where(link <= self.bound, value, np.inf) for value, link in ways])
        chosen = joined.argmin(0)
        return np.take_along_axis(joined, chosen[None], 0)[0] + self.search.space.crossing, chosen

    def through(self, group: DeviceGroup, block: Block, behind: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        within = np.where(self.search.stage(group, block) <= self.bound, behind[None, :], np.inf)
        if not within.size:
            return np.full(len(within), np.inf), np.zeros(len(within), np.int64)
        # Of equals the last cut: the earlier stage is then the fuller one.
        reached = within.shape[1] - 1 - within[:, ::-1].argmin(1)
        return np.take_along_axis(within, reached[:, None], 1)[:, 0], reached


class _Ways(_Rule):
    """The number of ways."""

    nothing, done = 0.0, 1.0

    def across(self, ways: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray | None]:
        return functools.reduce(np.add, (np.where(link <= self.bound, value, 0.0) for value, link in ways)), None

    def through(self, group: DeviceGroup, block: Block, behind: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return (self.search.stage(group, block) <= self.bound) @ behind, None

    def choose(self, ends: list[tuple[float, Counts, Counts]]) -> tuple[float, Counts, Counts]:
        return sum(end[0] for end in ends), *ends[0][1:]


def in_order(stages: Stages, classes: Sequence[Sequence[int]]) -> Stages:
    """Return the same stages, where of like devices the first stages take the lowest numbers."""
    renamed: dict[int, int] = {}
    for group in classes:
        used = [d for *_, devices in stages for d in devices if d in set(group)]
        renamed.update(zip(used, sorted(group), strict=False))
    return tuple((a, b, tuple(sorted(renamed[d] for d in devices))) for a, b, devices in stages)
