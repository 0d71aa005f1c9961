"""Cost models: what a stage on a group of devices costs. They know nothing of the search.

model         published in                                       what counts
pipedream     D. Narayanan et al., SOSP 2019                     slowest of compute with all-reduce, and boundaries
min_max       network-aware partitioning (M2 of the design)      slowest of compute, and of links between neighbors
throughput    J. Tarnawski et al., "Piper", NeurIPS 2021         slowest of compute and communication, one after the
                                                                 other; a memory cap
synchronous   this library                                       a whole step on the executor's tick timeline
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.errors import PartitionError
from jaxpipe.planning.cuts.cut_space import EVERYWHERE, Block, CutSpace


#: ``(first cut, last cut, devices)`` of each stage, first to last.
Stages = tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class DeviceGroup:
    """The devices of one stage, each with a copy of its parameters and a share of the micro-batches.

    ``followers`` is the number of devices of all stages behind it.
    """

    devices: tuple[int, ...]
    followers: int = 0

    @property
    def size(self) -> int:
        """Return how many replicas."""
        return len(self.devices)


@dataclass(frozen=True)
class CostModel(ABC):
    """Prices stages; all array arguments may be broadcast against each other."""

    network: Network
    num_microbatches: int | None = None

    name = ""

    def check(self, *, memory_given: bool) -> None:  # noqa: B027, as most models take anything
        """Raise ``PartitionError`` if the model does not know what was given."""

    @abstractmethod
    def stage_seconds(self, space: CutSpace, group: DeviceGroup, block: Block = EVERYWHERE) -> np.ndarray:
        """``[first cuts, last cuts]``: what the stage between two cuts costs on a group, its neighbors left aside."""

    def link_seconds(self, crossing: np.ndarray, group: DeviceGroup, after: DeviceGroup) -> np.ndarray:
        """Return the seconds to send ``crossing`` bytes forward and back, between a group and the one behind it."""
        return np.zeros_like(crossing)

    def transfer_seconds(self, count: np.ndarray, sources: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Time to send bytes over the slowest of all links from some devices to others; nothing takes none."""
        key = tuple(sources), tuple(targets)
        if key not in self._links:
            places = np.ix_(sources, targets)
            kinds = zip(self.network.bandwidth[places].flat, self.network.latency[places].flat, strict=True)
            self._links[key] = _slowest_links([(float(bandwidth), float(latency)) for bandwidth, latency in kinds])
        slowest = np.zeros_like(count)
        for bandwidth, latency in self._links[key]:
            slowest = np.maximum(slowest, latency + count / bandwidth if bandwidth else np.inf)
        return np.where(count > 0, slowest, 0.0)

    @cached_property
    def _links(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[float, float], ...]]:
        """A cache of the bandwidth and latency of each kind of link between two groups."""
        return {}

    def objective(self, space: CutSpace, stages: Stages) -> float:
        """Return what is made small: here the costliest stage or link."""
        costliest, followers, behind = 0.0, 0, None
        for first, last, devices in reversed(stages):
            group = DeviceGroup(devices, followers)
            block = np.array([first]), np.array([last])
            costliest = max(costliest, float(self.stage_seconds(space, group, block)[0, 0]))
            if behind is not None:
                costliest = max(costliest, float(self.link_seconds(space.crossing[[last]], group, behind)[0]))
            followers, behind = followers + len(devices), group
        return costliest

    def memory_bytes(self, residuals: np.ndarray, parameters: np.ndarray, group: DeviceGroup) -> np.ndarray:
        """Return what a stage holds on each device of its group."""
        return residuals * self.in_flight(group) + parameters

    def in_flight(self, group: DeviceGroup) -> int:
        """Micro-batches that one replica holds at a time, in a pipeline that is kept full."""
        return math.ceil((group.size + group.followers) / group.size)

    def slowest(self, group: DeviceGroup) -> float:
        """Speed of a group's slowest device."""
        return min(self.network.speed[d] for d in group.devices)


class MinMax(CostModel):
    """``C / k`` of each stage, and ``2 a / bandwidth`` over the slowest link between neighboring stages."""

    name = "min_max"

    def stage_seconds(self, space: CutSpace, group: DeviceGroup, block: Block = EVERYWHERE) -> np.ndarray:
        return space.between(space.seconds, block) / (group.size * self.slowest(group))

    def link_seconds(self, crossing: np.ndarray, group: DeviceGroup, after: DeviceGroup) -> np.ndarray:
        return 2 * self.transfer_seconds(crossing, group.devices, after.devices)


