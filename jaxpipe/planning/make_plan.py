"""The planning loop: candidates, finalized, fitted to a budget, cut again.

request, batch ──trace──▶ candidates ──finalize──▶ storage within the budget ──compile──▶ PlannedStep
                              ▲                          │
                              └── cut again, with what ──┘
                                  that storage adds
"""

# More than 15 of our modules: each step of the loop is a module.
import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from jaxpipe.agreement import agree
from jaxpipe.array_types import PyTree
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import JaxpipeError, JaxpipeWarning, MemoryBudgetError
from jaxpipe.models import check_batch
from jaxpipe.planning.balance_stages import balanced
from jaxpipe.planning.candidate import Candidate
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.compile_within_budget import refusal, smallest_compiled, with_step, within_budget
from jaxpipe.planning.finalize import FinalizedCandidate, finalize
from jaxpipe.planning.idle_devices import noted, without_idle
from jaxpipe.planning.kept_front import Point, add_point, better_point, front_path, read_front
from jaxpipe.planning.list_candidates import cut_again, list_candidates
from jaxpipe.planning.planned_step import MoreMicrobatches, OtherPlans, PlannedStep
from jaxpipe.planning.storage.fastest_choice import raised
from jaxpipe.planning.storage.solver_time import SolverTime
from jaxpipe.planning.storage.stage_budget import Solving
from jaxpipe.planning.trace_request import trace_request
from jaxpipe.target import building_for, platform
from jaxpipe.text.progress import phase, progress, tell
from jaxpipe.text.units import bytes_text


#: How many times as many micro-batches are tried where a budget is kept by no plan.
MORE_MICROBATCHES = (2, 4, 8)

#: The candidates of a request for another number of micro-batches; None for one that it cannot have.
Retrace: TypeAlias = Callable[[int], list[Candidate] | None]

#: How much longer a step may be if stashes take less: profiles are no better than this.
ALIKE = 0.02


@phase("all else")
@progress("Tracing the model")
def make_plan(request: Request, batch: PyTree, variables: PyTree = None) -> PlannedStep:
    """Plan a model for batches of the given shapes, and show how far that is; raises as ``partition``."""
    with building_for(request.mesh.devices.flat[0].platform):
        planned = _plan(request, batch, variables)
        less = without_idle(request, planned)
        if less is not None:
            planned = _no_longer(less, batch, variables, planned) or planned
    agree("jaxpipe.partition", lambda: {"the plan": planned.plan.to_json()})
    return planned


def _plan(request: Request, batch: PyTree, variables: PyTree) -> PlannedStep:
    """Return the plan for all devices of a request."""
    candidates = _candidates(request, batch, variables)
    again = functools.partial(_with_microbatches, request, batch, variables)
    return _by_default(candidates) if request.budget is None else _within(candidates, request.budget, again)


