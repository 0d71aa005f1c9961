"""The mixed-integer program: one choice for each item, the limits of every event, the fewest seconds.

Binary are only the choices. Whether an item has been computed again by an event follows from them: it is, if it is
not stored and either read or a source of what has been computed again by then.

    run[k, e] = (1 - stored[k]) * max(read by e, run[j, e] of all j that k is a source of)

is linear with one inequality from below for each term, and two from above, which are tight as the choices are whole.
After the peak rows of O. Beaumont et al., "Rockmate", ICML 2023, and P. Jain et al., "Checkmate", MLSys 2020, whose
decisions for every pair of tensor and time are left out here: an item is computed again at most once.
"""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpipe.planning.storage.storage_problem import NOT_STORED, Option, Problem, simulate


if TYPE_CHECKING:
    from scipy.sparse import csr_array

#: What storing as many bytes as there are in all costs beside the costliest item: of equals, the smallest stash.
TIE = 1e-6


@dataclass(frozen=True)
class Solution:
    """An answer of the solver.

    Attributes:
      choice: by item; None if there was none.
      optimal: whether it is proven to be the best, within the gap that was asked for.
      infeasible: whether it is proven that there is none.
      bound: no choice has fewer seconds (or a lower peak, if that was asked for).
    """

    choice: tuple[int, ...] | None
    optimal: bool
    infeasible: bool
    bound: float | None


class Rows:
    """Variables and inequalities ``sum(coefficient * variable) <= right``, as a sparse matrix."""

    def __init__(self) -> None:
        self.binary: list[bool] = []
        self.upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self.right: list[float] = []

    def variable(self, *, binary: bool = False, upper: float = 1.0) -> int:
        """A new variable between 0 and ``upper``."""
        self.binary.append(binary)
        self.upper.append(upper)
        return len(self.binary) - 1

    def add(self, terms: list[tuple[float, int]], right: float) -> None:
        """A new inequality."""
        self._entries += [(len(self.right), variable, coefficient) for coefficient, variable in terms]
        self.right.append(right)

    def matrix(self) -> "csr_array":
        """All coefficients; those of a variable that occurs twice in a row are added up."""
        from scipy.sparse import csr_array  # 15 MiB, and only budgets need it

        rows, columns, values = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        return csr_array((values, (rows, columns)), shape=(len(self.right), len(self.binary)))


