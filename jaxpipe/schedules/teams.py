"""Stages on several devices each: which device works on which micro-batch, and what goes from whom to whom.

Micro-batches are dealt round-robin to the devices of a stage, its team. A deal is the fewest of them that give all
devices of every team as many: the least common multiple of the teams' sizes. A tick of the schedule is one deal, of
which a device of a team of ``k`` works on ``deal / k``, one after the other. Teams of 3 and 1, in one tick:

    stage 0  device 0  0
             device 1  1
             device 2  2
    stage 1  device 3  0 1 2

The last deal may be short. Messages between neighboring stages go in rounds, in each of which a device sends to at
most one other and receives from at most one.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from jaxpipe.errors import ScheduleError


@dataclass(frozen=True)
class Round:
    """Messages that are sent at the same time.

    Attributes:
      pairs: from which device to which.
      sent: by device, the turn of the tick whose message it sends; -1 for none.
      landed: by device, the turn of the receiver that the message is for; -1 if none arrives.
    """

    pairs: tuple[tuple[int, int], ...]
    sent: tuple[int, ...]
    landed: tuple[int, ...]

    @property
    def back(self) -> "Round":
        """The same messages answered."""
        return Round(tuple((b, a) for a, b in self.pairs), self.landed, self.sent)


@dataclass(frozen=True)
class Teams:
    """How many devices each stage has; those of the first stage come first.

    Attributes:
      widths: by stage. Where a device has several stages, by device, and all 1.

    Raises:
      ScheduleError: unless there is a stage, and every stage has a device.

    Example:
      >>> teams = Teams((3, 1))
      >>> teams.deal, teams.stage_of, [teams.device(0, j) for j in range(6)]
      (3, (0, 0, 0, 1), [0, 1, 2, 0, 1, 2])
      >>> [one.pairs for one in teams.rounds]
      [((0, 3),), ((1, 3),), ((2, 3),)]
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
        """Whether every stage has one device."""
        return set(self.widths) == {1}

    @property
    def num_devices(self) -> int:
        """Of all stages."""
        return sum(self.widths)

    @cached_property
    def deal(self) -> int:
        """Micro-batches that are dealt out together."""
        return math.lcm(*self.widths)

    def deals(self, num_microbatches: int) -> int:
        """How many deals there are, the last of which may be short."""
        return -(-num_microbatches // self.deal)

    def turns(self, stage: int) -> int:
        """How many micro-batches of a deal each device of a stage works on."""
        return self.deal // self.widths[stage]

    @property
    def most_turns(self) -> int:
        """The same of the smallest team; also the rounds in which neighbors exchange messages."""
        return self.deal // min(self.widths)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first device of each stage."""
        return tuple(itertools.accumulate((0, *self.widths[:-1])))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage."""
        return tuple(tuple(range(a, a + n)) for a, n in zip(self.first, self.widths, strict=True))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """By device, its stage."""
        return tuple(s for s, n in enumerate(self.widths) for _ in range(n))

    @cached_property
    def replica_of(self) -> tuple[int, ...]:
        """By device, its place in its team."""
        return tuple(r for n in self.widths for r in range(n))

    def device(self, stage: int, microbatch: int) -> int:
        """Who works on a micro-batch."""
        return self.first[stage] + microbatch % self.widths[stage]

    def turn(self, stage: int, microbatch: int) -> int:
        """How many micro-batches of the same deal its device works on before it."""
        return microbatch % self.deal // self.widths[stage]

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """In which messages of one deal go to the next stage.

        As many micro-batches that follow each other as the smaller of two neighbors has devices are on different
        devices in both, so they go at the same time.
        """
        found = []
        for number in range(self.most_turns if len(self.widths) > 1 else 0):
            pairs, sent, landed = [], [-1] * self.num_devices, [-1] * self.num_devices
            for s, (here, there) in enumerate(itertools.pairwise(self.widths)):
                together = min(here, there)
                for j in range(number * together, min((number + 1) * together, self.deal)):
                    pair = self.device(s, j), self.device(s + 1, j)
                    pairs.append(pair)
                    sent[pair[0]], landed[pair[1]] = self.turn(s, j), self.turn(s + 1, j)
            found.append(Round(tuple(pairs), tuple(sent), tuple(landed)))
        return tuple(found)
