"""The seconds of a step of 1F1B on devices that run free, for many plans at once."""

from functools import cache

import numpy as np


def one_f_one_b_seconds(
    forward: np.ndarray,
    backward: np.ndarray,
    ahead: np.ndarray,
    back: np.ndarray,
    num_microbatches: int,
    trained: np.ndarray | None = None,
) -> np.ndarray:
    """Return the makespan of each plan, as ``jaxpipe.schedules.simulate`` has it for ``one_f_one_b`` running free.

    Args:
      forward, backward: ``[plans, stages]``, seconds of one micro-batch.
      ahead, back: ``[plans, stages - 1]``, seconds of the messages between each stage and the next.
      num_microbatches: of a step.
      trained: ``[plans, stages]``; stages without backward work leave it out. All have it if left out.

    Example:
      >>> one_f_one_b_seconds(np.ones((1, 4)), 2 * np.ones((1, 4)), np.zeros((1, 3)), np.zeros((1, 3)), 16)
      array([57.])
    """
    plans, stages = forward.shape
    nothing = np.zeros((plans, 1))
    work = np.ascontiguousarray(forward.T), np.ascontiguousarray(backward.T)
    ways = np.hstack([ahead, nothing]).T, np.hstack([nothing, back]).T
    free = np.zeros((stages, plans))
    # When the last message has come from the stage before, and from the one behind; a row besides for no stage.
    arrived = np.zeros((stages + 1, plans)), np.zeros((stages + 1, plans))
    for ahead_now, back_now in _steps(stages, num_microbatches):
        if len(ahead_now):
            ends = np.maximum(free[ahead_now], arrived[0][ahead_now]) + work[0][ahead_now]
            free[ahead_now] = ends
            arrived[0][ahead_now + 1] = ends + ways[0][ahead_now]
        if len(back_now):
            ends = np.maximum(free[back_now], arrived[1][back_now + 1]) + work[1][back_now]
            free[back_now] = ends if trained is None else np.where(trained.T[back_now], ends, free[back_now])
            arrived[1][back_now] = ends + ways[1][back_now]
    return free.max(0)


@cache
def _steps(stages: int, num_microbatches: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return the stages that work forward, and backward, in each tick of 1F1B if all work takes one tick.

    In this order every action comes behind what it needs, and no stage works forward twice before the next one has
    used the first result.
    """
    last, numbers = num_microbatches - 1, np.arange(stages)
    steps = []
    for tick in range(2 * (num_microbatches + stages - 1)):
        since = tick - numbers
        first = (since >= 0) & (since <= last) & (tick < stages)
        steady = (since % 2 == 0) & (since // 2 >= stages - numbers) & (since // 2 <= last)
        since = tick - (2 * stages - 1 - numbers)
        back = (since >= 0) & (since % 2 == 0) & (since // 2 <= last)
        steps.append((np.flatnonzero(first | steady), np.flatnonzero(back)))
    return tuple(steps)
