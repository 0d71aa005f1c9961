"""Min-max dynamic programme: cut a sequence of operators into contiguous stages."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxpipe.errors import PartitionError


def cut(
    seconds: Sequence[float],
    transfer: Sequence[float],
    allowed: Sequence[bool],
    num_stages: int,
    *,
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Choose ``num_stages`` contiguous stages whose slowest is as fast as can be.

    A stage's time is that of its operators plus that of sending on what crosses the cut behind it. Of all cuts whose
    slowest stage is as fast as that of the best, those that send least in total are taken. After D. Narayanan et al.,
    "PipeDream", SOSP 2019, without replication; cost ``O(num_stages * len(seconds)**2)``, vectorised over the earlier
    cut.

    Args:
      seconds: time of each operator, forward and backward, for one micro-batch.
      transfer: for each position ``0..len(seconds)``, time of sending what crosses a cut there.
      allowed: for each position, whether a stage may begin there.
      num_stages: how many stages; each gets at least one operator.
      slack: by what share of the best the slowest stage may be slower, if that makes less to send.

    Returns:
      Positions ``0 = c[0] < c[1] < ... < c[num_stages] = len(seconds)``.

    Raises:
      PartitionError: if there are not enough positions.

    Example:
      >>> cut([1, 1, 4, 1, 1], [0] * 6, [True] * 6, 3)
      (0, 2, 3, 5)
    """
    count = len(seconds)
    positions = [0, *(c for c in range(1, count) if allowed[c]), count]
    if num_stages < 1 or len(positions) - 1 < num_stages:
        raise PartitionError(
            f"{num_stages} stages were asked for, but the model has {count} operators with {len(positions) - 2} "
            f"places where it may be cut, so it makes between 1 and {max(len(positions) - 1, 1)} stages."
        )
    total = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, np.float64))])[positions]
    send = np.asarray(transfer, np.float64)[positions]
    send[-1] = 0.0

    def stage_times(b: int) -> np.ndarray:
        return total[b] - total[:b] + send[b]

    slowest = _solve(num_stages, len(positions), lambda best, b: np.maximum(best, stage_times(b)))[0]
    limit = slowest * (1 + slack + 1e-9)
    _, chosen = _solve(
        num_stages, len(positions), lambda best, b: np.where(stage_times(b) <= limit, best + send[b], np.inf)
    )
    return tuple(positions[k] for k in chosen)


def _solve(num_stages: int, count: int, extend: Callable[[np.ndarray, int], np.ndarray]) -> tuple[float, list[int]]:
    """Best value of covering all positions with ``num_stages`` stages, and the positions.

    ``extend(best, b)`` gives, for every earlier position ``a < b``, the value of ending a stage that began at ``a``
    in ``b``, given the best values up to ``a``.
    """
    best = np.full(count, np.inf)
    best[0] = 0.0
    back = np.zeros((num_stages, count), np.int64)
    for s in range(num_stages):
        new = np.full(count, np.inf)
        for b in range(s + 1, count):
            values = extend(best[:b], b)
            # Of equal values the latest start: the stage before it is then the fuller one.
            k = b - 1 - int(np.argmin(values[::-1]))
            new[b], back[s, b] = values[k], k
        best = new
    chosen = [count - 1]
    for s in reversed(range(num_stages)):
        chosen.append(int(back[s, chosen[-1]]))
    return float(best[-1]), chosen[::-1]