def _no_longer(less: Request, batch: PyTree, variables: PyTree, planned: PlannedStep) -> PlannedStep | None:
    """Return the plan for fewer devices, if there is one with the same budget whose step takes about no longer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JaxpipeWarning)  # the plan for all devices has warned
            fewer = _plan(less, batch, variables)
    except JaxpipeError:  # of a schedule for more stages, or a budget that needs the memory of all
        return None
    shorter = fewer.plan.step_seconds <= (1 + ALIKE) * planned.plan.step_seconds
    return noted(fewer, planned) if shorter and fewer.plan.budget == planned.plan.budget else None


def _candidates(request: Request, batch: PyTree, variables: PyTree) -> list[Candidate]:
    return sorted(list_candidates(trace_request(request, batch, variables)), key=lambda candidate: candidate.seconds)


def _with_microbatches(
    request: Request, batch: PyTree, variables: PyTree, num_microbatches: int
) -> list[Candidate] | None:
    """Return the candidates for another number of micro-batches; None if a batch cannot be cut into so many."""
    if check_batch.batch_size(batch) % (request.parts * num_microbatches):
        return None
    options = replace(request.options, time_limit=request.options.time_limit / MORE_MICROBATCHES[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JaxpipeWarning)
        try:
            other = replace(request, num_microbatches=num_microbatches, options=options)
            return _candidates(other, batch, variables)
        except JaxpipeError:  # a schedule that has no table for it, a loss that needs all examples
            return None


def _by_default(candidates: Sequence[Candidate]) -> PlannedStep:
    """Return the plan without a budget, compiled where predictions are not exact: for GPUs, as stage programs."""
    final = finalize(_leanest(candidates), None)
    wanted = candidates[0].traced.request.options.compile
    compiles = platform() != "cpu" if wanted is None else wanted
    is_mpmd = final.before_bytes.plan.runtime == "mpmd"
    return with_step(final.without_budget) if compiles and is_mpmd else final.before_bytes


def _leanest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or of stage programs one that is about as fast and keeps fewer bytes of stashes."""
    fastest = candidates[0]
    if fastest.traced.request.runtime == "spmd":
        return fastest
    alike = [candidate for candidate in candidates if candidate.seconds <= (1 + ALIKE) * fastest.seconds]
    return min(alike, key=lambda candidate: candidate.waiting_bytes)


def _within(candidates: Sequence[Candidate], budget: int, again: Retrace) -> PlannedStep:
    """Return the plan with the shortest step that keeps a budget; an error offers what the smallest plan needs.

    A plan that was found for a smaller budget is taken where it is faster.
    """
    search, best, refused = _Search.of(candidates, again), None, None
    path = front_path(candidates[0].traced)
    front = read_front(path)
    try:
        best = _for_budget(search, budget)
    except MemoryBudgetError as error:
        refused = error
    kept = best is not None and _needed(best) <= budget
    smallest = None if refused is None else refused.smallest
    point = better_point(front, budget, best.plan.step_seconds if best is not None and kept else math.inf, smallest)
    if point is not None:
        tell(f"A plan for {bytes_text(point.budget)} was {'faster' if kept else 'smaller'}")
        with contextlib.suppress(MemoryBudgetError):
            other = search.for_budget(_for_budget(search, point.budget), budget)
            if _needed(other) <= budget and not (best and kept and best.plan.step_seconds <= other.plan.step_seconds):
                return other
            if refused is not None and smallest is not None and _needed(other) < smallest:
                refused = refusal(budget, other)
        front.remove(point)
    if refused is not None:
        raise refused
    assert best is not None
    if kept:
        add_point(path, front, Point(_needed(best), best.plan.step_seconds, budget))
    return best


def _needed(planned: PlannedStep) -> int:
    """Return the bytes that XLA reserves for a plan, or that are predicted if it was not compiled."""
    return planned.plan.predicted_bytes if planned.compiled is None else planned.compiled.reserved_bytes


def _for_budget(search: "_Search", budget: int) -> PlannedStep:
    """Return the plan with the shortest step that is found for a budget."""
    options = search.request.options
    compiles = options.compile is not False
    best = search.fastest(budget)
    if best is None:
        least = search.for_budget(search.with_smallest.smallest(), budget)
        least = smallest_compiled(least) if compiles else least
        if _needed(least) <= budget:
            return least
        if not options.allow_over_budget:
            raise refusal(budget, least)
        budget = raised(budget, _needed(least))
        best = search.fastest(budget) or search.for_budget(least, budget)
    return within_budget(best) if compiles else best


