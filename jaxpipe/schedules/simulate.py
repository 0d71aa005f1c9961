"""The time a schedule takes when all stages walk through its ticks in step, as the executor does."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.schedules.table import Action, Kind, Schedule


@dataclass(frozen=True)
class Span:
    """One action on the timeline, in seconds from the start of the step."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Who computes what when.

    Attributes:
      spans: every action.
      makespan: seconds from the first start to the last end.
      peak_in_flight: by stage, the most micro-batches whose stash is held at once.
    """

    spans: tuple[Span, ...]
    makespan: float
    peak_in_flight: tuple[int, ...]

    @property
    def bubble_fraction(self) -> float:
        """The share of all stages' time in which they do not compute."""
        busy = sum(span.end - span.start for span in self.spans)
        total = self.makespan * len(self.peak_in_flight)
        return 1 - busy / total if total else 0.0


def simulate(
    schedule: Schedule, *, forward: Sequence[float], backward: Sequence[float], communication: float = 0.0
) -> Timeline:
    """Run a schedule on paper.

    In a tick all stages first do their forward work, then their backward work; either takes as long as the slowest
    stage that has any. Then neighbours exchange what they computed.

    Args:
      schedule: the table.
      forward, backward: seconds of one micro-batch, by stage.
      communication: seconds for the exchange after a tick.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> simulate(one_f_one_b(4, 16), forward=[1] * 4, backward=[2] * 4).makespan
      57.0
    """
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    spans = []
    now = 0.0
    for tick in schedule.ticks:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            here = [(s, a) for s, actions in enumerate(tick) for a in actions if a.kind is kind]
            spans += [Span(s, a, now, now + seconds[kind][s]) for s, a in here]
            now += max((seconds[kind][s] for s, _ in here), default=0.0)
        if schedule.num_stages > 1:
            now += communication
    return Timeline(tuple(spans), now, tuple(schedule.in_flight(s) for s in range(schedule.num_stages)))
