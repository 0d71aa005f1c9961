"""Programs of the sizes that a run has used last: compiled ones take megabytes, and sizes may never end."""

from collections.abc import Callable, Hashable
from typing import TypeVar


#: Programs that are kept of one kind. A loop over more sizes than these compiles each of them again.
MOST_KEPT = 32

T = TypeVar("T")


def recent(kept: dict[Hashable, T], key: Hashable, make: Callable[[], T], most: int | None = None) -> T:
    """Return the value kept under a key, made first if need be; the least recently used one makes room.

    ``most`` are kept; left out, ``MOST_KEPT``. Nothing that is made is None.

    Example:
      >>> kept = {}
      >>> for size in (1, 2, 1, 3):
      ...     _ = recent(kept, size, lambda: "compiled", most=2)
      >>> list(kept)
      [1, 3]
    """
    value = kept.pop(key, None)  # as another thread may take it meanwhile
    kept[key] = value = make() if value is None else value
    while len(kept) > (MOST_KEPT if most is None else most):
        kept.pop(next(iter(kept)), None)
    return value
