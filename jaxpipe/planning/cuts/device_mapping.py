"""Stages mapped to devices: of all mappings that make a step about no slower, the one with which swaps can do most.

The partitioner's cuts stay. A mapping's score is how many bytes of stashes can be with peers at a time, if every stage
that holds more than the mean sends to those that hold less. For each micro-batch a slice goes out and one comes back
over a direct link, one in each direction at once. So the link keeps the bandwidth times the seconds of a micro-batch
times the stashes that are away. Of mappings that let everything be moved the best is the one that does so in the
shortest time.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxpipe.costs.network import Network
from jaxpipe.planning.cuts.choose_plan import ROUNDING
from jaxpipe.planning.cuts.cost_models import Layout
from jaxpipe.planning.cuts.cut_space import space_of
from jaxpipe.planning.cuts.layouts import Limits, all_layouts, device_classes
from jaxpipe.planning.cuts.placed_stages import Partition, cut_at, model_of
from jaxpipe.schedules.swap_points import swap_points
from jaxpipe.schedules.table import Schedule


#: With more devices than this only exchanges of two are looked at, one after the other.
MOST_DEVICES = 8

#: How often the seconds are halved at most to tell mappings apart that let everything be moved.
MOST_HALVINGS = 60

#: By what share a step may take longer with another mapping: profiles are no better than this.
SLOWER = 0.01


@dataclass(frozen=True)
class Demand:
    """The bytes that stages would lend and could host.

    Attributes:
      excess: by stage, bytes of stashes that it holds beyond the mean and that can be away.
      free: by stage, bytes that it holds less.
      seconds: by stage, how long a link may send one way, latencies left out: a period for each stash that can be away.
      messages: in how many messages.
    """

    excess: np.ndarray
    free: np.ndarray
    seconds: np.ndarray
    messages: np.ndarray


def demand(schedule: Schedule, stash_bytes: Sequence[float], period: float) -> Demand:
    """Return the bytes to lend and to host, and the time for it, if a micro-batch takes ``period`` seconds."""
    stages = range(schedule.num_devices)
    points = [swap_points(schedule, s) for s in stages]
    sizes = np.array(stash_bytes, np.float64)
    in_flight = np.array([schedule.in_flight(s) for s in stages])
    away = np.maximum(in_flight - [point.home for point in points], 0).astype(np.float64)
    held = in_flight * sizes
    over = held - held.mean()
    return Demand(np.clip(over, 0.0, away * sizes), np.maximum(-over, 0.0), away * period, away)


def movable_bytes(wanted: Demand, bandwidth: np.ndarray, latency: np.ndarray, mappings: np.ndarray) -> np.ndarray:
    """The score of each mapping: the largest flow of bytes from stages with too much over their links to others.

    It is the smallest cut: some of the lending stages count with the links to every host, or with its free memory if
    that is less, and all others with their excess.
    """
    lenders, hosts = (np.flatnonzero(part > 0) for part in (wanted.excess, wanted.free))
    keeps = np.zeros((len(mappings), len(lenders), len(hosts)))
    for (a, s), (b, t) in itertools.product(enumerate(lenders), enumerate(hosts)):
        ends = mappings[:, s, :, None], mappings[:, t, None, :]
        sending = np.maximum(wanted.seconds[s] - wanted.messages[s] * latency[ends], 0.0)
        keeps[:, a, b] = (bandwidth[ends] * sending).min((1, 2))
    best = np.full(len(mappings), np.inf)
    for chosen in itertools.product((False, True), repeat=len(lenders)):
        inside = np.array(chosen, bool)
        taken = np.minimum(keeps[:, inside].sum(1), wanted.free[hosts]).sum(1)
        best = np.minimum(best, wanted.excess[lenders][~inside].sum() + taken)
    return best


def best_mapping(partition: Partition, schedule: Schedule, stash_bytes: Sequence[float], period: float) -> Partition:
    """The partition with its stages on other devices, if swaps can move more then and a step takes about no longer.

    Up to ``MOST_DEVICES`` devices every mapping is looked at, those that differ in exchanges of like devices once;
    with more devices, pairs are exchanged as long as that helps. ``Partition.searched`` names the search.
    """
    straight = schedule.num_chunks == 1 and schedule.takes_turns
    if schedule.num_devices == 1 or not straight or not schedule.has_backward:
        return partition
    wanted = demand(schedule, stash_bytes, period)
    if not wanted.excess.any():
        return partition
    within = model_of(partition)  # seconds are infinite where memory is too small, as for the partition perhaps
    model, network = replace(within, memory=()), partition.network
    stops = np.array([0, *(stage.operators.stop for stage in partition.stages)])
    space = space_of(partition.profile, np.argsort(partition.order) < stops[:, None])  # the cuts of the partition alone
    cuts = np.arange(len(stops))

    def seconds(mapping: np.ndarray) -> float:
        return within.objective(space, cuts, _layout(mapping))

    def better(best: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Return the best of a mapping and of others that are about no slower."""
        scores = movable_bytes(wanted, network.bandwidth, network.latency, np.array([best, *others]))
        others = others[scores[1:] >= scores[0] / ROUNDING]  # scores take far less time than seconds
        return _best_scored(wanted, network, np.array([best, *(x for x in others if seconds(x) <= limit < math.inf)]))

    best = np.array([stage.devices for stage in partition.stages])
    limit = (1 + SLOWER) * model.objective(space, cuts, _layout(best))
    if best.size <= MOST_DEVICES:
        how = "all mappings for swaps"
        best = better(best, np.array(list(_mappings(partition, within.memory))))
    else:
        how, last = "exchanges of two devices for swaps", np.zeros(0)
        while not np.array_equal(best, last):
            last, best = best, better(best, _exchanges(best))
    placed = cut_at(partition, model, space, cuts, _layout(best))
    return placed if placed.searched.endswith(how) else replace(placed, searched=f"{placed.searched}, {how}")


def _layout(mapping: np.ndarray) -> Layout:
    return tuple(map(tuple, mapping.tolist()))


def _best_scored(wanted: Demand, network: Network, mappings: np.ndarray) -> np.ndarray:
    """Return the mapping with the best score; of equals the first.

    Where several let everything be moved, they are compared for half of the seconds, and so on.
    """
    everything = wanted.excess.sum()
    for _ in range(MOST_HALVINGS):
        scores = movable_bytes(wanted, network.bandwidth, network.latency, mappings)
        mappings = mappings[scores >= scores.max() / ROUNDING]
        if len(mappings) == 1 or scores.max() < everything / ROUNDING:
            break
        wanted = replace(wanted, seconds=wanted.seconds / 2)
    return mappings[0]


def _mappings(partition: Partition, memory: Sequence[float]) -> Iterator[Layout]:
    """Return every mapping on the devices that are used, exchanges of like devices left out."""
    used = {d for stage in partition.stages for d in stage.devices}
    classes = [[d for d in group if d in used] for group in device_classes(partition.network, memory)]
    sizes = tuple(len(stage.devices) for stage in partition.stages)
    return all_layouts([group for group in classes if group], Limits(sizes, (sum(sizes),), sizes), len(sizes))


def _exchanges(mapping: np.ndarray) -> np.ndarray:
    """All mappings in which two devices of different stages have changed places."""
    mappings = []
    for first, second in itertools.combinations(np.ndindex(mapping.shape), 2):
        if first[0] != second[0]:
            other = mapping.copy()
            other[first], other[second] = mapping[second], mapping[first]
            mappings.append(np.sort(other, axis=1))
    return np.array(mappings)
