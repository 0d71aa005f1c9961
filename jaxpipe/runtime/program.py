"""A training step as data: stages of the model, a schedule, and where variables live."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from jaxpipe.array_types import AbstractArray, DType, Shaped, TensorNumber
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.stages import Placement, Stage
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import DeviceNumber, Kind, Schedule, StageNumber
from jaxpipe.sharding.partition_specs import Specs


@dataclass(frozen=True, eq=False)
class Program:
    """Stages, a schedule, and where variables live: all that a runtime needs.

    ``schedule.stage_of`` has the stages of every device. Stage programs (``jaxpipe.runtime.mpmd``) may have several
    devices in a stage: a device of the schedule then stands for all of them, and a micro-batch for a round
    (``jaxpipe.schedules.replicas``).
    """

    objective: MicrobatchProgram
    stages: tuple[Stage, ...]
    schedule: Schedule
    stage_replicas: StageReplicas  # the devices along the stage axis
    num_microbatches: int  # of a step, on each replica of the data axis
    placement: Placement[StageNumber]  # the stage of every variable
    replicated: bool  # the mesh has a data axis
    gradient_dtype: DType | None = None  # in which narrower ones are added up; None: float32
    specs: Specs = field(default_factory=Specs)  # over the devices of a stage

    def bytes_of(self, numbers: Sequence[TensorNumber]) -> int:
        """Bytes of some tensors on each device of a stage, in words."""
        return sum(self._bytes(t, a) for t, a in zip(numbers, self.avals(numbers), strict=True))

    def _bytes(self, t: TensorNumber, aval: Shaped) -> int:
        """Bytes of a tensor, or of an array that it is stored as, on each device of a stage."""
        return -(-4 * word_count(aval) // self.specs.submesh.shards(self.specs.of_tensor(t)))

    def avals(self, numbers: Sequence[TensorNumber]) -> list[AbstractArray]:
        """Shapes of some tensors."""
        return [self.objective.graph.tensors[t].aval for t in numbers]

    @property
    def num_devices(self) -> int:
        """Devices along the stage axis, or the stages on them."""
        return self.schedule.num_devices

    @cached_property
    def stage_numbers(self) -> tuple[StageNumber, ...]:
        """Numbers of the stages."""
        return tuple(map(StageNumber, range(len(self.stages))))

    @property
    def device_numbers(self) -> tuple[DeviceNumber, ...]:
        """Numbers of the devices along the stage axis."""
        return self.schedule.device_numbers

    def device(self, stage: StageNumber) -> DeviceNumber:
        """Return where a stage is."""
        return self.schedule.device(stage)

    @cached_property
    def on_devices(self) -> Placement[DeviceNumber]:
        """The device of every variable."""
        return self.placement.on_devices(self.schedule)

    def held(self, device: DeviceNumber) -> tuple[list[TensorNumber], list[TensorNumber]]:
        """The tensors of the parameters and of the state variables on a device, in the order of the layouts."""
        parameters, state = self.on_devices.held_by(device)
        return [self.objective.parameters[k] for k in parameters], [self.objective.state[k] for k in state]

    def trained(self, device: DeviceNumber) -> list[TensorNumber]:
        """The trained parameters of a device, in the order of the layout of gradients."""
        return [t for t in self.held(device)[0] if t not in self.objective.frozen]

    @cached_property
    def lent(self) -> dict[TensorNumber, DeviceNumber]:
        """The device of each parameter that others use and do not hold."""
        home = self.on_devices.home(self.objective)
        return {t: home[t] for s in self.stage_numbers for t in self.stages[s].borrowed if home[t] != self.device(s)}

    def received(self, s: StageNumber, kind: Kind) -> tuple[TensorNumber, ...]:
        """The tensors whose cotangents backward work of a kind is given, by its input part or by the next stage."""
        if kind is Kind.BACKWARD_WEIGHT:
            return self.stages[s].saved
        return self.stages[s + 1].returning if s + 1 < len(self.stages) else ()

    def sum_bytes(self, numbers: Sequence[TensorNumber]) -> int:
        """Bytes of the sums of gradients of some parameters."""
        return sum(sum_dtype(a.dtype, self.gradient_dtype).itemsize * a.size for a in self.avals(numbers))

    def in_flight(self, stage: StageNumber) -> int:
        """The most stashes of a stage that its device holds at the same time."""
        device = self.device(stage)
        return self.schedule.in_flight(device, self.schedule.chunk(stage)) * self.stage_replicas.per_device(device)

    def stash_bytes(self, stage: Stage) -> int:
        """Bytes of what one micro-batch of a stage keeps for its backward pass, on each of its devices, in words."""
        return sum(self._bytes(t, a) for t, avals in stage.stashed.items() for a in avals)

    def tangents(self, numbers: Sequence[TensorNumber]) -> list[AbstractArray]:
        """Shapes of the cotangents of some tensors."""
        return [cast(AbstractArray, aval.to_tangent_aval()) for aval in self.avals(numbers)]
