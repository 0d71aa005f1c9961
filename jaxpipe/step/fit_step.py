"""The level of a step that keeps a budget and computes least again.

plain ─over─▶ default ─▶ checkpoints that may compute less ─▶ between those known, as estimates say ─▶ level
                                   no level is within ─▶ the smallest ones ─▶ the least that is found

A compilation takes longer than all else, and each makes estimates better.
"""

import math

from jaxpipe.planning.bracket_search import next_place
from jaxpipe.step.step_front import DEFAULT, PLAIN, ROOMS, SMALLEST
from jaxpipe.step.step_variants import Needs, StepVariants
from jaxpipe.text.progress import phase


#: How many levels between others, and how many checkpoints before and after them, are compiled at most for a budget.
MOST_BETWEEN, MOST_CHECKPOINTS = 3, 2

#: How many levels besides the smallest are compiled at most before a budget is refused.
MOST_SMALL = 3

#: By what share estimates may be wrong where they speak against compiling a level.
INEXACT = 0.1

#: The same where a level is known whose storage takes as many bytes, such as the same checkpoints made otherwise.
INEXACT_ALIKE = 0.02

#: Default storage as other levels have theirs, where that makes a difference.
BEHIND_BARRIERS = f"room 0 of {ROOMS}"

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
    if variants.needs(DEFAULT).bytes > budget and BEHIND_BARRIERS in variants.front.levels:
        variants.needs(BEHIND_BARRIERS)
    _try_checkpoints(variants, budget)
    for _ in range(MOST_BETWEEN):
        level = _between(variants, budget)
        if level is None:
            break
        variants.needs(level)
    if _best(variants, budget) is None:
        _try_small(variants, budget)
    _try_checkpoints(variants, budget)
    return _best(variants, budget)


def _between(variants: StepVariants, budget: int) -> str | None:
    """Return the level to compile next of those from ample to small; None if none can run fewer products."""
    front, known = variants.front, variants.known
    sizes = {k: known[level].bytes for k, level in enumerate(front.levels) if level in known}
    place = next_place(sizes, front.estimate, len(front.levels), budget)
    if place is None or front.reruns(front.levels[place]) >= _fewest(variants, budget):
        return None
    return front.levels[place]


def _best(variants: StepVariants, budget: int) -> str | None:
    """Return the known level within a budget that runs the fewest products; of these, the first by estimates."""
    levels = [*variants.front.levels, *variants.front.hand_placed]

    def rank(level: str) -> tuple[int, int]:
        return variants.known[level].products, levels.index(level)

    return min((x for x in levels if x in variants.known and variants.known[x].bytes <= budget), key=rank, default=None)


def _fewest(variants: StepVariants, budget: int) -> float:
    """Return how many products run again at the best known level within a budget; infinity without one."""
    best = _best(variants, budget)
    if best is None:
        return math.inf
    # Decorated programs may run other products than the plain step besides those that run again.
    decorated = variants.known[DEFAULT].products - variants.front.reruns(DEFAULT)
    return variants.known[best].products - decorated


def _try_checkpoints(variants: StepVariants, budget: int) -> None:
    """Compile checkpoints that run fewer products again than the best level and may fit, until one does."""
    front, known = variants.front, variants.known
    for _ in range(MOST_CHECKPOINTS):
        fewest = _fewest(variants, budget)
        fewer = [x for x in front.hand_placed if x not in known and front.reruns(x) < fewest]
        level = next((x for x in fewer if _least(variants, x) <= budget), None)
        if level is None or variants.needs(level).bytes <= budget:
            break


def _try_small(variants: StepVariants, budget: int) -> None:
    """Compile levels that may need less than any that is known, until one is within a budget."""
    variants.needs(SMALLEST)
    for _ in range(MOST_SMALL):
        others = (x for x in (*variants.front.hand_placed, *SMALL_LEVELS) if x not in variants.known)
        size, level = min(((_least(variants, x), x) for x in others), default=(math.inf, SMALLEST))
        least = smallest(variants).bytes
        if least <= budget or size > least:
            break
        variants.needs(level)


def _least(variants: StepVariants, level: str) -> float:
    """Return about the fewest bytes that a level may need if all besides storage needs what it does at one like it."""
    front, known, size = variants.front, variants.known, variants.front.bytes(level)
    others = [x for x in known if x not in (PLAIN, DEFAULT)] or [DEFAULT]  # on a CPU, default storage has no barriers
    like = min(others, key=lambda other: abs(front.bytes(other) - size))
    inexact = INEXACT_ALIKE if front.bytes(like) == size else INEXACT
    return (size + known[like].bytes - front.bytes(like)) / (1 + inexact)


def smallest(variants: StepVariants) -> Needs:
    """Return what the smallest level needs that is known."""
    return min(variants.known.values())
