"""Schedules of two stages on each device in a V: the first and the last, the second and the last but one, ...

The turn of the V sends nothing, and loss and gradients of a device's second stage come early, so that work for weights
fills what is left of the bubble. An order is written as words: ``F0`` and ``I1`` are the next forward pass of chunk 0
and the next backward pass for inputs of chunk 1, ``W`` is the oldest work for weights that waits. A word without work
is left out.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.stage_map import v_shape
from jaxpipe.schedules.table import Action, Kind, Schedule, check_size


def zero_bubble_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero-bubble V: no device waits between its first and its last work, where F, I and W take as long.

    A device holds at most ``2 p`` stashes of stages half as long: the bytes of 1F1B's first device. A step takes
    ``6 m + p - 1`` of their passes with ``m >= 2 p - 1``, the least for stages in a V. After schedule ZB-V of P. Qi et
    al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv 2401.10241, and "Pipeline parallelism with controllable
    memory", NeurIPS 2024, arXiv 2405.15362.

    Args:
      num_devices, num_microbatches: its size.

    Raises:
      ScheduleError: if a size is below 1.

    Example:
      >>> print(zero_bubble_v(2, 2))
      tick      0    1    2    3    4    5    6    7    8    9    10   11   12
      device 0  F0   F1        F0'1 I0'1 W0'1 F1'1 I1'1 W1'1 I0   W0   I1   W1
      device 1       F0   F0'1 F1   F1'1 I0'1 W0'1 I0   I1'1 I1   W0   W1'1 W1
    """
    check_size(num_devices, num_microbatches)
    p, m = num_devices, num_microbatches
    return _v_schedule(
        "zero-bubble-v",
        [
            [
                *["F0"] * (2 * (p - d) - 1),
                *["F1", "F0"] * d,
                *["F1", "I1", "W"] * (p - d),
                *["F0", "I0", "W", "F1", "I1", "W"] * (m - p),
                *["I0", "I1"] * d,
                *["I0", "W"] * (p - d),
            ]
            for d in range(p)
        ],
        m,
    )


def dual_pipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """DualPipeV: a forward pass of one micro-batch and a backward pass of another in turn, on both stages of a device.

    A device holds at most ``2 p + 1`` stashes of stages half as long. A step takes at most ``6 m + 2 (p - 1)`` of their
    passes where F, I and W take as long, also where a forward pass ends with the backward pass behind it, as kernels
    that overlap both do. Here they run one after the other. After DeepSeek, "DualPipe", 2025, and its "cut-in-half" by
    P. Qi et al., "DualPipe could be better without the Dual", 2025.

    Args:
      num_devices: devices.
      num_microbatches: at least two for each device.

    Raises:
      ScheduleError: if a size is below 1, or there are fewer than ``2 * num_devices`` micro-batches.

    Example:
      >>> dual_pipe_v(4, 10).most_in_flight
      (9, 9, 9, 9)
    """
    check_size(num_devices, num_microbatches)
    p, m = num_devices, num_microbatches
    if m < 2 * p:
        raise ScheduleError(
            f"dual_pipe_v got num_devices={p}, num_microbatches={m}; it needs at least two micro-batches for each "
            f"device: {2 * p}. Use more, or zero_bubble_v, which has tables of all sizes."
        )
    return _v_schedule(
        "dual-pipe-v",
        [
            [
                *["F0"] * (2 * (p - d - 1)),
                *["F0", "F1"] * (d + 1),
                *["I1", "W", "F1"] * (p - d - 1),
                *["F0", "I1", "W", "F1", "I0", "W"] * (m - 2 * p + d + 1),
                *["I1", "W", "F1", "I0", "W"] * (p - d - 1),
                # Of the last backward passes of both stages the first half is whole.
                *itertools.islice(itertools.cycle(["I1", "W", "I0", "W"]), 2 * (d + 1)),
                *itertools.islice(itertools.cycle(["I1", "I0"]), d + 1, 2 * (d + 1)),
                *["W", "I0"] * (p - d - 1),
            ]
            for d in range(p)
        ],
        m,
    )


def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """V-Half: about half of the stashes of 1F1B's first device, and a bubble half as long.

    Passes of a micro-batch go down the V two slots apart and up one apart, forward and backward, and every device
    repeats its slots every six. A device holds at most ``p + 1`` stashes of stages half as long, ``p + 3`` if ``p`` is
    even. A step takes about ``6 m + 3 (p - 1)`` of their passes where F, I and W take as long and ``m >= 2 p``. After
    P. Qi et al., "Pipeline parallelism with controllable memory", NeurIPS 2024, arXiv 2405.15362.

    Args:
      num_devices, num_microbatches: its size.

    Raises:
      ScheduleError: if a size is below 1.

    Example:
      >>> max(v_half(9, 24).most_in_flight), max(zero_bubble_v(9, 24).most_in_flight)
      (10, 18)
    """
    check_size(num_devices, num_microbatches)
    last, gap = num_devices - 1, 4 - 3 * (num_devices % 2)  # with this gap no two passes of a device share a slot
    orders = []
    for d in range(num_devices):
        first = {
            "F0": 2 * d,
            "F1": 3 * last + 1 + gap - d,
            "I1": 3 * last + 2 + gap + 2 * d,
            "I0": 6 * last + 3 + gap - d,
        }
        slots = [(slot + 6 * j, word) for word, slot in first.items() for j in range(num_microbatches)]
        taken = {slot % 6 for slot in first.values()}
        slots += [(slot, "W") for slot in range(max(slots)[0]) if slot % 6 not in taken]
        orders.append([word for _, word in sorted(slots)])
    return _v_schedule("v-half", orders, num_microbatches)


def _v_schedule(name: str, words: Iterable[Iterable[str]], num_microbatches: int) -> Schedule:
    orders = [_order(row, num_microbatches) for row in words]
    return from_orders(name, orders, num_microbatches, 2, v_shape(len(orders)))


def _order(words: Iterable[str], num_microbatches: int) -> list[Action]:
    """Return the actions of a device from words; work for weights that is left comes last."""
    order, done, waiting = list[Action](), Counter[str](), deque[Action]()
    for word in words:
        if word == "W":
            if waiting:
                order.append(waiting.popleft())
        elif done[word] < num_microbatches:
            action = Action(Kind(word[0]), done[word], int(word[1]))
            order.append(action)
            done[word] += 1
            if action.kind is Kind.BACKWARD_INPUT:
                waiting.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
    return [*order, *waiting]
