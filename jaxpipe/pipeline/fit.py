"""Storage that keeps a pipeline within its memory budget, at the least cost in time.

    default plans ──▶ predicted bytes ──within──▶ done
                           │ over
                           ▼
    limits for each stage ──▶ a choice for each (jaxpipe.planning.storing) ──▶ stage programs ──▶ predicted bytes ...

All devices reserve the largest arena and the largest working memory of any stage, so a budget is split between the
two, and the split is searched for. The integer programme knows the stash and what is computed again; what else a
stage needs while it works is read off its real programs, and corrects the limits until these fit.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpipe import hosts
from jaxpipe import stage as stages
from jaxpipe.graph import Graph, Operator
from jaxpipe.pipeline.program import PAGE, Program
from jaxpipe.pipeline.sections import Section
from jaxpipe.pipeline.swap_choice import Links
from jaxpipe.planning.memory import working_bytes
from jaxpipe.planning.storing.choose import Answer, choose, lowest_peak
from jaxpipe.planning.storing.greedy import give_up
from jaxpipe.planning.storing.items import Items, limited, stage_items, storage_plan
from jaxpipe.planning.storing.problem import Problem, simulate
from jaxpipe.planning.storing.solver_time import SolverTime
from jaxpipe.progress import tell
from jaxpipe.stage import Stage
from jaxpipe.units import bytes_text


#: Shares of what is left of a budget that are tried for the arena.
ARENA_SHARES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)

#: Shares of the largest stash that are tried for the window through which an arena is written.
WINDOW_SHARES = (0.5, 0.75, 1.0)

#: Of all splits the ones that are given to the solver.
MOST_SPLITS = 3

#: How often limits are corrected by what the programs really need.
MOST_ROUNDS = 4

#: Budgets that are compared with their neighbors, between nothing and the default plan's arena and working memory.
LEVELS = 20

#: How far from the best a solver may stop.
GAP = 0.01

#: By how much of the solver's time a first search may be over for others to be started beside it.
QUICK = 0.1

#: How often the smallest plan is corrected by what its programs really need.
SMALLEST_ROUNDS = 2


@dataclass(frozen=True)
class Fitted:
    """How a stage's storage was chosen.

    Attributes:
      status: ``"default"``, or that of an ``Answer``.
      added_seconds: of a micro-batch, over the default plan.
      gap: by what share of the time for codecs and recomputation a better choice may be faster.
      solve_seconds: that all solutions for this stage took.
    """

    status: str = "default"
    added_seconds: float = 0.0
    gap: float = 0.0
    solve_seconds: float = 0.0


@dataclass(frozen=True)
class Prices:
    """What computing again and codecs cost.

    Attributes:
      seconds: of an operator of a graph, on the device.
      bytes_per_second: the rate of memory.
      slow: by stage, how many times slower than the profiled device the stage's own is, or are together.
      links: between the devices of stages, and to their host's memory if stashes may go there.
    """

    seconds: Callable[[Graph, Operator], float]
    bytes_per_second: float
    slow: tuple[float, ...]
    links: Links


#: What a step takes longer, the program, and its stages' storage.
Answered = tuple[float, Program, tuple[Fitted, ...]]


@dataclass(frozen=True)
class Solving:
    """A solver, and the time that it has for a plan.

    Attributes:
      solver: for cvxpy.
      time: what is left for them.
      for_smallest: seconds for each solution for the smallest plan.
    """

    solver: str
    time: SolverTime
    for_smallest: float


@dataclass(frozen=True)
class Terms:
    """The prediction, prices and solver that choices of storage are judged by.

    Attributes:
      predict: the bytes that a program needs on each device, by component.
      prices: what choices cost.
      solving: by whom, and how long.
    """

    predict: Callable[[Program], dict[str, int]]
    prices: Prices
    solving: Solving

    def needed(self, program: Program) -> int:
        """Return the predicted bytes of a program on each device."""
        return sum(self.predict(program).values())


class Fitter:
    """Storage for a program, within one budget after another."""

    def __init__(self, program: Program, terms: Terms):
        """Take a program with default storage. Nothing is done yet."""
        self.program, self._terms = program, terms

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Predicted bytes with default storage, by component."""
        return self._terms.predict(self.program)

    def within(self, budget: int) -> tuple[Program, tuple[Fitted, ...]] | None:
        """Return the program with the fastest storage of predicted bytes within a budget; None if no choice is.

        Some choice is within every budget that is no less than what ``smallest`` needs.
        """
        memory = self.memory
        if sum(memory.values()) <= budget:
            return self.program, (Fitted(),) * len(self.program.sections)
        time = self._terms.solving.time
        before = time.spent
        best = self._search.within(budget)
        if best is None:
            smallest = self.smallest
            return smallest[1:] if self._terms.needed(smallest[1]) <= budget else None
        step = max(1, (memory["arena"] + memory["working"]) // LEVELS)
        quick = time.spent - before <= QUICK * time.limit
        if budget - self._terms.needed(best[1]) >= step and quick:
            # So much room is left that the search may have gone astray. The plan of a smaller budget is kept if it is
            # as fast; that of a larger one is taken if it is faster and fits.
            steps = (sum(memory.values()) - budget) / step
            levels = math.floor(steps) + 1, math.ceil(steps) - 1
            below, above = (self._search.within(sum(memory.values()) - k * step) for k in levels)
            if below is not None and below[0] <= best[0]:
                best = below
            if above is not None and above[0] < best[0] and self._terms.needed(above[1]) <= budget:
                best = above
        return best[1:]

    @functools.cached_property
    def smallest(self) -> Answered:
        """The program with the least predicted bytes that is found. It does not depend on any budget."""
        return self._search.smallest

    @functools.cached_property
    def _search(self) -> "_Search":
        return _Search(self.program, self._terms)


class _Search:
    """Problems of all stages, and what their programs need beyond what the problems know."""

    def __init__(self, program: Program, terms: Terms):
        self.program, self._terms = program, terms
        prices = terms.prices
        stages = range(len(program.sections))
        self.slots = [1 if program.alone else program.in_flight(program.device(s)) for s in stages]
        self._built: dict[Any, Stage] = {}
        self._applied: dict[Any, Program] = {}
        self._greedy: dict[Any, float] = {}
        self.items: list[Items] = []
        for section in program.sections:
            assert section.stage is not None
            linearization = section.stage.linearization
            price = functools.partial(prices.seconds, linearization.graph)
            held = section.used
            self.items.append(stage_items(linearization, section.stage.storage, price, prices.bytes_per_second, held))
        self.spent = [0.0] * len(self.items)
        self.defaults = [simulate(self.problem(s, math.inf), found.default) for s, found in enumerate(self.items)]
        self.first_extra = self.extra = [
            working_bytes(program, s) - outcome.peak_bytes if outcome is not None else 0
            for s, outcome in enumerate(self.defaults)
        ]

    def problem(self, s: int, capacity: float, most_stored: float = math.inf, extra: int = 0) -> Problem:
        """A stage's problem. A stage that is alone gives its stash back piece by piece.

        That of others stays in the arena, which the capacity leaves out.
        """
        limit = None if most_stored == math.inf else most_stored
        return limited(self.items[s], capacity, frees=self.program.alone, most_stored=limit, extra=extra)

    def within(self, budget: int) -> Answered | None:
        """The fastest program within a budget; None if none was found."""
        self.extra = list(self.first_extra)
        memory = self._terms.predict(self.program)
        if sum(memory.values()) <= budget:
            return self._cost(self.program, [Fitted()] * len(self.items))
        target = budget - sum(n for name, n in memory.items() if name not in ("arena", "working"))
        last, begun, best = math.inf, False, None
        time = self._terms.solving.time
        for k in range(MOST_ROUNDS):
            tell(
                f"{self.program.schedule.name}: choosing what {len(self.items)} stage(s) store within "
                f"{bytes_text(budget)}, round {k + 1}; solvers took {time.spent:.1f} of "
                f"{time.limit:g} s"
            )
            answers = self.best(target) if target > 0 else None
            if answers is None:
                if best is not None or begun or not self._lowest:
                    break
                begun = True
                candidate, needed, answers = self._lowest[-1]
                if min(size for _, size, _ in self._lowest) > budget:
                    return None
                # What a large plan needs besides says little about a small one.
                self.extra = self._beyond(candidate, answers)
                continue
            candidate, needed = self._tried(answers)
            if needed <= budget:
                found = self._cost(candidate, self.report(answers))
                if best is not None and found[0] >= best[0]:
                    break
                best = found
                # What larger plans need besides was counted; this one may need less, and leave room.
                beyond = self._beyond(candidate, answers)
                if all(more >= less for more, less in zip(beyond, self.extra, strict=True)):
                    break
                self.extra = beyond
                continue
            self.extra = list(map(max, self.extra, self._beyond(candidate, answers)))
            if needed >= last:
                target -= needed - budget
            last = needed
        if best is not None:
            return best
        smallest = self.smallest
        return smallest if self._terms.needed(smallest[1]) <= budget else None

    def _tried(self, answers: Sequence[Answer]) -> tuple[Program, int]:
        candidate = self.apply(answers)
        return candidate, self._terms.needed(candidate)

    def _cost(self, program: Program, fitted: Sequence[Fitted]) -> Answered:
        added = [0.0] * program.num_devices
        for s, (found, slow) in enumerate(zip(fitted, self._terms.prices.slow, strict=True)):
            added[program.device(s)] += found.added_seconds * slow
        return program.num_microbatches * max(added), program, tuple(fitted)

    def best(self, room: float) -> list[Answer] | None:
        """Answers for all stages within a room, the slowest added time least."""
        if self.program.alone:
            return self._within(_Split((math.inf,), room))
        ranked: list[tuple[float, int, _Split]] = []
        for k, split in enumerate(self._splits(room)):
            most = ranked[-1][0] if len(ranked) == MOST_SPLITS else math.inf
            seconds = self._greedily(split, most)
            if len(ranked) < MOST_SPLITS or seconds < most:
                ranked = sorted([*ranked, (seconds, k, split)], key=lambda entry: entry[:2])[:MOST_SPLITS]
        found = [answers for _, _, split in ranked if (answers := self._within(split))]
        return min(found, key=self._added, default=None)

    def _splits(self, room: float) -> list["_Split"]:
        """Ways to split a room between arena and working memory.

        Every stage's slots but one are as large as its stash; the last is the window, as large as the largest stash.
        """
        page = 4 * PAGE
        largest = max(outcome.stash_bytes for outcome in self.defaults if outcome is not None)
        splits = []
        for share in ARENA_SHARES:
            arena = share * room
            windows = {min(arena, share * largest) for share in WINDOW_SHARES} | {arena / max(self.slots)}
            for window in sorted(windows):
                most = [min(window, (arena - window) / (n - 1)) if n > 1 else window for n in self.slots]
                splits.append(_Split(tuple(n // page * page for n in most), room - arena))
        return splits

    def _greedily(self, split: "_Split", most: float) -> float:
        """The seconds of the slowest stage without a solver, if they are below ``most``; infinite without a choice."""
        slowest = 0.0
        for s, slow in enumerate(self._terms.prices.slow):
            limits = split.working, split.most_stored[s], self.extra[s]
            if (s, *limits) not in self._greedy:
                problem = self.problem(s, *limits)
                choice = give_up(problem)
                outcome = None if choice is None else simulate(problem, choice)
                self._greedy[s, *limits] = math.inf if outcome is None else outcome.seconds
            slowest = max(slowest, self._greedy[s, *limits] * slow)
            if slowest >= most:
                break
        return slowest

    def _within(self, split: "_Split") -> list[Answer] | None:
        """The fastest answers within the limits of a split; None if a stage has none."""
        answers, solving = [], self._terms.solving
        for s, most in enumerate(split.most_stored):
            problem = self.problem(s, split.working, most, self.extra[s])
            answer, spent = solving.time.solve(choose, problem, solver=solving.solver, gap=GAP)
            self.spent[s] += spent
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def _added(self, answers: Sequence[Answer]) -> tuple[float, float]:
        added = [
            fitted.added_seconds * slow
            for fitted, slow in zip(self.report(answers), self._terms.prices.slow, strict=True)
        ]
        return max(added), sum(added)

    def apply(self, answers: Sequence[Answer]) -> Program:
        """The program with these answers."""
        choices = tuple(answer.choice for answer in answers)
        if choices in self._applied:
            return self._applied[choices]
        sections: list[Section] = []
        for s, (section, found, choice) in enumerate(zip(self.program.sections, self.items, choices, strict=True)):
            if (s, choice) not in self._built:
                self._built[s, choice] = stages.assemble(found.linearization, storage_plan(found, choice))
            sections.append(replace(section, stage=self._built[s, choice]))
        self._applied[choices] = replace(self.program, sections=tuple(sections))
        return self._applied[choices]

    def _beyond(self, candidate: Program, answers: Sequence[Answer]) -> list[int]:
        """What the stages' programs need beyond what the problems know."""
        found = []
        for s, answer in enumerate(answers):
            outcome = simulate(self.problem(s, math.inf), answer.choice)
            assert outcome is not None
            found.append(working_bytes(candidate, s) - outcome.peak_bytes)
        return found

    def report(self, answers: Sequence[Answer]) -> tuple[Fitted, ...]:
        """What is said of each stage."""
        before = [outcome.seconds if outcome is not None else 0.0 for outcome in self.defaults]
        return tuple(
            Fitted(answer.status, answer.outcome.seconds - seconds, answer.gap, spent)
            for answer, seconds, spent in zip(answers, before, self.spent, strict=True)
        )

    @functools.cached_property
    def smallest(self) -> Answered:
        """The program that needs least, of those with as little memory as is found and that with default storage."""
        usual = self._terms.needed(self.program)
        candidate, needed, answers = min(self._lowest, key=lambda tried: tried[1], default=(None, usual, None))
        if candidate is None or answers is None or needed >= usual:
            return self._cost(self.program, [Fitted()] * len(self.items))
        return self._cost(candidate, self.report(answers))

    @functools.cached_property
    def _lowest(self) -> list[tuple[Program, int, list[Answer]]]:
        """Programs with as little memory as the search gets to, the bytes that they need, and answers; may be empty."""
        tell(f"{self.program.schedule.name}: looking for the smallest plan")
        tried: list[tuple[Program, int, list[Answer]]] = []
        extra, solving = self.first_extra, self._terms.solving
        for _ in range(SMALLEST_ROUNDS):
            answers = []
            for s, slots in enumerate(self.slots):
                problem = self.problem(s, math.inf, extra=extra[s])
                if not self.program.alone:
                    problem = replace(problem, held=slots + 1)
                options = {"solver": solving.solver, "time_limit": solving.for_smallest, "gap": GAP}
                answers.append(hosts.from_first(functools.partial(lowest_peak, problem, **options)))
            if None in answers:
                break
            candidate, needed = self._tried(answers)
            if any(candidate is earlier for earlier, _, _ in tried):
                break
            tried.append((candidate, needed, answers))
            extra = self._beyond(candidate, answers)
        return tried


@dataclass(frozen=True)
class _Split:
    """Limits of all stages: bytes of one stash of each, and working memory."""

    most_stored: tuple[float, ...]
    working: float
