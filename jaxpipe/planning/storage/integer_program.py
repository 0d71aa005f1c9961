"""The mixed-integer program: one choice for each item, the limits of every event, the fewest seconds.

    x[o]     1 if option o is stored: the whole numbers, from which all else follows
    s[k]     1 if item k is stored: the sum of x[o] over its options
    r[k, e]  1 if item k has been computed again before event e = 0, ..., E

An item has been computed again if it is not stored and an event has read it, or another item that is computed from it
has been computed again:

    r[k, e + 1] = (1 - s[k]) * max(an event up to e reads k, r[j, e + 1] for each reader j of k)

This is linear, with one inequality from below for each term and two from above, which are tight as x is whole. Other
products of conditions are variables that memory makes as small as they can be:

    all(conditions) >= sum(conditions) - (number of conditions - 1)

After the peak rows of O. Beaumont et al., "Rockmate", ICML 2023, and P. Jain et al., "Checkmate", MLSys 2020, whose
decisions for every pair of tensor and time are left out here: an item is computed again at most once.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
from cvxpy.error import SolverError
from scipy.sparse import csr_array

from jaxpipe.planning.storage.quiet_solver import silence_highs
from jaxpipe.planning.storage.storage_problem import NOT_STORED, Option, Problem, Solution, SolverOptions, outcome_of


#: What storing as many bytes as there are in all costs beside the costliest item: of equals, the smallest stash.
TIE = 1e-6


@dataclass(frozen=True)
class _Program:
    """A problem's variables, and the indices by which constraints name them.

    Attributes:
      problem: the problem.
      unit: bytes that count as 1.
      options: those of all items, each behind its item.
      windows: for each item the events in which it may be computed again, up to the first one that reads it.
      entry: ``r[k, e]`` is ``r[entry[k, e]]``; before an item's window that is the last one, which is 0.
      x: which options are stored.
      s: which items are stored.
      r: which items have been computed again.
    """

    problem: Problem
    unit: float
    options: tuple[tuple[int, Option], ...]
    windows: tuple[range, ...]
    entry: np.ndarray
    x: cp.Variable
    s: cp.Expression
    r: cp.Variable


def _program(problem: Problem) -> _Program:
    items, events = problem.items, len(problem.base)
    first, settled = problem.first_uses.copy(), [-1] * len(items)
    for k, readers in reversed([*enumerate(problem.dependents)]):
        first[k] = min([first[k], *(first[j] for j in readers)])
        settled[k] = max(items[k].uses[:1] or [settled[j] for j in readers], default=-1)
    windows = tuple(range(0 if item.seconds is None else settled[k] + 1)[first[k] :] for k, item in enumerate(items))
    entry, start = np.full((len(items), events + 1), sum(map(len, windows))), 0
    for k, window in enumerate(windows):
        for e in window:
            entry[k, e + 1 :] = start
            start += 1
    options = tuple((k, option) for k, item in enumerate(items) for option in item.options)
    x = cp.Variable(len(options), boolean=True)
    return _Program(
        problem=problem,
        unit=max(1.0, *map(float, problem.base), float(problem.capacity) if np.isfinite(problem.capacity) else 0.0),
        options=options,
        windows=windows,
        entry=entry,
        x=x,
        s=_sparse(1.0, [k for k, _ in options], range(len(options)), (len(items), len(options))) @ x,
        r=cp.Variable(start + 1, bounds=[0, 1]),
    )


def solve(problem: Problem, options: SolverOptions) -> Solution:
    """Ask a solver."""
    least_peak = options.least_peak
    if not any(item.options for item in problem.items):  # nothing to choose, and a solver would refuse
        choice = (NOT_STORED,) * len(problem.items)
        outcome = outcome_of(problem, choice)
        fits = outcome is not None and (least_peak or outcome.fits())
        bound = float(outcome.peak_bytes) if least_peak and outcome is not None else None
        return Solution(choice if fits else None, fits, not fits, bound)
    program = _program(problem)
    memory, constraints = _memory(program)
    constraints += _choices(program)
    if least_peak:
        objective, scale = cp.max(memory), program.unit
    else:
        objective, scale, limits = _seconds(program)
        constraints += limits
        if np.isfinite(problem.capacity):
            constraints.append(memory <= problem.capacity / program.unit)
    return _solved(program, cp.Problem(cp.Minimize(objective), constraints), scale, options)


def _choices(program: _Program) -> list[cp.Constraint]:
    """Let each item be stored at most once, and be in memory when it is needed.

        s[k] <= 1
        s[k] + r[k, E] >= 1                    if an event reads item k
        s[k] >= r[j, E]                        for each reader j of item k, if k cannot be computed again
        s[k] + r[k, e + 1] <= 1                in the window of item k
        s[k] + r[k, e + 1] >= r[j, e + 1]      likewise, for each reader j of item k, until an event reads it
        r[k, e + 1] <= sum of r[j, e + 1]      likewise, over the readers j of item k; +1 if the event reads it

    The last entry of ``r`` has no readers.
    """
    problem, entry, s, r = program.problem, program.entry, program.s, program.r
    items, readers = problem.items, problem.dependents
    used = [k for k, item in enumerate(items) if item.uses]
    kept, needing = _columns(2, [(k, j) for k, item in enumerate(items) if item.seconds is None for j in readers[k]])
    window = [(k, e) for k, events in enumerate(program.windows) for e in events]
    k, e = _columns(2, window)
    source, reader, event = _columns(3, [(k, j, e) for k, e in window if e not in items[k].uses for j in readers[k]])
    again, again_reader = entry[source, event + 1], entry[reader, event + 1]
    read = np.array([*(e in items[k].uses for k, e in window), False], float)
    return [
        *_no_less(s[used] + r[entry[used, -1]], 1),
        *_no_less(s[kept], r[entry[needing, -1]]),
        *_no_less(1 - s[k], r[entry[k, e + 1]]),
        *_no_less(s[source] + r[again], r[again_reader]),
        s <= 1,
        r <= read + _sparse(1.0, again, again_reader, (r.size, r.size)) @ r,
    ]


def _memory(program: _Program) -> tuple[cp.Expression, list[cp.Constraint]]:
    """Return the bytes in memory in each event, and the constraints of the variables in them.

        base[e] + sum of held[o] * bytes[o] * x[o]
                + sum of bytes[o] * x[o]               of items that are still to be read, if ``frees``
                + sum of unpacked[o] * x[o]            of items that have been read and are still to be read
                + sum of bytes[k] * r[k, e + 1]        of items that are still to be read

    Items are read by events, as counted here, and by others that are computed again, as ``_alive_for_readers`` counts.
    """
    problem, items = program.problem, program.problem.items
    events = np.arange(len(problem.base))[:, None]
    first, last = np.array([problem.first_uses, problem.last_uses])
    size, unpacked, held, k = np.array(
        [
            (option.bytes, option.unpacked_bytes, problem.held if option.held is None else option.held, k)
            for k, option in program.options
        ]
    ).T
    stored = held * size + (events <= last[k]) * (problem.frees * size + (events >= first[k]) * unpacked)
    event, k = np.nonzero(events <= last)
    again = np.array([item.bytes for item in items])[k]
    computed = _sparse(again / program.unit, event, program.entry[k, event + 1], (len(events), program.r.size))
    live, constraints = _alive_for_readers(program)
    memory = np.array(problem.base) / program.unit + (stored / program.unit) @ program.x + computed @ program.r
    return memory + live, constraints


def _alive_for_readers(program: _Program) -> tuple[cp.Expression, list[cp.Constraint]]:
    """Count what is in memory for readers that are computed again, where it is not for an event.

    By the end of an event a reader ``i`` has begun, or at its beginning a reader ``j`` is left:

        begun[i, e] = r[i, e + 1]        left[j, e] = r[j, E] - r[j, e]

        all[o, e] >= x[o]        + left[j, e] - 1                  behind the last use; bytes[o], unpacked[o]
        all[k, e] >= r[k, e + 1] + left[j, e] - 1                  behind the last use; bytes[k]
        all[o, e] >= x[o] + begun[i, e] - 1                        before the first use; unpacked[o]
        all[o, e] >= x[o] + begun[i, e] + left[j, e] - 2           without a use; unpacked[o]
    """
    problem, items, entry, r = program.problem, program.problem.items, program.entry, program.r
    events = range(len(problem.base))
    behind = [events[last + 1 :] for last in problem.last_uses]
    # Of each term the place of its variable, item, event, bytes, and whether a reader must have begun or be left.
    stored = [
        (o, k, e, option.bytes * problem.frees + option.unpacked_bytes * bool(items[k].uses), False, True)
        for o, (k, option) in enumerate(program.options)
        for e in behind[k]
    ]
    again = [
        (program.x.size + int(entry[k, e + 1]), k, e, item.bytes, False, True)
        for k, item in enumerate(items)
        for e in behind[k]
        if entry[k, e + 1] < r.size - 1
    ]
    terms = [term for term in (*stored, *again) if term[3] and _later(program, *term[1:3])]
    terms += [
        (o, k, e, option.unpacked_bytes, True, unused)
        for unused in (False, True)
        for o, (k, option) in enumerate(program.options)
        if option.unpacked_bytes and unused == (not items[k].uses)
        for e in events[: problem.first_uses[k]]
    ]
    present, _, event, size, begins, ends = _columns(6, terms)
    readers = [
        (n, i, j)
        for n, (_, k, e, _, begun, left) in enumerate(terms)
        for i in (_begun(program, k, e) if begun else [0])
        for j in (_later(program, k, e) if left else [0])
    ]
    live = cp.Variable(max(1, len(terms)), bounds=[0, 1])
    by_event = _sparse(size / program.unit, event, range(len(terms)), (len(events), live.size))
    if not readers:
        return by_event @ live, []
    n, i, j = _columns(3, readers)
    e = event[n]
    begun = cp.multiply(begins[n], r[entry[i, e + 1]])
    left = cp.multiply(ends[n], r[entry[j, -1]] - r[entry[j, e]])
    conditions = cp.hstack([program.x, r])[present[n]] + begun + left
    return by_event @ live, [live[n] >= conditions - begins[n] - ends[n]]


def _begun(program: _Program, k: int, e: int) -> list[int]:
    """Return the readers of an item that may have been computed again by the end of an event."""
    return [j for j in program.problem.dependents[k] if program.windows[j] and e >= program.windows[j].start]


def _later(program: _Program, k: int, e: int) -> list[int]:
    """Return the readers of an item that may be computed again in an event or after it."""
    return [j for j in program.problem.dependents[k] if program.windows[j] and e < program.windows[j].stop]


def _no_less(left: Any, right: Any) -> list[cp.Constraint]:
    """Return the constraint, if it has rows: cvxpy before 1.9 takes no others."""
    return [left >= right] if left.size else []


def _seconds(program: _Program) -> tuple[cp.Expression, float, list[cp.Constraint]]:
    """Return the cost of a choice, its unit in seconds, and the limits of swaps.

        sum of seconds[o] * x[o] + sum of seconds[k] * r[k, E] + late + TIE * sum of bytes[o] * x[o]

        late >= sum of link_seconds[o] * x[o] - overlap
        sum of bytes[o] * x[o] <= most_swapped              of options that swap

    Of equally fast choices the smallest stash counts, and bytes that swap twice.
    """
    problem, x, ran = program.problem, program.x, program.entry[:, -1]
    size, codecs, link, swap = np.array(
        [(option.bytes, option.seconds, option.link_seconds, option.held is not None) for _, option in program.options]
    ).T
    again = np.array([item.seconds or 0.0 for item in problem.items]) * (ran < program.r.size - 1)
    unit = float(max(codecs.max(), again.max(), link.max())) or 1.0
    size = size / program.unit
    cost = (codecs / unit + TIE * (1 + swap) * size) @ x + (again / unit) @ program.r[ran]
    if not swap.any():
        return cost, unit, []
    late = cp.Variable(nonneg=True)
    limits = [late >= (link @ x - problem.overlap) / unit]
    if np.isfinite(problem.most_swapped):
        limits.append((swap * size) @ x <= problem.most_swapped / program.unit)
    return cost + late, unit, limits


def _solved(program: _Program, problem: cp.Problem, scale: float, options: SolverOptions) -> Solution:
    solver, limits = options.solver, {"time_limit": options.time_limit, "mip_rel_gap": options.gap}
    # The least absolute gap is that without a slack.
    for_highs = {**limits, "mip_abs_gap": max(1e-6, options.slack / scale), "random_seed": 0}
    settings = {"HIGHS": for_highs, "SCIPY": {"scipy_options": limits}}
    if solver == "HIGHS":
        silence_highs()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(solver, str):
                problem.solve(solver=solver, **settings.get(solver, {}))
            else:
                solver.solve(problem, time_limit=options.time_limit, gap=options.gap)
    except SolverError:
        return Solution()
    infeasible = problem.status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE)
    if program.x.value is None:
        return Solution(infeasible=infeasible)
    choice = [NOT_STORED] * len(program.problem.items)
    for position, (k, option) in enumerate(program.options):
        if program.x.value[position] > 0.5:
            choice[k] = program.problem.items[k].options.index(option)
    return Solution(tuple(choice), problem.status == cp.OPTIMAL, False, _bound(problem, scale))


def _bound(problem: cp.Problem, scale: float) -> float | None:
    """The solver's own bound, if it tells one; else the value, if that is proven to be the best within the gap."""
    bound: Any = getattr(getattr(problem.solver_stats, "extra_stats", None), "mip_dual_bound", None)
    if bound is None and problem.status == cp.OPTIMAL:
        bound = problem.value
    return None if bound is None or not np.isfinite(bound) else max(0.0, float(bound)) * scale


def _sparse(values: Any, rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
    """Return a matrix of values at positions; those at equal positions are added up."""
    return csr_array((np.broadcast_to(values, len(rows)), (rows, columns)), shape=shape)


def _columns(width: int, rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the columns of a table of integers, which may have no rows."""
    return np.array(rows, int).reshape(-1, width).T
