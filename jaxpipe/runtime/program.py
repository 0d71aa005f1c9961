"""The program that every device runs, as data: stages of the model, a schedule, and where everything is.

``jaxpipe.runtime.spmd.tick_loop`` runs it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import jax

from jaxpipe.array_types import AbstractArray, DType, Shaped, TensorNumber
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.gradient_precision import sum_dtype
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.spmd.tick_table import Arena, Row, arena, tick_table
from jaxpipe.runtime.stages import Placement, Stage
from jaxpipe.runtime.uint32_words import word_count
from jaxpipe.schedules.allocate import Inbox, inbox
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import DeviceNumber, Kind, Schedule, StageNumber
from jaxpipe.sharding.partition_specs import Specs


#: 32-bit words of a page of the arena.
PAGE = 1024


@dataclass(frozen=True, eq=False)
class Program:
    """Stages, a schedule, and where variables live: all that the tick loop needs.

    Stage ``s`` is on device ``s % schedule.num_devices``. Stage programs (``jaxpipe.runtime.mpmd``) may have several
    devices in a stage: a device of the schedule then stands for all of them, and a micro-batch for a round
    (``jaxpipe.schedules.replicas``).
    """

    objective: MicrobatchProgram
    stages: tuple[Stage, ...]
    schedule: Schedule
    stage_replicas: StageReplicas  # the devices along the stage axis
    num_microbatches: int  # of a step, on each replica of the data axis
    placement: Placement[DeviceNumber]  # the device of every variable
    parameters: Layout  # the layouts are by device
    gradients: Layout  # of the trained parameters
    state: Layout
    replicated: bool  # the mesh has a data axis
    gradient_dtype: DType | None = None  # in which narrower ones are added up; None: float32
    specs: Specs = field(default_factory=Specs)  # over the devices of a stage

    def bytes_of(self, numbers: Sequence[TensorNumber]) -> int:
        """Bytes of some tensors on each device of a stage, in words."""
        sizes = ((4 * word_count(a), t) for a, t in zip(self.avals(numbers), numbers, strict=True))
        return sum(-(-size // self.specs.submesh.shards(self.specs.of_tensor(t))) for size, t in sizes)

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

    def held(self, device: DeviceNumber) -> tuple[list[TensorNumber], list[TensorNumber]]:
        """The tensors of the parameters and of the state variables on a device, in the order of the layouts."""
        parameters, state = self.placement.held_by(device)
        return [self.objective.parameters[k] for k in parameters], [self.objective.state[k] for k in state]

    def trained(self, device: DeviceNumber) -> list[TensorNumber]:
        """The trained parameters of a device, in the order of the layout of gradients."""
        return [t for t in self.held(device)[0] if t not in self.objective.frozen]

    @cached_property
    def shared(self) -> tuple[TensorNumber, ...]:
        """Parameters that a device uses and does not hold."""
        borrowed: dict[TensorNumber, None] = {}
        for s in self.stage_numbers:
            local_parameters = self.held(self.device(s))[0]
            borrowed.update((t, None) for t in self.stages[s].borrowed if t not in local_parameters)
        return tuple(borrowed)

    @cached_property
    def sums(self) -> Layout:
        """The layout of sums of gradients: the places of the gradients, in types that are as wide or wider."""
        return self.summed(self.gradients)

    def summed(self, layout: Layout) -> Layout:
        """Return the layout of sums of gradients, given that of what they are gradients of."""
        return layout.with_dtypes(functools.partial(sum_dtype, gradient_dtype=self.gradient_dtype))

    @cached_property
    def shared_trained(self) -> tuple[TensorNumber, ...]:
        """The trained ones among the shared parameters."""
        return tuple(t for t in self.shared if t not in self.objective.frozen)

    @cached_property
    def gradient_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The gradient buffers of one micro-batch: those of the layout, then one for each that is shared."""
        shared = [(math.prod(a.shape), a.dtype) for a in self.avals(self.shared_trained)]
        return [jax.ShapeDtypeStruct((n,), dtype) for n, dtype in (*self.gradients.buffers, *shared)]

    @cached_property
    def sum_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The buffers in which gradients are added up."""
        return [jax.ShapeDtypeStruct(a.shape, sum_dtype(a.dtype, self.gradient_dtype)) for a in self.gradient_avals]

    @cached_property
    def alone(self) -> bool:
        """Return whether one stage does all, both passes of a micro-batch in every tick: nothing waits in an arena."""
        if len(self.stages) > 1 or not self.schedule.has_backward:
            return False
        ahead, behind = (self.schedule.row(0, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        return ahead == behind and -1 not in ahead

    @cached_property
    def stash_pages(self) -> tuple[int, ...]:
        """Pages that one micro-batch takes in the arena, by stage."""
        return tuple(
            _pages(self.stash_avals(stage)) if stage.vjp and self.schedule.has_backward else 0 for stage in self.stages
        )

    @cached_property
    def saved_pages(self) -> tuple[int, ...]:
        """Pages that the cotangents take which wait for the weight part of the backward work, by stage."""
        if not self.schedule.splits_backward:
            return (0,) * len(self.stages)
        return tuple(_pages(self.tangents(stage.saved)) for stage in self.stages)

    def in_flight(self, device: DeviceNumber, chunk: int | None = None) -> int:
        """The most stashes that a device holds at the same time, of all its stages or of one."""
        return self.schedule.in_flight(device, chunk) * self.stage_replicas.per_device(device)

    @property
    def sends_early(self) -> bool:
        """Return whether messages to the next stage leave before the backward work of a tick, not after all of it.

        Kinds of work that share a phase exchange their messages when it is over.
        """
        return self.schedule.backward_kind not in self.schedule.phases[0]

    @cached_property
    def places(self) -> Arena:
        """First pages of everything in the arena."""
        return arena(self.schedule, self.stash_pages, self.saved_pages)

    @cached_property
    def arena_pages(self) -> int:
        """Pages of the arena, each thing in which is read and written through a window of the largest of its kind."""
        if self.alone or not self.schedule.has_backward:
            return 0
        windows = (self.places.stashes, self.stash_pages), (self.places.saved, self.saved_pages)
        return max((place + max(pages) for places, pages in windows for place in places.values()), default=0)

    @cached_property
    def inboxes(self) -> tuple[Inbox, Inbox]:
        """Slots of the messages forward and backward."""
        return inbox(self.schedule, Kind.FORWARD), inbox(self.schedule, self.schedule.backward_kind)

    @cached_property
    def table(self) -> Row:
        """The work of every device in each tick, as numbers."""
        return tick_table(self.schedule, self.places, *self.inboxes)

    @cached_property
    def message_words(self) -> tuple[int, int]:
        """Words sent forward and backward after each tick."""
        forward = max(sum(word_count(a) for a in self.avals(s.leaving)) for s in self.stages)
        back = max(sum(word_count(a) for a in self.avals(s.returning)) for s in self.stages)
        return forward, back

    @property
    def inbox_words(self) -> int:
        """Words of the messages that a device has room for."""
        return sum(box.slots * words for box, words in zip(self.inboxes, self.message_words, strict=True))

    def stash_avals(self, stage: Stage) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what one micro-batch of a stage keeps in the arena."""
        assert stage.vjp is not None
        kept = set(stage.stashed)
        stored = zip(stage.vjp.plan.stored, stage.vjp.stash_avals, strict=True)
        return [aval for t, avals in stored if t in kept for aval in avals]

    def stash_bytes(self, stage: Stage) -> int:
        """Bytes of the same on each device of a stage, in words."""
        assert stage.vjp is not None
        kept, total = set(stage.stashed), 0
        for t, avals in zip(stage.vjp.plan.stored, stage.vjp.stash_avals, strict=True):
            if t in kept:
                shards = self.specs.submesh.shards(self.specs.of_tensor(t))
                total += sum(-(-4 * word_count(a) // shards) for a in avals)
        return total

    def tangents(self, numbers: Sequence[TensorNumber]) -> list[AbstractArray]:
        """Shapes of the cotangents of some tensors."""
        return [cast(AbstractArray, aval.to_tangent_aval()) for aval in self.avals(numbers)]


def _pages(avals: Sequence[Shaped]) -> int:
    return -(-sum(map(word_count, avals)) // PAGE)
