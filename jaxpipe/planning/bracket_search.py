"""The next program to compile, where programs in a row need fewer and fewer bytes and XLA alone knows how many.

program      0     1     2     3     4     5        estimates fall from left to right
XLA's bytes  900   -     -     400   -     -        budget 500: between 0 and 3 one may be within
"""

import bisect
from collections.abc import Callable, Iterable, Mapping

import numpy as np


#: The share of a budget that may be left without a search for a program with more bytes.
LEFT = 0.03

#: How many programs of a row are compiled at most, one after the other, for a budget.
MOST_COMPILED = 4


def straight_lines(
    known: Iterable[tuple[float, float]], slope: float = 1.0, least_slope: float = 0.0
) -> Callable[[float], float]:
    """Return a function that predicts one number from another, such as XLA's bytes from estimated ones.

    Args:
      known: pairs of the two. Straight lines lead from each to the next, and go on beyond the first and the last with
        the slope from the one to the other.
      slope: that if they do not rise.
      least_slope: that of lines beyond the known pairs at least.

    Example:
      >>> predicted = straight_lines([(100, 900), (50, 400)])
      >>> predicted(60), predicted(40), straight_lines([(100, 900)])(60)
      (500.0, 300.0, 860.0)
    """
    points = sorted(known) or [(0.0, 0.0)]
    (low, least), (high, most) = points[0], points[-1]
    slope = max(least_slope, (most - least) / (high - low) if high > low and most > least else slope)
    places, besides = zip(*((x, y - slope * x) for x, y in points), strict=True)
    return lambda x: slope * x + float(np.interp(x, places, besides))


def next_place(known: Mapping[int, int], predicted: Callable[[int], float], count: int, budget: int) -> int | None:
    """Return the place of the program to compile next; None if no other can be better.

    It is the first that may be within the budget, or the last where none is known to be.

    Args:
      known: XLA's bytes, by place.
      predicted: gives those of a place that is not known.
      count: the number of programs.
      budget: the most bytes.

    Example:
      >>> next_place({0: 900, 3: 400}, [900, 700, 500, 400, 300, 200].__getitem__, 6, 500)
      2
    """
    high = min((place for place, size in known.items() if size <= budget), default=count)
    low = max((place for place in known if place < high), default=-1)
    if high - low <= 1 or (high in known and budget - known[high] <= LEFT * budget):
        return None
    place = bisect.bisect_left(range(high), True, low + 1, key=lambda k: predicted(k) <= budget)
    return place if place < high else None if high in known else high - 1
