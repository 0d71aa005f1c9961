"""1F1B, in pair ticks and as the textbook has it."""

from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.table import Action, Kind, Schedule, check_size, table


def one_f_one_b(num_devices: int, num_microbatches: int, *, paired: bool = True) -> Schedule:
    """One forward, one backward, in turn; after D. Narayanan et al., "PipeDream", SOSP 2019.

    In pair ticks stage ``i`` of ``p`` works forward on micro-batch ``j`` in tick ``i + j`` and backward in tick
    ``2(p-1) - i + j``. When all stages walk in step this loses nothing over the ideal ``(m + p - 1)(F + B)``, and keeps
    ``2(p-1-i) + 1`` micro-batches in flight. The textbook's keeps ``p - i``, and takes as long if every stage runs
    free; but in step it waits for the longer of F and B twice.

    Args:
      num_devices, num_microbatches: its size.
      paired: in pair ticks.

    Raises:
      ScheduleError: if a size is below 1.
    """
    check_size(num_devices, num_microbatches)
    if not paired:
        orders = [_order(num_devices, num_microbatches, i) for i in range(num_devices)]
        return from_orders("1f1b-textbook", orders, num_microbatches)
    work: dict[tuple[int, int], list[Action]] = {}
    for i in range(num_devices):
        for j in range(num_microbatches):
            work.setdefault((i + j, i), []).append(Action(Kind.FORWARD, j))
            work.setdefault((2 * (num_devices - 1) - i + j, i), []).append(Action(Kind.BACKWARD, j))
    return table("1f1b", num_devices, num_microbatches, work)


def _order(p: int, m: int, i: int) -> list[Action]:
    """Return as many forwards as there are stages behind, then one backward and one forward in turn."""
    ahead = min(m, p - i)
    order = [Action(Kind.FORWARD, j) for j in range(ahead)]
    for j in range(m):
        order.append(Action(Kind.BACKWARD, j))
        if j + ahead < m:
            order.append(Action(Kind.FORWARD, j + ahead))
    return order
