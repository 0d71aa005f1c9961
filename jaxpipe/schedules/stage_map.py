"""The device of every stage: in turn, in a V, or any other map of one's own.

4 devices, 2 stages on each    in turn       in a V
device 0                       0  4          0  7
device 1                       1  5          1  6
device 2                       2  6          2  5
device 3                       3  7          3  4
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

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
    if stage_of is None or stage_of == ():
        return tuple(tuple(range(d, num_devices * num_chunks, num_devices)) for d in range(num_devices))
    if callable(stage_of):
        stages = tuple(tuple(stage_of(d, c) for c in range(num_chunks)) for d in range(num_devices))
    else:
        stages = tuple(map(tuple, stage_of))
    if [len(row) for row in stages] != [num_chunks] * num_devices:
        raise ScheduleError(
            f"{name}: stage_of={stages} has rows of {[len(row) for row in stages]} stages; there must be a row of "
            f"{num_chunks} for each of {num_devices} devices."
        )
    counts, every = Counter(itertools.chain.from_iterable(stages)), range(num_devices * num_chunks)
    wrong = [
        *(f"stage {s} {n} times" for s, n in counts.items() if n > 1),
        *(f"{s!r}, which is no stage" for s in counts if s not in every),
        *(f"stage {s} not at all" for s in every if s not in counts),
    ]
    if wrong:
        raise ScheduleError(
            f"{name}: stage_of={stages} has {', '.join(wrong)}; each of the stages 0..{every[-1]} must be in it once."
        )
    return stages
