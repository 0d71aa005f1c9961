"""A choice without a solver: items are given up one by one, those first that give most bytes for a second."""

from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.planning.storage.storage_problem import NOT_STORED, Outcome, Problem, simulate


#: How many changes are tried before each is made.
MOST_TRIALS = 16


def give_up(problem: Problem) -> tuple[int, ...] | None:
    """Start with the fastest form of everything and change single items until the limits hold; None if none helps.

    What was given up and turned out not to be needed is taken back at the end.
    """
    choice, now = _descended(problem)
    if now is None or not now.fits(problem):
        return None
    for k in sorted(now.computed, key=lambda k: -(problem.items[k].seconds or 0.0)):
        for option in range(len(problem.items[k].options)):
            other = [*choice[:k], option, *choice[k + 1 :]]
            found = simulate(problem, other)
            if found is not None and found.fits(problem) and found.seconds < now.seconds:
                choice, now = other, found
    return tuple(choice)


def give_up_all(problem: Problem) -> tuple[int, ...] | None:
    """Go on like this until nothing makes the peak lower; None if the result cannot be run."""
    choice, now = _descended(replace(problem, capacity=min(0, *problem.base)))
    return None if now is None else tuple(choice)


def _descended(problem: Problem) -> tuple[list[int], Outcome | None]:
    """The choice, and its outcome, at which the limits hold or no single change brings them nearer."""
    choice = [_fastest(problem, k) for k in range(len(problem.items))]
    now = simulate(problem, choice)
    while now is None or not now.fits(problem):
        step = _best_step(problem, choice, now)
        if step is None:
            break
        k, option = step
        choice[k] = option
        now = simulate(problem, choice)
    return choice, now


def _fastest(problem: Problem, k: int) -> int:
    """The position of the fastest form of an item, the smallest of equals; what no event reads is not stored."""
    item = problem.items[k]
    if not item.uses:
        return NOT_STORED
    ways = [(option.seconds, option.bytes, position) for position, option in enumerate(item.options)]
    if item.seconds is not None:
        ways.append((item.seconds, item.bytes, NOT_STORED))
    return min(ways)[2]


def _excess(problem: Problem, outcome: Outcome) -> tuple[float, float]:
    """Return by how much the capacity is exceeded; and, where several events are equally bad, by how much in all."""
    over = max(0.0, outcome.peak_bytes - problem.capacity)
    return over, sum(max(0.0, b - problem.capacity) for b in outcome.bytes)


def _best_step(problem: Problem, choice: Sequence[int], now: Outcome | None) -> tuple[int, int] | None:
    moves = []
    for k, item in enumerate(problem.items):
        if choice[k] == NOT_STORED:
            if now is None:
                moves += [(0.0, k, position) for position in range(len(item.options))]
            continue
        option = item.options[choice[k]]
        for position, other in enumerate(item.options):
            if other.bytes < option.bytes:
                moves.append(((other.seconds - option.seconds) / (option.bytes - other.bytes), k, position))
        if item.seconds is not None:
            moves.append(((item.seconds - option.seconds) / max(1, option.bytes), k, NOT_STORED))
    best = None
    before = None if now is None else _excess(problem, now)
    for _, k, position in sorted(moves)[:MOST_TRIALS]:
        found = simulate(problem, [*choice[:k], position, *choice[k + 1 :]])
        if found is None:
            continue
        after = _excess(problem, found)
        if before is not None and after >= before:
            continue
        gain = 1.0 if before is None else (before[0] - after[0]) or 1e-3 * (before[1] - after[1])
        price = (max(0.0, found.seconds - (0.0 if now is None else now.seconds)) / gain, -gain)
        if best is None or price < best[0]:
            best = price, k, position
    return None if best is None else best[1:]