class Uniform(CostModel):
    """A model that knows one bandwidth for all links and one speed for all devices."""

    def check(self, *, memory_given: bool) -> None:
        network = self.network
        if not network.is_uniform or len(set(network.speed)) > 1:
            raise PartitionError(
                f"cost_model={self.name!r} knows one bandwidth for all links and one speed for all devices, but "
                "network= has several. Use Network.uniform, or cost_model='min_max' or 'synchronous'."
            )
        if network.num_devices > 1 and network.latency[0, 1]:
            raise PartitionError(
                f"cost_model={self.name!r} knows no latency, but network= has {network.latency[0, 1]:g} s. Use "
                "Network.uniform(n, bandwidth), or cost_model='min_max' or 'synchronous'."
            )

    @property
    def bandwidth(self) -> float:
        """Bytes in a second, on every link."""
        return float(self.network.bandwidth[0, 1]) if self.network.num_devices > 1 else math.inf

    def all_reduce_seconds(self, parameters: np.ndarray, group: DeviceGroup) -> np.ndarray:
        """Both directions of a ring all-reduce of the gradients, as the published models charge it."""
        if group.size == 1:
            return np.zeros_like(parameters)
        return 4 * (group.size - 1) / group.size * parameters / self.bandwidth


class PipeDream(Uniform):
    """The published objective, as its code states it: ``(C + 4 (m-1) W / (B m)) / m``, and ``2 a / (B m)``.

    What enters a stage is charged to every stage but the first, what leaves it to every stage between the first and
    the last.
    """

    name = "pipedream"

    def check(self, *, memory_given: bool) -> None:
        super().check(memory_given=memory_given)
        if memory_given:
            raise PartitionError(
                "cost_model='pipedream' knows no memory cap, but memory= (or the network's memory_bytes) is given. "
                "Leave it out, or use cost_model='throughput'."
            )

    def stage_seconds(self, space: CutSpace, group: DeviceGroup, block: Block = EVERYWHERE) -> np.ndarray:
        reduction = self.all_reduce_seconds(space.between(space.parameters, block), group)
        compute = (space.between(space.seconds, block) / self.slowest(group) + reduction) / group.size
        sends = 2 * space.crossing / (self.bandwidth * group.size)
        first, last = block
        entering = sends[first, None]  # nothing enters the first
        leaving = np.where(np.arange(len(sends))[first, None] > 0, sends[None, last], 0.0)
        return np.maximum(compute, np.maximum(entering, leaving))


class Throughput(Uniform):
    """``[C + 2 sum(a) / B] / d + 4 (d-1) / d W / (M B)``, with nothing overlapped."""

    name = "throughput"

    def check(self, *, memory_given: bool) -> None:
        super().check(memory_given=memory_given)
        if self.num_microbatches is None:
            raise PartitionError(
                "cost_model='throughput' spreads the all-reduce over the micro-batches of a step; pass "
                "num_microbatches=."
            )

    def stage_seconds(self, space: CutSpace, group: DeviceGroup, block: Block = EVERYWHERE) -> np.ndarray:
        sends = 2 * space.crossing / self.bandwidth
        first, last = block
        work = space.between(space.seconds, block) / self.slowest(group) + sends[first, None] + sends[None, last]
        reduction = self.all_reduce_seconds(space.between(space.parameters, block), group)
        return work / group.size + reduction / (self.num_microbatches or 1)


