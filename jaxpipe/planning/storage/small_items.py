"""A problem without choices about small items: statistics of normalizations, biases, keys.

They are most of a large model's items and next to none of its bytes. Each is stored if it is read, and the others'
events have their bytes as base bytes. The reduced problem's choices are choices of the whole problem within its limits,
since the bytes of the small items are counted in every event and none of them is held elsewhere.
"""

import itertools
from dataclasses import replace

import numpy as np

from jaxpipe.planning.storage.storage_problem import Item, Option, Problem


#: The share of a problem's bytes that all small items together have at most, where an exact answer is wanted.
SHARE = 1e-3


def without_small_items(problem: Problem, share: float = SHARE) -> Problem:
    """Return a problem whose small items can only be stored, with their bytes in every event instead of their own.

    Items and options keep their positions, so that a choice means the same in both problems; options of swaps, which
    come last, are left out.
    """
    scale = problem.capacity if np.isfinite(problem.capacity) else max(problem.base)
    copies = max(1, problem.held + problem.frees)
    small: dict[int, int] = {}
    left = int(share * scale)
    kept = {k: options for k, item in enumerate(problem.items) if (options := _kept_on_device(item))}
    for k in sorted(kept, key=lambda k: problem.items[k].bytes):
        size = max(option.bytes * copies + option.unpacked_bytes for option in kept[k])
        if size > left:
            break
        small[k] = size
        left -= size
    items = tuple(_always_stored(item) if k in small else item for k, item in enumerate(problem.items))
    return replace(problem, items=items, base=tuple(base + sum(small.values()) for base in problem.base))


def _kept_on_device(item: Item) -> tuple[Option, ...]:
    """Return the first options of an item, those that are on the device; their positions are those of the item's."""
    return tuple(itertools.takewhile(lambda option: option.held is None, item.options))


def _always_stored(item: Item) -> Item:
    options = tuple(replace(option, bytes=0, unpacked_bytes=0) for option in _kept_on_device(item))
    return replace(item, options=options, bytes=0, sources=(), seconds=None)
