"""The cost models of others, whose answers may be compared with published ones.

model         published in                                       what counts
pipedream     D. Narayanan et al., SOSP 2019                     slowest of compute with all-reduce, and boundaries
min_max       network-aware partitioning (M2 of the design)      slowest of compute, and of links between neighbors
throughput    J. Tarnawski et al., "Piper", NeurIPS 2021         slowest of compute and communication, one after the
                                                                 other; a memory cap
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from jaxpipe.errors import PartitionError
from jaxpipe.planning.cuts.cost_models import CostModel, Layout
from jaxpipe.planning.cuts.cut_space import CutSpace


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

    def possible_seconds(self, space: CutSpace, devices: Sequence[int], followers: int) -> np.ndarray:
        """Return the seconds of all stages, infinite where they do not fit the memory, or there is none."""
        possible = space.nested
        if self.memory:
            residuals, parameters = space.between(space.residuals), space.between(space.parameters)
            held = self.memory_bytes(residuals, parameters, len(devices), followers)
            possible = possible & (held <= min(self.memory[d] for d in devices))
        return np.where(possible, self.stage_seconds(space, devices), np.inf)

    def prices(
        self, space: CutSpace, plans: Sequence[tuple[np.ndarray, Layout]], within: float = math.inf
    ) -> list[np.ndarray]:
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
