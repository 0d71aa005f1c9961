"""A schedule from the order in which each device does its work."""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.stage_map import StageMapLike, stage_map
from jaxpipe.schedules.table import Action, Kind, Schedule, check_cells


def from_orders(
    name: str,
    orders: Sequence[Sequence[Action]],
    num_microbatches: int,
    num_chunks: int = 1,
    stage_of: StageMapLike = None,
) -> Schedule:
    """Each action in the first tick in which all that it needs is there, one action of a device in a tick.

    Args:
      name: what the schedule is called.
      orders: the actions of each device.
      num_microbatches, num_chunks: its size.
      stage_of: the stage of each device and chunk: rows of stages, such as ``v_shape(num_devices)``, or a function of
        device and chunk; left out: ``chunk * num_devices + device``.

    Raises:
      ScheduleError: if the orders deadlock, an action names a micro-batch or chunk that does not exist, or ``stage_of``
        does not have every stage once.

    Example:
      >>> from jaxpipe.schedules.table import Kind
      >>> f, b = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
      >>> print(from_orders("drawn", [[f, b], [f, b]], 1))
      tick      0  1  2  3
      device 0  F0       B0
      device 1     F0 B0
    """
    for device, action in ((d, a) for d, order in enumerate(orders) for a in order):
        if not (0 <= action.microbatch < num_microbatches and 0 <= action.chunk < num_chunks):
            raise ScheduleError(
                f"{name}: stage {device} does {action}, but there are {num_microbatches} micro-batches and "
                f"{num_chunks} stages on a device."
            )
    if not any(orders):
        raise ScheduleError(f"{name}: no device does anything.")
    check_cells(name, len(orders), max(map(len, orders)))
    columns = tuple(tuple((x,) if x else () for x in column) for column in itertools.zip_longest(*orders))
    stages = stage_map(name, stage_of, len(orders), num_chunks)
    listed = Schedule(name, len(orders), num_microbatches, columns, num_chunks, stage_of=stages)
    part = 1.0 if listed.splits_backward else 0.5
    try:
        timeline = listed.simulate(forward=1, backward_input=part, backward_weight=part)
    except ScheduleError:
        listed.check_work()  # what lacks something looks like a deadlock
        raise
    check_cells(name, len(orders), int(timeline.makespan))
    ticks: list[list[tuple[Action, ...]]] = [[()] * len(orders) for _ in range(int(timeline.makespan))]
    for device, action, start, _ in timeline.spans:
        ticks[int(start)][device] = (action,)
    return replace(listed, ticks=tuple(map(tuple, ticks)))


def from_words(
    name: str, words: Iterable[Iterable[str]], num_microbatches: int, num_chunks: int = 1, stage_of: StageMapLike = None
) -> Schedule:
    """Each device's order in words, without the numbers of micro-batches.

    ``F0``, ``B0`` and ``I1`` are the next forward pass of chunk 0, its next backward pass, and the next one for inputs
    of chunk 1; ``W`` is the oldest work for weights that waits, what is left of which comes last. A word without work
    is left out.

    Example:
      >>> print(from_words("drawn", [["F0", "F0", "I0", "I0"]], 2))
      tick      0  1  2  3  4  5
      device 0  F0 F1 I0 I1 W0 W1
    """
    orders = [_order(row, num_microbatches) for row in words]
    return from_orders(name, orders, num_microbatches, num_chunks, stage_of)


def _order(words: Iterable[str], num_microbatches: int) -> list[Action]:
    order, done, waiting = list[Action](), Counter[str](), deque[Action]()
    for word in words:
        if word == "W":
            if waiting:
                order.append(waiting.popleft())
        elif done[word] < num_microbatches:
            action = Action(Kind(word[0]), done[word], int(word[1:]))
            order.append(action)
            done[word] += 1
            if action.kind is Kind.BACKWARD_INPUT:
                waiting.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
    return [*order, *waiting]
