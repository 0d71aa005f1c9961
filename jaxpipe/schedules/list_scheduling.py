"""A schedule from the seconds of the stages: list scheduling in both directions of time, and a bound for any order.

seconds, in-flight limits ──▶ graph of the work (jaxpipe.schedules.work_graph) ──▶ priority rules ──▶ schedules
                                                                                                        │ the best
priorities by how late work may end ◀── schedule of the mirrored graph ◀── priorities by its ends ◀─────┘
"""

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import synchronous
from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.simulate import Costs, Links, Seconds, both_parts, run_free, stage_links, stage_seconds
from jaxpipe.schedules.stage_map import StageMapLike, stage_map, v_shape
from jaxpipe.schedules.table import Kind, Schedule, check_size, needed_work
from jaxpipe.schedules.work_graph import Operation, Ranks, Sequenced, WorkGraph, list_scheduled
from jaxpipe.text.units import whole_number


#: Actions that a search puts into order, over all schedules that it tries: under a second.
MOST_ACTIONS = 120_000

#: Schedules that a search tries at least, however large they are, and at most.
FEWEST_RUNS, MOST_RUNS = 16, 200

#: Shares of an operation's seconds by which it may delay a more urgent one.
PATIENCES = (1.0, 0.5, 0.0)

#: By what share a step may be over the bound for the search to end: measured seconds are no better than this.
CLOSE = 1e-3

#: The work of a stage, with the backward pass in two parts and as a whole.
SPLIT, WHOLE = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), (Kind.FORWARD, Kind.BACKWARD)

#: Rounding of sums of seconds.
ROUNDING = 1e-9


def list_schedule(
    num_devices: int,
    num_microbatches: int,
    *,
    forward: Seconds,
    backward_input: Seconds,
    backward_weight: Seconds,
    backward: Seconds | None = None,
    communication: float | Sequence[tuple[float, float]] = 0.0,
    in_flight: int | Sequence[int] | None = None,
    num_chunks: int = 1,
    stage_of: StageMapLike = None,
) -> Schedule:
    """Search for the order of work with the shortest step, for devices that run free.

    Every device runs the micro-batches of a stage in order, forward, backward and for weights, and holds at most
    ``in_flight`` stashes. The backward pass is tried as a whole and in two parts. The result is at least as short as
    GPipe, textbook 1F1B and zero-bubble H1 (or interleaved 1F1B, or the tables for a V) where these keep the limits;
    it is such a table if none shorter comes up. Equal arguments give equal tables.

    List scheduling with priority rules, then forward-backward improvement: K. Y. Li and R. J. Willis, "An iterative
    scheduling technique for resource-constrained project scheduling", EJOR 1992. P. Qi et al.
    (ICLR 2024, arXiv 2401.10241) order the split backward pass by measured seconds as well.

    Args:
      num_devices: devices.
      num_microbatches: of a step.
      forward, backward_input, backward_weight: seconds of a micro-batch, for all stages or by stage.
      backward: of the backward pass as a whole; left out: the sum of its parts.
      communication: seconds of a message; or a pair for each stage and the next, forward and back.
      in_flight: most stashes of a device, for all or by device; left out: ``num_devices * num_chunks``, as many bytes
        as ``num_devices`` micro-batches have on a device.
      num_chunks: stages on each device; left out with rows in ``stage_of``: as many as these have.
      stage_of: the stage of each device and chunk, as ``from_orders`` takes it: ``v_shape(num_devices)`` for a V.

    Raises:
      ScheduleError: if a size is below 1, numbers do not fit the stages, or a limit leaves no room for a micro-batch.

    Example:
      >>> table = list_schedule(4, 8, forward=[1, 2, 1, 1], backward_input=1, backward_weight=1)
      >>> table.simulate(forward=[1, 2, 1, 1], backward_input=1, backward_weight=1).makespan
      33.0
    """
    times = forward, backward, backward_input, backward_weight
    problem = _problem(num_devices, num_microbatches, num_chunks, stage_of, times, communication, in_flight)
    fixed = [(problem.makespan(table), table) for table in _fixed_tables(problem)]
    best, seconds = None, min((makespan for makespan, _ in fixed), default=math.inf)
    for kinds in (SPLIT, WHOLE) if any(problem.costs[Kind.BACKWARD_WEIGHT]) else (WHOLE,):
        least = _bound(problem, kinds)
        if seconds <= least * (1 + CLOSE):
            continue
        graph = _graph(problem, kinds)
        ordered = _Search(graph, problem.costliest, least).run()
        if ordered is not None and ordered.makespan < seconds * (1 - ROUNDING):
            best, seconds = ordered.orders(graph), ordered.makespan
    chunks = problem.table.num_chunks
    if best is not None:
        name = "list-schedule" if chunks == 1 else f"list-schedule-{'v' if problem.is_v else chunks}"
        return from_orders(name, best, num_microbatches, chunks, problem.table.stage_of)
    if not fixed:
        raise ScheduleError(
            f"in_flight={list(problem.in_flight)}: the search found no order of {num_microbatches} micro-batches on "
            f"{num_devices} devices with {chunks} stage(s) on each that keeps these limits. Raise them."
        )
    return min(fixed, key=lambda pair: pair[0])[1]


