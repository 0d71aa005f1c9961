"""Points of plans that were found for budgets: a larger budget takes the plan of a smaller one where that is faster.

Storage is chosen by predictions, candidates are compared within a budget, and solvers are stopped: a smaller budget may
lead to a faster plan. What a request has come by is on disk; a plan is made again from the budget it was found for.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxpipe import multihost
from jaxpipe.graph.program_text import program_text
from jaxpipe.planning.compare_requests import request_parts
from jaxpipe.planning.trace_request import Traced
from jaxpipe.text.kept_files import keep, kept_path, read_kept
from jaxpipe.text.stable_text import stable_text


class Point(NamedTuple):
    """A plan: its bytes on the fullest device, the seconds of its step, and the budget that it was found for."""

    bytes: int
    seconds: float
    budget: int

    def rank(self, budget: int) -> tuple[bool, float]:
        """Return the place of a plan among others for a budget: those within it by seconds, then the rest by bytes."""
        return (True, self.bytes) if self.bytes > budget else (False, self.seconds)


def front_path(traced: Traced) -> Path:
    """Return the file of a request. What two requests share by mistake costs them time: plans are made again."""
    request, profile = replace(traced.request, memory=None), traced.profile
    seconds = profile.forward_seconds, profile.backward_seconds
    settings = [request_parts(request, [traced.batch], {}), request.mesh.devices.flat[0].device_kind, seconds]
    programs = program_text(traced.objective.graph) + program_text(traced.update.graph)
    return kept_path("fronts", programs + stable_text(settings))


def read_front(path: Path) -> list[Point]:
    """Return the points that the first process has."""
    return multihost.from_first(lambda: read_kept(path, list[Point]) or [])


def better_point(front: Iterable[Point], budget: int, best: Point) -> Point | None:
    """Return the first of the points for a budget if it is better than the best that a search has found."""
    first = min(front, key=lambda point: (point.rank(budget), point.bytes), default=best)
    return first if first.rank(budget) < best.rank(budget) else None


def add_point(path: Path, front: Iterable[Point], point: Point) -> None:
    """Keep a point, and those of the front that are smaller or faster."""
    kept = [other for other in front if other.bytes < point.bytes or other.seconds < point.seconds]
    if not any(other.bytes <= point.bytes and other.seconds <= point.seconds for other in kept):
        kept.append(point)
    multihost.from_first(lambda: keep(path, kept))
