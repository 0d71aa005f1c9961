"""Interleaved 1F1B: every device has several stages, which lie apart."""

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.table import Action, Kind, Schedule, check_size
from jaxpipe.text.units import whole_number


def interleaved(num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """``num_chunks`` stages on each device: a bubble as many times smaller, but more to send and to hold.

    Device ``d`` of ``p`` has the stages ``d``, ``p + d``, ``2 p + d``, ... Micro-batches go through the chunks in
    groups of ``p``. After D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021.

    Args:
      num_devices: devices.
      num_microbatches: a multiple of the devices.
      num_chunks: stages on each.

    Raises:
      ScheduleError: if a size is below 1, or micro-batches are no multiple of the devices.
    """
    check_size(num_devices, num_microbatches)
    p, m, v = num_devices, num_microbatches, whole_number(num_chunks, "num_chunks", ScheduleError)
    if v < 1 or m % p:
        raise ScheduleError(
            f"interleaved got num_devices={p}, num_microbatches={m}, num_chunks={v}; there must be at "
            "least one chunk, and as many micro-batches as devices or a multiple of that."
        )
    return from_orders(f"interleaved-{v}", [_order(p, m, v, d) for d in range(p)], m, v)


def _order(p: int, m: int, v: int, d: int) -> list[Action]:
    forward = [Action(Kind.FORWARD, k // (p * v) * p + k % p, k // p % v) for k in range(m * v)]
    backward = [Action(Kind.BACKWARD, k // (p * v) * p + k % p, v - 1 - k // p % v) for k in range(m * v)]
    ahead = min(m * v, 2 * (p - d - 1) + (v - 1) * p + 1)
    order = forward[:ahead]
    for k, action in enumerate(backward):
        order.append(action)
        order += forward[ahead + k : ahead + k + 1]
    return order