def makespan_bound(
    num_devices: int,
    num_microbatches: int,
    *,
    forward: Seconds,
    backward_input: Seconds,
    backward_weight: Seconds,
    backward: Seconds | None = None,
    communication: float | Sequence[tuple[float, float]] = 0.0,
    in_flight: int | Sequence[int] | None = None,
    num_chunks: int = 1,
    stage_of: StageMapLike = None,
) -> float:
    """Return a lower bound of the seconds of a step, for every order of work with or without a split backward pass.

    For each device: until its first message arrives it waits; before its first backward work it does no more forward
    work than its stashes have room for, and after its last no more work for weights; and a stash stays for the round
    trip of its micro-batch, so that few stashes make for few micro-batches in that time.

    Args:
      num_devices, num_microbatches, num_chunks, stage_of: the size, and which stage is where.
      forward, backward_input, backward_weight, backward, communication, in_flight: as ``list_schedule`` takes them.

    Raises:
      ScheduleError: as ``list_schedule`` does.

    Example:
      >>> makespan_bound(8, 16, forward=1, backward_input=1, backward_weight=1)  # zero-bubble H1 takes as long
      55.0
    """
    times = forward, backward, backward_input, backward_weight
    problem = _problem(num_devices, num_microbatches, num_chunks, stage_of, times, communication, in_flight)
    return min(_bound(problem, SPLIT), _bound(problem, WHOLE))


@dataclass(frozen=True)
class _Problem:
    """Checked arguments: a table of this size without work, seconds, and the most stashes of each device."""

    table: Schedule
    costs: Costs
    links: Links
    in_flight: tuple[int, ...]

    @property
    def costliest(self) -> int:
        """The stage with the most work."""
        work = [sum(x) for x in zip(self.costs[Kind.FORWARD], self.costs[Kind.BACKWARD], strict=True)]
        return work.index(max(work))

    @property
    def is_v(self) -> bool:
        """True if stages are in a V."""
        return self.table.stage_of == v_shape(self.table.num_devices) and self.table.num_devices > 1

    def makespan(self, schedule: Schedule) -> float:
        """Return the seconds of a step with some table."""
        return max(span.end for span in run_free(schedule, self.costs, self.links))


def _problem(
    num_devices: int,
    num_microbatches: int,
    num_chunks: int,
    stage_of: StageMapLike,
    times: Sequence[Seconds | None],
    communication: float | Sequence[tuple[float, float]],
    in_flight: int | Sequence[int] | None,
) -> _Problem:
    check_size(num_devices, num_microbatches)
    chunks = whole_number(num_chunks, "num_chunks", ScheduleError)
    if chunks < 1:
        raise ScheduleError(f"num_chunks={chunks}; a device has at least 1 stage.")
    if isinstance(stage_of, Sequence) and stage_of and chunks == 1:
        chunks = len(stage_of[0])
    stages = stage_map("list-schedule", stage_of, num_devices, chunks)
    table = Schedule("list-schedule", num_devices, num_microbatches, (), chunks, stage_of=stages)
    asked = stage_seconds(times, table.total_stages, "there are")
    costs = {kind: _checked(kind.name.lower(), seconds) for kind, seconds in asked.items()}
    costs.setdefault(Kind.BACKWARD, both_parts(costs))
    given = stage_links(communication, table.total_stages, "there are")
    _checked("communication", list(itertools.chain.from_iterable(given)))
    links = [link if apart else (0.0, 0.0) for link, apart in zip(given, table.apart, strict=True)]
    return _Problem(table, costs, links, _limits(in_flight, table))


