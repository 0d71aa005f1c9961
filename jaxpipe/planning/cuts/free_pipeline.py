"""The seconds of a step of 1F1B on devices that run free, for many plans at once."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np


#: How many plans are priced at a time, those with the least bounds first.
PRICED_AT_ONCE = 32


class Timelines(NamedTuple):
    """The work of some plans with as many stages.

    Attributes:
      forward, backward: ``[plans, stages]``, seconds of one micro-batch.
      ways: ``[plans, stages - 1]``, seconds of a message between each stage and the next, in either direction.
      trained: ``[plans, stages]``; stages without backward work leave it out.
      besides: seconds of each plan that follow the pipeline's.
      num_microbatches: of a step.
    """

    forward: np.ndarray
    backward: np.ndarray
    ways: np.ndarray
    trained: np.ndarray
    besides: np.ndarray
    num_microbatches: int

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of a step of some plans, as ``Schedule.simulate`` has them for ``one_f_one_b``.

        Example:
          >>> work = np.ones((1, 4)), 2 * np.ones((1, 4)), np.zeros((1, 3)), np.ones((1, 4), bool), np.zeros(1)
          >>> Timelines(*work, 16).seconds(np.arange(1))
          array([57.])
        """
        forward, backward, trained = (x[rows].T.copy() for x in (self.forward, self.backward, self.trained))
        stages, plans = forward.shape
        ahead = np.vstack([self.ways[rows].T, np.zeros((1, plans))])
        back, everywhere, free = np.roll(ahead, 1, axis=0), trained.all(), np.zeros((stages, plans))
        # When the last message has come from the stage before, and from the one behind; a row besides for no stage.
        before, behind = np.zeros((2, stages + 1, plans))
        for ahead_now, back_now in _steps(stages, self.num_microbatches):
            if len(ahead_now):
                ends = np.maximum(free[ahead_now], before[ahead_now]) + forward[ahead_now]
                free[ahead_now] = ends
                before[ahead_now + 1] = ends + ahead[ahead_now]
            if len(back_now):
                ends = np.maximum(free[back_now], behind[back_now + 1]) + backward[back_now]
                free[back_now] = ends if everywhere else np.where(trained[back_now], ends, free[back_now])
                behind[back_now] = ends + back[back_now]
        return free.max(0) + self.besides[rows]

    def bounds(self) -> np.ndarray:
        """Return a lower bound of the seconds of a step, for each plan.

        A stage waits for its first message, does all its work, and what it sends back last goes on to the first stage.
        And it keeps no more micro-batches than there are stages from it on, each for the round trip behind it.
        """
        m, (plans, stages) = self.num_microbatches, self.forward.shape
        none = np.zeros((plans, 1))
        backward = np.where(self.trained, self.backward, 0.0)
        back = np.where(self.trained[:, :-1], self.ways, 0.0)
        begins = np.hstack([none, np.cumsum(self.forward[:, :-1] + self.ways, axis=1)])
        follows = np.hstack([none, np.cumsum(backward[:, :-1] + back, axis=1)])
        busy = begins + m * (self.forward + backward) + follows
        trips = np.hstack([self.ways + back, none]) + self.forward + backward
        trips = np.cumsum(trips[:, ::-1], axis=1)[:, ::-1]
        kept = stages - np.arange(stages)
        waits = begins + ((m - 1) // kept + 1) * trips + (m - 1) % kept * self.forward + follows
        return np.maximum(busy, np.where(self.trained, waits, 0.0)).max(1) + self.besides


def shortest(timelines: Sequence[Timelines], within: float) -> list[np.ndarray]:
    """Return the seconds of all plans; infinite for some that take more than ``within`` times the shortest."""
    bounds = [timeline.bounds() for timeline in timelines]
    seconds = [np.full(len(bound), np.inf) for bound in bounds]
    least = math.inf
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k].min(initial=math.inf)):
        order = bounds[k].argsort(kind="stable")
        size = PRICED_AT_ONCE if within < math.inf else len(order)
        while len(order) and bounds[k][order[0]] <= least * within:
            rows, order, size = order[:size], order[size:], 2 * size
            seconds[k][rows] = timelines[k].seconds(rows)
            least = min(least, float(seconds[k][rows].min()))
    return seconds


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
