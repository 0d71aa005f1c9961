"""A problem without choices about small items: statistics of normalizations, biases, keys.

They are most of a large model's items and next to none of its bytes. Each is stored if it is read, and the others'
events have their bytes as base bytes. The reduced problem's choices are choices of the whole problem within its limits,
since the bytes of the small items are counted in every event.
"""

from dataclasses import replace

import numpy as np

from jaxpipe.planning.storage.storage_problem import Item, Problem


#: The share of a problem's bytes that all small items together have at most.
SHARE = 1e-3


def without_small_items(problem: Problem) -> Problem:
    """Return a problem whose small items can only be stored, with their bytes in every event instead of their own.

    Items keep their positions and options theirs, so that a choice means the same in both problems.
    """
    scale = problem.capacity if np.isfinite(problem.capacity) else max(problem.base)
    copies = max(1, problem.held + problem.frees)
    small: dict[int, int] = {}
    left = int(SHARE * scale)
    for k in sorted(range(len(problem.items)), key=lambda k: problem.items[k].bytes):
        size = max((option.bytes * copies + option.unpacked_bytes for option in problem.items[k].options), default=None)
        if size is None:
            continue
        if size > left:
            break
        small[k] = size
        left -= size
    if not small:
        return problem
    items = tuple(_always_stored(item) if k in small else item for k, item in enumerate(problem.items))
    return replace(problem, items=items, base=tuple(base + sum(small.values()) for base in problem.base))


def _always_stored(item: Item) -> Item:
    options = tuple(replace(option, bytes=0, unpacked_bytes=0, link_seconds=0.0) for option in item.options)
    return replace(item, options=options, bytes=0, sources=(), seconds=None)