def _checked(name: str, times: Sequence[float]) -> tuple[float, ...]:
    wrong = next((x for x in times if not (isinstance(x, int | float) and 0 <= x < math.inf)), None)
    if wrong is not None:
        raise ScheduleError(f"{name}= has {wrong!r} among its times; seconds are finite numbers, 0 or more.")
    return tuple(map(float, times))


def _limits(in_flight: int | Sequence[int] | None, table: Schedule) -> tuple[int, ...]:
    """Return the most stashes of each device, no more than it can have."""
    devices, chunks = table.num_devices, table.num_chunks
    if in_flight is None:
        in_flight = table.total_stages
    limits = tuple(in_flight) if isinstance(in_flight, Sequence) else (in_flight,) * devices
    if len(limits) != devices:
        raise ScheduleError(
            f"in_flight= has {len(limits)} limits, but there are {devices} devices: pass a number for each, or one for "
            "all."
        )
    for limit in limits:
        if whole_number(limit, "in_flight", ScheduleError) < chunks:
            raise ScheduleError(
                f"in_flight= has the limit {limit}; a micro-batch has {chunks} stash(es) on each device, so it must be "
                f"at least {chunks}."
            )
    return tuple(min(limit, table.num_microbatches * chunks) for limit in limits)


def _fixed_tables(problem: _Problem) -> Iterator[Schedule]:
    """Yield the tables of this size that keep the limits."""
    size = problem.table
    makers = [synchronous.one_f_one_b, synchronous.zero_bubble, synchronous.gpipe]
    if problem.is_v:
        makers = [synchronous.zero_bubble_v, synchronous.v_half, synchronous.dual_pipe_v]
    elif size.num_chunks > 1:
        makers = [functools.partial(synchronous.interleaved, num_chunks=size.num_chunks)]
    for maker in makers:
        with contextlib.suppress(ScheduleError):  # some have no table of some sizes
            table = maker(size.num_devices, size.num_microbatches)
            held = zip(table.most_in_flight, problem.in_flight, strict=True)
            if table.stage_of == size.stage_of and all(most <= limit for most, limit in held):
                yield table


def _graph(problem: _Problem, kinds: Sequence[Kind]) -> WorkGraph:
    """Return the work of a step, the backward pass in two parts or whole."""
    table = problem.table
    numbers = {(kind, s): o for o, (s, kind) in enumerate(itertools.product(range(table.total_stages), kinds))}
    operations = []
    for kind, s in numbers:
        d, takes = table.device(s), (kind is kinds[0]) - (kind is kinds[-1])
        # A stash stays free for each later stage, so that micro-batches that have begun can always go on.
        room = problem.in_flight[d] - sum(later > s for later in table.stage_of[d])
        needs = tuple(
            (numbers[needed, source], 0.0 if source == s else problem.links[min(source, s)][int(source > s)])
            for needed, source in needed_work(kind, s, table.total_stages)
        )
        operations.append(Operation(kind, s, d, table.chunk(s), problem.costs[kind][s], needs, takes, room))
    return WorkGraph(tuple(operations), table.num_devices, table.num_microbatches)


