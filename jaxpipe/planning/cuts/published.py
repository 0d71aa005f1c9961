"""The cost models of others, whose answers may be compared with published ones, and the search for them.

model         published in                                       what counts
pipedream     D. Narayanan et al., SOSP 2019                     slowest of compute with all-reduce, and boundaries
min_max       network-aware partitioning (M2 of the design)      slowest of compute, and of links between neighbors
throughput    J. Tarnawski et al., "Piper", NeurIPS 2021         slowest of compute and communication, one after the
                                                                 other; a memory cap

The search is a dynamic program along an order of the devices, of which each stage takes the next ones. From the last
stage to the first, the best way to run all that lies behind a cut is kept for each number of devices that it uses, and
of its first stage.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.errors import PartitionError
from jaxpipe.planning.cuts.choose_plan import ROUNDING, Found
from jaxpipe.planning.cuts.cost_models import CostModel, Layout, Plans
from jaxpipe.planning.cuts.cut_space import CutSpace
from jaxpipe.planning.cuts.device_orders import improve, seeds
from jaxpipe.planning.cuts.layouts import Limits


#: Cuts that are looked at to compare orders of devices.
CUTS_FOR_ORDERS = 48


class Bottleneck(CostModel):
    """A model whose price is that of the costliest stage or link."""

    def check(self) -> None:
        """Raise ``PartitionError`` if the model does not know what was given."""

    @abstractmethod
    def stage_seconds(self, space: CutSpace, devices: Sequence[int]) -> np.ndarray:
        """``[first cuts, last cuts]``: what the stage between two cuts costs on some devices, neighbors left aside."""

    def link_seconds(self, crossing: np.ndarray, devices: Sequence[int], after: Sequence[int]) -> np.ndarray:
        """Return the seconds to send ``crossing`` bytes forward and back, between devices and those behind."""
        return np.zeros_like(crossing)

    def possible_seconds(self, space: CutSpace, devices: Sequence[int], behind: Sequence[int]) -> np.ndarray:
        """Return the seconds of all stages with devices behind, infinite for those that do not fit or do not exist."""
        possible = space.nested
        if self.memory:
            residuals, parameters = space.between(space.residuals), space.between(space.parameters)
            in_flight, *_ = self.in_flight([devices, *([d] for d in behind)])
            held = self.memory_bytes(residuals, parameters, in_flight)
            possible = possible & (held <= self.room((devices,))[0])
        return np.where(possible, self.stage_seconds(space, devices), np.inf)

    def prices(self, space: CutSpace, plans: Sequence[Plans], within: float = math.inf) -> list[np.ndarray]:
        prices = []
        for cuts, layout in plans:
            costs = [self.stage_seconds(space, x)[cuts[:, k], cuts[:, k + 1]] for k, x in enumerate(layout)]
            pairs = enumerate(itertools.pairwise(layout))
            costs += [self.link_seconds(space.crossing[cuts[:, k + 1]], *pair) for k, pair in pairs]
            prices.append(np.where(self.fits(space, cuts, layout), np.max(costs, axis=0), np.inf))
        return prices


class MinMax(Bottleneck):
    """``C / k`` of each stage, and ``2 a / bandwidth`` over the slowest link between neighboring stages."""

    name = "min_max"

    def stage_seconds(self, space: CutSpace, devices: Sequence[int]) -> np.ndarray:
        return space.between(space.seconds) / (len(devices) * self.slowest(devices))

    def link_seconds(self, crossing: np.ndarray, devices: Sequence[int], after: Sequence[int]) -> np.ndarray:
        return 2 * self.transfer_seconds(crossing, devices, after)


class Uniform(Bottleneck):
    """A model that knows one bandwidth for all links and one speed for all devices."""

    def check(self) -> None:
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

    def all_reduce_seconds(self, parameters: np.ndarray, size: int) -> np.ndarray:
        """Both directions of a ring all-reduce of the gradients, as the published models charge it."""
        return 4 * (size - 1) / size * parameters / self.bandwidth


class PipeDream(Uniform):
    """The published objective, as its code states it: ``(C + 4 (m-1) W / (B m)) / m``, and ``2 a / (B m)``.

    What enters a stage is charged to every stage but the first, what leaves it to every stage between the first and
    the last.
    """

    name = "pipedream"

    def check(self) -> None:
        super().check()
        if self.memory:
            raise PartitionError(
                "cost_model='pipedream' knows no memory cap, but memory= (or the network's memory_bytes) is given. "
                "Leave it out, or use cost_model='throughput'."
            )

    def stage_seconds(self, space: CutSpace, devices: Sequence[int]) -> np.ndarray:
        reduction = self.all_reduce_seconds(space.between(space.parameters), len(devices))
        compute = (space.between(space.seconds) / self.slowest(devices) + reduction) / len(devices)
        sends = 2 * space.crossing / (self.bandwidth * len(devices))
        entering = sends[:, None]  # nothing enters the first
        leaving = np.where(np.arange(len(sends))[:, None] > 0, sends[None], 0.0)
        return np.maximum(compute, np.maximum(entering, leaving))


class Throughput(Uniform):
    """``[C + 2 sum(a) / B] / d + 4 (d-1) / d W / (M B)``, with nothing overlapped."""

    name = "throughput"

    def check(self) -> None:
        super().check()
        if self.num_microbatches is None:
            raise PartitionError(
                "cost_model='throughput' spreads the all-reduce over the micro-batches of a step; pass "
                "num_microbatches=."
            )

    def stage_seconds(self, space: CutSpace, devices: Sequence[int]) -> np.ndarray:
        sends = 2 * space.crossing / self.bandwidth
        work = space.between(space.seconds) / self.slowest(devices) + sends[:, None] + sends[None]
        reduction = self.all_reduce_seconds(space.between(space.parameters), len(devices))
        return work / len(devices) + reduction / (self.num_microbatches or 1)


def cheapest_bottleneck(
    space: CutSpace, model: Bottleneck, classes: Sequence[Sequence[int]], limits: Limits, slack: float
) -> Found | None:
    """Return stages none of which costs more than the least by more than ``slack``, and that send the fewest bytes."""
    order, alike = tuple(range(model.network.num_devices)), len(classes) == 1
    if not alike:
        order = _best_order(space, model, limits)
    least, *_ = along_order(space, model, order, limits)
    if least == math.inf:
        return None
    _, cuts, layout = along_order(space, model, order, limits, least * (ROUNDING + slack))
    bound = least if alike else _relaxed(space, model, limits)
    placements = "all placements" if alike else "some orders of the devices"
    return Found(model.objective(space, cuts, layout), cuts, layout, bound, 1, placements)


def along_order(
    space: CutSpace, model: Bottleneck, order: Sequence[int], limits: Limits, limit: float | None = None
) -> tuple[float, np.ndarray, Layout]:
    """Return the least cost of the costliest stage or link; or, within a limit, the least bytes sent in all.

    With the cuts and the devices of the stages, if there are any.
    """
    count, most = len(space.crossing), limits.totals[-1]
    end = np.full(count, np.inf)
    end[-1] = 0.0
    # By devices that are used, and those of the first stage: values, ends of that stage, numbers of the next one's.
    best: dict[int, dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]] = {0: {0: (end, end, end)}}
    for used in range(1, most + 1):
        best[used] = {}
        for taken in limits.sizes(used):
            rest, first = used - taken, len(order) - used
            if not best.get(rest):
                continue
            group = order[first : first + taken]
            cost = model.possible_seconds(space, group, order[first + taken :])
            ways = []
            for following, (values, *_) in best[rest].items():
                after = order[first + taken : first + taken + following]
                links = model.link_seconds(space.crossing, group, after) if following else np.zeros(count)
                behind = (
                    np.where(links <= limit, values + space.crossing, np.inf) if limit else np.maximum(values, links)
                )
                ways.append(behind)
            chosen = np.argmin(ways, axis=0)
            behind = np.min(ways, axis=0)
            total = np.where(cost <= limit, behind, np.inf) if limit else np.maximum(cost, behind)
            ended = count - 1 - total[:, ::-1].argmin(1)  # of equals the last: the earlier stage is then the fuller one
            best[used][taken] = total[np.arange(count), ended], ended, np.array(list(best[rest]))[chosen]
    answers = [(float(values[0]), used, taken) for used in limits.totals for taken, (values, *_) in best[used].items()]
    value, used, taken = min(answers, default=(math.inf, 0, 0))
    cuts, layout = [0], []
    while used and value < math.inf:
        _, ended, following = best[used][taken]
        first = len(order) - used
        cuts.append(int(ended[cuts[-1]]))
        layout.append(tuple(sorted(order[first : first + taken])))
        used, taken = used - taken, int(following[cuts[-1]])
    return value, np.array(cuts), tuple(layout)


def _best_order(space: CutSpace, model: Bottleneck, limits: Limits) -> tuple[int, ...]:
    """An order of the devices, the first stages first, that makes the costliest stage or link cheap."""
    few = space.thinned(CUTS_FOR_ORDERS)

    def price(order: tuple[int, ...]) -> float:
        return along_order(few, model, order, limits)[0]

    return improve(min(seeds(model.network), key=price), price)


def _relaxed(space: CutSpace, model: Bottleneck, limits: Limits) -> float:
    """A bound: the same devices, as if each were the best of them and all links the best link."""
    network = model.network
    off, count = ~np.eye(network.num_devices, dtype=bool), network.num_devices
    best = Network.uniform(count, float(network.bandwidth[off].max()), float(network.latency[off].min()))
    best = replace(best, speed=(max(network.speed),) * count)
    kinder = replace(model, network=best, memory=(max(model.memory),) * count if model.memory else ())
    return along_order(space, kinder, range(count), limits)[0]
