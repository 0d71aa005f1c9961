"""A choice without a solver: items are given up that give most bytes for a second, then what still fits is taken back.

Large models repeat layers, so all items that are alike are given up at once: in a row of equal layers the peak falls
only when all of them have given up the same item. Where that is not enough, items are given up one by one, too.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.planning.storage.storage_problem import NOT_STORED, Item, Outcome, Problem, outcome_of, possible


#: How many changes are tried before each is made, where items are given up one by one.
MOST_TRIALS = 16


#: Items that change together.
Groups = Sequence[Sequence[int]]


def give_up(problem: Problem) -> Outcome | None:
    """Return a fast choice within the limits; None if none is found."""
    now = _descended(problem, [item.fastest[1] for item in problem.items], _alike(problem))
    if not now.fits():
        now = give_up_all(problem)
    if not now.fits():
        return None
    ends = [_taken_back(now, per_byte) for per_byte in (True, False)]
    return min(ends, key=lambda end: end.seconds).tidied()


def give_up_all(problem: Problem) -> Outcome:
    """Return the choice with the lowest peak that is found, whatever the capacity."""
    outcome = outcome_of(problem, _given_up(replace(problem, capacity=min(0, *problem.base))))
    assert outcome is not None
    return outcome


@functools.lru_cache(maxsize=256)  # asked again with every budget; a problem holds numbers alone
def _given_up(problem: Problem) -> tuple[int, ...]:
    """Give up alike items and then single ones until nothing makes the peak lower; the other way around, too."""
    fastest = [item.fastest[1] for item in problem.items]
    single, alike = ([(k,) for k in range(len(fastest))], MOST_TRIALS), (_alike(problem), None)
    ends = []
    for first, second in ((single, alike), (alike, single)):
        ends.append(_descended(problem, _descended(problem, fastest, *first).choice, *second))
    return min(ends, key=lambda end: end.peak_bytes).choice


def _descended(problem: Problem, choice: Sequence[int], groups: Groups, most_trials: int | None = None) -> Outcome:
    """Change groups of items until the limits hold, or no single change brings them nearer.

    Of the changes so many are simulated in a step, the cheapest for each byte first; all, if left out.
    """
    now = outcome_of(problem, possible(problem, choice))
    assert now is not None
    while not now.fits() and (step := _best_step(now, groups, most_trials)) is not None:
        now = step
    return now


def _taken_back(now: Outcome, per_byte: bool) -> Outcome:
    """Store what is computed again as far as it fits, first what takes most seconds, or most for each byte."""
    items, before = now.problem.items, None
    gain = [(item.seconds or 0.0) / (max(1, item.bytes) if per_byte else 1) for item in items]
    while before != now.choice:
        before = now.choice
        for k in sorted(now.computed, key=lambda k: -gain[k]):
            for option in range(len(items[k].options)):
                other = now.changed({k: option})
                if other is not None and other.seconds < now.seconds and other.fits():
                    now = other
    return now


def _alike(problem: Problem) -> Groups:
    """Return the items that cost the same and are computed from items that cost the same."""
    groups: dict[tuple, list[int]] = {}
    for k, item in enumerate(problem.items):
        sources = tuple(_cost(problem.items[source]) for source in item.sources)
        groups.setdefault((_cost(item), sources), []).append(k)
    return list(groups.values())


def _cost(item: Item) -> tuple:
    return item.options, item.bytes, item.seconds, len(item.uses)


def _moves(problem: Problem, choice: Sequence[int], group: Sequence[int]) -> list[tuple[float, int]]:
    """Return the changes of a group that may give bytes, as seconds for each byte of an item and the new option."""
    item, here = problem.items[group[0]], choice[group[0]]
    if here == NOT_STORED:
        return []
    option = item.options[here]
    moves = [
        ((other.seconds - option.seconds) / (option.bytes - other.bytes), position)
        for position, other in enumerate(item.options)
        if other.bytes < option.bytes
    ]
    if item.seconds is not None:
        moves.append(((item.seconds - option.seconds) / max(1, option.bytes), NOT_STORED))
    return moves


def _best_step(now: Outcome, groups: Groups, most_trials: int | None) -> Outcome | None:
    """Return the choice after the change that costs fewest seconds for each byte by which it lowers the excess."""
    moves = [(price, group, position) for group in groups for price, position in _moves(now.problem, now.choice, group)]
    best, before = None, now.excess()
    for _, group, position in sorted(moves)[:most_trials]:
        other = now.changed(dict.fromkeys(group, position))
        if other is None:
            continue
        after = other.excess()
        if after >= before:
            continue
        gain = (before[0] - after[0]) or 1e-3 * (before[1] - after[1])
        price = (max(0.0, other.seconds - now.seconds) / gain, -gain)
        if best is None or price < best[0]:
            best = price, other
    return None if best is None else best[1]
