"""The next program to compile, where programs in a row need fewer and fewer bytes and XLA alone knows how many.

program      0     1     2     3     4     5        estimates fall from left to right
XLA's bytes  900   -     -     400   -     -        budget 500: between 0 and 3 one may be within
"""

from collections.abc import Mapping, Sequence


#: The share of a budget that may be left without a search for a program with more bytes.
LEFT = 0.03


def next_place(known: Mapping[int, int], estimates: Sequence[float], budget: int) -> int | None:
    """Return the place of the program to compile next; None if no other can be better.

    Between two compiled programs bytes are taken to follow a straight line over the estimates, beyond the last one to
    fall as they did before; estimates are taken to be as wrong as for the first program that is compiled.

    Args:
      known: XLA's bytes, by place.
      estimates: of each program; once a program is known, only differences count.
      budget: the most bytes.

    Example:
      >>> next_place({0: 900, 3: 400}, [100, 80, 60, 50, 40, 30], 500)
      2
    """
    high = min((place for place, size in known.items() if size <= budget), default=len(estimates))
    low = max((place for place in known if place < high), default=-1)
    if high - low <= 1 or (high in known and budget - known[high] <= LEFT * budget):
        return None
    if low < 0:
        wrong = known[high] - estimates[high] if high in known else 0
        within = (k for k in range(high) if estimates[k] + wrong <= budget)
        return next(within, None if high in known else high - 1)
    # The bytes that are saved for each one that is estimated to be.
    first, last = (low, high) if high in known else (min(known), low)
    estimated = estimates[first] - estimates[last]
    fall = (known[first] - known[last]) / estimated if estimated > 0 else 1.0
    within = (k for k in range(low + 1, high) if known[low] - fall * (estimates[low] - estimates[k]) <= budget)
    return next(within, None if high in known else high - 1)
