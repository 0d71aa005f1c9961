"""``Candidate``: cuts and a schedule, how long a step takes with them, and their plans with some storage.

traced ──list_candidates──▶ Candidate ──default, with_storage(...)──▶ PlannedStep
"""

# More than 15 of our modules: the parts of a planned step are put together here.
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jax.sharding import Mesh

from jaxpipe.array_types import Device
from jaxpipe.collect_later import collecting_later
from jaxpipe.costs.assumed_links import slowest_used
from jaxpipe.costs.kernels import program_cost
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.outer_loop import OuterLoop
from jaxpipe.graph.op_cost import weight
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.models.traced_update import trace_update, without_frozen
from jaxpipe.plan import Plan
from jaxpipe.planning.arrange_devices import arrange
from jaxpipe.planning.cuts.device_mapping import best_mapping
from jaxpipe.planning.cuts.placed_stages import Partition, on_devices, stage_speeds
from jaxpipe.planning.describe_plan import describe, program_timeline, stage_seconds, step_seconds
from jaxpipe.planning.storage.choose_swaps import Links
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.stage_levels import Fitted
from jaxpipe.planning.trace_request import Traced, rates_in
from jaxpipe.residuals.choose_formats import ResidualPlan
from jaxpipe.runtime.executable_plan import ExecutablePlan, Update
from jaxpipe.runtime.mpmd.device_bytes import Peak, array_bytes, device_peaks
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.optimizer_by_stage import check_asynchronous, partition_update
from jaxpipe.runtime.replica_exchange import stage_exchange, stage_outer_loop, warn_of_first_moment
from jaxpipe.runtime.stages import Placement, Program, Stage, cut_stages, place_variables, shared_stages, with_backward
from jaxpipe.schedules import StageReplicas, schedule_makers
from jaxpipe.schedules.table import Kind, Schedule, StageNumber, without_backward
from jaxpipe.sharding.mesh_axes import DATA
from jaxpipe.targets.building import building_for
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.units import bytes_text


