"""The next program to compile, where programs in a row need fewer and fewer bytes and XLA alone knows how many.

program      0     1     2     3     4     5        estimates fall from left to right
XLA's bytes  900   -     -     400   -     -        budget 500: between 0 and 3 one may be within
"""

from collections.abc import Callable, Mapping


#: The share of a budget that may be left without a search for a program with more bytes.
LEFT = 0.03


def next_place(known: Mapping[int, int], estimate: Callable[[int], float], count: int, budget: int) -> int | None:
    """Return the place of the program to compile next; None if no other can be better.

    Between two compiled programs bytes are taken to follow a straight line over the estimates, beyond the last one to
    fall as they did before; estimates are taken to be as wrong as for the first program that is compiled.

    Args:
      known: XLA's bytes, by place.
      estimate: of the program at a place; once a program is known, only differences count; called for some places.
      count: of the programs.
      budget: the most bytes.

    Example:
      >>> next_place({0: 900, 3: 400}, [100, 80, 60, 50, 40, 30].__getitem__, 6, 500)
      2
    """
    high = min((place for place, size in known.items() if size <= budget), default=count)
    low = max((place for place in known if place < high), default=-1)
    if high - low <= 1 or (high in known and budget - known[high] <= LEFT * budget):
        return None
    if low < 0:
        wrong = known[high] - estimate(high) if high in known else 0
        within = (k for k in range(high) if estimate(k) + wrong <= budget)
        return next(within, None if high in known else high - 1)
    # The bytes that are saved for each one that is estimated to be.
    first, last = (low, high) if high in known else (min(known), low)
    estimated = estimate(first) - estimate(last)
    fall = (known[first] - known[last]) / estimated if estimated > 0 else 1.0
    within = (k for k in range(low + 1, high) if known[low] - fall * (estimate(low) - estimate(k)) <= budget)
    return next(within, None if high in known else high - 1)
