"""The plan with the shortest step within a budget: the candidate first, then the level of what its stages store.

    candidates ──about what storage adds──▶ the most promising, and cut again for the budget
         level ──predicted bytes──▶ a level within the budget ──compiled bytes──▶ the plan
                no level is within ──▶ cut again for less
                no level is within, or it takes long ──▶ candidates whose cuts level the bytes of devices
                no level is within ──▶ small levels of all candidates, and what the least of them needs

Levels, and candidates that level bytes, do not depend on the budget: whoever asks for what an error has offered gets a
plan that runs.
"""

# More than 15 of our modules: candidates, their levels and what these need come together here.
import contextlib
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from jaxpipe import multihost
from jaxpipe.errors import JaxpipeError, JaxpipeWarning
from jaxpipe.models import check_batch
from jaxpipe.plan import BalanceRound
from jaxpipe.planning.bracket_search import MOST_COMPILED, next_place, straight_lines
from jaxpipe.planning.candidate import Candidate, Cut, PlannedStep, build_candidate
from jaxpipe.planning.cuts.placed_stages import stage_speeds
from jaxpipe.planning.list_candidates import cut_for_memory, leanest, list_candidates, price
from jaxpipe.planning.storage.program_front import reruns_products
from jaxpipe.planning.storage.solving import Solving
from jaxpipe.planning.storage.stage_levels import StageLevels, Ways, stage_levels
from jaxpipe.planning.trace_request import trace_request
from jaxpipe.runtime.stages import Program
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.units import bytes_text, seconds_text


#: How many times as many micro-batches are tried where a budget is kept by no plan.
MORE_MICROBATCHES = (2, 4, 8)

#: By what share a step may be shorter with another candidate for storage to be chosen for it, too.
PROMISED = 0.01

#: How many times as long as tracing solvers may take if no limit is given, and at least, in seconds.
SOLVER_SHARE, LEAST_SECONDS = 6, 2.0

#: The places of small levels: shares of the way from default storage to the lowest.
SMALL_LEVELS = (1.0, 0.9, 0.75, 0.5, 0.0)

#: The share of a step by which storage must have made it longer, or no other cut can make it much shorter.
WORTH_A_CUT = 0.02

#: How often a program is cut again at most.
MOST_ROUNDS = 3

#: By what share estimates and predictions may be wrong where they speak against a level.
INEXACT = 0.1


#: For how many budgets other cuts are looked for at most, each smaller by what the last were over.
MOST_TARGETS = 3


class LevelPlans:
    """The plans of levels, each made when it is first needed. Levels that are alike have the same."""

    def __init__(self, levels: StageLevels, make: Callable[[int], PlannedStep]):
        """Nothing is made yet; ``make`` makes the plan of a place."""
        self._levels, self._make = levels, make
        self.known: dict[int, PlannedStep] = {}  # by place

    def at(self, place: int) -> PlannedStep:
        """Return the plan of a level."""
        if place not in self.known:
            planned = self._make(place)
            self.known = dict.fromkeys(self._levels.alike(place, planned.program), planned) | self.known
        return self.known[place]

    def sizes(self, estimates: Sequence[float]) -> list[float]:
        """Return the bytes of all levels, from estimates that are corrected by what is known."""
        known = ((estimates[place], plan.needed_bytes) for place, plan in self.known.items())
        return [*map(straight_lines(known), estimates)]

    def search(self, estimates: Sequence[float], budget: int) -> None:
        """Make plans until no other can use a budget better."""
        for _ in range(MOST_COMPILED):
            known = {place: plan.needed_bytes for place, plan in self.known.items()}
            place = next_place(known, self.sizes(estimates).__getitem__, len(estimates), budget)
            if place is None:
                break
            self.at(place)


