"""A schedule: which stage works on which micro-batch in which tick."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError


class Kind(enum.Enum):
    """What a stage does with a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One piece of work of one stage."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """A table of work.

    All stages walk through the ticks in step. Within a tick a stage does at most one action of each kind, forward
    before backward; what a tick sends to a neighbour arrives for the next tick.

    Attributes:
      name: what it is called.
      num_stages, num_microbatches: its size.
      ticks: ``ticks[t][s]`` are the actions of stage ``s`` in tick ``t``.

    Example:
      >>> from jaxpipe.schedules import one_f_one_b
      >>> print(one_f_one_b(2, 2))
      tick     0     1     2     3
      stage 0  F0    F1    B0    B1
      stage 1        F0 B0 F1 B1
    """

    name: str
    num_stages: int
    num_microbatches: int
    ticks: tuple[tuple[tuple[Action, ...], ...], ...]

    def row(self, stage: int, kind: Kind) -> tuple[int, ...]:
        """The micro-batch that a stage works on in each tick, -1 for none."""
        return tuple(next((a.microbatch for a in tick[stage] if a.kind is kind), -1) for tick in self.ticks)

    def when(self, stage: int, kind: Kind) -> dict[int, int]:
        """The tick in which a stage works on each micro-batch."""
        return {j: t for t, j in enumerate(self.row(stage, kind)) if j >= 0}

    def in_flight(self, stage: int) -> int:
        """The most micro-batches whose stash a stage holds at the same time."""
        return max(self.slots(stage).values(), default=-1) + 1

    def slots(self, stage: int) -> dict[int, int]:
        """A place in the stage's arena for each micro-batch: the lowest one free from its forward to its backward."""
        starts, ends = self.when(stage, Kind.FORWARD), self.when(stage, Kind.BACKWARD)
        taken: dict[int, int] = {}
        for j in sorted(ends, key=starts.__getitem__):
            busy = {taken[i] for i in taken if ends[i] >= starts[j]}
            taken[j] = next(k for k in range(len(ends)) if k not in busy)
        return taken

    @property
    def has_backward(self) -> bool:
        """Whether it trains, rather than only computes forward."""
        return any(a.kind is Kind.BACKWARD for tick in self.ticks for actions in tick for a in actions)

    def validate(self) -> None:
        """Check that every stage does all its work once and that nothing is needed before it is there.

        Raises:
          ScheduleError: naming the stage, the micro-batch and the ticks.
        """
        kinds = [Kind.FORWARD, Kind.BACKWARD] if self.has_backward else [Kind.FORWARD]
        for tick in self.ticks:
            if len(tick) != self.num_stages:
                raise ScheduleError(f"{self.name}: a tick has {len(tick)} stages, expected {self.num_stages}.")
            for s, actions in enumerate(tick):
                if [a.kind for a in actions] not in ([], *([k] for k in kinds), kinds):
                    raise ScheduleError(
                        f"{self.name}: stage {s} does {' '.join(map(str, actions))} in one tick; a tick holds at most "
                        "one forward and then one backward."
                    )
        for s in range(self.num_stages):
            for kind in kinds:
                done = sorted(j for j in self.row(s, kind) if j >= 0)
                if done != list(range(self.num_microbatches)):
                    raise ScheduleError(
                        f"{self.name}: stage {s} does {kind.value} of micro-batches {done}; it must do each of "
                        f"0..{self.num_microbatches - 1} once."
                    )
        for s in range(self.num_stages):
            forward = self.when(s, Kind.FORWARD)
            if s > 0:
                self._check_order(forward, self.when(s - 1, Kind.FORWARD), 1, f"F of stage {s}", f"F of stage {s - 1}")
            if self.has_backward:
                backward = self.when(s, Kind.BACKWARD)
                self._check_order(backward, forward, 0, f"B of stage {s}", f"F of stage {s}")
                if s + 1 < self.num_stages:
                    after = self.when(s + 1, Kind.BACKWARD)
                    self._check_order(backward, after, 1, f"B of stage {s}", f"B of stage {s + 1}")

    def _check_order(self, later: dict[int, int], earlier: dict[int, int], gap: int, what: str, needs: str) -> None:
        for j, tick in later.items():
            if tick < earlier[j] + gap:
                raise ScheduleError(
                    f"{self.name}: {what} for micro-batch {j} is in tick {tick}, but it needs {needs}, which is in "
                    f"tick {earlier[j]}; it may start in tick {earlier[j] + gap}."
                )

    def __str__(self) -> str:
        cells = [["tick", *map(str, range(len(self.ticks)))]]
        for s in range(self.num_stages):
            cells.append([f"stage {s}", *(" ".join(map(str, tick[s])) for tick in self.ticks)])
        widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
        lines = [" ".join(c.ljust(w) for c, w in zip(row, _spread(widths), strict=True)).rstrip() for row in cells]
        return "\n".join(lines)


def _spread(widths: Sequence[int]) -> list[int]:
    """The first column as wide as it needs, with a space after it; all others alike."""
    return [widths[0] + 1, *([max(widths[1:], default=0)] * (len(widths) - 1))]


def table(name: str, num_stages: int, num_microbatches: int, work: dict[tuple[int, int], list[Action]]) -> Schedule:
    """A schedule from the actions of each ``(tick, stage)``, forward before backward."""
    length = 1 + max(t for t, _ in work)
    order = {Kind.FORWARD: 0, Kind.BACKWARD: 1}
    ticks = tuple(
        tuple(tuple(sorted(work.get((t, s), []), key=lambda a: order[a.kind])) for s in range(num_stages))
        for t in range(length)
    )
    return Schedule(name, num_stages, num_microbatches, ticks)


def check_size(num_stages: int, num_microbatches: int) -> None:
    """Raise ``ScheduleError`` unless both are positive."""
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"A schedule was asked for with num_stages={num_stages}, num_microbatches={num_microbatches}; "
            "both must be at least 1."
        )
