"""The time that a schedule takes, with every device running free or with all devices in step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.table import KINDS, Action, Kind, Schedule


#: Seconds of a micro-batch: for every stage the same, or by stage.
Seconds = float | Sequence[float]

#: Seconds of a micro-batch by kind of work and stage; arguments that give them, in the order of the kinds.
Costs = dict[Kind, tuple[float, ...]]
KIND_ARGUMENTS = ("forward", "backward", "backward_input", "backward_weight")

#: Seconds of messages between each stage and the next, forward and back.
Links = Sequence[tuple[float, float]]


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
    if (backward_input is None) != (backward_weight is None) or (backward is None) == (backward_input is None):
        raise ScheduleError("simulate takes either backward=, or backward_input= and backward_weight=.")
    whose, given = f"{schedule.name} has", (forward, backward, backward_input, backward_weight)
    costs = stage_seconds(given, schedule.total_stages, whose)
    if backward is None:
        costs[Kind.BACKWARD] = both_parts(costs)
    elif schedule.splits_backward:
        raise ScheduleError(f"{schedule.name} splits the backward work; pass backward_input= and backward_weight=.")
    if not lockstep:
        spans, after = run_free(schedule, costs, stage_links(communication, schedule.total_stages, whose), begins), 0.0
    elif isinstance(communication, Sequence):
        raise ScheduleError("communication= by stage is for devices that run free: pass lockstep=False, or a number.")
    else:
        after = communication if schedule.num_devices > 1 else 0.0
        spans = _in_step(schedule, costs, after)
    end = max((span.end for span in spans), default=0.0) + after
    return Timeline(tuple(spans), float(end), schedule.most_in_flight)


def stage_seconds(given: Sequence[Seconds | None], count: int, whose: str) -> Costs:
    """Return the seconds of each kind that are given, in the order of ``KINDS``, for each of ``count`` stages.

    Raises:
      ScheduleError: if there are more or fewer; ``whose`` stages they are, as in ``"there are"``.
    """
    costs: Costs = {}
    for name, kind, seconds in zip(KIND_ARGUMENTS, KINDS, given, strict=True):
        if seconds is not None:
            costs[kind] = tuple(seconds) if isinstance(seconds, Sequence) else (seconds,) * count
            if len(costs[kind]) != count:
                raise ScheduleError(
                    f"{name}= has {len(costs[kind])} times, but {whose} {count} stages: pass a time for each."
                )
    return costs


def both_parts(costs: Costs) -> tuple[float, ...]:
    """Return the seconds of both parts of the backward work of each stage."""
    return tuple(i + w for i, w in zip(costs[Kind.BACKWARD_INPUT], costs[Kind.BACKWARD_WEIGHT], strict=True))


def stage_links(communication: float | Sequence[tuple[float, float]], count: int, whose: str) -> Links:
    """Return the seconds of messages between each of ``count`` stages and the next.

    Raises:
      ScheduleError: if there are more or fewer; ``whose`` stages they are, as in ``"there are"``.
    """
    alike = not isinstance(communication, Sequence)
    links = ((communication, communication),) * (count - 1) if alike else tuple(communication)
    if len(links) != count - 1:
        raise ScheduleError(
            f"communication= has {len(links)} pairs, but {whose} {count} stages: pass {count - 1}, one for each stage "
            "and the next."
        )
    return links


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
        now += communication
    return spans


def run_free(schedule: Schedule, costs: Costs, links: Links, begins: Mapping[int, float] | None = None) -> list[Span]:
    """Return the timeline in which each action begins when its device is free and all that it needs has arrived."""
    free, ends, spans = [0.0] * schedule.num_devices, dict[int, float](), list[Span]()
    seconds = [costs[kind][s] if kind in costs else 0.0 for s in range(schedule.total_stages) for kind in KINDS]
    ways = [*itertools.chain.from_iterable(links), 0.0]
    for device, action, work, result, needs in schedule.steps:
        start = free[device]
        for need, way in needs:
            start = max(start, ends[need] + ways[way])
        if begins:
            start = max(start, begins.get(result, 0.0))
        free[device] = ends[result] = end = start + seconds[work]
        spans.append(Span(device, action, start, end))
    return spans
