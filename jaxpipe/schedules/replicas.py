"""Stages on several devices each, which share the micro-batches.

Micro-batches go round-robin to the replicas of a stage, one on each of its devices. A round is the fewest micro-batches
that give all replicas of every stage as many: the least common multiple of the numbers of replicas. An entry of the
schedule is one round, of which a replica of a stage with ``k`` works on a ``k``-th, one micro-batch after the other.
Stages with 3 replicas and with 1:

    stage 0  device 0  0
             device 1  1
             device 2  2
    stage 1  device 3  0 1 2

The last round may be short.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from jaxpipe.errors import ScheduleError


@dataclass(frozen=True)
class StageReplicas:
    """The number of devices of each stage; those of the first stage come first.

    Attributes:
      per_stage: how many replicas each stage has. Where a device has several stages, by device, and all 1.

    Raises:
      ScheduleError: unless there is a stage, and every stage has a device.

    Example:
      >>> stage_replicas = StageReplicas((3, 1))
      >>> stage_replicas.round_size, stage_replicas.groups, [stage_replicas.per_device(s) for s in range(2)]
      (3, ((0, 1, 2), (3,)), [1, 3])
    """

    per_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.per_stage or min(self.per_stage) < 1:
            raise ScheduleError(
                f"StageReplicas(per_stage={self.per_stage}): every stage needs at least 1 device, as in "
                "StageReplicas((3, 1))."
            )

    @property
    def is_single(self) -> bool:
        """Return whether every stage has one device."""
        return set(self.per_stage) == {1}

    @cached_property
    def round_size(self) -> int:
        """Return how many micro-batches a round has."""
        return math.lcm(*self.per_stage)

    def rounds(self, num_microbatches: int) -> int:
        """Return how many rounds there are, the last of which may be short."""
        return -(-num_microbatches // self.round_size)

    def per_device(self, stage: int) -> int:
        """Return how many micro-batches of a round each device of a stage works on."""
        return self.round_size // self.per_stage[stage]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage."""
        ends = itertools.accumulate(self.per_stage)
        return tuple(tuple(range(end - n, end)) for n, end in zip(self.per_stage, ends, strict=True))
