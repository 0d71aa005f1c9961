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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxpipe import stage as stages
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.graph import Graph, Operator
from jaxpipe.pipeline.program import PAGE, Program
from jaxpipe.pipeline.sections import Section
from jaxpipe.planning.storing.choose import Answer, choose, lowest_peak
from jaxpipe.planning.storing.greedy import give_up
from jaxpipe.planning.storing.items import Items, limited, stage_items, storage_plan
from jaxpipe.planning.storing.problem import NOT_STORED, Problem, simulate
from jaxpipe.units import bytes_text


#: Shares of what is left of a budget that are tried for the arena.
ARENA_SHARES = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)

#: Of these the ones that are given to the solver.
MOST_SPLITS = 3

#: How often limits are corrected by what the programs really need.
MOST_ROUNDS = 4

#: How far from the best a solver may stop.
GAP = 0.01


@dataclass(frozen=True)
class Fitted:
    """How a stage's storage was chosen.

    Attributes:
      status: ``"default"``, ``"optimal"``, ``"gap"``, ``"time limit"`` or ``"greedy"``.
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
      slow: by stage, how many times slower than the profiled device the stage's own is.
    """

    seconds: Callable[[Graph, Operator], float]
    bytes_per_second: float
    slow: tuple[float, ...]


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
      PartitionError: if the solver is not installed.
    """
    count = len(program.sections)
    memory = predict(program)
    if sum(memory.values()) <= budget:
        return program, (Fitted(),) * count
    room = budget - sum(n for name, n in memory.items() if name not in ("arena", "working"))
    search = _Search(program, working_bytes, prices, solver, time_limit)
    tried: list[int] = []
    target = room
    for _ in range(MOST_ROUNDS):
        answers = search.best(target) if target > 0 else None
        if answers is None:
            break
        candidate = search.apply(answers)
        needed = sum(predict(candidate).values())
        tried.append(needed)
        if needed <= budget:
            return candidate, search.report(answers)
        search.correct(candidate, answers)
        if len(tried) > 1 and tried[-1] >= tried[-2]:
            target -= needed - budget
    least = search.least()
    if least is not None:
        candidate = search.apply(least)
        tried.append(sum(predict(candidate).values()))
        if tried[-1] <= budget:
            return candidate, search.report(least)
    raise _too_small(memory, search, least, budget, tried)


class _Search:
    """Problems of all stages, and what their programs need beyond what the problems know."""

    def __init__(
        self,
        program: Program,
        working_bytes: Callable[[Program, int], int],
        prices: Prices,
        solver: str,
        time_limit: float,
    ):
        self.program, self._working, self._solver = program, working_bytes, solver
        self._time_limit, self._slow = time_limit, prices.slow
        self.slots = [1 if program.alone else program.schedule.in_flight(s) for s in range(len(program.sections))]
        self.items: list[Items] = []
        for section in program.sections:
            assert section.stage is not None
            linearization = section.stage.linearization
            price = functools.partial(prices.seconds, linearization.graph)
            held = section.used
            self.items.append(stage_items(linearization, section.stage.storage, price, prices.bytes_per_second, held))
        self.spent = [0.0] * len(self.items)
        self.defaults = [simulate(self.problem(s, math.inf), found.default) for s, found in enumerate(self.items)]
        self.extra = [
            working_bytes(program, s) - outcome.peak_bytes if outcome is not None else 0
            for s, outcome in enumerate(self.defaults)
        ]

    def problem(self, s: int, capacity: float, most_stored: float | None = None, extra: int = 0) -> Problem:
        """A stage's problem: alone it gives its stash back piece by piece, else it has a copy out of the arena."""
        alone = self.program.alone
        return limited(
            self.items[s], capacity, held=0 if alone else 1, frees=alone, most_stored=most_stored, extra=extra
        )

    def best(self, room: float) -> list[Answer] | None:
        """Answers for all stages within a room, the slowest added time least."""
        if self.program.alone:
            return self._within(0.0, room)
        limits = [(share * room, (1 - share) * room) for share in ARENA_SHARES]
        limits.sort(key=lambda limit: self._greedily(*limit))
        found = [answers for limit in limits[:MOST_SPLITS] if (answers := self._within(*limit))]
        return min(found, key=self._added, default=None)

    def _greedily(self, arena: float, working: float) -> float:
        """The seconds of the slowest stage without a solver; infinite if a stage finds nothing."""
        slowest = 0.0
        for s, slow in enumerate(self._slow):
            problem = self._limited(s, arena, working)
            choice = give_up(problem)
            outcome = None if choice is None else simulate(problem, choice)
            slowest = max(slowest, math.inf if outcome is None else outcome.seconds * slow)
        return slowest

    def _limited(self, s: int, arena: float, working: float) -> Problem:
        most = None if self.program.alone else arena // self.slots[s] // (4 * PAGE) * (4 * PAGE)
        return self.problem(s, working, most, self.extra[s])

    def _within(self, arena: float, working: float) -> list[Answer] | None:
        """The fastest answers with an arena and working memory of some bytes; None if a stage has none."""
        answers = []
        limit = self._time_limit if self.program.alone else self._time_limit / MOST_SPLITS
        for s in range(len(self.slots)):
            start = time.perf_counter()
            answer = choose(self._limited(s, arena, working), solver=self._solver, time_limit=limit, gap=GAP)
            self.spent[s] += time.perf_counter() - start
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def _added(self, answers: Sequence[Answer]) -> tuple[float, float]:
        added = [fitted.added_seconds * slow for fitted, slow in zip(self.report(answers), self._slow, strict=True)]
        return max(added), sum(added)

    def apply(self, answers: Sequence[Answer]) -> Program:
        """The program with these answers."""
        sections: list[Section] = []
        for section, found, answer in zip(self.program.sections, self.items, answers, strict=True):
            built = stages.assemble(found.linearization, storage_plan(found, answer.choice))
            sections.append(replace(section, stage=built))
        return replace(self.program, sections=tuple(sections))

    def correct(self, candidate: Program, answers: Sequence[Answer]) -> None:
        """Learn what the stages' programs need beyond what the problems know."""
        for s, answer in enumerate(answers):
            known = answer.outcome.peak_bytes - self.extra[s]
            self.extra[s] = max(self.extra[s], self._working(candidate, s) - known)

    def report(self, answers: Sequence[Answer]) -> tuple[Fitted, ...]:
        """What is said of each stage."""
        before = [outcome.seconds if outcome is not None else 0.0 for outcome in self.defaults]
        return tuple(
            Fitted(answer.status, answer.outcome.seconds - seconds, answer.gap, spent)
            for answer, seconds, spent in zip(answers, before, self.spent, strict=True)
        )

    def least(self) -> list[Answer] | None:
        """Answers with as little memory as is found."""
        found = []
        for s, slots in enumerate(self.slots):
            problem = self.problem(s, math.inf, extra=self.extra[s])
            if not self.program.alone:
                problem = replace(problem, held=problem.held + slots)
            answer = lowest_peak(problem, solver=self._solver, time_limit=self._time_limit)
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


def _too_small(
    memory: dict[str, int],
    search: _Search,
    least: Sequence[Answer] | None,
    budget: int,
    tried: Sequence[int],
) -> MemoryBudgetError:
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in memory.items())
    needed = sum(memory.values())
    smallest = min([needed, *tried])
    largest = [] if least is None else search.largest(least)
    binding = f" What then is stored most: {', '.join(largest)}." if largest else ""
    return MemoryBudgetError(
        f"memory={bytes_text(budget)}: by default each device needs {bytes_text(needed)} ({parts}). The smallest "
        f"budget that was found to be met, for this number of stages and micro-batches, is {smallest} bytes "
        f"({bytes_text(smallest)}).{binding} More micro-batches or more stages need less."
    )
