"""Devices of stages: one for each replica of the pipeline, or several that share the micro-batches of a stage."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpipe.pipeline.axes import DATA
from jaxpipe.runtime.mpmd.instructions import Place


@dataclass(frozen=True, eq=False)
class StageDevices:
    """The devices of every stage, its members.

    Attributes:
      rows: by stage, its members: first those of the first replica.
      replicas: of the pipeline, each with its own part of the batch.
    """

    rows: tuple[tuple[Any, ...], ...]
    replicas: int

    def members(self, s: int) -> range:
        """Numbers of the members of a stage."""
        return range(len(self.rows[s]))

    def width(self, s: int) -> int:
        """Return how many members share the micro-batches of a replica."""
        return len(self.rows[s]) // self.replicas

    def member(self, s: int, r: int, j: int) -> int:
        """Return the member of a stage that works on micro-batch ``j`` of replica ``r``; round-robin."""
        return r * self.width(s) + j % self.width(s)

    def replica(self, place: Place) -> int:
        """Return the replica that a member belongs to."""
        return place.replica // self.width(place.stage)

    def at(self, place: Place) -> Any:
        """Return the device of a place; of a whole stage, its first one."""
        return self.rows[place.stage][max(place.replica, 0)]

    def of(self, place: Place) -> tuple[Any, ...]:
        """Return the devices of a place."""
        row = self.rows[place.stage]
        return row if place.is_whole else row[place.replica : place.replica + 1]

    def mesh(self, place: Place) -> Mesh:
        """Return the devices of a place as a mesh."""
        return Mesh(np.array(self.of(place)), (DATA,))

    def of_replica(self, r: int) -> list[Any]:
        """Return the devices of all stages of a replica."""
        return [d for s, row in enumerate(self.rows) for d in row[r * self.width(s) : (r + 1) * self.width(s)]]

    def of_replicas(self, replicas: Iterable[int]) -> tuple[Any, ...]:
        """Return the devices of all stages of some replicas, each once."""
        return tuple(dict.fromkeys(d for r in replicas for d in self.of_replica(r)))

    @cached_property
    def every(self) -> tuple[Any, ...]:
        """All devices, each once."""
        return tuple(dict.fromkeys(d for row in self.rows for d in row))

    @property
    def platform(self) -> str:
        """Platform of the devices."""
        return self.every[0].platform

    @cached_property
    def processes(self) -> frozenset[int]:
        """The processes that have any of the devices."""
        return frozenset(d.process_index for d in self.every)
