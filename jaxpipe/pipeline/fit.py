"""Storage that keeps a pipeline within its memory budget, at the least cost in time.

    default plans ──▶ predicted bytes ──within──▶ done
                           │ over
                           ▼
    with stashes at home, and with some of them in peers' memory, or the host's (jaxpipe.schedules.peers):
    limits for each stage ──▶ a choice for each (jaxpipe.planning.storing) ──▶ stage programs ──▶ predicted bytes ...

All devices reserve the largest arena and the largest working memory of any stage, so a budget is split between the
two, and the split is searched for. The integer programme knows the stash and what is computed again; what else a
stage needs while it works is read off its real programs, and corrects the limits until these fit.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxpipe import hosts
from jaxpipe import stage as stages
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.graph import Graph, Operator
from jaxpipe.pipeline.program import PAGE, Program
from jaxpipe.pipeline.sections import Section
from jaxpipe.pipeline.swap import exchange_seconds
from jaxpipe.planning.storing.choose import Answer, choose, lowest_peak
from jaxpipe.planning.storing.greedy import give_up
from jaxpipe.planning.storing.items import Items, limited, stage_items, storage_plan
from jaxpipe.planning.storing.problem import NOT_STORED, Problem, simulate
from jaxpipe.schedules.peers import Links, balance
from jaxpipe.units import bytes_text


#: Shares of what is left of a budget that are tried for the arena.
ARENA_SHARES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)

#: Shares of the largest stash that are tried for the window through which an arena is written.
WINDOW_SHARES = (0.5, 0.75, 1.0)

#: Of all splits the ones that are given to the solver.
MOST_SPLITS = 3

#: How often limits are corrected by what the programs really need.
MOST_ROUNDS = 4

#: Budgets that are compared with their neighbours, between nothing and the default plan's arena and working memory.
LEVELS = 20

#: How far from the best a solver may stop.
GAP = 0.01


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


def fit(
    program: Program,
    predict: Callable[[Program], dict[str, int]],
    working_bytes: Callable[[Program, int], int],
    budget: int,
    prices: Prices,
    *,
    solver: str,
    time_limit: float,
) -> tuple[Program, tuple[Fitted, ...]]:
    """The program with storage choices such that its predicted bytes are within a budget.

    Args:
      program: with default storage.
      predict: bytes on each device by component.
      working_bytes: what a stage needs while it computes.
      budget: bytes on each device.
      prices: what choices cost.
      solver: for cvxpy.
      time_limit: seconds for all solutions of a stage.

    Raises:
      MemoryBudgetError: if no choice was found, with the smallest budget for which one is.
    """
    memory = predict(program)
    if sum(memory.values()) <= budget:
        return program, (Fitted(),) * len(program.sections)
    searches: dict[Any, _Search] = {}
    links = dict.fromkeys((prices.links.without_host, prices.links)) if program.may_swap else ()

    def answer(budget: int) -> Answered | None:
        swapped = [with_swaps(program, predict, budget, one) for one in links]
        variants: dict[Any, Program] = {}
        for variant in (program, *filter(None, swapped)):
            moved = None if variant.swaps is None else (variant.swaps.ticks, variant.swaps.slices)
            variants.setdefault(moved, variant)
        found = []
        for moved, variant in variants.items():
            if moved not in searches:
                searches[moved] = _Search(variant, predict, working_bytes, prices, solver, time_limit)
            result = searches[moved].within(budget)
            if result is not None:
                found.append(result)
        return min(found, key=lambda result: result[0], default=None)

    best = answer(budget)
    if best is None:
        raise _too_small(memory, list(searches.values()), budget)
    step = max(1, (memory["arena"] + memory["working"]) // LEVELS)
    spent = max(max(search.spent) for search in searches.values())
    if budget - sum(predict(best[1]).values()) >= step and 3 * spent <= time_limit:
        # So much room is left that the search may have gone astray. The plan of a smaller budget is kept if it is as
        # fast; that of a larger one is taken if it is faster and fits.
        steps = (sum(memory.values()) - budget) / step
        levels = math.floor(steps) + 1, math.ceil(steps) - 1
        below, above = (answer(sum(memory.values()) - k * step) for k in levels)
        if below is not None and below[0] <= best[0]:
            best = below
        if above is not None and above[0] < best[0] and sum(predict(above[1]).values()) <= budget:
            best = above
    return best[1:]


def with_swaps(
    program: Program, predict: Callable[[Program], dict[str, int]], budget: int, links: Links
) -> Program | None:
    """The program with the fastest swaps that keep a budget by themselves, else those with the smallest arena.

    None if no swap makes the arena smaller.
    """
    find = functools.partial(balance, program.schedule, program.stash_pages, links)
    memory = predict(program)
    room = (budget - sum(memory.values()) + memory["arena"]) // (4 * PAGE)
    while room > 0:
        swaps = find(room)
        if swaps is None:
            return None
        swapped = replace(program, swaps=swaps)
        over = sum(predict(swapped).values()) - budget
        if over <= 0 or swapped.arena_pages > room:
            return swapped
        # What lands before it is written needs room, too.
        room -= max(1, over // (4 * PAGE))
    smallest = find()
    return None if smallest is None else replace(program, swaps=smallest)


class _Search:
    """Problems of all stages, and what their programs need beyond what the problems know."""

    def __init__(
        self,
        program: Program,
        predict: Callable[[Program], dict[str, int]],
        working_bytes: Callable[[Program, int], int],
        prices: Prices,
        solver: str,
        time_limit: float,
    ):
        self.program, self._predict, self._working, self._solver = program, predict, working_bytes, solver
        self._time_limit, self._prices = time_limit, prices
        stages = range(len(program.sections))
        if program.swaps is not None:
            self.slots = [program.swaps.slots for _ in stages]
        else:
            self.slots = [1 if program.alone else program.in_flight(program.device(s)) for s in stages]
        self.tried: list[int] = []
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
        memory = self._predict(self.program)
        if sum(memory.values()) <= budget:
            return self._cost(self.program, [Fitted()] * len(self.items))
        target = budget - sum(n for name, n in memory.items() if name not in ("arena", "working"))
        last, smallest, best = math.inf, None, None
        for _ in range(MOST_ROUNDS):
            answers = self.best(target) if target > 0 else None
            if answers is None:
                if best is not None or smallest is not None or self.least is None:
                    break
                smallest = candidate, needed = self._tried(self.least)
                if needed > budget:
                    return None
                # What a large plan needs besides says little about a small one.
                self.extra = self._beyond(candidate, self.least)
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
        if self.least is None:
            return None
        candidate, needed = smallest or self._tried(self.least)
        return self._cost(candidate, self.report(self.least)) if needed <= budget else None

    def _tried(self, answers: Sequence[Answer]) -> tuple[Program, int]:
        candidate = self.apply(answers)
        needed = sum(self._predict(candidate).values())
        self.tried.append(needed)
        return candidate, needed

    def _cost(self, program: Program, fitted: Sequence[Fitted]) -> Answered:
        added = [0.0] * program.num_devices
        for s, (found, slow) in enumerate(zip(fitted, self._prices.slow, strict=True)):
            added[program.device(s)] += found.added_seconds * slow
        return program.num_microbatches * max(added) + exchange_seconds(program), program, tuple(fitted)

    def best(self, room: float) -> list[Answer] | None:
        """Answers for all stages within a room, the slowest added time least."""
        if self.program.alone:
            return self._within(_Split((math.inf,), room))
        splits = sorted(self._splits(room), key=self._greedily)
        found = [answers for split in splits[:MOST_SPLITS] if (answers := self._within(split))]
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

    def _greedily(self, split: "_Split") -> float:
        """The seconds of the slowest stage without a solver; infinite if a stage finds nothing."""
        slowest = 0.0
        for s, slow in enumerate(self._prices.slow):
            problem = self.problem(s, split.working, split.most_stored[s], self.extra[s])
            choice = give_up(problem)
            outcome = None if choice is None else simulate(problem, choice)
            if outcome is None:
                return math.inf
            slowest = max(slowest, outcome.seconds * slow)
        return slowest

    def _within(self, split: "_Split") -> list[Answer] | None:
        """The fastest answers within the limits of a split; None if a stage has none."""
        answers = []
        limit = self._time_limit if self.program.alone else self._time_limit / MOST_SPLITS
        for s, most in enumerate(split.most_stored):
            problem = self.problem(s, split.working, most, self.extra[s])
            options = {"solver": self._solver, "time_limit": limit, "gap": GAP}
            answer, spent = hosts.from_first(functools.partial(_timed, choose, problem, **options))
            self.spent[s] += spent
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def _added(self, answers: Sequence[Answer]) -> tuple[float, float]:
        added = [
            fitted.added_seconds * slow for fitted, slow in zip(self.report(answers), self._prices.slow, strict=True)
        ]
        return max(added), sum(added)

    def apply(self, answers: Sequence[Answer]) -> Program:
        """The program with these answers."""
        sections: list[Section] = []
        for section, found, answer in zip(self.program.sections, self.items, answers, strict=True):
            built = stages.assemble(found.linearization, storage_plan(found, answer.choice))
            sections.append(replace(section, stage=built))
        return replace(self.program, sections=tuple(sections))

    def _beyond(self, candidate: Program, answers: Sequence[Answer]) -> list[int]:
        """What the stages' programs need beyond what the problems know."""
        found = []
        for s, answer in enumerate(answers):
            outcome = simulate(self.problem(s, math.inf), answer.choice)
            assert outcome is not None
            found.append(self._working(candidate, s) - outcome.peak_bytes)
        return found

    def report(self, answers: Sequence[Answer]) -> tuple[Fitted, ...]:
        """What is said of each stage."""
        before = [outcome.seconds if outcome is not None else 0.0 for outcome in self.defaults]
        return tuple(
            Fitted(answer.status, answer.outcome.seconds - seconds, answer.gap, spent)
            for answer, seconds, spent in zip(answers, before, self.spent, strict=True)
        )

    @functools.cached_property
    def least(self) -> list[Answer] | None:
        """Answers with as little memory as is found."""
        found = []
        for s, slots in enumerate(self.slots):
            problem = self.problem(s, math.inf, extra=self.extra[s])
            if not self.program.alone:
                problem = replace(problem, held=math.ceil(slots) + 1)
            options = {"solver": self._solver, "time_limit": self._time_limit}
            answer = hosts.from_first(functools.partial(lowest_peak, problem, **options))
            if answer is None:
                return None
            found.append(answer)
        return found

    def largest(self, answers: Sequence[Answer]) -> list[str]:
        """The largest tensors that are stored even so, by name and size."""
        stored = [
            (item.options[option].bytes, item.name)
            for found, answer in zip(self.items, answers, strict=True)
            for item, option in zip(found.problem.items, answer.choice, strict=True)
            if option != NOT_STORED
        ]
        return [f"{name} ({bytes_text(size)})" for size, name in sorted(stored, reverse=True)[:3]]


def _timed(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    """What a function gives, and the seconds that it took."""
    start = time.perf_counter()
    return function(*args, **options), time.perf_counter() - start


@dataclass(frozen=True)
class _Split:
    """Limits of all stages: bytes of one stash of each, and working memory."""

    most_stored: tuple[float, ...]
    working: float


def _too_small(memory: dict[str, int], searches: Sequence[_Search], budget: int) -> MemoryBudgetError:
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in memory.items())
    needed = sum(memory.values())
    search = min(searches, key=lambda search: min(search.tried, default=math.inf))
    smallest = min([needed, *search.tried])
    largest = [] if search.least is None else search.largest(search.least)
    binding = f" What then is stored most: {', '.join(largest)}." if largest else ""
    return MemoryBudgetError(
        f"memory={bytes_text(budget)}: by default each device needs {bytes_text(needed)} ({parts}). The smallest "
        f"budget that was found to be met, for this number of stages and micro-batches, is {smallest} bytes "
        f"({bytes_text(smallest)}).{binding} More micro-batches or more stages need less.",
        smallest,
    )