class LevelSearch:
    """The levels of a candidate, with what is predicted and compiled of them, whatever the budget.

    The one that keeps a budget is looked for by predicted bytes first and then by those that XLA reserves.
    """

    def __init__(
        self, candidate: Candidate, levels: StageLevels, compiled: Callable[[PlannedStep], PlannedStep] | None
    ):
        """Nothing is done yet; ``compiled`` compiles a plan, None leaves it at predictions."""
        predicted = LevelPlans(levels, lambda place: candidate.described(*levels.program_at(place)).with_bytes())
        self.levels, self._predicted, self._plans = levels, predicted, predicted
        if compiled is not None:
            self._plans = LevelPlans(levels, lambda place: compiled(predicted.at(place)))

    def fastest(self, budget: int) -> PlannedStep | None:
        """Return the fastest plan that is found within a budget; None if none is."""
        self._predicted.search(self.levels.rooms, budget)
        if self._plans is not self._predicted:
            self._plans.search(self._predicted.sizes(self.levels.rooms), budget)
        within = [plan for plan in self._plans.known.values() if plan.needed_bytes <= budget]
        return min(within, key=lambda plan: (plan.plan.step_seconds, plan.needed_bytes), default=None)

    def lacks(self, budget: int) -> int:
        """Return the bytes by which the smallest of all plans so far is over a budget."""
        return min((plan.needed_bytes - budget for plan in self._plans.known.values()), default=budget)

    def small(self, budget: int) -> PlannedStep:
        """Return the first small level within a budget, or else the one that needs least."""
        default, lowest = self.levels.default_place, self.levels.lowest_place
        plans: list[PlannedStep] = []
        for share in SMALL_LEVELS:
            place = default + round(share * (lowest - default))
            least = min((plan.needed_bytes for plan in plans), default=math.inf)
            if least <= budget:
                break
            if self._predicted.at(place).needed_bytes <= (1 + INEXACT) * least:
                plans.append(self._plans.at(place))
        return min(plans, key=lambda plan: plan.needed_bytes)


