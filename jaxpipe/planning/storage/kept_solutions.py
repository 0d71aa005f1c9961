"""Solutions on disk: whoever asks once more for the same problem gets what was found before.

A solver that is stopped by the clock finds one solution today and another tomorrow. A budget that an error has offered
must be met by the next process, so that solutions that are not proven to be the best are kept, as JSON in
``$JAXPIPE_CACHE_DIR/solutions``, or else in the user's cache folder. They may be deleted at any time.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from jaxpipe.costs.profile_cache import cache_folder
from jaxpipe.options import Solver
from jaxpipe.planning.storage.storage_problem import Problem, Solution, outcome_of
from jaxpipe.text.kept_files import keep, read_kept
from jaxpipe.text.stable_text import digest, stable_text


#: A solver that has more than so many times the seconds of a kept solution is asked again.
PATIENCE = 4


def kept_or_solved(
    solve: Callable[..., Solution],
    problem: Problem,
    *,
    solver: str | Solver,
    time_limit: float,
    gap: float,
    slack: float = 0.0,
    least_peak: bool,
) -> Solution:
    """Return the solution of a solver within some time, or that of an earlier call that had about as much.

    Without any time, the solver is not called. What is proven is found again without being kept.
    """
    path = _path(problem, solver if isinstance(solver, str) else stable_text(solver), gap, slack, least_peak)
    kept, seconds = _load(path, problem)
    if kept is not None and PATIENCE * seconds >= time_limit:
        return kept
    if time_limit <= 0:
        return Solution()
    solution = solve(problem, solver=solver, time_limit=time_limit, gap=gap, slack=slack, least_peak=least_peak)
    if solution.optimal or solution.infeasible:
        return solution
    solution = _better(problem, kept, solution, least_peak)
    keep(path, {**asdict(solution), "seconds": time_limit})
    return solution


def _better(problem: Problem, kept: Solution | None, new: Solution, least_peak: bool) -> Solution:
    """Return the better of two solutions, so that more time never makes one worse."""
    rated = []
    for solution in (kept, new):
        outcome = None if solution is None or solution.choice is None else outcome_of(problem, solution.choice)
        if solution is not None and outcome is not None:
            rated.append((outcome.peak_bytes if least_peak else outcome.seconds, len(rated), solution))
    return min(rated)[2] if rated else new


def _path(problem: Problem, *settings: object) -> Path:
    return cache_folder().parent / "solutions" / f"{digest(repr((problem, *settings)))}.json"


def _load(path: Path, problem: Problem) -> tuple[Solution | None, float]:
    """Return a kept solution and the seconds that it took; None without a file that is a choice of the problem."""
    kept = read_kept(path)
    try:
        seconds, choice = float(kept.pop("seconds")), kept.pop("choice")
        solution = Solution(choice=None if choice is None else tuple(choice), **kept)
        sizes = [len(item.options) for item in problem.items]
        if solution.choice is None or all(-1 <= k < n for k, n in zip(solution.choice, sizes, strict=True)):
            return solution, seconds
    except (ValueError, TypeError, KeyError, AttributeError):  # none, or no solution of this problem
        pass
    return None, 0.0