@dataclass(frozen=True, eq=False)
class _Search:
    """Finalized candidates, fastest first, of which each budget has its best."""

    finalized: Sequence[FinalizedCandidate]
    again: Retrace
    offers: dict[int, MoreMicrobatches | None] = field(default_factory=dict)

    @classmethod
    def of(cls, candidates: Sequence[Candidate], again: Retrace) -> "_Search":
        options = candidates[0].traced.request.options
        time = SolverTime(options.time_limit)
        solutions = sum(len(candidate.program.stages) for candidate in candidates)
        solving = Solving(options.solver, time, time.for_smallest(solutions))
        return cls([finalize(candidate, solving) for candidate in candidates], again)

    @property
    def request(self) -> Request:
        return self.finalized[0].candidate.traced.request

    @cached_property
    def with_smallest(self) -> FinalizedCandidate:
        """The candidate that has the plan with the least predicted bytes, whatever its cuts and schedule."""
        return min(self.finalized, key=lambda final: final.smallest().plan.predicted_bytes)

    def fastest(self, budget: int) -> PlannedStep | None:
        """Return the plan with the shortest step of predicted bytes within a budget; None if no plan is within."""
        best: PlannedStep | None = None
        for final in self.finalized:
            if best is not None and final.least_seconds >= best.plan.step_seconds:
                continue
            first = final.within(budget)
            if first is None:
                continue
            planned = balanced(first, functools.partial(_cut_again_within, final, budget))
            if best is None or planned.plan.step_seconds < best.plan.step_seconds:
                best = planned
        return None if best is None else self.for_budget(best, budget)

    def more_microbatches(self, budget: int) -> MoreMicrobatches | None:
        """Return what keeps a budget, found once: with each number default storage is tried, with the most others."""
        if budget not in self.offers:
            self.offers[budget] = self._more_microbatches(budget)
        return self.offers[budget]

    def _more_microbatches(self, budget: int) -> MoreMicrobatches | None:
        before = self.finalized[0].candidate.traced.batching.num_microbatches
        most: list[Candidate] | None = None
        for times in MORE_MICROBATCHES:
            tell(f"Trying num_microbatches={times * before}")
            candidates = self.again(times * before)
            if candidates is None:
                break
            most = candidates
            default = finalize(_leanest(candidates), None).without_budget
            if default.plan.predicted_bytes <= budget:
                return _offered(default, self.request)
        best = None if most is None else _Search.of([_leanest(most)], self.again).fastest(budget)
        return None if best is None else _offered(best, self.request)

    def for_budget(self, planned: PlannedStep, budget: int) -> PlannedStep:
        """Return a plan as one for a budget, which may be raised from the requested one."""
        assert planned.others is not None
        asked = self.request.budget if budget != self.request.budget else None
        others = _PlansOfRequest(self, planned.others)
        return replace(planned, plan=replace(planned.plan, budget=budget, raised_from=asked), others=others)


@dataclass(frozen=True, eq=False)
class _PlansOfRequest:
    """Plans for other budgets: of one candidate those with the same cuts, of all the smallest and the default."""

    search: _Search
    same_cuts: OtherPlans

    @property
    def memory(self) -> int | str | None:
        return self.search.request.memory

    @property
    def may_raise(self) -> bool:
        return self.search.request.options.allow_over_budget

    def refit(self, predicted_bytes: int) -> PlannedStep:
        return self.same_cuts.refit(predicted_bytes)

    def smallest(self) -> PlannedStep:
        return self.search.with_smallest.smallest()

    def default(self) -> PlannedStep:
        return self.search.finalized[0].default()

    def most_smaller(self) -> int:
        return self.search.with_smallest.most_smaller()

    def more_microbatches(self, budget: int) -> MoreMicrobatches | None:
        return self.search.more_microbatches(budget)


def _offered(planned: PlannedStep, request: Request) -> MoreMicrobatches:
    seconds = None if isinstance(request.profile, Profile) else planned.plan.step_seconds
    return MoreMicrobatches(planned.batching.num_microbatches, planned.plan.predicted_bytes, seconds)


def _cut_again_within(final: FinalizedCandidate, budget: int, charged: Profile) -> PlannedStep | None:
    """Return the plan of the same schedule, cut for another profile, within a budget; None if it does not fit."""
    return finalize(cut_again(final.candidate, charged), final.solving).within(budget)