class BudgetSearch:
    """The plans of some candidates within one budget after another, whose solvers share their time."""

    def __init__(self, candidates: Sequence[Candidate], log: list[str]):
        """Nothing is searched yet; what is found is added to the log."""
        traced = candidates[0].traced
        options = traced.request.options
        limit = max(LEAST_SECONDS, SOLVER_SHARE * traced.trace_seconds)
        limit = multihost.from_first(lambda: limit) if options.time_limit is None else options.time_limit
        self.candidates, self._log, self._compiles = candidates, log, options.compile is not False
        self._solving = Solving(options.solver, limit)
        self._searches: dict[Candidate, LevelSearch] = {}
        self._levels: dict[Candidate, StageLevels] = {}
        self._built = {(x.traced, x.schedule, x.cut.partition.cuts): x for x in candidates}
        self._wrong: tuple[int, ...] | None = None
        self._compiled: dict[Program, PlannedStep] = {}

    @phase("storage")
    def shortest(self, budget: int) -> PlannedStep:
        """Return the plan with the shortest step that is found for a budget; the smallest, if none is within."""
        target, best, rounds = budget, None, list[PlannedStep]()
        for _ in range(MOST_TARGETS):
            expected = [self._expected(candidate, target) for candidate in self.candidates]
            lean = min(expected, key=lambda x: (max(target, self._estimated(x.candidate).least), _price(x)))
            starts = dict.fromkeys((min(expected, key=_price).candidate, lean.candidate))
            rounds = [x for start in starts for x in self._rounds(start, target, self._ways)]
            rounds = [x for x in rounds if self._estimated(x.candidate).least <= (1 + INEXACT) * target]
            best = self._best([*self.candidates, *(planned.candidate for planned in rounds)], None, budget)
            if best is not None:
                break
            target -= min(search.lacks(budget) for search in self._searches.values())
        if best is not None and best.candidate not in self.candidates:
            best = self._best(self._with_cuts_of(best.candidate), best, budget)
        elif best is None or best.plan.step_seconds > (1 + WORTH_A_CUT) * best.candidate.seconds:
            best = self._best(self._level, best, budget)
        if best is None:
            return self._small(budget)
        last, others = _round_of(best), map(_round_of, rounds)
        longer = (x for x in others if x.cuts != last.cuts and x.step_seconds > last.step_seconds)
        return replace(best, plan=replace(best.plan, rounds=(*longer, last)))

    def _rounds(self, candidate: Candidate, budget: int, ways_of: Callable[[Candidate], Ways]) -> list[PlannedStep]:
        """Return about the plans of a candidate, and of others with cuts that balance it within a budget.

        What stages may store, and what that adds to their work, counts when a program is cut again.
        """
        plans, short_enough = [self._expected(candidate, budget)], (1 + WORTH_A_CUT) * candidate.seconds
        for _ in range(MOST_ROUNDS):
            short = [x.candidate for x in plans if x.plan.step_seconds <= short_enough]
            if any(self._estimated(x).least <= budget for x in short):
                break
            again = plans[-1].candidate
            with contextlib.suppress(JaxpipeError):  # stages that change state out of a table's order
                again = self._with_cut(cut_for_memory(again, ways_of(again), budget), again)
            if any(again is plan.candidate for plan in plans):
                break
            tell(f"Cut again at {again.cut.partition.cuts[:-1]}, round {len(plans) + 1}")
            plans.append(self._expected(again, budget))
        return plans

    @cached_property
    def _level(self) -> list[Candidate]:
        """The candidates with one stage on each of all devices, cut so that by default the fullest needs least.

        They are the same for all budgets, so estimates are those of before anything was traced.
        """
        most = max(x.program.num_devices for x in self.candidates)
        straight = [x for x in self.candidates if len(x.program.stages) == most]
        if not straight:
            return []
        rounds = self._rounds(min(straight, key=self._default_need), 0, lambda x: self._levels_of(x).ways[:1])
        lean = min((planned.candidate for planned in rounds), key=self._default_need)
        return [lean, *self._with_cuts_of(lean)]

    def _default_need(self, candidate: Candidate) -> float:
        return max(self._levels_of(candidate).default_bytes)

    def _with_cuts_of(self, candidate: Candidate) -> list[Candidate]:
        """Return a candidate for each other schedule of stages on as many devices, with the cuts of one."""
        alike = (x for x in self.candidates if x.traced is candidate.traced and x.schedule != candidate.schedule)
        return [self._with_cut(candidate.cut, x) for x in alike if x.cut.replicas == candidate.cut.replicas]

    def _with_cut(self, cut: Cut, like: Candidate) -> Candidate:
        """Return the candidate with some cuts and the schedule of another, the same for the same cuts."""
        key = cut.traced, like.schedule, cut.partition.cuts
        if key not in self._built:
            self._built[key] = build_candidate(cut, like.schedule, like.maker)
        return self._built[key]

    def _best(self, candidates: Sequence[Candidate], best: PlannedStep | None, budget: int) -> PlannedStep | None:
        """Return the best plan within a budget of some candidates, and of a plan that is known."""
        waiting = list(dict.fromkeys(candidates))
        while (expected := self._most_promising(waiting, best, budget)) is not None:
            waiting.remove(expected.candidate)
            planned = self._search(expected.candidate).fastest(budget)
            if planned is None:
                name = expected.candidate.program.schedule.name
                self._log.append(f"{name}: nothing within {bytes_text(budget)}")
                continue
            if not self._compiles:
                self._log.append(f"{_described(planned)} predicted, for {bytes_text(budget)}")
            if best is None or _price(planned) < _price(best):
                best = planned
        return best

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
            planned = candidate.default.with_bytes()
            if planned.plan.predicted_bytes <= budget:
                return planned
        if most is None:
            return None
        planned = BudgetSearch([most], []).shortest(budget)
        return planned if planned.needed_bytes <= budget else None

    def _with_microbatches(self, num_microbatches: int) -> Candidate | None:
        """Return the candidate for another number of micro-batches; None if a batch cannot be cut into so many."""
        request, batch, variables = self.candidates[0].traced.asked
        if check_batch.batch_size(batch) % (request.parts * num_microbatches):
            return None
        options = replace(request.options, compile=False)
        other = replace(request, num_microbatches=num_microbatches, options=options)
        with warnings.catch_warnings(), contextlib.suppress(JaxpipeError):  # no such table; a loss that needs all
            warnings.simplefilter("ignore", JaxpipeWarning)
            return leanest(list_candidates(trace_request(other, batch, variables)))
        return None

    def _most_promising(
        self, candidates: Sequence[Candidate], best: PlannedStep | None, budget: int
    ) -> PlannedStep | None:
        """Return the candidate with the shortest step, about, that a budget leaves it; None if none beats the best."""
        limit, promising = math.inf if best is None else (1 - PROMISED) * _price(best), None
        for candidate in candidates:
            if price(candidate, self._least_seconds(candidate)) < limit:
                expected = self._expected(candidate, budget)
                if _price(expected) < limit:
                    limit, promising = _price(expected), expected
        return promising

    def _expected(self, candidate: Candidate, budget: int) -> PlannedStep:
        """Return a candidate with about the storage within a budget, without bytes."""
        return candidate.described(candidate.program, self._estimated(candidate).expected(budget))

    def _least_seconds(self, candidate: Candidate) -> float:
        """Return a lower bound of a step's seconds with some cuts and a schedule, within any budget."""
        if not any(reruns_products(stage.programs) for stage in candidate.program.stages):
            return candidate.seconds
        return candidate.seconds - self._estimated(candidate).most_saved_seconds

    def _small(self, budget: int) -> PlannedStep:
        """Return the smallest plan of all candidates, or the fastest of the first that is within a budget."""
        candidates = dict.fromkeys([*self.candidates, *self._level])
        least = {candidate: self._estimated(candidate).least for candidate in candidates}
        plans: list[PlannedStep] = []
        for candidate in sorted(candidates, key=least.__getitem__):
            if least[candidate] > (1 + INEXACT) * min(least.values()):
                break
            search = self._search(candidate)
            plans.append(search.small(budget))
            if plans[-1].needed_bytes <= budget:
                return search.fastest(budget) or plans[-1]
        return min(plans, key=lambda plan: plan.needed_bytes)

    def _search(self, candidate: Candidate) -> LevelSearch:
        """Return the levels of a candidate, with what its devices need besides what their stages store."""
        if candidate not in self._searches:
            if candidate is not self.candidates[0]:
                self._search(self.candidates[0])  # estimates are as wrong for every budget
            besides = self._estimated(candidate).besides_of(candidate.default.needs)
            self._wrong = self._wrong or tuple(map(operator.sub, besides, candidate.held_bytes))
            levels = replace(self._estimated(candidate), besides=besides)
            self._searches[candidate] = LevelSearch(candidate, levels, self._with_step if self._compiles else None)
        return self._searches[candidate]

    def _estimated(self, candidate: Candidate) -> StageLevels:
        """Return the levels of a candidate with about what its devices need besides; no calls are traced for it.

        Estimates are taken to be as wrong as for the first candidate whose calls are traced.
        """
        levels = self._levels_of(candidate)
        if self._wrong is None or len(self._wrong) != candidate.program.num_devices:
            return levels
        return replace(levels, besides=tuple(map(operator.add, candidate.held_bytes, self._wrong)))

    def _ways(self, candidate: Candidate) -> Ways:
        """Return what storage makes of stages, by estimates for which calls were traced."""
        self._search(self.candidates[0])
        return self._estimated(candidate).ways

    def _levels_of(self, candidate: Candidate) -> StageLevels:
        """Return the levels of a candidate, estimated as if nothing had been traced."""
        if candidate not in self._levels:
            held, prices, links = candidate.held_bytes, candidate.prices, candidate.links
            policy = candidate.traced.request.policy
            self._levels[candidate] = stage_levels(candidate.program, held, prices, links, self._solving, policy)
        return self._levels[candidate]

    def _with_step(self, planned: PlannedStep) -> PlannedStep:
        """Compile a plan, once for equal programs."""
        if planned.program not in self._compiled:
            known = self._compiled[planned.program] = planned.with_step()
            self._log.append(f"{_described(planned)} predicted, {bytes_text(known.needed_bytes)} compiled")
        return self._compiled[planned.program]


def _price(planned: PlannedStep) -> float:
    return price(planned.candidate, planned.plan.step_seconds)


def _described(planned: PlannedStep) -> str:
    plan = planned.plan
    return f"{plan.schedule}: step {seconds_text(plan.step_seconds)}, {bytes_text(plan.predicted_bytes)}"


def _round_of(planned: PlannedStep) -> BalanceRound:
    plan, speeds = planned.plan, stage_speeds(planned.partition)
    stages = zip(plan.stages, plan.stage_replicas.per_stage, speeds, strict=True)
    seconds = [(stage.forward_seconds + stage.backward_seconds) / (width * speed) for stage, width, speed in stages]
    return BalanceRound(planned.partition.cuts[:-1], tuple(seconds), plan.step_seconds)
