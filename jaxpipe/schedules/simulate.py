"""The time that a schedule takes, with every device running free or with all devices in step."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.table import KINDS, Action, Kind, Schedule


#: Seconds of a micro-batch: for every stage the same, or by stage.
Seconds = float | Sequence[float]

#: Seconds of a micro-batch by kind of work and stage.
Costs = dict[Kind, tuple[float, ...]]

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


def simulate(schedule: Schedule, **arguments: Any) -> Timeline:
    """Run a schedule on paper; arguments as ``Schedule.simulate`` takes them."""
    return schedule.simulate(**arguments)


def stage_seconds(given: Sequence[Seconds | None], count: int, whose: str) -> Costs:
    """Return the seconds of each kind that are given, in the order of ``KINDS``, for each of ``count`` stages.

    Raises:
      ScheduleError: if there are more or fewer; ``whose`` stages they are, as in ``"there are"``.
    """
    costs: Costs = {}
    for kind, seconds in zip(KINDS, given, strict=True):
        if seconds is not None:
            costs[kind] = tuple(seconds) if isinstance(seconds, Sequence) else (seconds,) * count
            if len(costs[kind]) != count:
                raise ScheduleError(
                    f"{kind.name.lower()}= has {len(costs[kind])} times, but {whose} {count} stages: pass a time for "
                    "each."
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


def run_in_step(schedule: Schedule, seconds: Costs, communication: float) -> list[Span]:
    """Return the timeline in which all devices do the work of a phase before any begins the next."""
    spans = []
    now = 0.0
    for tick in schedule.ticks:
        for phase in schedule.phases:
            free: dict[int, float] = {}
            for s, action in ((s, a) for s, actions in enumerate(tick) for a in actions if a.kind in phase):
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
