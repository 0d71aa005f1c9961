"""Zero-bubble H1: what a weight's gradient takes fills the bubble."""

from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.table import Action, Kind, Schedule, check_size


def zero_bubble(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B whose backward work comes in two parts, the one for weights later.

    Stage ``i`` does its weight work ``i`` micro-batches after its input work, so that cotangents reach early stages
    sooner and every stage holds at most as many stashes as there are stages. With F = I = W the bubble is a third of
    1F1B's. After schedule H1 of P. Qi et al., ICLR 2024, arXiv 2401.10241.

    Raises:
      ScheduleError: if a size is below 1.
    """
    check_size(num_devices, num_microbatches)
    orders = [_order(num_devices, num_microbatches, i) for i in range(num_devices)]
    return from_orders("zero-bubble-h1", orders, num_microbatches)


def _order(p: int, m: int, i: int) -> list[Action]:
    ahead = min(m, p - i)
    order = [Action(Kind.FORWARD, j) for j in range(ahead)]
    for j in range(m):
        order.append(Action(Kind.BACKWARD_INPUT, j))
        if j >= i:
            order.append(Action(Kind.BACKWARD_WEIGHT, j - i))
        if j + ahead < m:
            order.append(Action(Kind.FORWARD, j + ahead))
    return order + [Action(Kind.BACKWARD_WEIGHT, j) for j in range(max(0, m - i), m)]
