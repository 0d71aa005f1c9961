"""A schedule from the order in which each device does its work."""

import itertools
from collections.abc import Sequence

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.simulate import simulate
from jaxpipe.schedules.stage_map import StageMapLike, stage_map
from jaxpipe.schedules.table import Action, Schedule, check_cells, table


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
    columns = tuple(
        tuple((action,) if action else () for action in column) for column in itertools.zip_longest(*orders)
    )
    stages = stage_map(name, stage_of, len(orders), num_chunks)
    listed = Schedule(name, len(orders), num_microbatches, columns, num_chunks, stage_of=stages)
    if listed.splits_backward:
        timeline = simulate(listed, forward=1, backward_input=1, backward_weight=1, lockstep=False)
    else:
        timeline = simulate(listed, forward=1, backward=1, lockstep=False)
    work = {(int(span.start), span.stage): [span.action] for span in timeline.spans}
    return table(name, len(orders), num_microbatches, work, num_chunks, stages)
