"""GPipe: all forwards, then all backwards; and its forward half, for evaluation."""

from jaxpipe.schedules.ordered import from_orders
from jaxpipe.schedules.stage_map import StageMapLike, stage_map
from jaxpipe.schedules.table import Action, Kind, Schedule, check_size


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """All micro-batches forward, then all backward.

    Every stage holds all micro-batches in flight. After Y. Huang et al., "GPipe", NeurIPS 2019.

    Raises:
      ScheduleError: if a size is below 1.
    """
    check_size(num_devices, num_microbatches)
    order = [Action(kind, j) for kind in (Kind.FORWARD, Kind.BACKWARD) for j in range(num_microbatches)]
    return from_orders("gpipe", [order] * num_devices, num_microbatches)


def forward_only(
    num_devices: int, num_microbatches: int, num_chunks: int = 1, stage_of: StageMapLike = None
) -> Schedule:
    """All micro-batches forward, nothing backward; with chunks, as many at a time as there are devices."""
    check_size(num_devices, num_microbatches)
    stages = stage_map("forward", stage_of, num_devices, num_chunks)
    groups = [range(j, min(j + num_devices, num_microbatches)) for j in range(0, num_microbatches, num_devices)]
    orders = [
        [Action(Kind.FORWARD, j, row.index(stage)) for group in groups for stage in sorted(row) for j in group]
        for row in stages
    ]
    return from_orders("forward", orders, num_microbatches, num_chunks, stages)
