"""Stages on several devices each, which share the micro-batches.

Micro-batches are dealt round-robin to the devices of a stage, its team. A deal is the fewest of them that give all
devices of every team as many: the least common multiple of the teams' sizes. An entry of the schedule is one deal, of
which a device of a team of ``k`` works on ``deal / k``, one after the other. Teams of 3 and 1:

    stage 0  device 0  0
             device 1  1
             device 2  2
    stage 1  device 3  0 1 2

The last deal may be short.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from jaxpipe.errors import ScheduleError


@dataclass(frozen=True)
class Teams:
    """The number of devices of each stage; those of the first stage come first.

    Attributes:
      widths: by stage. Where a device has several stages, by device, and all 1.

    Raises:
      ScheduleError: unless there is a stage, and every stage has a device.

    Example:
      >>> teams = Teams((3, 1))
      >>> teams.deal, teams.groups, [teams.turns(s) for s in range(2)]
      (3, ((0, 1, 2), (3,)), [1, 3])
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ScheduleError(
                f"Teams(widths={self.widths}): there must be a number of devices for each stage, at least 1, as in "
                "Teams((3, 1))."
            )

    @property
    def single(self) -> bool:
        """Return whether every stage has one device."""
        return set(self.widths) == {1}

    @cached_property
    def deal(self) -> int:
        """Micro-batches that are dealt out together."""
        return math.lcm(*self.widths)

    def deals(self, num_microbatches: int) -> int:
        """Return how many deals there are, the last of which may be short."""
        return -(-num_microbatches // self.deal)

    def turns(self, stage: int) -> int:
        """Return how many micro-batches of a deal each device of a stage works on."""
        return self.deal // self.widths[stage]

    @property
    def most_turns(self) -> int:
        """Return how many micro-batches of a deal each device of the smallest team works on."""
        return self.deal // min(self.widths)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage."""
        ends = itertools.accumulate(self.widths)
        return tuple(tuple(range(end - n, end)) for n, end in zip(self.widths, ends, strict=True))
