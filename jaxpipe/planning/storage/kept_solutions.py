"""Solutions on disk: whoever asks once more for the same problem gets what was found before.

A solver that is stopped by the clock finds one solution today and another tomorrow. A budget that an error has offered
must be met by the next process, so that solutions that are not proven to be the best are kept.
"""

import math
from dataclasses import asdict
from pathlib import Path

from jaxpipe.planning.storage.storage_problem import NOT_STORED, Problem, Solution, SolverOptions, outcome_of
from jaxpipe.text.kept_files import keep, kept_path, read_kept
from jaxpipe.text.stable_text import stable_text


#: A solver that has more than so many times the seconds of a kept solution is asked again.
PATIENCE = 4


def kept_or_solved(problem: Problem, options: SolverOptions) -> Solution:
    """Return the solution of a solver within some time, or that of an earlier call that had about as much.

    Without any time, the solver is not called. What is proven is found again without being kept.
    """
    path = _path(problem, options)
    kept, seconds = _load(path, problem)
    if kept is not None and PATIENCE * seconds >= options.time_limit:
        return kept
    if options.time_limit <= 0:
        return Solution()
    from jaxpipe.planning.storage import integer_program  # cvxpy takes a second to import

    solution = integer_program.solve(problem, options)
    if solution.optimal or solution.infeasible:
        return solution
    known = (solution,) if kept is None else (kept, solution)  # so that more time never makes one worse
    solution = min(known, key=lambda x: _cost(problem, x, options.least_peak))
    keep(path, (asdict(solution), options.time_limit))
    return solution


def _cost(problem: Problem, solution: Solution, least_peak: bool) -> float:
    """Return what a solution makes small; infinite without a possible choice."""
    outcome = None if solution.choice is None else outcome_of(problem, solution.choice)
    return math.inf if outcome is None else outcome.peak_bytes if least_peak else outcome.seconds


def _path(problem: Problem, options: SolverOptions) -> Path:
    solver = options.solver if isinstance(options.solver, str) else stable_text(options.solver)
    return kept_path("solutions", repr((problem, solver, options.gap, options.slack, options.least_peak)))


def _load(path: Path, problem: Problem) -> tuple[Solution | None, float]:
    """Return a kept solution and the seconds that it took; None without a file that is a choice of the problem."""
    kept, items = read_kept(path, tuple[Solution, float]), problem.items
    if kept is None:
        return None, 0.0
    choice = kept[0].choice
    known = (k in range(NOT_STORED, len(item.options)) for k, item in zip(choice or (), items, strict=False))
    return kept if choice is None or (len(choice) == len(items) and all(known)) else (None, 0.0)
