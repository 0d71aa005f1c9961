"""The best choice that can be had: a solver's or the greedy one, whichever is faster, both simulated."""

import functools
import math
from dataclasses import dataclass, replace

from jaxpipe.errors import PartitionError
from jaxpipe.options import Solver
from jaxpipe.planning.storage.greedy import give_up, give_up_all
from jaxpipe.planning.storage.kept_solutions import kept_or_solved
from jaxpipe.planning.storage.small_items import SHARE, without_small_items
from jaxpipe.planning.storage.storage_problem import Outcome, Problem, SolverOptions, outcome_of


#: A solver's numbers are exact to this fraction; one that is over the limit by so little is solved again.
ACCURACY = 1e-6

#: By what part of a budget it is raised at a time, if the caller allows that.
STEP = 0.1


@dataclass(frozen=True)
class Answer:
    """A choice within the limits.

    Attributes:
      outcome: the choice, simulated.
      status: ``"optimal"``, ``"gap"`` (within the requested gap), ``"time limit"``, ``"greedy"`` if no solver had a
        better one, ``"checkpoints"`` if those of blocks are better, ``"lowest peak"`` if that alone was wanted, or
        ``"fewer reruns"``.
      bound: no choice has fewer seconds.
    """

    outcome: Outcome
    status: str
    bound: float

    @property
    def choice(self) -> tuple[int, ...]:
        """The option of each item."""
        return self.outcome.choice

    @property
    def gap(self) -> float:
        """By what share of its seconds a better choice may be faster."""
        seconds = self.outcome.seconds
        return (seconds - self.bound) / seconds if seconds > self.bound else 0.0


def choose(problem: Problem, options: SolverOptions) -> Answer | None:
    """The fastest choice within the limits, as far as it is found in the time; None if none was found.

    The solver is not called where it cannot save more than the slack.
    """
    if problem.capacity < max(problem.base):
        return None
    least, greedy = least_seconds(problem), give_up(problem)
    if greedy is not None and greedy.seconds <= least + options.slack:
        return Answer(greedy, "optimal" if greedy.seconds <= least else "gap", least)
    # Perhaps once more, with the capacity lowered by what the solver's arithmetic leaves open.
    for limited in (problem, replace(problem, capacity=problem.capacity * (1 - ACCURACY))):
        solved = kept_or_solved(without_small_items(limited, max(SHARE, options.gap)), options)
        solution = None if solved.choice is None else outcome_of(problem, solved.choice)
        if solution is None or solution.fits():
            break
    solution = solution.tidied() if solution is not None and solution.fits() else None
    best = min(filter(None, (solution, greedy)), key=lambda outcome: outcome.seconds, default=None)
    if best is None:
        return None
    bound = max(least, min(best.seconds, solved.bound or 0.0))
    if solved.optimal:
        status = "optimal" if best.seconds <= bound * (1 + 1e-9) else "gap"
    else:
        status = "time limit" if best is solution else "greedy"
    return Answer(best, status, bound)


@functools.lru_cache(maxsize=256)  # asked again for every candidate that is compared
def greedy_choice(problem: Problem) -> Answer | None:
    """A fast choice within the limits that is found without a solver; None if none is found."""
    outcome = None if problem.capacity < max(problem.base) else give_up(problem)
    return None if outcome is None else Answer(outcome, "greedy", least_seconds(problem))


def check_solver(solver: str | Solver) -> str | Solver:
    """The name of a mixed-integer solver, as cvxpy spells it, or a solver of the caller's own.

    Raises:
      PartitionError: if it is not installed, or solves no mixed-integer programs.
    """
    if solver == "HIGHS" or (not isinstance(solver, str) and callable(getattr(solver, "solve", None))):
        return solver  # HiGHS is a dependency
    from cvxpy.reductions.solvers.defines import INSTALLED_MI_SOLVERS  # takes a second to import

    if not isinstance(solver, str) or solver.upper() not in INSTALLED_MI_SOLVERS:
        raise PartitionError(
            f"solver={solver!r} is none of the mixed-integer solvers that cvxpy finds: "
            f"{', '.join(sorted(INSTALLED_MI_SOLVERS))}. Install it if it is one, or use solver='HIGHS', or an "
            "object with a method solve(problem, *, time_limit, gap)."
        )
    return solver.upper()


def raised(budget: int, least: int) -> int:
    """A budget that was too small, raised by tenths of it until it is no less than ``least``."""
    step = max(1, math.ceil(STEP * budget))
    return budget + max(0, -(-(least - budget) // step)) * step


def lowest_peak(problem: Problem, options: SolverOptions) -> Answer:
    """A choice with as low a peak as is found in the time, whatever it costs.

    Equal problems have equal answers, also where the time was too short to prove that nothing is lower.
    """
    solved = kept_or_solved(without_small_items(problem), replace(options, gap=0.0, least_peak=True))
    solution = None if solved.choice is None else outcome_of(problem, solved.choice)
    outcomes = (outcome.tidied() for outcome in (solution, give_up_all(problem)) if outcome is not None)
    return Answer(min(outcomes, key=lambda outcome: outcome.peak_bytes), "lowest peak", 0.0)


def least_seconds(problem: Problem) -> float:
    """A bound for any choice: every item that is read, in the form in which by itself it is fastest."""
    total = 0.0
    for item in problem.items:  # sum() of floats rounds otherwise
        total += item.fastest[0]
    return total
