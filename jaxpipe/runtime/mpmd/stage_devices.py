"""Devices of stages: one for each replica of the pipeline, or several that share the micro-batches of a stage.

A member of a stage is a group of devices over which its programs are sharded; its first device stands for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from jax.sharding import Mesh

from jaxpipe.array_types import Device
from jaxpipe.runtime.mpmd.step_graph import Place
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import Submesh
from jaxpipe.targets.known import target_of
from jaxpipe.targets.target import Target


@dataclass(frozen=True, eq=False)
class StageDevices:
    """The devices of every stage, its members."""

    rows: tuple[tuple[Device, ...], ...]  # by stage, the first device of each member; first those of the first replica
    replicas: int  # of the pipeline
    submesh: Submesh = field(default_factory=Submesh)  # over which the programs of a member are sharded

    def place(self, s: StageNumber, member: int = -1) -> Place:
        """Return a place; of a stage with one member, all are one."""
        return Place(s, 0 if len(self.rows[s]) == 1 else member)

    def members(self, s: StageNumber) -> list[Place]:
        """Return the places of the members of a stage."""
        return [Place(s, r) for r in range(len(self.rows[s]))]

    @property
    def counts(self) -> tuple[bool, ...]:
        """By stage, whether it is the last one on its devices, which writes what every device has."""
        return tuple(all(set(row) != set(later) for later in self.rows[s + 1 :]) for s, row in enumerate(self.rows))

    def width(self, s: StageNumber) -> int:
        """Return how many members share the micro-batches of a replica."""
        return len(self.rows[s]) // self.replicas

    def member(self, s: StageNumber, r: int, j: int) -> int:
        """Return the member of a stage that works on micro-batch ``j`` of replica ``r``; round-robin."""
        return r * self.width(s) + j % self.width(s)

    def replica(self, place: Place) -> int:
        """Return the replica that a member belongs to."""
        return place.replica // self.width(place.stage)

    def at(self, place: Place) -> Device:
        """Return the first device of a place."""
        return self.rows[place.stage][max(place.replica, 0)]

    def firsts(self, place: Place) -> tuple[Device, ...]:
        """Return the first device of each member at a place."""
        row = self.rows[place.stage]
        return row if place.replica < 0 else row[place.replica : place.replica + 1]

    def of(self, place: Place) -> tuple[Device, ...]:
        """Return the devices of a place."""
        return tuple(d for first in self.firsts(place) for d in self.submesh.group(first))

    def cross(self, source: Place, target: Place) -> bool:
        """Return whether what is sent between two places goes to another process."""
        pairs = zip(self.of(source), self.of(target), strict=True)
        return any(a.process_index != b.process_index for a, b in pairs)

    def mesh(self, place: Place) -> Mesh:
        """Return the devices of a place as a mesh."""
        return self.submesh.mesh(self.firsts(place))

    def of_replicas(self, replicas: Iterable[int]) -> tuple[Device, ...]:
        """Return the devices of all stages of some replicas, each once."""
        places = [place for s in range(len(self.rows)) for place in self.members(StageNumber(s))]
        ordered = (place for r in replicas for place in places if self.replica(place) == r)
        return tuple(dict.fromkeys(d for place in ordered for d in self.of(place)))

    @cached_property
    def every(self) -> tuple[Device, ...]:
        """All devices, each once."""
        return self.of_replicas(range(self.replicas))

    @property
    def target(self) -> Target:
        """The kind of the devices."""
        return target_of(self.every[0])

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have any of the devices."""
        return frozenset(d.process_index for d in self.every)
