"""The work of a step as a graph, and list scheduling on it: the input of a search for a schedule.

An operation is one kind of work of one stage. It runs once for each micro-batch, in the order of the micro-batches, so
that sums of gradients have the bits of plain training. Two graphs describe a step: the one in its own direction, and
its mirror, in which time runs backward. A schedule for either is a schedule for the other, read from its end.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpipe.schedules.table import Action, Kind


#: By operation and micro-batch, its priority: the smallest number runs first.
Ranks = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Operation:
    """One kind of work of a stage."""

    kind: Kind
    stage: int
    device: int
    chunk: int
    seconds: float  # of one micro-batch
    needs: tuple[tuple[int, float], ...]  # operations of the same micro-batch, with seconds of the message from each
    takes: int = 0  # stashes that it adds to those of its device; -1 where it frees one
    room: int = 0  # stashes on its device below which it may take another, if it takes any


@dataclass(frozen=True)
class WorkGraph:
    """All operations of a step."""

    operations: tuple[Operation, ...]
    num_devices: int
    num_microbatches: int

    @functools.cached_property
    def mirror(self) -> "WorkGraph":
        """The graph with time running backward: an operation needs those that needed it."""
        needs: list[list[tuple[int, float]]] = [[] for _ in self.operations]
        for o, operation in enumerate(self.operations):
            for source, seconds in operation.needs:
                needs[source].append((o, seconds))
        pairs = zip(self.operations, needs, strict=True)
        mirrored = (replace(x, needs=tuple(sources), takes=-x.takes) for x, sources in pairs)
        return replace(self, operations=tuple(mirrored))


@dataclass(frozen=True)
class Sequenced:
    """A schedule of a graph."""

    makespan: float
    log: tuple[tuple[int, int], ...]  # operations with their micro-batches, in the order in which they begin
    ends: tuple[tuple[float, ...], ...]  # by operation and micro-batch, in seconds

    def mirrored(self) -> "Sequenced":
        """Return the schedule read from its end; ``ends`` stay as they are."""
        last = len(self.ends[0]) - 1
        return replace(self, log=tuple((o, last - j) for o, j in reversed(self.log)))

    def next_ranks(self) -> Ranks:
        """Return priorities for the mirrored graph: what ends last here runs first there."""
        return [[-end for end in reversed(row)] for row in self.ends]

    def orders(self, graph: WorkGraph) -> list[list[Action]]:
        """Return the actions of each device."""
        orders: list[list[Action]] = [[] for _ in range(graph.num_devices)]
        for o, j in self.log:
            operation = graph.operations[o]
            orders[operation.device].append(Action(operation.kind, j, operation.chunk))
        return orders


def list_scheduled(graph: WorkGraph, ranks: Ranks, patience: float) -> Sequenced | None:
    """Return the schedule in which a free device begins the ready operation with the smallest rank.

    A device waits for the message of an operation with a smaller rank where the ready one would delay that by more than
    ``patience`` of its seconds: 1 never waits, 0 always. None if devices whose stashes are all in use wait for each
    other.
    """
    operations, m = graph.operations, graph.num_microbatches
    numbers = [[o for o, x in enumerate(operations) if x.device == d] for d in range(graph.num_devices)]
    needs = [x.needs for x in operations]
    # By operation, the other devices that read its result, and the seconds of the message.
    followers = [
        [(operations[o].device, seconds) for o, seconds in x.needs if operations[o].device != x.device]
        for x in graph.mirror.operations
    ]
    takes, rooms = [x.takes for x in operations], [x.room for x in operations]
    free, held = [0.0] * graph.num_devices, [0] * graph.num_devices
    ends: list[list[float]] = [[] for _ in operations]
    log: list[tuple[int, int]] = []
    events = [(0.0, d) for d in range(graph.num_devices)]
    while events:
        now, d = heapq.heappop(events)
        if free[d] > now:
            continue
        best, least = -1, math.inf
        coming: list[tuple[float, float]] = []
        for o in numbers[d]:
            j = len(ends[o])
            if j == m or (takes[o] > 0 and held[d] >= rooms[o]):
                continue
            arrival = 0.0
            for source, seconds in needs[o]:
                row = ends[source]
                if len(row) <= j:
                    break
                arrival = max(arrival, row[j] + seconds)
            else:
                rank = ranks[o][j]
                if arrival > now:
                    coming.append((rank, arrival))
                elif rank < least:
                    best, least = o, rank
        if best < 0:
            continue
        taken = operations[best].seconds
        if any(rank < least and now + taken - arrival > patience * taken for rank, arrival in coming):
            continue  # the message wakes the device
        log.append((best, len(ends[best])))
        held[d] += takes[best]
        free[d] = end = now + taken
        ends[best].append(end)
        heapq.heappush(events, (end, d))
        for other, seconds in followers[best]:
            heapq.heappush(events, (end + seconds, other))
    return None if len(log) < len(operations) * m else Sequenced(max(free), tuple(log), tuple(map(tuple, ends)))
