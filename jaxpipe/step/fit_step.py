"""The level of a step that keeps a budget and computes least again.

plain ─over─▶ default ─▶ between those known, as estimates say ─▶ checkpoints that may compute less ─▶ level
                                   no level is within ─▶ all small ones ─▶ the least that is found
"""

from jaxpipe.step.bracket_search import next_place
from jaxpipe.step.step_front import DEFAULT, PLAIN, ROOMS, SMALLEST
from jaxpipe.step.step_variants import Needs, StepVariants
from jaxpipe.text.progress import phase


#: How many levels between others are compiled at most for one budget.
MOST_COMPILATIONS = 6

#: By what share estimates may be wrong where they speak against compiling a level.
INEXACT = 0.1

#: Levels besides the smallest that are compiled before a budget is refused.
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
    variants.needs(DEFAULT)
    front, known = variants.front, variants.known
    for _ in range(MOST_COMPILATIONS):
        sizes = {k: known[level].bytes for k, level in enumerate(front.levels) if level in known}
        place = next_place(sizes, front.estimate, len(front.levels), budget)
        if place is None:
            break
        variants.needs(front.levels[place])
    if _best(variants, budget) is None:
        _try_small(variants, budget)
    else:
        _try_less_again(variants, budget)
    return _best(variants, budget)


def _best(variants: StepVariants, budget: int) -> str | None:
    """Return the known level within a budget that runs the fewest products; of these, the first by estimates."""
    levels = [*variants.front.levels, *variants.front.hand_placed]

    def rank(level: str) -> tuple[int, int]:
        return variants.known[level].products, levels.index(level)

    return min((x for x in levels if x in variants.known and variants.known[x].bytes <= budget), key=rank, default=None)


def _try_small(variants: StepVariants, budget: int) -> None:
    """Compile levels that may need less than any that is known, until one is within a budget."""
    variants.needs(SMALLEST)
    for level in (*variants.front.hand_placed, *SMALL_LEVELS):
        may_be_smaller = _predicted(variants, level) <= (1 + INEXACT) * smallest(variants).bytes
        if (level in variants.known or may_be_smaller) and variants.needs(level).bytes <= budget:
            break


def _try_less_again(variants: StepVariants, budget: int) -> None:
    """Compile checkpoints that run fewer products again than the best level and may fit, until one does."""
    best, front = _best(variants, budget), variants.front
    assert best is not None
    limit = 0 if best == PLAIN else front.reruns(best)
    for level in front.hand_placed:
        may_fit = front.reruns(level) < limit and _predicted(variants, level) <= (1 + INEXACT) * budget
        if may_fit and variants.needs(level).bytes <= budget:
            break


def _predicted(variants: StepVariants, level: str) -> float:
    """Return the bytes of a step with the storage of a level if all else needs what it needs at least elsewhere."""
    front, known = variants.front, variants.known
    return front.bytes(level) + min(known[other].bytes - front.bytes(other) for other in known if other != PLAIN)


def smallest(variants: StepVariants) -> Needs:
    """Return what the smallest level needs that is known."""
    return min(variants.known.values())
