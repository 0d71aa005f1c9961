"""The time that a schedule takes, with every device running free or with all devices in step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.table import KINDS, Action, Kind, Schedule


#: Seconds of a micro-batch: for every stage the same, or by stage.
Seconds = float | Sequence[float]


class Span(NamedTuple):
    """One action on the timeline, in seconds from the start of the step."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The timeline of a schedule: the device and the time of each action.

    Attributes:
      spans: every action; ``stage`` is the device.
      makespan: seconds from the first start to the last end.
      peak_in_flight: by device, the most stashes that are held at once.
    """

    spans: tuple[Span, ...]
    makespan: float
    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all devices' time in which they do not compute."""
        busy = sum(span.end - span.start for span in self.spans)
        total = self.makespan * len(self.peak_in_flight)
        return 1 - busy / total if total else 0.0


def simulate(
    schedule: Schedule,
    *,
    forward: Seconds,
    backward: Seconds | None = None,
    backward_input: Seconds | None = None,
    backward_weight: Seconds | None = None,
    communication: float | Sequence[tuple[float, float]] = 0.0,
    begins: Mapping[int, float] | None = None,
    lockstep: bool = False,
) -> Timeline:
    """Run a schedule on paper.

    Free, a device begins its next action as soon as it is done with the last and all that the action needs has
    arrived. In step, all devices do the work of one phase of a tick before the next begins (``Schedule.phases``), so
    that it takes as long as the slowest device that has any; then neighbors exchange what they computed.

    Args:
      schedule: the table.
      forward: seconds of one micro-batch.
      backward: the same, for the whole of the backward work; or
      backward_input, backward_weight: for its two parts. A schedule that does not split takes their sum.
      communication: seconds from one device to another, for all, or for each stage and the next, forward and back. A
        message leaves when its work is done and holds nobody up but whoever waits for it. In step: of the exchange
        after a tick.
      begins: running free, when an action may begin at the earliest, by the number of its result (``Step``).
      lockstep: all devices walk through the ticks in step.

    Raises:
      ScheduleError: if costs do not fit the schedule, or an action waits for one behind it.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> simulate(one_f_one_b(4, 16), forward=1, backward=2).makespan
      57.0
    """
    seconds = _seconds(schedule, forward, backward, backward_input, backward_weight)
    if lockstep and isinstance(communication, Sequence):
        raise ScheduleError("communication= by stage is for devices that run free: pass lockstep=False, or a number.")
    if isinstance(communication, Sequence):
        links = tuple(communication)
        if len(links) != schedule.total_stages - 1:
            raise ScheduleError(
                f"communication= has {len(links)} pairs, but {schedule.name} has {schedule.total_stages} stages: pass "
                f"{schedule.total_stages - 1}, one for each stage and the next."
            )
        spans = _free(schedule, seconds, links, begins or {})
        communication = 0.0
    elif lockstep:
        spans = _in_step(schedule, seconds, communication)
    else:
        spans = _free(schedule, seconds, ((communication, communication),) * (schedule.total_stages - 1), begins or {})
    end = max((span.end for span in spans), default=0.0)
    if lockstep and schedule.num_devices > 1:
        end += communication
    return Timeline(tuple(spans), float(end), schedule.most_in_flight)


Costs = dict[Kind, tuple[float, ...]]


def _seconds(
    schedule: Schedule, forward: Seconds, backward: Seconds | None, first: Seconds | None, second: Seconds | None
) -> Costs:
    """Seconds of each kind by stage, chunk after chunk."""
    count = schedule.total_stages

    def by_stage(name: str, cost: Seconds) -> tuple[float, ...]:
        seconds = tuple(cost) if isinstance(cost, Sequence) else (float(cost),) * count
        if len(seconds) != count:
            raise ScheduleError(f"{name}= has {len(seconds)} times, but {schedule.name} has {count} stages.")
        return seconds

    if (first is None) != (second is None) or (backward is None) == (first is None):
        raise ScheduleError("simulate takes either backward=, or backward_input= and backward_weight=.")
    costs = {Kind.FORWARD: by_stage("forward", forward)}
    if first is not None and second is not None:
        costs[Kind.BACKWARD_INPUT] = by_stage("backward_input", first)
        costs[Kind.BACKWARD_WEIGHT] = by_stage("backward_weight", second)
        parts = zip(costs[Kind.BACKWARD_INPUT], costs[Kind.BACKWARD_WEIGHT], strict=True)
        costs[Kind.BACKWARD] = tuple(i + w for i, w in parts)
    elif schedule.splits_backward:
        raise ScheduleError(f"{schedule.name} splits the backward work; pass backward_input= and backward_weight=.")
    else:
        assert backward is not None
        costs[Kind.BACKWARD] = by_stage("backward", backward)
    return costs


def _in_step(schedule: Schedule, seconds: Costs, communication: float) -> list[Span]:
    spans = []
    now = 0.0
    for tick in schedule.ticks:
        for phase in schedule.phases:
            here = [(s, a) for s, actions in enumerate(tick) for a in actions if a.kind in phase]
            free: dict[int, float] = {}
            for s, action in here:
                start = free.get(s, now)
                free[s] = start + seconds[action.kind][schedule.stage(s, action.chunk)]
                spans.append(Span(s, action, start, free[s]))
            now = max(free.values(), default=now)
        if schedule.num_devices > 1 and tick is not schedule.ticks[-1]:
            now += communication
    return spans


def _free(
    schedule: Schedule, seconds: Costs, links: Sequence[tuple[float, float]], begins: Mapping[int, float]
) -> list[Span]:
    """Each action begins when its device is free, and all that it needs has arrived."""
    free, ends, spans = [0.0] * schedule.num_devices, dict[int, float](), list[Span]()
    costs = [seconds[kind][s] if kind in seconds else 0.0 for s in range(schedule.total_stages) for kind in KINDS]
    ways = [*itertools.chain.from_iterable(links), 0.0]
    for device, action, work, result, needs in schedule.steps:
        start = free[device]
        for need, way in needs:
            start = max(start, ends[need] + ways[way])
        if begins:
            start = max(start, begins.get(result, 0.0))
        free[device] = ends[result] = end = start + costs[work]
        spans.append(Span(device, action, start, end))
    return spans
