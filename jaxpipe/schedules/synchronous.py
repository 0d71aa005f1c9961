"""Schedules that update at the end of a step: devices take turns, or have two stages each in a V.

The turn of a V sends nothing, and loss and gradients of a device's second stage come early, so that work for weights
fills what is left of the bubble.
"""

import itertools

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.ordered import from_words
from jaxpipe.schedules.stage_map import StageMapLike, stage_map, v_shape
from jaxpipe.schedules.table import Schedule, check_size
from jaxpipe.text.units import whole_number


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """All micro-batches forward, then all backward.

    Every stage holds all micro-batches in flight. After Y. Huang et al., "GPipe", NeurIPS 2019.

    Raises:
      ScheduleError: if a size is below 1.
    """
    check_size(num_devices, num_microbatches)
    words = ["F0"] * num_microbatches + ["B0"] * num_microbatches
    return from_words("gpipe", [words] * num_devices, num_microbatches)


def forward_only(
    num_devices: int, num_microbatches: int, num_chunks: int = 1, stage_of: StageMapLike = None
) -> Schedule:
    """All micro-batches forward, nothing backward; with chunks, as many at a time as there are devices."""
    check_size(num_devices, num_microbatches)
    stages = stage_map("forward", stage_of, num_devices, num_chunks)
    turns = -(-num_microbatches // num_devices)
    words = [[f"F{row.index(stage)}" for stage in sorted(row) for _ in range(num_devices)] * turns for row in stages]
    return from_words("forward", words, num_microbatches, num_chunks, stages)


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
    p, m = num_devices, num_microbatches
    return from_words("1f1b", [["F0"] * (p - d) + ["B0", "F0"] * m for d in range(p)], m)


def zero_bubble(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B whose backward work comes in two parts, the one for weights later.

    Stage ``i`` does its weight work ``i`` micro-batches after its input work, so that cotangents reach early stages
    sooner and every stage holds at most as many stashes as there are stages. With F = I = W the bubble is a third of
    1F1B's. After schedule H1 of P. Qi et al., ICLR 2024, arXiv 2401.10241.

    Raises:
      ScheduleError: if a size is below 1.
    """
    check_size(num_devices, num_microbatches)
    p, m = num_devices, num_microbatches
    words = [["F0"] * (p - d) + ["I0", "F0"] * d + ["I0", "W", "F0"] * (m - d) for d in range(p)]
    return from_words("zero-bubble-h1", words, m)


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
    chunks = [k // p % v for k in range(m * v)]
    forward, backward = [f"F{c}" for c in chunks], [f"B{v - 1 - c}" for c in chunks]
    words = []
    for d in range(p):
        ahead = 2 * (p - d - 1) + (v - 1) * p + 1
        turns = itertools.zip_longest(backward, forward[ahead:], fillvalue="F0")
        words.append([*forward[:ahead], *itertools.chain.from_iterable(turns)])
    return from_words(f"interleaved-{v}", words, m, v)


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
    words = [
        [
            *["F0"] * (2 * (p - d) - 1),
            *["F1", "F0"] * d,
            *["F1", "I1", "W"] * (p - d),
            *["F0", "I0", "W", "F1", "I1", "W"] * (m - p),
            *["I0", "I1"] * d,
            *["I0", "W"] * (p - d),
        ]
        for d in range(p)
    ]
    return from_words("zero-bubble-v", words, m, 2, v_shape(p))


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
    words = [
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
    ]
    return from_words("dual-pipe-v", words, m, 2, v_shape(p))


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
    words = []
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
        words.append([word for _, word in sorted(slots)])
    return from_words("v-half", words, num_microbatches, 2, v_shape(num_devices))