@dataclass(frozen=True, eq=False)
class Cut:
    """A traced program, cut; the programs of its stages are built when they are first needed, and traced once.

    Schedules with this number of stages share it. In its partition devices take turns; ``on_devices`` follows the map
    of a schedule.
    """

    traced: Traced
    partition: Partition
    traces: dict[Any, Any] = field(default_factory=dict)  # of the work of its stages, filled while graphs are written
    storage: tuple[ResidualPlan | None, ...] | None = None  # where it is not the default

    @cached_property
    def replicas(self) -> StageReplicas:
        """The number of devices along the stage axis of each stage."""
        replicas = self.traced.request.replicas
        return StageReplicas(tuple(len(stage.devices) // replicas for stage in self.partition.stages))

    def on_devices(self, schedule: Schedule) -> Partition:
        """Return the partition with each stage on the device on which a schedule has it."""
        if schedule.num_chunks == 1:  # its map says how devices are called
            return self.partition
        stages = self.partition.stages
        groups = [stages[schedule.device(StageNumber(s))].devices for s in range(len(stages))]
        return on_devices(self.partition, groups, self.partition.network)

    @cached_property
    def placement(self) -> Placement[StageNumber]:
        """The stage of every variable."""
        return place_variables(self.traced.objective, self._places)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The programs of the stages."""
        objective = self.traced.objective
        stages = cut_stages(objective, self._places, self.placement)
        stages = shared_stages(objective, stages, self.replicas)
        return with_backward(objective, stages, self.traced.request.policy, self.storage)

    @property
    def num_frozen(self) -> int:
        """The number of first stages that have no backward work because the optimizer does not train them.

        The last one is taken to have some.
        """
        if not self.traced.objective.frozen:
            return 0
        trained = (s for s, stage in enumerate(self.stages) if stage.is_trained)
        return min(next(trained, len(self.stages)), len(self.stages) - 1)

    @property
    def _places(self) -> Sequence[int]:
        return 0, *(stage.operators.stop for stage in self.partition.stages)


@dataclass(frozen=True, eq=False)
class Candidate:
    """Cuts and a schedule. What a plan has besides is made when it is first needed, for candidates that come so far.

    Its partition is that of the cut on the devices of its schedule, or has others to which peers can swap more;
    ``program`` has default storage, ``schedule`` is its table as if all stages were trained, ``maker`` what made that
    for the seconds of these stages.
    """

    cut: Cut
    partition: Partition
    program: Program
    schedule: Schedule
    maker: schedule_makers.ScheduleMaker | None = None
    #: Of its plans' steps, the runtime that has written the graph of a program's, with what each device needs along it.
    graphs: dict[Program, tuple[MpmdRuntime, dict[Device, Peak]]] = field(default_factory=dict, init=False)

    @property
    def traced(self) -> Traced:
        """The program before it was cut."""
        return self.cut.traced

    @cached_property
    def seconds(self) -> float:
        """The seconds of a step; storage within a budget may add to them."""
        program, partition = self.program, self.partition
        seconds = stage_seconds(program, partition)
        return step_seconds(program, partition, program_timeline(self.traced.request, program, partition, seconds))

    @cached_property
    def waiting_bytes(self) -> int:
        """Bytes of stashes on the device that keeps most."""
        held = [0] * self.program.num_devices
        for s, stage in zip(self.program.stage_numbers, self.program.stages, strict=True):
            held[self.program.device(s)] += self.program.in_flight(s) * _stash_bytes(stage)
        return max(held)

    @cached_property
    def held_bytes(self) -> list[int]:
        """About what each device holds besides stashes: what is always there, and cotangents that weights wait for.

        The first are parameters, sums of gradients, optimizer state and the batch.
        """
        program, update = self.program, self.update.by_stage
        held = [
            program.bytes_of(program.held(d)[0]) + program.sum_bytes(program.trained(d)) for d in program.device_numbers
        ]
        for t, s in zip(update.state, update.state_stage, strict=True):
            if s is not None:
                held[program.schedule.device(s)] += update.graph.tensors[t].bytes
        batch = sum(map(array_bytes, self.traced.local))
        for s, stage in zip(program.stage_numbers, program.stages, strict=True):
            d = program.device(s)
            waiting = program.schedule.in_flight(d, program.schedule.chunk(s), since=Kind.BACKWARD_INPUT)
            held[d] += waiting * program.bytes_of(stage.saved)
        users = {program.device(s) for s, x in zip(program.stage_numbers, program.stages, strict=True) if x.used}
        return [n + batch if d in users else n for d, n in zip(program.device_numbers, held, strict=True)]

    @property
    def longest_microbatch(self) -> float:
        """The seconds of a micro-batch on the slowest stage."""
        work = zip(stage_seconds(self.program, self.partition), self._slowness, strict=True)
        return max((stage.forward_seconds + stage.backward_seconds) * slow for stage, slow in work)

    @property
    def prices(self) -> Prices:
        """The prices of computing an operator again and of encoding."""
        graph, profile = self.program.objective.graph, self.partition.profile
        rates = rates_in(profile)
        _, estimated = program_cost(graph, rates)
        profiled = {
            (t, op.name): seconds
            for op, seconds in zip(graph.operators, profile.forward_seconds, strict=True)
            for t in op.outputs
            if weight(op) is None
        }
        scale = sum(profile.forward_seconds) / estimated if estimated else 1.0
        return Prices(rates, profiled, scale, self._slowness, self.longest_microbatch)

    @property
    def links(self) -> Links:
        """The links for swaps. Without a network nobody has said that devices exchange more than messages."""
        request = self.traced.request
        host_bytes = 0 if request.host is None or request.host.refused else request.host.budget
        devices = tuple(stage.devices for stage in self.partition.stages)
        return Links(self.partition.network, devices, request.network is not None, host_bytes)

    @property
    def _slowness(self) -> tuple[float, ...]:
        """By stage, how many times slower than the profiled device its own is, or are together."""
        program, speeds = self.program, stage_speeds(self.partition)
        widths = program.stage_replicas.per_stage
        pairs = zip(program.stage_numbers, speeds, strict=True)
        return tuple(1 / (widths[program.device(s)] * speed) for s, speed in pairs)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices in the order in which stages use them."""
        request, placed = self.traced.request, self.partition
        links = request.network or slowest_used(placed.network, request.mesh)
        return arrange(request.mesh, [placed.stages[row[0]].devices for row in self.schedule.stage_of], links)

    @property
    def placement(self) -> Placement[int]:
        """The stage of each variable, or its device where one program has several stages on each."""
        return self.program.placement if self.traced.request.runtime == "mpmd" else self.program.on_devices

    @cached_property
    def update(self) -> Update:
        """The optimizer, stage by stage."""
        traced, program, placement = self.traced, self.program, self.placement
        request, update = traced.request, traced.update
        if update.per_stage:
            whole = trace_update(request.optimizer, traced.model, placement.parameters)
            update = without_frozen(whole, update.trained)
        by_stage = partition_update(update, traced.model, placement.parameters)
        exchange = request.exchange if request.replicas > 1 else None
        check_asynchronous(program, by_stage, exchange is not None, request.options.zero)
        sent = outer = None
        num_places = len(program.stages) if request.runtime == "mpmd" else program.num_devices
        if isinstance(exchange, OuterLoop):
            outer = stage_outer_loop(exchange, traced.model, placement, num_places, request.replicas, by_stage)
        elif exchange is not None:
            warn_of_first_moment(by_stage)
            sent = stage_exchange(exchange, traced.model, placement, num_places, request.replicas)
        return Update(by_stage, sent, request.options.on_nonfinite, outer)

    @cached_property
    def default(self) -> "PlannedStep":
        """The plan with default storage."""
        return self.described(self.program, (Fitted(),) * len(self.program.stages))

    def described(self, program: Program, fitted: tuple[Fitted, ...]) -> "PlannedStep":
        """Return the plan for the program with some storage, and what that adds; without the bytes of its devices.

        To know these all calls are traced.
        """
        return self.planned(program, describe(self.traced, program, self.partition, self.update, fitted))

    def planned(self, program: Program, plan: Plan) -> "PlannedStep":
        """Return the step of a plan, of which the program has the storage."""
        traced, update, request = self.traced, self.update, self.traced.request
        return PlannedStep(
            candidate=self,
            plan=plan,
            mesh=self.mesh,
            batch=traced.batch,
            program=program,
            update=update,
            batching=traced.batching,
            policy=request.policy,
            schedules=request.schedules if self.maker is None else (self.maker, *request.schedules),
            shardings=traced.shardings,
            traces=self.cut.traces,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep(ExecutablePlan):
    """An executable plan, and the candidate whose plan it is."""

    candidate: Candidate

    @outside_mesh()
    @collecting_later()
    @phase("bytes")
    def _peaks(self) -> tuple[MpmdRuntime, dict[Device, Peak]]:
        """Return the runtime of the plan's program with its graph, and what each device needs along that."""
        graphs = self.candidate.graphs
        if self.program not in graphs:
            with building_for(self.mesh.devices.flat[0]):
                runtime = MpmdRuntime(replace(self, graph=None))
                graphs[self.program] = runtime, runtime.predicted
        return graphs[self.program]

    def with_bytes(self) -> "PlannedStep":
        """Return the plan with its graph, and the bytes that each device needs for it.

        To trace all calls for them takes longer than all else.
        """
        if self.plan.memory:
            return self
        runtime, peaks = self._peaks()
        firsts = [peaks[row[0]] for row in runtime.devices.rows]
        plan = replace(
            self.plan,
            memory=max(peaks.values(), key=lambda peak: peak.total).components,
            each_device=tuple(peak.total for peak in peaks.values()),
            stage_memory=tuple(peak.components for peak in firsts),
            fullest_in=tuple(peak.label for peak in firsts),
        )
        if plan.host is not None:
            plan = replace(plan, host=replace(plan.host, bytes=max(peak.host for peak in peaks.values())))
        return replace(self, plan=plan, graph=runtime.graph)

    @property
    def needs(self) -> list[int]:
        """The predicted bytes of each device along the stage axis."""
        runtime, peaks = self._peaks()
        rows = (runtime.devices.rows[stages[0]] for stages in self.program.schedule.stage_of)
        return [max(peaks[x].total for x in row) for row in rows]

    @phase("compile")
    def with_step(self) -> "PlannedStep":
        """Compile the stage programs, in all processes at once; nothing if they have been compiled.

        What counts is the fullest device of any process.
        """
        if self.compiled is not None:
            return self
        tell(f"Compiling the training step, {bytes_text(self.plan.predicted_bytes)} predicted")
        runtime = MpmdRuntime(self)
        step = runtime.build()
        peaks = device_peaks(step, runtime.devices)
        size = max(peak.total for peak in peaks.values())
        tell(f"XLA reserves {bytes_text(size)} on the fullest device")
        firsts = [peaks[row[0]] for row in runtime.devices.rows]
        plan = replace(
            self.plan,
            compiled_each_device=tuple(peak.total for peak in runtime.in_mesh_order(peaks).values()),
            compiled_stage_memory=tuple(peak.components for peak in firsts),
            fullest_in=tuple(peak.label for peak in firsts),
        )
        return replace(self, plan=plan, compiled=step)

    @property
    def profile(self) -> Profile:
        """The profile that the plan's seconds are sums of."""
        if self.candidate.traced.request.plan is not None:
            raise PartitionError("This pipeline was made from plan=, for which nothing is profiled. Use profile_model.")
        return self.candidate.traced.profile

    @property
    def partition(self) -> Partition:
        """The cuts and devices, with what they were chosen from."""
        return self.candidate.partition

    @property
    def needed_bytes(self) -> int:
        """The bytes that XLA reserves for the plan, or that are predicted if it is not compiled."""
        return self.plan.predicted_bytes if self.compiled is None else max(self.plan.compiled_each_device)


def build_candidate(cut: Cut, schedule: Schedule, maker: schedule_makers.ScheduleMaker | None = None) -> Candidate:
    """Return the program of a cut and a schedule in which all stages are trained; ``maker`` as ``Candidate`` has it."""
    request, partition = cut.traced.request, cut.on_devices(schedule)
    program = make_program(cut, schedule)
    candidate = Candidate(cut, partition, program, schedule, maker)
    if request.budget is not None and request.network is not None and program.stage_replicas.is_single:
        stashes = list(map(_stash_bytes, program.stages))
        partition = best_mapping(partition, program.schedule, stashes, candidate.longest_microbatch)
    return replace(candidate, partition=partition)


def make_program(cut: Cut, schedule: Schedule) -> Program:
    """Return the program of a cut and a schedule in which all stages are trained.

    Raises:
      PartitionError: if the schedule gives state to micro-batches in another order than that of the batch.
    """
    traced, request = cut.traced, cut.traced.request
    _check_order(cut, schedule)
    return Program(
        objective=traced.objective,
        stages=cut.stages,
        schedule=without_backward(schedule, cut.num_frozen),
        stage_replicas=StageReplicas(cut.replicas.per_stage[: schedule.num_devices]),
        num_microbatches=traced.batching.num_microbatches,
        placement=cut.placement,
        replicated=DATA in request.mesh.axis_names,
        gradient_dtype=request.gradient_dtype,
        specs=traced.shardings.specs(traced.objective),
    )


def _check_order(cut: Cut, schedule: Schedule) -> None:
    """Raise ``PartitionError`` if a stage whose state changes works forward on micro-batches in an order of its own."""
    objective, m = cut.traced.objective, schedule.num_microbatches
    axes = zip(objective.state, objective.model.examples, strict=True)
    shared = {t: objective.names[t] for t, axis in axes if axis is None}
    for s, stage in enumerate(cut.stages):
        changed = [shared[t] for t, new in zip(stage.state, stage.new_state, strict=True) if t in shared and new != t]
        order = sorted(range(m), key=schedule.stage_ticks(s, Kind.FORWARD).__getitem__) if changed else []
        if order != sorted(order):
            raise PartitionError(
                f"schedule= gave {schedule.name}, whose stage {s} works forward on the micro-batches {order[:16]}, in "
                f"this order; the model changes {changed[0]} there, which each micro-batch has from the one before it "
                f"in the batch. Let this stage work forward on 0..{m - 1} in order."
            )


def _stash_bytes(stage: Stage) -> int:
    return sum(a.size * a.dtype.itemsize for a in stage.stash_avals)
