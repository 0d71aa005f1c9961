"""The level of a step that keeps a budget and computes least again.

plain ─over─▶ default storage ─▶ the level that may be within and runs fewest products again ─▶ the next one ─▶ level
                                   no level is within ─▶ the smallest ones ─▶ the least that is found

A compilation takes longer than all else, and each makes predictions for the others better.
"""

import math
from collections.abc import Callable

from jaxpipe.planning.bracket_search import LEFT, MOST_COMPILED, next_place, straight_lines
from jaxpipe.step.step_front import DEFAULT, PLAIN, ROOMS, SMALLEST
from jaxpipe.step.step_variants import Needs, StepVariants
from jaxpipe.text.progress import phase


#: By what share of bytes predictions may be wrong where they speak against checkpoints; against a small level, without
#: which the step is refused.
INEXACT, INEXACT_SMALL = 0.02, 0.1

#: Levels that may be smaller than the smallest by estimates.
SMALL_LEVELS = tuple(f"room {k} of {ROOMS}" for k in (15, 12, 8))


@phase("storage")
def fitting_level(variants: StepVariants, budget: int) -> str | None:
    """Return the level that runs the fewest products of those within a budget; None if none is found.

    What was compiled for other budgets counts, too.
    """
    if variants.needs(PLAIN).bytes <= budget:
        return PLAIN
    if not variants.programs:
        return None
    first = variants.front.first
    variants.needs(first)
    _compile(variants, budget, _better)
    best, reruns = _best(variants, budget), variants.front.reruns
    if best is None or reruns(best) >= reruns(DEFAULT):
        variants.needs(DEFAULT)  # on CPUs without barriers: with the bits of the plain step, and faster or smaller
    if _best(variants, budget) is None:
        for next_level in (_small, _by_jax, _better):
            _compile(variants, budget, next_level)
    return _best(variants, budget)


def _compile(variants: StepVariants, budget: int, next_level: Callable[[StepVariants, int], str | None]) -> None:
    """Compile one level after the other."""
    for _ in range(MOST_COMPILED):
        level = next_level(variants, budget)
        if level is None:
            break
        variants.needs(level)


def _better(variants: StepVariants, budget: int) -> str | None:
    """Return a level that may be within a budget and run fewer products than the best one; None if no level may."""
    front, known, best = variants.front, variants.known, _best(variants, budget)
    predicted, levels = _prediction(variants), [*front.hand_placed]
    if best is None or known[best].bytes < (1 - LEFT) * budget:
        row, sizes = front.row, {place: known[x].bytes for place, x in enumerate(front.row) if x in known}
        place = next_place(sizes, lambda k: predicted(row[k], front.estimate(row[k])), len(row), budget)
        levels += [] if place is None else [row[place]]
    # Decorated programs may run other products than the plain step besides those that run again.
    decorated = known[front.first].products - front.reruns(front.first)
    fewest = math.inf if best is None else known[best].products - decorated
    likely = (x for x in levels if x not in known and predicted(x, front.estimate(x)) <= (1 + INEXACT) * budget)
    fewer = (x for x in likely if front.reruns(x) < fewest)
    return min(fewer, key=lambda x: (front.reruns(x), front.seconds(x)), default=None)


def _small(variants: StepVariants, budget: int) -> str | None:
    """Return a level that may be within a budget, or need less than any known one; None if no level may."""
    front, known, least = variants.front, variants.known, smallest(variants).bytes
    if least <= budget:
        return None
    if SMALLEST not in known:
        return SMALLEST
    predicted, tried = _prediction(variants), {(front.is_by_jax(x), front.bytes(x)) for x in known}
    others = (x for x in (*front.hand_placed, *SMALL_LEVELS) if (front.is_by_jax(x), front.bytes(x)) not in tried)
    size, level = min(((predicted(x, front.bytes(x)), x) for x in others), default=(math.inf, None))
    return level if size <= max(least - 1, (1 + INEXACT_SMALL) * budget) else None


def _by_jax(variants: StepVariants, budget: int) -> str | None:
    """Return the smallest of JAX's checkpoints before one is compiled, unless all besides storage is over the budget.

    Until then their estimates say little.
    """
    front, known = variants.front, variants.known
    by_jax = [x for x in front.hand_placed if front.is_by_jax(x)]
    if any(x in known for x in by_jax) or smallest(variants).bytes <= budget:
        return None
    besides = known[SMALLEST].bytes - front.bytes(SMALLEST)
    return min(by_jax, key=front.bytes, default=None) if besides <= budget else None


def _prediction(variants: StepVariants) -> Callable[[str, float], float]:
    """Return a function that predicts the bytes that XLA reserves for a level from estimated bytes.

    JAX's checkpoints are corrected by themselves once one of them is known. Beyond what is known levels are taken to
    save what they are estimated to at least, lest one is left out because those before it have saved less.
    """
    front, known = variants.front, variants.known
    levels = [x for x in (*front.row, *front.hand_placed) if x in known]
    pairs = [[(front.bytes(x), known[x].bytes) for x in levels if front.is_by_jax(x) == kind] for kind in (False, True)]
    ours, by_jax = (straight_lines(points, least_slope=1.0) for points in (pairs[0], pairs[1] or pairs[0]))
    return lambda level, estimate: (by_jax if front.is_by_jax(level) else ours)(estimate)


def _best(variants: StepVariants, budget: int) -> str | None:
    """Return the known level within a budget that runs the fewest products; of these, the first by estimates."""
    levels, known = (PLAIN, DEFAULT, *variants.front.row, *variants.front.hand_placed), variants.known
    within = (x for x in levels if x in known and known[x].bytes <= budget)
    return min(within, key=lambda x: known[x].products, default=None)


def smallest(variants: StepVariants) -> Needs:
    """Return the needs of the smallest level that is known."""
    return min(variants.known.values())
