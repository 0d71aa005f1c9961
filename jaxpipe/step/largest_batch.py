"""The largest batch of a step that a device has room for."""

from jaxpipe.costs.device_memory import pool_fraction
from jaxpipe.step.explained_step import Explained, batch_size, bytes_with_batch


#: Programs that are compiled to find it.
_MOST_PROGRAMS = 3


def largest_batch(explained: Explained) -> int | None:
    """Return the most examples whose step is within the pool; None where the memory or the batch is not known.

    Bytes are a straight line but for padding: between two sizes that were compiled the next is interpolated, and the
    answer is one that was compiled and fits. After few programs it may be smaller than the very largest.
    """
    size = batch_size(explained.step.arguments)
    if explained.target.memory is None or size is None:
        return None
    room = int(explained.target.memory * pool_fraction(explained.target.target))
    known = {size: explained.bytes}
    guess = max(1, size // 2)
    for _ in range(_MOST_PROGRAMS):
        try:
            needed = None if guess in known else bytes_with_batch(explained, guess)
        except Exception:  # a size that the user's step does not take, or too large for the compiler
            needed = None
        if needed is None:
            break
        known[guess] = needed
        guess = _next(known, room)
    return max((batch for batch, needed in known.items() if needed <= room), default=None)


def _next(known: dict[int, int], room: int) -> int:
    """Return the batch at which the line through the two sizes that are nearest to the limit meets it."""
    nearest = sorted(known, key=lambda batch: abs(known[batch] - room))[:2]
    (low, high) = sorted(nearest)
    slope = (known[high] - known[low]) / max(high - low, 1)
    if slope <= 0:
        return high
    return max(1, int(low + (room - known[low]) / slope))
