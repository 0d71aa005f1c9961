"""Storage within a budget for the few candidates that can be the fastest."""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from jaxpipe.costs.profile import Profile
from jaxpipe.errors import JaxpipeError, JaxpipeWarning
from jaxpipe.models import check_batch
from jaxpipe.planning.balance_stages import WORTH_A_CUT, balanced
from jaxpipe.planning.candidate import Candidate, PlannedStep
from jaxpipe.planning.compile_within_budget import SMALL_PLANS, adjusted, smallest_compiled, with_step
from jaxpipe.planning.list_candidates import cut_again, leanest, list_candidates, price
from jaxpipe.planning.price_storage import longest_microbatch, price_storage
from jaxpipe.planning.storage.program_front import Solving, reruns_products
from jaxpipe.planning.storage.solver_time import SolverTime
from jaxpipe.planning.storage.stage_budget import StageFitter
from jaxpipe.planning.trace_request import trace_request
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.units import bytes_text, seconds_text


#: How many times as many micro-batches are tried where a budget is kept by no plan.
MORE_MICROBATCHES = (2, 4, 8)

#: By what share a step may be shorter with another schedule, if there were no budget, for storage to be chosen for it.
PROMISED = 0.01


class BudgetSearch:
    """The plans of some candidates within one budget after another, whose solvers share their time."""

    def __init__(self, candidates: Sequence[Candidate], log: list[str]):
        options = candidates[0].traced.request.options
        time = SolverTime(options.time_limit)
        solutions = sum(len(candidate.program.stages) for candidate in candidates)
        self.candidates, self._log, self._compiles = candidates, log, options.compile is not False
        self._solving = Solving(options.solver, time, time.for_smallest(solutions))
        self._fitters: dict[Candidate, StageFitter] = {}
        self._compiled: list[PlannedStep] = []

    @phase("storage")
    def shortest(self, budget: int) -> PlannedStep:
        """Return the plan with the shortest step that is found for a budget; the smallest, if none is within."""
        first = self._fastest(budget)
        if not self._compiles:
            return self.smallest if first is None else first
        best: PlannedStep | None = None
        if first is not None:
            refit = functools.partial(self._refit, first.candidate)
            best = adjusted([self._with_step(first)], budget, refit, self._with_step)
        if best is None or best.needed_bytes > budget:
            best = smallest_compiled(self._small_plans(), budget, self._with_step)
            if first is None and best.needed_bytes <= budget:
                refit = functools.partial(self._refit, self.smallest.candidate)
                best = adjusted([best], budget, refit, self._with_step)
        rounds = () if first is None else first.plan.rounds
        return replace(best, plan=replace(best.plan, rounds=rounds))

    @cached_property
    def smallest(self) -> PlannedStep:
        """The plan with the least predicted bytes, whatever its cuts and schedule."""
        smallest = (self._smallest_of(candidate) for candidate in self.candidates)
        return min(smallest, key=lambda planned: planned.plan.predicted_bytes)

    @property
    def most_smaller(self) -> int:
        """The bytes that another plan without swaps may take less than the smallest at most, as solvers count."""
        return self._fitter(self.smallest.candidate).most_smaller

    def more_microbatches(self, budget: int) -> PlannedStep | None:
        """Return a plan with the fewest of twice, four and eight times as many micro-batches within predicted bytes.

        With each number default storage is tried, with the most others.
        """
        before, most = self.candidates[0].traced.batching.num_microbatches, None
        for times in MORE_MICROBATCHES:
            tell(f"Trying num_microbatches={times * before}")
            candidate = self._with_microbatches(times * before)
            if candidate is None:
                break
            most = candidate
            if candidate.default.plan.predicted_bytes <= budget:
                return candidate.default
        return None if most is None else BudgetSearch([most], [])._fastest(budget)

    def _with_microbatches(self, num_microbatches: int) -> Candidate | None:
        """Return the candidate for another number of micro-batches; None if a batch cannot be cut into so many."""
        request, batch, variables = self.candidates[0].traced.asked
        if check_batch.batch_size(batch) % (request.parts * num_microbatches):
            return None
        options = replace(request.options, time_limit=request.options.time_limit / MORE_MICROBATCHES[-1])
        other = replace(request, num_microbatches=num_microbatches, options=options)
        with warnings.catch_warnings(), contextlib.suppress(JaxpipeError):  # no such table; a loss that needs all
            warnings.simplefilter("ignore", JaxpipeWarning)
            return leanest(list_candidates(trace_request(other, batch, variables)))
        return None

    def _fastest(self, budget: int) -> PlannedStep | None:
        """Return the plan with the shortest step of predicted bytes within a budget; None if no plan is within."""
        found: list[PlannedStep] = []
        for candidate in self._most_promising_first(budget):
            limit = (1 - PROMISED) * min(map(_price, found), default=math.inf)
            if price(candidate, self._least_seconds(candidate)) >= limit or self._expected(candidate, budget) >= limit:
                continue
            planned = self._within(candidate, budget)
            if planned is None:
                self._log.append(
                    f"{candidate.program.schedule.name}: nothing within {bytes_text(budget)}, as predicted"
                )
                continue
            self._log.append(f"{_described(planned)} predicted, for {bytes_text(budget)}")
            found.append(planned)
        if not found:
            return None
        best, *others = sorted(found, key=_price)
        best = self._balanced(best, budget, math.inf)
        for planned in others:
            if price(planned.candidate) < (1 - WORTH_A_CUT) * _price(best):
                best = min(best, self._balanced(planned, budget, _price(best)), key=_price)
        return best

    def _most_promising_first(self, budget: int) -> list[Candidate]:
        """Return the candidates; those that are as fast as the first without a budget by what is expected within it."""
        first, *others = self.candidates
        alike = [first, *(x for x in others if (1 - PROMISED) * price(x) <= price(first))]
        if len(alike) > 1:
            alike.sort(key=lambda candidate: self._expected(candidate, budget))
        return [*alike, *(x for x in others if x not in alike)]

    def _expected(self, candidate: Candidate, budget: int) -> float:
        """Return the price of a candidate within a budget if estimates of what is not stored are right."""
        added = [fitted.added_seconds for fitted in self._fitter(candidate).expected(budget)]
        return price(candidate, candidate.seconds_with(added))

    def _balanced(self, first: PlannedStep, budget: int, least: float) -> PlannedStep:
        """Return a plan or one with the same schedule and other cuts, if a step may be shorter than ``least`` then."""
        again = functools.partial(self._cut_again, first.candidate, budget, min(least, _price(first)))
        return balanced(first, again)

    def _cut_again(self, candidate: Candidate, budget: int, least: float, charged: Profile) -> PlannedStep | None:
        """Return the plan of the same schedule, cut for another profile, within a budget.

        What its devices need besides what stages store is taken to be what it was before. None if a step is not shorter
        than ``least`` then, or it does not fit.
        """
        other = cut_again(candidate, charged)
        self._fitter(other, self._fitter(candidate).beyond)
        if self._expected(other, budget) >= (1 - PROMISED) * least:
            return None
        return self._within(other, budget)

    def _least_seconds(self, candidate: Candidate) -> float:
        """Return what a step takes at least with some cuts and a schedule, within any budget."""
        if not any(reruns_products(stage.vjp) for stage in candidate.program.stages):
            return candidate.seconds
        return candidate.seconds - self._fitter(candidate).most_saved_seconds

    def _within(self, candidate: Candidate, budget: int) -> PlannedStep | None:
        """Return the fastest plan of a candidate of predicted bytes within a budget; None if no plan is within."""
        answer = self._fitter(candidate).within(budget)
        return None if answer is None else candidate.with_storage(*answer)

    def _refit(self, candidate: Candidate, budget: int) -> PlannedStep:
        """Return the fastest plan of a candidate within predicted bytes; the smallest, if that needs more."""
        return self._within(candidate, budget) or self._smallest_of(candidate)

    def _smallest_of(self, candidate: Candidate) -> PlannedStep:
        return candidate.with_storage(*self._fitter(candidate).smallest)

    def _small_plans(self) -> Iterator[PlannedStep]:
        """Yield small plans, which do not depend on the budget: the smallest first and that with default storage last.

        Predictions may be wrong.
        """
        smallest, default = self.smallest, self.candidates[0].default
        yield smallest
        least, most = smallest.plan.predicted_bytes, default.plan.predicted_bytes
        for part in SMALL_PLANS if least < most else ():
            yield self._refit(smallest.candidate, int(least + part * (most - least)))
        yield default

    def _fitter(self, candidate: Candidate, held: Sequence[int] | None = None) -> StageFitter:
        if candidate not in self._fitters:
            program, partition, request = candidate.program, candidate.partition, candidate.traced.request
            prices, period = price_storage(request, program, partition), longest_microbatch(program, partition)
            held = candidate.held_bytes if held is None else held
            self._fitters[candidate] = StageFitter(
                program, candidate.needs, held, prices, self._solving, period, request.policy
            )
        return self._fitters[candidate]

    def _with_step(self, planned: PlannedStep) -> PlannedStep:
        """Compile a plan, once for equal programs."""
        known = next((other for other in self._compiled if other.program is planned.program), None)
        if known is None:
            known = with_step(planned)
            self._compiled.append(known)
            self._log.append(f"{_described(planned)} predicted, {bytes_text(known.needed_bytes)} compiled")
        return known


def _price(planned: PlannedStep) -> float:
    return price(planned.candidate, planned.plan.step_seconds)


def _described(planned: PlannedStep) -> str:
    plan = planned.plan
    return f"{plan.schedule}: step {seconds_text(plan.step_seconds)}, {bytes_text(plan.predicted_bytes)}"
