"""Schedules that update weights while micro-batches are in flight.

Each micro-batch is a mini-batch of its own (or each group of them, with double buffers): a stage updates its weights
as soon as its backward work on it is done, and never waits for the others. The weights that the backward work of a
micro-batch uses are those of its forward work, so that each gradient is one of some weights, if not of the newest; or
(``local_accumulation``) the newest, and no older weights are kept.

    weights of 4 stages for 8 micro-batches, as updates that they contain (``Schedule.versions``)
    stage 0  0 0 0 0 1 2 3 4        three updates behind
    stage 1  0 0 0 1 2 3 4 5
    stage 2  0 0 1 2 3 4 5 6
    stage 3  0 1 2 3 4 5 6 7        none behind: as training on one device

After the last micro-batch the pipeline drains; all stages then have the same number of updates.
"""

from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.synchronous import one_f_one_b
from jaxpipe.schedules.table import Kind, Schedule


def pipedream(num_devices: int, num_microbatches: int) -> Schedule:
    """1F1B with an update after every backward pass, and stashed weights.

    Stage ``i`` of ``p`` is ``p - 1 - i`` updates behind and keeps ``p - i`` versions of its weights. After D. Narayanan
    et al., "PipeDream", SOSP 2019.

    Args:
      num_devices, num_microbatches: its size.

    Raises:
      ScheduleError: if a size is below 1.

    Example:
      >>> pipedream(4, 8).versions[1]
      (0, 0, 0, 1, 2, 3, 4, 5)
    """
    base = one_f_one_b(num_devices, num_microbatches)
    return replace(base, name="pipedream", versions=tuple(_newest(base, s) for s in range(num_devices)))


def double_buffered(num_devices: int, num_microbatches: int, *, group: int | None = None) -> Schedule:
    """1F1B with an update after every group of micro-batches, and two versions of the weights (2BW).

    Groups of at least ``num_devices`` micro-batches use the weights that lack the update of the group before them, on
    all stages: ``w[t+1] = w[t] - f(gradient at w[t-1])``. After D. Narayanan et al., "Memory-efficient
    pipeline-parallel DNN training", ICML 2021.

    Args:
      num_devices, num_microbatches: its size.
      group: micro-batches to an update; left out, as many as there are stages.

    Raises:
      ScheduleError: if a size is below 1, or groups are too small or do not divide the micro-batches.

    Example:
      >>> double_buffered(2, 8).versions[0]
      (0, 0, 0, 0, 1, 1, 2, 2)
    """
    group = num_devices if group is None else group
    base = one_f_one_b(num_devices, num_microbatches)
    if group < num_devices or num_microbatches % group:
        raise ScheduleError(
            f"double_buffered got num_devices={num_devices}, num_microbatches={num_microbatches}, "
            f"group={group}; a group has at least as many micro-batches as there are stages, and groups divide all."
        )
    versions = tuple(max(0, j // group - 1) for j in range(num_microbatches))
    return replace(base, name="2bw", versions=(versions,) * num_devices, group=group)


def local_accumulation(num_devices: int, num_microbatches: int, *, group: int | None = None) -> Schedule:
    """1F1B with an update of each stage after every group of its own gradients, and one version of the weights.

    Forward and backward work of a stage use the weights that it has then. Between both work on a micro-batch of stage
    ``i`` of ``p`` there are ``p - 1 - i`` gradients, so at most that number by the group, rounded up, of updates: with
    groups of ``p``, one. What is stored for the backward pass is of the weights of the forward pass; what is computed
    again is of the newest. After I. Elam et al., "Breaking the bubble: Asynchronous pipeline parallel training with
    bounded weight inconsistency", arXiv 2606.07881 (PACI).

    Args:
      num_devices, num_microbatches: its size.
      group: micro-batches to an update; left out, as many as there are stages.

    Raises:
      ScheduleError: if a size is below 1, or groups do not divide the micro-batches.

    Example:
      >>> schedule = local_accumulation(4, 8)
      >>> schedule.versions[0], schedule.staleness
      ((0, 0, 0, 0, 0, 0, 0, 1), (1, 1, 1, 0))
    """
    group = num_devices if group is None else group
    base = one_f_one_b(num_devices, num_microbatches)
    if group < 1 or num_microbatches % group:
        raise ScheduleError(
            f"local_accumulation got num_microbatches={num_microbatches}, group={group}; groups divide all of them."
        )
    versions = tuple(_newest(base, s, group) for s in range(num_devices))
    return replace(base, name="paci", versions=versions, group=group, keeps_versions=False)


def _newest(schedule: Schedule, stage: int, group: int = 1) -> tuple[int, ...]:
    """By micro-batch, how often a stage has updated its weights before its forward work."""
    forward, backward = (schedule.when(stage, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
    return tuple(sum(tick < forward[j] for tick in backward.values()) // group for j in sorted(forward))
