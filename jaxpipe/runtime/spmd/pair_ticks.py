"""1F1B in pair ticks, which lose nothing where all devices walk in step, and what this runtime runs for each name."""

from collections.abc import Sequence

from jaxpipe.schedules import schedule_makers
from jaxpipe.schedules.schedule_makers import ScheduleMaker
from jaxpipe.schedules.synchronous import interleaved, one_f_one_b, zero_bubble
from jaxpipe.schedules.table import Action, Kind, Schedule, check_cells, check_size


def pair_ticks(num_devices: int, num_microbatches: int) -> Schedule:
    """Return 1F1B with one forward and one backward in each tick.

    Stage ``i`` of ``p`` works forward on micro-batch ``j`` in tick ``i + j`` and backward in tick ``2(p-1) - i + j``:
    ``(m + p - 1)(F + B)`` in step, with ``2(p-1-i) + 1`` micro-batches in flight. The textbook's table waits for the
    longer of F and B twice.
    """
    check_size(num_devices, num_microbatches)
    length = 2 * (num_devices - 1) + num_microbatches
    check_cells("1f1b", num_devices, length)

    def actions(i: int, tick: int) -> tuple[Action, ...]:
        turns = {Kind.FORWARD: tick - i, Kind.BACKWARD: tick - 2 * (num_devices - 1) + i}
        return tuple(Action(kind, j) for kind, j in turns.items() if 0 <= j < num_microbatches)

    ticks = (tuple(actions(i, tick) for i in range(num_devices)) for tick in range(length))
    return Schedule("1f1b", num_devices, num_microbatches, tuple(ticks))


#: The tables that ``schedule="auto"`` chooses from; of two that are as fast, the first.
AUTO: tuple[ScheduleMaker, ...] = (pair_ticks, zero_bubble, interleaved)


def makers_in_step(makers: Sequence[ScheduleMaker]) -> tuple[ScheduleMaker, ...]:
    """Return the makers of this runtime's tables, for the requested ones."""
    if makers is schedule_makers.AUTO:
        return AUTO
    return tuple(pair_ticks if maker is one_f_one_b else maker for maker in makers)
