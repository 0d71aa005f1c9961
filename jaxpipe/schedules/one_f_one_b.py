"""1F1B in pair ticks."""

from jaxpipe.schedules.table import Action, Kind, Schedule, check_size, table


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, then one backward, in every tick.

    Stage ``i`` of ``p`` works forward on micro-batch ``j`` in tick ``i + j`` and backward in tick ``2(p-1) - i + j``.
    When all stages walk in step this loses nothing over the ideal ``(m + p - 1)(F + B)``, and keeps ``2(p-1-i) + 1``
    micro-batches in flight; textbook 1F1B keeps ``p - i``, but in step it waits for the longer of F and B twice.
    After D. Narayanan et al., "PipeDream: Generalized pipeline parallelism for DNN training", SOSP 2019.

    Raises:
      ScheduleError: if a size is below 1.
    """
    check_size(num_stages, num_microbatches)
    work: dict[tuple[int, int], list[Action]] = {}
    for i in range(num_stages):
        for j in range(num_microbatches):
            work.setdefault((i + j, i), []).append(Action(Kind.FORWARD, j))
            work.setdefault((2 * (num_stages - 1) - i + j, i), []).append(Action(Kind.BACKWARD, j))
    return table("1f1b", num_stages, num_microbatches, work)
