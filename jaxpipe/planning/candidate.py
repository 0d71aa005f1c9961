"""``Candidate``: cuts and a schedule as a program with default storage, and how long its step takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxpipe.planning.cuts.device_mapping import best_mapping
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.planning.describe_plan import program_timeline, stage_seconds, step_seconds
from jaxpipe.planning.price_storage import longest_microbatch
from jaxpipe.planning.trace_request import Traced
from jaxpipe.runtime.fold_state import shared_stages
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.buffer_layout import lay_out
from jaxpipe.runtime.stages import Placement, Stage, count_frozen, cut_stages, place, with_backward
from jaxpipe.schedules import schedule_makers
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import Schedule, StageNumber, without_backward
from jaxpipe.sharding.mesh_axes import DATA


@dataclass(frozen=True, eq=False)
class Cut:
    """A traced program, cut; the programs of its stages are built when they are first needed, and traced once."""

    traced: Traced
    partition: Partition
    traces: dict[Any, Any] = field(default_factory=dict)  # of the work of its stages, filled while calls are listed

    @cached_property
    def replicas(self) -> StageReplicas:
        """The number of devices along the stage axis of each stage."""
        replicas = self.traced.request.replicas
        return StageReplicas(tuple(len(stage.devices) // replicas for stage in self.partition.stages))

    @cached_property
    def placement(self) -> Placement[StageNumber]:
        """The stage of every variable."""
        return place(self.traced.objective, self._places)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The programs of the stages, with default storage."""
        objective = self.traced.objective
        stages = cut_stages(objective, self._places, self.placement)
        stages = shared_stages(objective, self.traced.model, stages, self.replicas)
        return with_backward(objective, stages, self.traced.request.policy)

    @property
    def num_frozen(self) -> int:
        """The number of first stages that have no backward work because the optimizer does not train them."""
        return count_frozen(self.stages) if self.traced.objective.frozen else 0

    @property
    def _places(self) -> Sequence[int]:
        return 0, *(stage.operators.stop for stage in self.partition.stages)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A program with default storage.

    Its partition is that of the cut, or has other devices to which peers can swap more; ``schedule`` is its table as if
    all stages were trained, ``maker`` what made that for the seconds of these stages.
    """

    cut: Cut
    partition: Partition
    program: Program
    schedule: Schedule
    maker: schedule_makers.ScheduleMaker | None = None

    @property
    def traced(self) -> Traced:
        """The program before it was cut."""
        return self.cut.traced

    @cached_property
    def seconds(self) -> float:
        """The seconds of a step; storage within a budget may add to them."""
        request, program, partition = self.traced.request, self.program, self.partition
        seconds = stage_seconds(program, partition, own_sums=request.runtime == "mpmd")
        return step_seconds(program, partition, program_timeline(request, program, partition, seconds))

    @property
    def waiting_bytes(self) -> int:
        """Bytes of stashes on the device that keeps most."""
        held = [0] * self.program.num_devices
        for s, stage in zip(self.program.stage_numbers, self.program.stages, strict=True):
            d = self.program.device(s)
            held[d] += self.program.in_flight(d, s // self.program.num_devices) * _stash_bytes(self.program, stage)
        return max(held)


def build_candidate(cut: Cut, schedule: Schedule, maker: schedule_makers.ScheduleMaker | None = None) -> Candidate:
    """Return the program of a cut and a schedule in which all stages are trained; ``maker`` as ``Candidate`` has it."""
    traced, placement = cut.traced, cut.placement.on_devices(schedule.num_devices)
    model, request, devices = traced.model, traced.request, range(schedule.num_devices)
    held = [placement.held_by(d)[0] for d in devices]
    parameters = [[(model.parameters[k].aval, traced.update.trained[k]) for k in numbers] for numbers in held]
    program = Program(
        objective=traced.objective,
        stages=cut.stages,
        schedule=without_backward(schedule, cut.num_frozen),
        stage_replicas=StageReplicas(cut.replicas.per_stage[: schedule.num_devices]),
        num_microbatches=traced.batching.num_microbatches,
        placement=placement,
        parameters=lay_out([[aval for aval, _ in pairs] for pairs in parameters]),
        gradients=lay_out([[aval for aval, trained in pairs if trained] for pairs in parameters]),
        state=lay_out([[model.state[k].aval for k in placement.held_by(d)[1]] for d in devices]),
        replicated=DATA in request.mesh.axis_names,
        gradient_dtype=request.gradient_dtype,
        specs=traced.shardings.specs(traced.objective),
    )
    partition = cut.partition
    if request.budget is not None and request.network is not None and program.stage_replicas.is_single:
        messages = [4 * n for n in program.message_words]
        stashes = [_stash_bytes(program, stage) for stage in program.stages]
        period = longest_microbatch(program, partition)
        partition = best_mapping(partition, program.schedule, stashes, period, messages)
    return Candidate(cut, partition, program, schedule, maker)


def _stash_bytes(program: Program, stage: Stage) -> int:
    return sum(a.size * a.dtype.itemsize for a in program.stash_avals(stage))