class _Search:
    """Schedules of a graph, until one meets a bound or the runs are used up."""

    def __init__(self, graph: WorkGraph, costliest: int, bound: float):
        self._graphs = graph, graph.mirror
        self._costliest, self._bound = costliest, bound
        actions = len(graph.operations) * graph.num_microbatches
        self._runs = min(MOST_RUNS, max(FEWEST_RUNS, MOST_ACTIONS // actions))
        self._best: tuple[Sequenced, int] | None = None

    def run(self) -> Sequenced | None:
        """Return the shortest schedule; None if none was found."""
        for way, rule, patience in itertools.product(range(2), _RULES, PATIENCES):
            graph = self._graphs[way]
            ranks = [[_rank(rule, x, self._costliest)] * graph.num_microbatches for x in graph.operations]
            self._scheduled(ranks, way, patience)
        self._restart()
        if self._best is None:
            return None
        ordered, way = self._best
        return ordered.mirrored() if way else ordered

    def _improve(self, ranks: Ranks, way: int) -> None:
        """Schedule the graph and its mirror in turn, each by the ends of the other, while that makes a step shorter."""
        least = math.inf
        while True:
            tried = [self._scheduled(ranks, way, patience) for patience in PATIENCES]
            ordered = min(filter(None, tried), key=lambda x: x.makespan, default=None)
            if ordered is None or ordered.makespan >= least * (1 - ROUNDING):
                return
            least, ranks, way = ordered.makespan, ordered.next_ranks(), 1 - way

    def _restart(self) -> None:
        """Improve the best schedule from ranks near its own; the numbers are the same in every process."""
        draw = random.Random(0)
        while self._best is not None and not self._done:
            ordered, way = self._best
            noise = ordered.makespan * draw.choice((0.005, 0.02, 0.05))
            ranks = [[rank + draw.uniform(-noise, noise) for rank in row] for row in ordered.next_ranks()]
            self._improve(ranks, 1 - way)

    @property
    def _done(self) -> bool:
        reached = self._best is not None and self._best[0].makespan <= self._bound * (1 + CLOSE)
        return reached or self._runs <= 0

    def _scheduled(self, ranks: Ranks, way: int, patience: float) -> Sequenced | None:
        """Return a schedule of the graph (0) or its mirror (1); None if it deadlocks, or the search is over."""
        if self._done:
            return None
        self._runs -= 1
        ordered = list_scheduled(self._graphs[way], ranks, patience)
        if ordered is not None and (self._best is None or ordered.makespan < self._best[0].makespan):
            self._best = ordered, way
        return ordered


#: Priorities by the kind of work, the first letter runs first: before the costliest stage, in it, and behind it.
_RULES = (
    ("BIFW", "BIFW", "BIFW"),
    ("FBIW", "FBIW", "FBIW"),
    ("FBIW", "BIFW", "BIFW"),  # feeds the costliest stage
    ("BIFW", "BIFW", "FBIW"),  # drains it
    ("BIWF", "BIWF", "BIWF"),
)


def _rank(rule: Sequence[str], operation: Operation, costliest: int) -> float:
    place = 1 + (operation.stage > costliest) - (operation.stage < costliest)
    return rule[place].index(operation.kind.value)


def _bound(problem: _Problem, kinds: Sequence[Kind]) -> float:
    """Return the largest of the bounds of all devices."""
    forward, inputs = problem.costs[kinds[0]], problem.costs[kinds[1]]
    m, count = problem.table.num_microbatches, problem.table.total_stages
    weights = problem.costs[Kind.BACKWARD_WEIGHT] if Kind.BACKWARD_WEIGHT in kinds else (0.0,) * count
    ahead, back = zip(*problem.links, strict=True) if problem.links else ((), ())
    # By stage: when its first message may be there, when its first cotangent, and what follows its backward work.
    first = list(itertools.accumulate(map(sum, zip(forward, ahead, strict=False)), initial=0.0))
    turn = first[-1] + forward[-1]
    returned = list(itertools.accumulate((inputs[s + 1] + back[s] for s in range(count - 2, -1, -1)), initial=turn))
    returned.reverse()
    after = list(itertools.accumulate((inputs[s] + back[s] for s in range(count - 1)), initial=weights[0]))
    bounds = [0.0]
    for d, limit in enumerate(problem.in_flight):
        stages = sorted(problem.table.stage_of[d])
        ahead_of, back_of, late_of = (m * sum(x[s] for s in stages) for x in (forward, inputs, weights))
        early = min(ahead_of, limit * max(forward[s] for s in stages))
        late = min(late_of, limit * max(weights[s] for s in stages))
        begins, follows = max(first[stages[0]] + early, returned[stages[-1]]), max(late, after[stages[0]])
        bounds.append(begins + (ahead_of - early) + back_of + (late_of - late) + follows)
        if len(stages) == 1:
            # A device's micro-batch number limit + 1 begins after the round trip of the first, and so on.
            s = stages[0]
            trip = returned[s] - first[s] + inputs[s]
            rounds, rest = divmod(m - 1, limit)
            stays = trip + weights[s]
            begins = first[s] + rounds * stays + rest * forward[s]
            bounds.append(begins + max(trip + after[s], stays))
    return max(bounds)
