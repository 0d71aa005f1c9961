"""1F1B, as the textbook has it."""

from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.table import Action, Kind, Schedule, check_size


def one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """One forward, one backward, in turn; after D. Narayanan et al., "PipeDream", SOSP 2019.

    Stage ``i`` of ``p`` keeps ``p - i`` micro-batches in flight, and a step takes ``(m + p - 1)(F + B)``.

    Args:
      num_devices, num_microbatches: its size.

    Raises:
      ScheduleError: if a size is below 1.

    Example:
      >>> print(one_f_one_b(2, 3))
      tick      0  1  2  3  4  5  6  7
      device 0  F0 F1    B0 F2 B1    B2
      device 1     F0 B0 F1 B1 F2 B2
    """
    check_size(num_devices, num_microbatches)
    orders = [_order(num_devices, num_microbatches, i) for i in range(num_devices)]
    return from_orders("1f1b", orders, num_microbatches)


def _order(p: int, m: int, i: int) -> list[Action]:
    """Return as many forwards as there are stages behind, then one backward and one forward in turn."""
    ahead = min(m, p - i)
    order = [Action(Kind.FORWARD, j) for j in range(ahead)]
    for j in range(m):
        order.append(Action(Kind.BACKWARD, j))
        if j + ahead < m:
            order.append(Action(Kind.FORWARD, j + ahead))
    return order
