"""Stages, their schedule and their devices: what a list is written for."""

import math
from dataclasses import dataclass, field

from jaxpipe.array_types import TensorNumber
from jaxpipe.runtime.mpmd.call_list import Traces
from jaxpipe.runtime.mpmd.instructions import Place
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_work import Context
from jaxpipe.schedules.table import Schedule, StageNumber


@dataclass(frozen=True, eq=False)
class Layout:
    """Stages, their schedule and their devices."""

    context: Context
    schedule: Schedule
    devices: StageDevices
    homes: dict[TensorNumber, StageNumber]  # by parameter, its stage
    traces: Traces = field(default_factory=dict)  # of the same cuts; filled while lists are written

    @property
    def stages(self) -> tuple[StageNumber, ...]:
        """Numbers of the stages."""
        return self.context.stage_numbers

    @property
    def replicas(self) -> range:
        """Numbers of the replicas."""
        return range(self.devices.replicas)

    def dealt(self, k: int) -> range:
        """The micro-batches of an entry of the table: one, or a round where members of a stage share them."""
        count = math.lcm(*(self.devices.width(s) for s in self.stages))
        return range(k * count, min((k + 1) * count, self.context.num_microbatches))

    @property
    def home(self) -> Place:
        """First member of the last stage, which computes loss and metrics."""
        return Place(self.stages[-1], 0)

    @property
    def rows_cross(self) -> bool:
        """Return whether the stages of any replica belong to several processes."""
        return any(len({d.process_index for d in self.devices.of_replica(r)}) > 1 for r in self.replicas)
