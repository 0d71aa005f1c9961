"""``Solving``: a solver, and the seconds that all of its solutions together may take for one plan."""

import functools
import math
import time
from dataclasses import dataclass, field, replace

from jaxpipe import multihost
from jaxpipe.options import Solver
from jaxpipe.planning.storage.fastest_choice import Answer, choose
from jaxpipe.planning.storage.storage_items import Items
from jaxpipe.planning.storage.storage_problem import Problem, SolverOptions
from jaxpipe.residuals.vjp_program import VJPProgram


#: How far from the best a search may stop: the share of a micro-batch's seconds on the slowest stage that a better
#: choice could save, or of what codecs and recomputation take.
GAP = 0.01

#: The part of what is left that one solution may take at most, so that a hard one leaves something for the others.
SHARE = 0.5

#: The part of the whole below which what is left is not worth a start of the solver.
REST = 0.01


@dataclass
class Solving:
    """A solver whose time all stages, rounds and searches of a plan share.

    The first process measures, so that all processes know of the same seconds.

    Attributes:
      solver: for cvxpy, or one that solves its problems.
      limit: seconds in all.
      spent: seconds that solutions have taken so far.
      items: of programs, which stages of several candidates may have.
    """

    solver: str | Solver
    limit: float
    spent: float = 0.0
    items: dict[VJPProgram, Items] = field(default_factory=dict)
    _fronts: dict[Problem, list[tuple[float, Answer]]] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds that are left; 0 if they are not worth a start."""
        rest = self.limit - self.spent
        return rest if rest > REST * self.limit else 0.0

    def fastest(self, problem: Problem, slack: float) -> tuple[Answer | None, float]:
        """Return the fastest choice but for ``slack`` seconds, and the seconds that it took to find.

        Equal stages have one front: what was the fastest within more bytes, and is within these, is so still.
        """
        front = self._fronts.setdefault(replace(problem, capacity=math.inf), [])
        for capacity, answer in front:
            if answer.outcome.peak_bytes <= problem.capacity <= (1 + GAP) * capacity:
                return answer, 0.0
        options = SolverOptions(self.solver, SHARE * self.left, GAP, slack)
        answer, seconds = multihost.from_first(functools.partial(_timed_choice, problem, options))
        self.spent += seconds
        if answer is not None:
            front.append((problem.capacity, answer))
        return answer, seconds


def _timed_choice(problem: Problem, options: SolverOptions) -> tuple[Answer | None, float]:
    start = time.perf_counter()
    return choose(problem, options), time.perf_counter() - start
