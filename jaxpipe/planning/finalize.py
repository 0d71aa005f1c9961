"""A candidate with its optimizer and layouts, to which only the storage is missing.

candidate ──finalize──▶ FinalizedCandidate ──without_budget, within(budget), smallest()──▶ PlannedStep
"""

# More than 15 of our modules: the parts of a planned step are put together here.
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.sharding import Mesh

from jaxpipe.array_types import Shaped
from jaxpipe.costs.assumed_links import slowest_used
from jaxpipe.models import check_batch
from jaxpipe.models.microbatch_program import trace_loss
from jaxpipe.models.traced_update import trace_update
from jaxpipe.models.trained_parameters import without_frozen
from jaxpipe.planning.arrange_devices import arrange
from jaxpipe.planning.candidate import Candidate
from jaxpipe.planning.describe_plan import describe, describe_frozen
from jaxpipe.planning.planned_step import MoreMicrobatches, PlannedStep
from jaxpipe.planning.price_storage import longest_microbatch, price_storage
from jaxpipe.planning.stage_lists import StageLists
from jaxpipe.planning.storage.stage_budget import Fitted, Solving, StageFitter, reruns_products
from jaxpipe.runtime.asynchronous_updates import check_asynchronous
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, partition_update
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.replica_exchange import stage_exchange, warn_of_adam
from jaxpipe.runtime.spmd.buffer_layout import lay_out
from jaxpipe.runtime.spmd.predicted_bytes import predict
from jaxpipe.runtime.stages import Placement


@dataclass(frozen=True, eq=False)
class FinalizedCandidate:
    """A candidate with its optimizer and layouts, to which only the storage is missing.

    Its mesh has the devices in the order in which stages use them; variables are placed by stage, or by device where
    one program has several stages on each. Its plans have the same cuts and schedule.
    """

    candidate: Candidate
    mesh: Mesh
    placement: Placement[int]
    update: Update
    solving: Solving | None
    lists: StageLists

    @cached_property
    def without_budget(self) -> PlannedStep:
        """The plan with default storage."""
        program = self.candidate.program
        return self._planned(program, (Fitted(),) * len(program.stages), None)

    def within(self, budget: int) -> PlannedStep | None:
        """Return the fastest plan of predicted bytes within a budget; None if no plan is within."""
        answer = self._fitter.within(budget)
        return None if answer is None else replace(self._planned(*answer, budget), others=self)

    @property
    def memory(self) -> int | str | None:
        """Return the budget as the caller wrote it."""
        return self.candidate.traced.request.memory

    @property
    def may_raise(self) -> bool:
        """Return False: a request raises its budget where no candidate keeps it."""
        return False

    def refit(self, predicted_bytes: int) -> PlannedStep:
        """Return the fastest plan within predicted bytes; the smallest, if that needs more."""
        return self.within(predicted_bytes) or self._smallest

    def smallest(self) -> PlannedStep:
        """Return the plan with the least predicted bytes."""
        return self._smallest

    def default(self) -> PlannedStep:
        """Return the plan with default storage, as one for a budget."""
        return replace(self.without_budget, others=self)

    def most_smaller(self) -> int:
        """Return the bytes that another plan without swaps may take less than the smallest at most."""
        return self._fitter.most_smaller

    def more_microbatches(self, budget: int) -> MoreMicrobatches | None:
        """Return None: a request is traced again for other micro-batches, not a candidate."""
        return None

    @cached_property
    def _smallest(self) -> PlannedStep:
        return replace(self._planned(*self._fitter.smallest, None), others=self)

    @cached_property
    def _fitter(self) -> StageFitter:
        assert self.solving is not None
        program, partition, request = self.candidate.program, self.candidate.partition, self.candidate.traced.request
        prices, period = price_storage(request, program, partition), longest_microbatch(program, partition)
        needs = functools.partial(self.lists.needs, self.without_budget)
        return StageFitter(program, needs, prices, self.solving, period, request.policy)

    @property
    def least_seconds(self) -> float:
        """Seconds that a step takes at least with these cuts and this schedule, within any budget."""
        if not any(map(reruns_products, self.candidate.program.stages)):
            return self.candidate.seconds
        return self.candidate.seconds - self._fitter.most_saved_seconds

    def _planned(self, program: Program, fitted: tuple[Fitted, ...], budget: int | None) -> PlannedStep:
        """Return the plan for a program with some storage, and how that was chosen."""
        candidate, traced, update = self.candidate, self.candidate.traced, self.update
        request, model, by_stage = traced.request, traced.model, update.by_stage
        rows, memory = check_batch.batch_size(traced.microbatch), {}
        if request.runtime == "spmd":
            memory = predict(program, update, [a for a, s in _owned(by_stage) if s is None], traced.local)
        plan = describe(request, program, candidate.partition, memory, rows, fitted, budget)
        sent = None if update.exchange is None else update.exchange.sent_bytes
        frozen = describe_frozen(program, model)
        notes = (*plan.notes, *traced.notes)
        step = PlannedStep(
            plan=replace(plan, per_stage=by_stage.per_stage, frozen=frozen, exchange_bytes=sent, notes=notes),
            profile=traced.profile,
            partition=candidate.partition,
            mesh=self.mesh,
            batch=traced.batch,
            microbatch=traced.microbatch,
            model=model,
            program=program,
            stage_placement=candidate.cut.placement,
            placement=self.placement,
            update=update,
            batching=traced.batching,
            policy=request.policy,
            schedules=request.schedules if candidate.maker is None else (candidate.maker, *request.schedules),
            retrace=lambda shapes: trace_loss(model, request.loss, shapes).training(traced.update.trained),
            shardings=traced.shardings,
        )
        return step if request.runtime == "spmd" else self.lists.with_bytes(step)


def finalize(candidate: Candidate, solving: Solving | None) -> FinalizedCandidate:
    """Return a candidate with its optimizer and layouts; with a solver, to be fitted to budgets."""
    program, traced, request = candidate.program, candidate.traced, candidate.traced.request
    placement = candidate.cut.placement if request.runtime == "mpmd" else program.placement
    placed = candidate.partition
    links = request.network or slowest_used(placed.network, request.mesh)
    mesh = arrange(request.mesh, [placed.stages[d].devices for d in range(program.num_devices)], links)
    update = traced.update
    if update.per_stage:
        whole = trace_update(request.optimizer, traced.model, placement.parameters)
        update = without_frozen(whole, update.trained)
    by_stage = partition_update(update, traced.model, placement.parameters)
    exchange = request.exchange if request.replicas > 1 else None
    check_asynchronous(program, by_stage, exchange is not None, request.options.zero)
    # A leaf is in the stage or on the device of its parameter, as ``placement`` says.
    owned = [(a, None if s is None else s % program.num_devices) for a, s in _owned(by_stage)]
    layout = lay_out([[a for a, owner in owned if owner == d] for d in range(program.num_devices)])
    sent = None
    if exchange is not None:
        warn_of_adam(by_stage.state_shape)
        layouts = program.gradients, program.sums
        sent = stage_exchange(exchange, traced.model, placement, *layouts, request.replicas)
    update = Update(by_stage, layout, sent, request.options.on_nonfinite)
    return FinalizedCandidate(candidate, mesh, placement, update, solving, StageLists(candidate.cut.traces))


def _owned(by_stage: PartitionedUpdate) -> Sequence[tuple[Shaped, int | None]]:
    """Return the arrays of an optimizer's state, each with its stage; None for those that all stages have."""
    return list(zip(by_stage.state_avals, by_stage.state_stage, strict=True))
