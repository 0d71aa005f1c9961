"""Places, and the operators of a step's graph, which read and write numbered values.

Call      run a task on the device of a stage, or on those of all its replicas
Send      copy arrays to another device, or to the host's memory and back
Spread    copy arrays to all devices, if they belong to several processes
Split     take an array of all replicas of a stage apart, without a copy
Join      put the replicas' arrays together, without a copy
Wait      let the host wait for copies
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jaxpipe.schedules.table import StageNumber


class Place(NamedTuple):
    """A stage and one of its replicas; or all of them (-1), whose arrays are global."""

    stage: StageNumber
    replica: int = -1


#: The number of a task of the graph, and where it runs.
TaskAt: TypeAlias = tuple[int, Place]


@dataclass(frozen=True)
class Call:
    """Run task number ``task`` of the graph.

    ``microbatch`` is -1 for work at the end of a step; ``action`` is the position in the order of a device's actions.
    """

    task: int
    place: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    microbatch: int = -1
    action: int = -1


@dataclass(frozen=True)
class Send:
    """Copy arrays from one device to another, or between a device's memory and its host's.

    Between devices of different processes the last ``returning`` arrays go the other way.
    """

    source: Place
    target: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    to_host: bool = False
    returning: int = 0

    @property
    def ends(self) -> tuple[Place, Place]:
        """The source and the target."""
        return self.source, self.target

    @property
    def targets(self) -> tuple[Place, ...]:
        """By array, the place that it goes to."""
        return (self.target,) * (len(self.reads) - self.returning) + (self.source,) * self.returning


@dataclass(frozen=True)
class Spread:
    """Copy arrays from one device to those of all stages of some replicas, as arrays that these have in common."""

    source: Place
    replicas: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Take the array of all replicas of a stage apart."""

    place: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Join:
    """Put arrays of all replicas together: side by side along their first axis, or, if they are equal, as one."""

    place: Place
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True)
class Wait:
    """Let the host wait for copies from a place. It reads them and what they are of, which is held until then."""

    place: Place
    reads: tuple[int, ...]
    writes: tuple[()] = ()


Instruction = Call | Send | Spread | Split | Join | Wait
