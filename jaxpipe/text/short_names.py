"""Names and numbers of many things in little room."""

import re
from collections.abc import Iterable, Sequence


def number_ranges(numbers: Iterable[int]) -> str:
    """Return numbers in order, with runs abbreviated.

    Example:
      >>> number_ranges([0, 1, 2, 3, 8])
      '0-3, 8'
    """
    ordered = sorted(numbers)
    starts = [k for k in ordered if k - 1 not in ordered]
    ends = [k for k in ordered if k + 1 not in ordered]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def cut_middle(path: str, most: int = 28) -> str:
    """Return a path of at most so many characters, without those in its middle if it is longer.

    Example:
      >>> cut_middle("bert/encoder/layer/11/attention/output")
      'bert/…/11/attention/output'
    """
    if len(path) <= most:
        return path
    first, *rest = path.split("/")
    tails = (f"{first}/…/{'/'.join(rest[k:])}" for k in range(1, len(rest)))
    half = (most - 1) // 2
    return next((tail for tail in tails if len(tail) <= most), f"{path[:half]}…{path[-half:]}")


def shorten(names: Sequence[str], most: int = 4) -> str:
    """Return the first and the last of many names; those that are counted on are a range.

    Example:
      >>> shorten(["embed", "layer/0", "layer/1", "layer/2", "head"])
      'embed, layer/0-2, head'
      >>> shorten(["a", "b", "c", "d", "e", "f"])
      'a, b, … (3 more), f'
    """
    ranges: list[tuple[str, int | None, int | None]] = []
    for name in names:
        stem, number = re.fullmatch(r"(.*?)(0|[1-9]\d{0,8})?", name, re.DOTALL).groups()  # type: ignore[union-attr]
        count = None if number is None else int(number)
        if ranges and count is not None and ranges[-1][0] == stem and ranges[-1][2] == count - 1:
            ranges[-1] = stem, ranges[-1][1], count
        else:
            ranges.append((stem, count, count))
    texts = [
        cut_middle(stem + ("" if first is None else str(first))) + ("" if first == last else f"-{last}")
        for stem, first, last in ranges
    ]
    if len(texts) <= most:
        return ", ".join(texts)
    first = max(1, most - 2)
    return f"{', '.join(texts[:first])}, … ({len(texts) - first - 1} more), {texts[-1]}"
