"""The device of every stage: in turn, in a V, or any other map of one's own.

4 devices, 2 stages on each    in turn       in a V
device 0                       0  4          0  7
device 1                       1  5          1  6
device 2                       2  6          2  5
device 3                       3  7          3  4
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jaxpipe.errors import ScheduleError


#: ``stage_of[device][chunk]`` is a stage.
StageMap = tuple[tuple[int, ...], ...]

#: A map as users write it: rows of stages, a function of device and chunk, or None where devices take turns.
StageMapLike = Sequence[Sequence[int]] | Callable[[int, int], int] | None


def v_shape(num_devices: int) -> StageMap:
    """Return the map of a V: device ``d`` of ``p`` has the stages ``d`` and ``2 p - 1 - d``.

    Args:
      num_devices: devices.

    Example:
      >>> v_shape(2)
      ((0, 3), (1, 2))
    """
    return tuple((d, 2 * num_devices - 1 - d) for d in range(num_devices))


def stage_map(name: str, stage_of: StageMapLike, num_devices: int, num_chunks: int) -> StageMap:
    """Return the stages of each device by chunk; without a map, those of devices that take turns.

    Raises:
      ScheduleError: unless each stage is one chunk of one device.

    Example:
      >>> stage_map("drawn", None, 2, 2), stage_map("drawn", lambda device, chunk: 2 * device + chunk, 2, 2)
      (((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """
    if stage_of is None or (isinstance(stage_of, tuple) and not stage_of):
        return tuple(tuple(range(d, num_devices * num_chunks, num_devices)) for d in range(num_devices))
    try:
        rows: Any = stage_of
        if callable(stage_of):
            rows = [[stage_of(d, c) for c in range(num_chunks)] for d in range(num_devices)]
        stages = tuple(tuple(map(operator.index, row)) for row in rows)
    except TypeError as error:
        raise ScheduleError(
            f"{name}: stage_of={stage_of!r} ({error}); it must be rows of whole numbers, one for each device, or a "
            "function of device and chunk."
        ) from error
    lengths = [len(row) for row in stages]
    if lengths != [num_chunks] * num_devices:
        raise ScheduleError(
            f"{name}: stage_of= has {_listed(lengths)} stages on its devices; there must be {num_chunks} on each of "
            f"{num_devices}."
        )
    devices: dict[int, list[int]] = {s: [] for s in range(num_devices * num_chunks)}
    for d, s in ((d, s) for d, row in enumerate(stages) for s in row):
        if s not in devices:
            raise ScheduleError(f"{name}: stage_of= has {s!r} on device {d}; stages are 0..{len(devices) - 1}.")
        devices[s].append(d)
    wrong = [f"stage {s} on {_listed(rows, ' and ') or 'none'}" for s, rows in devices.items() if len(rows) != 1]
    if wrong:
        raise ScheduleError(
            f"{name}: stage_of=, by device, has {_listed(wrong)}; each of the stages 0..{len(devices) - 1} must be on "
            "one device."
        )
    return stages


def _listed(values: Sequence[object], between: str = ", ") -> str:
    return between.join([*map(str, values[:4]), *["..."] * (len(values) > 4)])