@dataclass(frozen=True)
class Synchronous(CostModel):
    """A whole step on the executor's own timeline.

    All stages walk through the ticks in step (``jaxpipe.schedules.simulate``): of the forward passes in a tick the
    slowest counts, of the backward passes too, and after each tick neighbors exchange messages that are as large as
    the largest of all. The micro-batches of a step go through in ``R`` rounds (``jaxpipe.schedules.replicas``), each of
    as many as the numbers of devices of all stages divide. With ``F_s`` and ``B_s`` a device's seconds for a round, and
    ``T`` ticks

        step = wavefront(F) + wavefront(B) + T * exchange + all-reduce

    It is at least ``sum(F) + (R - 1) max(F)``, and the same of ``B``. Stage and link alone are priced as what they
    add to a step for each micro-batch. Where nothing is trained in the first stages, they work forward only, and in a
    tick the device counts whose forward and backward passes take longest together
    (``jaxpipe.schedules.table.Schedule.frozen``).

    A replica holds its parameters, their gradients, and in pair ticks ``2 y - 1`` micro-batches where a pipeline that
    is kept full by any means holds ``y``.

    Attributes:
      weight: how much a link counts beside a stage, where the two are compared; as a step has the sum of the slowest
        of both, no single weight leads to the best plan.
      frozen: whether parameters are frozen, so that stages without backward work are left out of it.
    """

    name = "synchronous"
    weight: float = 1.0
    frozen: bool = False

    @property
    def m(self) -> int:
        """Micro-batches of a step, of all replicas together."""
        return self.num_microbatches or 1

    def stage_seconds(self, space: CutSpace, group: DeviceGroup, block: Block = EVERYWHERE) -> np.ndarray:
        reduction = self.all_reduce_seconds(space.between(space.parameters, block), group)
        return space.between(space.seconds, block) / (group.size * self.slowest(group)) + reduction / self.m

    def link_seconds(self, crossing: np.ndarray, group: DeviceGroup, after: DeviceGroup) -> np.ndarray:
        sends = 2 * self.transfer_seconds(crossing, group.devices, after.devices)
        return self.weight * sends / min(group.size, after.size)

    def objective(self, space: CutSpace, stages: Stages) -> float:
        forward, backward, reductions = [], [], [0.0]
        together = math.lcm(*(len(devices) for *_, devices in stages))
        rounds = math.ceil(self.m / together)
        for first, last, devices in stages:
            group = DeviceGroup(devices)
            rate = group.size * self.slowest(group) / together
            forward.append(max(0.0, space.forward[last] - space.forward[first]) / rate)
            backward.append(max(0.0, space.backward[last] - space.backward[first]) / rate)
            weights = np.array([space.parameters[last] - space.parameters[first]])
            reductions.append(float(self.all_reduce_seconds(weights, group)[0]))
        idle = sum(1 for _ in itertools.takewhile(lambda b: b == 0, backward[:-1])) if self.frozen else 0
        if idle:
            total = pair_seconds(forward, backward, rounds, idle)
        else:
            total = wavefront_seconds(forward, rounds) + wavefront_seconds(backward, rounds)
        total += max(reductions)
        if len(stages) == 1:
            return total
        ticks = rounds + 2 * (len(stages) - 1) - idle  # of pair ticks, jaxpipe.schedules.one_f_one_b
        return total + ticks * together * self.exchange_seconds(space, stages)

    def exchange_seconds(self, space: CutSpace, stages: Stages) -> float:
        """Return what neighbors need to exchange messages, forward and back, as large as the largest of all.

        For one micro-batch: of two groups, every device of the smaller one sends or receives at a time.
        """
        largest = np.array([max(float(space.crossing[last]) for _, last, _ in stages[:-1])])
        return 2 * max(
            float(self.transfer_seconds(largest, before, behind)[0]) / min(len(before), len(behind))
            for (*_, before), (*_, behind) in itertools.pairwise(stages)
        )

    def all_reduce_seconds(self, parameters: np.ndarray, group: DeviceGroup) -> np.ndarray:
        """A ring all-reduce over a group's slowest link, once in a step."""
        if group.size == 1:
            return np.zeros_like(parameters)
        inside = np.ix_(group.devices, group.devices)
        bandwidth, latency = self.network.bandwidth[inside].min(), self.network.latency[inside].max()
        if not bandwidth:
            return np.full_like(parameters, np.inf)
        return 2 * (group.size - 1) * (parameters / group.size / bandwidth + latency)

    def memory_bytes(self, residuals: np.ndarray, parameters: np.ndarray, group: DeviceGroup) -> np.ndarray:
        return residuals * self.in_flight(group) + 2 * parameters

    def in_flight(self, group: DeviceGroup) -> int:
        return min(2 * super().in_flight(group) - 1, math.ceil(self.m / group.size))


#: The cost models, by the value of ``cost_model=``.
MODELS: dict[str, type[CostModel]] = {model.name: model for model in (PipeDream, MinMax, Throughput, Synchronous)}


def _slowest_links(links: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return those of some links (bandwidth, latency) that no other is slower than for messages of any size."""
    kept: list[tuple[float, float]] = []
    for bandwidth, latency in sorted(links, key=lambda link: (link[0], -link[1])):
        if not kept or latency > kept[-1][1]:
            kept.append((bandwidth, latency))
    return tuple(kept)


def wavefront_seconds(seconds: Sequence[float], num_microbatches: int) -> float:
    """One kind of work of all micro-batches, passed from stage to stage tick by tick; in a tick the slowest counts.

    Example:
      >>> wavefront_seconds([1, 3, 2], 4)  # 1 + 3 + 3 + 3 + 3 + 2
      15.0
    """
    count, m = len(seconds), num_microbatches
    short = min(m, count)
    windows = [max(seconds[max(0, t - m + 1) : t + 1]) for t in range(count)]
    windows += [max(seconds[k:]) for k in range(count - short + 1, count)]
    return float(sum(windows) + (m - short) * max(seconds))


def pair_seconds(forward: Sequence[float], backward: Sequence[float], num_microbatches: int, frozen: int) -> float:
    """Pair ticks of which the first stages only have the forward part; in a tick the slowest device counts.

    Example:
      >>> pair_seconds([3, 1], [0, 2], 4, 1)  # 3 + 3 + 3 + 3 + 3
      15.0
    """
    last, m = len(forward) - 1, num_microbatches
    spans = [(i, i + m, i, seconds) for i, seconds in enumerate(forward)]
    spans += [(2 * last - i, 2 * last - i + m, i, seconds) for i, seconds in enumerate(backward) if i >= frozen]
    ends = sorted({tick for first, behind, *_ in spans for tick in (first, behind)})
    total = 0.0
    for tick, following in itertools.pairwise(ends):
        work = [0.0] * len(forward)
        for first, behind, i, seconds in spans:
            if first <= tick < behind:
                work[i] += seconds
        total += (following - tick) * max(work)
    return total
