"""``SolverTime``: the seconds that all solvers together may take for one plan."""

import functools
import time
from collections.abc import Callable
from typing import Any

from jaxpipe import multihost


#: The part of what is left that one solution may take at most, so that a hard one leaves something for the others.
SHARE = 0.5

#: The part of the whole below which what is left is not worth a start of the solver.
REST = 0.01


class SolverTime:
    """Seconds that all stages, rounds and searches of a plan share.

    The first process measures, so that all processes know of the same seconds.

    Attributes:
      limit: seconds in all.
      spent: seconds that solutions have taken so far.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.spent = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left; 0 if they are not worth a start."""
        rest = self.limit - self.spent
        return rest if rest > REST * self.limit else 0.0

    def solve(self, choose: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
        """``choose(*args, time_limit=..., **options)`` in the first process, and the seconds that it took."""
        limit = SHARE * self.left
        answer, seconds = multihost.from_first(functools.partial(_timed, choose, *args, time_limit=limit, **options))
        self.spent += seconds
        return answer, seconds


def _timed(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(*args, **options), time.perf_counter() - start
