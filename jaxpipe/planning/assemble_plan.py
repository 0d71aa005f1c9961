"""From cuts and a schedule to a plan with everything that runs it.

cuts, schedule ──build_candidate──▶ a program with default storage, and its seconds
candidates ──choose──▶ the fastest that keeps the budget ──finalize──▶ PlannedStep
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxpipe.costs import roofline
from jaxpipe.costs.assumed_links import slowest_used
from jaxpipe.costs.kernels import graph_seconds
from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.op_cost import weight
from jaxpipe.models import check_batch
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.microbatch_program import MicrobatchProgram, trace_loss
from jaxpipe.models.traced_update import TracedUpdate, trace_update
from jaxpipe.models.trained_parameters import without_frozen
from jaxpipe.models.variable_shardings import Shardings
from jaxpipe.planning.arrange_devices import arrange
from jaxpipe.planning.balance_stages import balanced
from jaxpipe.planning.choose_runtime import choose_runtime
from jaxpipe.planning.compile_within_budget import is_near_budget, refusal, with_step, within_budget
from jaxpipe.planning.cuts.device_mapping import best_mapping
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.planning.describe_plan import (
    RuntimeChoice,
    describe,
    describe_frozen,
    rates_in,
    stage_links,
    stage_seconds,
)
from jaxpipe.planning.planned_step import Budget, PlannedStep
from jaxpipe.planning.request import Request
from jaxpipe.planning.storage.choose_storage import raised
from jaxpipe.planning.storage.solver_time import SolverTime
from jaxpipe.planning.storage.stage_budget import Fitted, Prices, Solving, StageFitter
from jaxpipe.runtime.asynchronous_updates import check_asynchronous
from jaxpipe.runtime.executable_plan import Batching, Update
from jaxpipe.runtime.fold_state import shared_stages
from jaxpipe.runtime.mpmd.estimated_bytes import predicted_bytes
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.optimizer_by_stage import partition_update
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.replica_exchange import stage_exchange, warn_of_adam
from jaxpipe.runtime.spmd.buffer_layout import lay_out
from jaxpipe.runtime.spmd.predicted_bytes import predict
from jaxpipe.runtime.stages import Placement, Stage, count_frozen, cut_stages, place, with_backward
from jaxpipe.schedules import Schedule, schedule_makers
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import without_backward
from jaxpipe.sharding.mesh_axes import DATA


#: How much longer a step may be if stashes take less: profiles are no better than this.
ALIKE = 0.02


@dataclass(frozen=True, eq=False)
class Traced:
    """A model traced for batches of some shapes.

    Attributes:
      objective, model: what is computed for a micro-batch.
      update: the optimizer.
      profile: what its operators cost.
      links: between the devices, in the order of ``mesh.devices.flat``.
      batch, microbatch: shapes.
      batching: how the batch is cut.
      local: one replica's part of the batch.
      shardings: how variables are split within a stage.
    """

    objective: MicrobatchProgram
    model: BoundModel
    update: TracedUpdate
    profile: Profile
    links: Network
    batch: Any
    microbatch: Any
    batching: Batching
    local: Sequence[Any]
    shardings: Shardings


@dataclass(frozen=True, eq=False)
class Candidate:
    """A program with default storage.

    Attributes:
      request: the arguments of ``partition``.
      partition: the cuts, and a device for each stage.
      stage_placement: the stage of every variable.
      program: what would run.
      schedule: its table, as if all stages were trained.
      maker: what made the table, if it was searched for with the seconds of these stages.
    """

    request: Request
    partition: Partition
    stage_placement: Placement
    program: Program
    schedule: Schedule
    maker: schedule_makers.ScheduleMaker | None = None

    @cached_property
    def runtime(self) -> RuntimeChoice:
        """The runtime of the program."""
        return choose_runtime(self.request, self.program, self.partition)

    @property
    def seconds(self) -> float:
        """The seconds of a step; storage within a budget may add to them."""
        return self.runtime.seconds[self.runtime.name]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of stashes on the device that keeps most."""
        held = [0] * self.program.num_devices
        for s, stage in enumerate(self.program.stages):
            d = self.program.device(s)
            size = sum(a.size * a.dtype.itemsize for a in self.program.stash_avals(stage))
            held[d] += self.program.in_flight(d, s // self.program.num_devices) * size
        return max(held)


def stages_for(request: Request, traced: Traced, partition: Partition) -> tuple[Placement, tuple[Stage, ...]]:
    """The stages' programs for some cuts, and the stage of every variable."""
    objective, cuts = traced.objective, (0, *(stage.operators.stop for stage in partition.stages))
    placement = place(objective, cuts)
    stages = shared_stages(
        objective, traced.model, cut_stages(objective, cuts, placement), stage_replicas_of(partition, request)
    )
    return placement, with_backward(objective, stages, request.policy)


def stage_replicas_of(partition: Partition, request: Request) -> StageReplicas:
    """Return how many devices along the stage axis each stage has."""
    return StageReplicas(tuple(len(stage.devices) // request.replicas for stage in partition.stages))


def build_candidate(
    request: Request,
    traced: Traced,
    partition: Partition,
    schedule: Schedule,
    stage_placement: Placement,
    stages: tuple[Stage, ...],
    maker: schedule_makers.ScheduleMaker | None = None,
) -> Candidate:
    """The program for stages and a schedule, in which all stages are trained; ``maker`` as ``Candidate`` has it."""
    model, devices = traced.model, range(schedule.num_stages)
    placement = stage_placement.on_devices(schedule.num_stages)
    held = [placement.held_by(d)[0] for d in devices]
    parameters = [[(model.parameters[k].aval, traced.update.trained[k]) for k in numbers] for numbers in held]
    program = Program(
        objective=traced.objective,
        stages=stages,
        schedule=without_backward(schedule, frozen_stages(traced, stages)),
        stage_replicas=StageReplicas(stage_replicas_of(partition, request).per_stage[: schedule.num_stages]),
        num_microbatches=traced.batching.num_microbatches,
        placement=placement,
        parameters=lay_out([[aval for aval, _ in pairs] for pairs in parameters]),
        gradients=lay_out([[aval for aval, trained in pairs if trained] for pairs in parameters]),
        state=lay_out([[model.state[k].aval for k in placement.held_by(d)[1]] for d in devices]),
        replicated=DATA in request.mesh.axis_names,
        gradient_dtype=request.gradient_dtype,
        specs=traced.shardings.specs(traced.objective),
    )
    if request.budget is not None and request.network is not None and program.stage_replicas.is_single:
        partition = _map_for_swaps(program, partition)
    return Candidate(request, partition, stage_placement, program, schedule, maker)


def frozen_stages(traced: Traced, stages: Sequence[Stage]) -> int:
    """Count the first stages that have no backward work because the optimizer does not train them."""
    return count_frozen(stages) if traced.objective.frozen else 0


def choose(
    request: Request,
    traced: Traced,
    candidates: Sequence[Candidate],
    cut_again: Callable[[Candidate, Profile], Candidate],
) -> PlannedStep:
    """The plan with the shortest step that keeps the budget.

    Args:
      cut_again: another candidate with the schedule of one, for another profile.

    Raises:
      MemoryBudgetError: if none does, and the budget must not be raised; it offers what the smallest plan needs.
    """
    candidates = sorted(candidates, key=lambda candidate: candidate.seconds)
    budget = request.budget
    if budget is None:
        return finalize(traced, _leanest(candidates), None).default
    time = SolverTime(request.options.time_limit)
    solutions = sum(len(candidate.program.stages) for candidate in candidates)
    solving = Solving(request.options.solver, time, time.for_smallest(solutions))
    finalized = [finalize(traced, candidate, solving) for candidate in candidates]

    @functools.cache
    def smallest() -> PlannedStep:
        return min((final.smallest for final in finalized), key=lambda planned: planned.plan.predicted_bytes)

    def for_budget(planned: PlannedStep, budget: int) -> PlannedStep:
        assert planned.budget is not None
        asked = request.budget if budget != request.budget else None
        others = replace(planned.budget, smallest=smallest, may_raise=request.options.allow_over_budget)
        return replace(planned, plan=replace(planned.plan, budget=budget, raised_from=asked), budget=others)

    def fastest(budget: int) -> PlannedStep | None:
        best: PlannedStep | None = None
        for final in finalized:
            if best is not None and final.candidate.seconds >= best.plan.step_seconds:
                break
            planned = _balanced(traced, final, budget, solving, cut_again)
            if planned is not None and (best is None or planned.plan.step_seconds < best.plan.step_seconds):
                best = planned
        return None if best is None else for_budget(best, budget)

    best = fastest(budget)
    if best is None:
        least = for_budget(smallest(), budget)
        least = with_step(least) if request.options.compile else least
        needed = least.plan.predicted_bytes if least.compiled is None else least.compiled.reserved_bytes
        if needed <= budget:
            return least
        if not request.options.allow_over_budget:
            raise refusal(budget, least, finalized[0].default.plan.memory)
        budget = raised(budget, needed)
        best = fastest(budget) or for_budget(least, budget)
    if request.options.compile and is_near_budget(best.plan):
        best = within_budget(best, any_cuts=True)
    return best


def _leanest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or one of stage programs that is about as fast and keeps fewer bytes of stashes."""
    fastest = candidates[0]
    if fastest.runtime.name != "mpmd":
        return fastest
    alike = [d for d in candidates if d.runtime.name == "mpmd" and d.seconds <= (1 + ALIKE) * fastest.seconds]
    return min(alike, key=lambda candidate: candidate.waiting_bytes)


def _balanced(
    traced: Traced,
    finalized: "FinalizedCandidate",
    budget: int,
    solving: Solving,
    cut_again: Callable[[Candidate, Profile], Candidate],
) -> PlannedStep | None:
    """Return the plan within a budget, its cuts moved while that makes the step shorter; None if no plan is within."""
    first = finalized.within(budget)
    if first is None:
        return None
    return balanced(
        first, lambda charged: finalize(traced, cut_again(finalized.candidate, charged), solving).within(budget)
    )


@dataclass(frozen=True, eq=False)
class FinalizedCandidate:
    """A candidate with its optimizer and layouts, to which only the storage is missing.

    Attributes:
      candidate: the cuts and the schedule.
      planned: the plan for a program, how its storage was chosen, and the budget.
      fitter: chooses storage; None without a budget.
    """

    candidate: Candidate
    planned: Callable[[Program, tuple[Fitted, ...], int | None], PlannedStep]
    fitter: StageFitter | None

    @cached_property
    def default(self) -> PlannedStep:
        """The plan with default storage."""
        program = self.candidate.program
        return self.planned(program, (Fitted(),) * len(program.stages), None)

    def within(self, budget: int) -> PlannedStep | None:
        """Return the fastest plan of predicted bytes within a budget; None if no plan is within."""
        assert self.fitter is not None
        answer = self.fitter.within(budget)
        return None if answer is None else self._with_others(self.planned(*answer, budget))

    @cached_property
    def smallest(self) -> PlannedStep:
        """The plan with the least predicted bytes."""
        assert self.fitter is not None
        return self._with_others(self.planned(*self.fitter.smallest, None))

    def _with_others(self, planned: PlannedStep) -> PlannedStep:
        def refit(target: int) -> PlannedStep:
            return self.within(target) or self.smallest

        return replace(planned, budget=Budget(refit, lambda: self.smallest, self.default.plan.memory, False))


def finalize(traced: Traced, candidate: Candidate, solving: Solving | None) -> FinalizedCandidate:
    """The optimizer and layouts; with solvers also the search for storage within budgets."""
    request, program, placed = candidate.request, candidate.program, candidate.partition
    runtime = candidate.runtime.name
    # Variables are placed by stage, or by device where one program has several stages on each.
    model, placement = traced.model, candidate.stage_placement if runtime == "mpmd" else program.placement
    devices = range(program.num_devices)
    paired_by = request.network or slowest_used(placed.network, request.mesh)
    mesh = arrange(request.mesh, [placed.stages[d].devices for d in devices], paired_by)
    traced_update = traced.update
    if traced_update.per_stage:
        whole = trace_update(request.optimizer, model, placement.parameters)
        traced_update = without_frozen(whole, traced_update.trained)
    by_stage = partition_update(traced_update, model, placement.parameters)
    exchanges = request.exchange is not None and request.replicas > 1
    check_asynchronous(program, by_stage, exchanges, request.options.zero)
    owners = [None if s is None else program.device(s) for s in by_stage.state_stage]
    owned = list(zip(by_stage.state_avals, owners, strict=True))
    exchange = None
    if request.exchange is not None and exchanges:
        warn_of_adam(by_stage.state_shape)
        layouts = program.gradients, program.sums
        exchange = stage_exchange(request.exchange, model, placement, *layouts, request.replicas)
    state_layout = lay_out([[a for a, owner in owned if owner == d] for d in devices])
    update = Update(by_stage, state_layout, exchange, request.options.on_nonfinite)
    shared = [a for a, owner in owned if owner is None]
    lists = StageLists()

    def planned(chosen: Program, fitted: tuple[Fitted, ...], budget: int | None) -> PlannedStep:
        rows = check_batch.batch_size(traced.microbatch)
        memory = {} if runtime == "mpmd" else predict(chosen, update, shared, traced.local)
        plan = describe(request, chosen, placed, memory, rows, fitted, budget, candidate.runtime)
        plan = replace(plan, per_stage=by_stage.per_stage, frozen=describe_frozen(chosen, model))
        if exchange is not None:
            plan = replace(plan, exchange_bytes=exchange.sent_bytes)
        step = PlannedStep(
            plan=plan,
            profile=traced.profile,
            partition=placed,
            mesh=mesh,
            batch=traced.batch,
            microbatch=traced.microbatch,
            model=model,
            program=chosen,
            stage_placement=candidate.stage_placement,
            placement=placement,
            update=update,
            batching=traced.batching,
            policy=request.policy,
            schedules=request.schedules if candidate.maker is None else (candidate.maker, *request.schedules),
            retrace=lambda one: trace_loss(model, request.loss, one).training(traced_update.trained),
            shardings=traced.shardings,
        )
        return lists.with_bytes(step) if runtime == "mpmd" else step

    fitter = None
    if solving is not None:
        default = functools.cache(lambda: planned(program, (Fitted(),) * len(program.stages), None))
        prices, period = _prices(request, program, placed), _period(program, placed)
        fitter = StageFitter(
            program, lambda chosen: lists.needs(default(), chosen), prices, solving, period, request.policy
        )
    return FinalizedCandidate(candidate, planned, fitter)


class StageLists:
    """The lists of plans with the same cuts. The list of a program, and the work of a stage, is traced once."""

    def __init__(self) -> None:
        """Nothing is traced yet."""
        self._calls: dict[int, tuple[Program, Any]] = {}
        self._traces: dict[Any, Any] = {}

    def with_list(self, planned: PlannedStep) -> PlannedStep:
        """Return a plan with its list."""
        program, planned = planned.program, replace(planned, traces=self._traces)
        if id(program) not in self._calls:  # with the program, so that its number stays its own
            self._calls[id(program)] = program, MpmdRuntime(planned).calls
        return replace(planned, calls=self._calls[id(program)][1])

    def with_bytes(self, planned: PlannedStep) -> PlannedStep:
        """Return a plan with its list, and the bytes that each device needs for it."""
        planned = self.with_list(planned)
        runtime = MpmdRuntime(planned)
        peaks = runtime.predicted
        each = [sum(peak.components.values()) for peak in peaks.values()]
        stages = tuple(peaks[row[0]].components for row in runtime.devices.rows)
        fullest = list(peaks.values())[each.index(max(each))]
        plan = replace(planned.plan, memory=fullest.components, each_device=tuple(each), stage_memory=stages)
        if plan.host is not None:
            plan = replace(plan, host=replace(plan.host, bytes=max(peak.host for peak in peaks.values())))
        return replace(planned, plan=plan)

    def needs(self, planned: PlannedStep, program: Program) -> list[int]:
        """Return the predicted bytes of each device along the stage axis, for a plan with another program."""
        runtime = MpmdRuntime(self.with_list(replace(planned, program=program, calls=None)))
        peaks = predicted_bytes(runtime.calls, runtime.devices)
        return [max(peaks[x].total for x in row) for row in runtime.devices.rows[: program.num_devices]]


def _map_for_swaps(program: Program, partition: Partition) -> Partition:
    """Return the same cuts on the devices with which peers can take most, if a step takes no longer with them."""
    messages = [4 * n for n in program.message_words]
    stashes = [sum(a.size * a.dtype.itemsize for a in program.stash_avals(stage)) for stage in program.stages]
    return best_mapping(partition, program.schedule, stashes, _period(program, partition), messages)


def _period(program: Program, partition: Partition) -> float:
    """Return the seconds of a micro-batch on the slowest stage."""
    work = zip(stage_seconds(program, partition, own_sums=True), _slowness(program, partition), strict=True)
    return max((stage.forward + stage.backward) * slow for stage, slow in work)


def _slowness(program: Program, partition: Partition) -> tuple[float, ...]:
    """Return, by stage, how many times slower than the profiled device its own is, or are together."""
    widths = [program.stage_replicas.per_stage[program.device(s)] for s in range(len(partition.stages))]
    pairs = zip(partition.stages, widths, strict=True)
    return tuple(1 / (width * min(partition.network.speed[d] for d in stage.devices)) for stage, width in pairs)


def _prices(request: Request, program: Program, partition: Partition) -> Prices:
    """Return the seconds to compute an operator again: as profiled if known, else in proportion to an estimate."""
    graph, profile = program.objective.graph, partition.profile
    rates = rates_in(profile)
    estimated = sum(graph_seconds(graph, rates))
    scale = sum(profile.forward_seconds) / estimated if estimated else 1.0
    known = {
        (t, op.name): seconds
        for op, seconds in zip(graph.operators, profile.forward_seconds, strict=True)
        for t in op.outputs
        if weight(op) is None
    }

    def seconds(graph: Graph, op: Operator) -> float:
        return known.get((op.outputs[0], op.name), scale * roofline.seconds([op], graph, rates))

    links = stage_links(partition, 0 if request.host is None or request.host.refused else request.host.budget)
    if request.network is None:  # nobody has said that devices exchange more than messages
        links = replace(links, bandwidth=tuple((0.0,) * len(row) for row in links.bandwidth))
    return Prices(seconds, rates.bytes / scale if scale else rates.bytes, _slowness(program, partition), links)