class _Model:
    """Rows and columns of a problem, in units of its largest capacity."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.rows = Rows()
        self.unit = max(1.0, float(problem.capacity if np.isfinite(problem.capacity) else 0), *map(float, problem.base))
        self.readers: list[list[int]] = [[] for _ in problem.items]
        for k, item in enumerate(problem.items):
            for source in item.sources:
                self.readers[source].append(k)
        self.stored = [[self.rows.variable(binary=True) for _ in item.options] for item in problem.items]
        self._run: list[dict[int, int]] = [{} for _ in problem.items]
        self._first, self._settled = self._windows()
        self.events: list[list[tuple[float, int]]] = [[] for _ in problem.base]
        self._choices()
        for e in range(len(problem.base)):
            self._live(e)

    def _windows(self) -> tuple[list[int], list[int]]:
        """For each item the first event in which it may be computed again, and that from which on nothing changes."""
        events = len(self.problem.base)
        first, settled = [events] * len(self.problem.items), [0] * len(self.problem.items)
        for k in range(len(self.problem.items) - 1, -1, -1):
            item, readers = self.problem.items[k], self.readers[k]
            first[k] = min([*item.uses[:1], *(first[j] for j in readers)], default=events)
            settled[k] = item.uses[0] if item.uses else max((settled[j] for j in readers), default=0)
        return first, settled

    def run(self, k: int, e: int) -> list[tuple[float, int]]:
        """Return whether an item has been computed again by an event, as terms."""
        if e < self._first[k] or not self._run[k]:
            return []
        return [(1.0, self._run[k][min(e, self._settled[k])])]

    def ran(self, k: int) -> list[tuple[float, int]]:
        """Return whether an item is computed again at all."""
        return self.run(k, max(self._settled[k], self._first[k]))

    def _choices(self) -> None:
        """Each item stored at most once, and there when it is needed."""
        rows = self.rows
        for k in range(len(self.problem.items) - 1, -1, -1):
            item = self.problem.items[k]
            stored = [(1.0, v) for v in self.stored[k]]
            if stored:
                rows.add(stored, 1)
            if item.seconds is None:
                for j in self.readers[k]:
                    rows.add([*self.ran(j), *_times(-1, stored)], 0)
                if item.uses:
                    rows.add(_times(-1, stored), -1)
                continue
            window = range(self._first[k], self._settled[k] + 1)
            self._run[k] = {e: rows.variable() for e in window}
            for e in window:
                mine = [(1.0, self._run[k][e])]
                rows.add([*mine, *stored], 1)
                if item.uses and e >= item.uses[0]:
                    rows.add([*_times(-1, mine), *_times(-1, stored)], -1)
                    continue
                behind = [self.run(j, e) for j in self.readers[k]]
                for terms in behind:
                    rows.add([*terms, *_times(-1, mine), *_times(-1, stored)], 0)
                rows.add([*mine, *(t for terms in behind for t in _times(-1, terms))], 0)

    def _live(self, e: int) -> None:
        """Return what is in memory in an event, besides its base bytes."""
        problem, terms = self.problem, self.events[e]
        for k, item in enumerate(problem.items):
            options = [*zip(item.options, self.stored[k], strict=True)]
            held = [problem.held if option.held is None else option.held for option in item.options]
            terms += [(option.bytes * n / self.unit, v) for (option, v), n in zip(options, held, strict=True)]
            used = bool(item.uses) and e <= item.uses[-1]
            if item.seconds is not None:
                if used:
                    terms += _times(item.bytes / self.unit, self.run(k, e))
                else:
                    self._until_read(terms, item.bytes, self.run(k, e), k, e)
            for option, v in options:
                mine = [(1.0, v)]
                if problem.frees:
                    if used:
                        terms += _times(option.bytes / self.unit, mine)
                    else:
                        self._until_read(terms, option.bytes, mine, k, e)
                if option.unpacked_bytes:
                    if used and e >= item.uses[0]:
                        terms += _times(option.unpacked_bytes / self.unit, mine)
                    elif used:
                        begun = [j for j in self.readers[k] if self.run(j, e)]
                        self._while_begun(terms, option.unpacked_bytes, mine, begun, e)
                    else:
                        self._until_read(terms, option.unpacked_bytes, mine, k, e, once_read=not item.uses)

    def _until_read(
        self, terms: list, size: int, there: list[tuple[float, int]], k: int, e: int, *, once_read: bool = False
    ) -> None:
        """Add ``size`` if item ``k`` is there and a reader of it is computed again in this event or after it.

        With ``once_read`` only if one has been computed again by this event, too.
        """
        later = [j for j in self.readers[k] if self._run[j] and e <= self._settled[j]]
        if not there or not later or not size:
            return
        live = self.rows.variable()
        terms.append((size / self.unit, live))
        for j in later:
            reading = [*there, *self.ran(j), *_times(-1, self.run(j, e - 1)), (-1.0, live)]
            if not once_read:
                self.rows.add(reading, 1)
                continue
            for i in self.readers[k]:
                if self.run(i, e):
                    self.rows.add([*reading, *self.run(i, e)], 2)

    def _while_begun(self, terms: list, size: int, there: list[tuple[float, int]], begun: list[int], e: int) -> None:
        """Add ``size`` if the item is there and one of its readers has been computed again by this event."""
        if not begun:
            return
        live = self.rows.variable()
        terms.append((size / self.unit, live))
        for j in begun:
            self.rows.add([*there, *self.run(j, e), (-1.0, live)], 1)


def solve(
    problem: Problem, *, solver: str = "HIGHS", time_limit: float = 10.0, gap: float = 0.0, least_peak: bool = False
) -> Solution:
    """Ask a solver.

    Args:
      problem: what is to be chosen.
      solver: the name of a mixed-integer solver that cvxpy finds.
      time_limit: seconds, for HiGHS itself and through SciPy; others are not limited.
      gap: relative difference from the bound at which to stop.
      least_peak: make the peak as low as can be, whatever it costs, instead of keeping to the capacity.
    """
    if not any(item.options for item in problem.items):  # nothing to choose, and a solver would refuse
        choice = (NOT_STORED,) * len(problem.items)
        found = simulate(problem, choice)
        fits = found is not None and (least_peak or found.fits(problem))
        return Solution(choice if fits else None, fits, not fits, None)
    model = _Model(problem)
    rows = model.rows
    peak = rows.variable(upper=np.inf) if least_peak else None
    for e, base in enumerate(problem.base):
        if peak is None and np.isfinite(problem.capacity):
            rows.add(model.events[e], (problem.capacity - base) / model.unit)
        elif peak is not None:
            rows.add([*model.events[e], (-1.0, peak)], -base / model.unit)
    stash = [
        (option.bytes / model.unit, v)
        for item, variables in zip(problem.items, model.stored, strict=True)
        for option, v in zip(item.options, variables, strict=True)
    ]
    swapped, late, longest = _swaps(model)
    cost = np.zeros(len(rows.binary))
    scale = 1.0
    if peak is not None:
        cost[peak] = 1.0
    else:
        for k, item in enumerate(problem.items):
            for option, v in zip(item.options, model.stored[k], strict=True):
                cost[v] += option.seconds
            for _, v in model.ran(k):
                cost[v] += item.seconds or 0.0
        if late is not None:
            cost[late] = longest
        scale = float(cost.max()) or 1.0
        cost /= scale
        for size, v in stash:
            cost[v] += TIE * size
        for option, v in swapped:  # of equals, what stays
            cost[v] += TIE * option.bytes / model.unit
    return _solved(model, cost, scale if peak is None else model.unit, solver, time_limit, gap)


def _swaps(model: _Model) -> tuple[list[tuple[Option, int]], int | None, float]:
    """Limit what is swapped, and bound the link time that does not overlap with work.

        sum(bytes * swapped) <= most_swapped
        sum(link_seconds * swapped) - overlap <= late

    Returns:
      The options that swap with their variables, the variable ``late`` (None without swaps), and its unit in seconds.
    """
    problem, rows = model.problem, model.rows
    pairs = [
        (option, v)
        for item, variables in zip(problem.items, model.stored, strict=True)
        for option, v in zip(item.options, variables, strict=True)
        if option.held is not None
    ]
    longest = max((option.link_seconds for option, _ in pairs), default=0.0) or 1.0
    if not pairs:
        return pairs, None, longest
    late = rows.variable(upper=np.inf)
    if np.isfinite(problem.most_swapped):
        rows.add([(option.bytes / model.unit, v) for option, v in pairs], problem.most_swapped / model.unit)
    terms = [(option.link_seconds / longest, v) for option, v in pairs]
    rows.add([*terms, (-1.0, late)], problem.overlap / longest)
    return pairs, late, longest


def _solved(model: _Model, cost: np.ndarray, scale: float, solver: str, time_limit: float, gap: float) -> Solution:
    import cvxpy as cp  # takes a second to import, and only budgets need it
    from cvxpy.error import SolverError
    from scipy.sparse import csr_array

    rows = model.rows
    binary = np.flatnonzero(rows.binary)
    rest = np.flatnonzero(~np.asarray(rows.binary, bool))
    chosen = cp.Variable(len(binary), boolean=True)
    free = cp.Variable(max(1, len(rest)))
    matrix, right = rows.matrix().tocsc(), np.asarray(rows.right)
    left = csr_array(matrix[:, binary]) @ chosen
    objective = cost[binary] @ chosen
    constraints: list[Any] = [free >= 0]
    if len(rest):
        left = left + csr_array(matrix[:, rest]) @ free
        objective = objective + cost[rest] @ free
        limited = np.flatnonzero(np.isfinite(np.asarray(rows.upper)[rest]))
        constraints.append(free[limited] <= np.asarray(rows.upper)[rest][limited])
    constraints.append(left <= right)
    problem = cp.Problem(cp.Minimize(objective), constraints)
    limits = {"time_limit": time_limit, "mip_rel_gap": gap}
    options = {"HIGHS": {**limits, "random_seed": 0}, "SCIPY": {"scipy_options": limits}}.get(solver, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem.solve(solver=solver, **options)
    except SolverError:
        return Solution(None, False, False, None)
    infeasible = problem.status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE)
    if chosen.value is None:
        return Solution(None, False, infeasible, None)
    values = dict(zip(binary.tolist(), np.asarray(chosen.value), strict=True))
    choice = tuple(
        next((position for position, v in enumerate(variables) if values[v] > 0.5), NOT_STORED)
        for variables in model.stored
    )
    return Solution(choice, problem.status == cp.OPTIMAL, False, _bound(problem, scale))


def _bound(problem: Any, scale: float) -> float | None:
    """The solver's own bound, if it tells one; the value, if that is proven to be the best."""
    found: Any
    if problem.status == "optimal":
        found = problem.value
    else:
        found = getattr(getattr(problem.solver_stats, "extra_stats", None), "mip_dual_bound", None)
    return None if found is None or not np.isfinite(found) else max(0.0, float(found)) * scale


def _times(factor: float, terms: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(factor * coefficient, variable) for coefficient, variable in terms]
