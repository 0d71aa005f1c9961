"""Schedules by name, those that ``schedule="auto"`` compares, and tables of a size from functions that make them."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence

from jaxpipe.errors import PartitionError, ScheduleError
from jaxpipe.schedules.asynchronous import double_buffered, pipedream
from jaxpipe.schedules.gpipe import gpipe
from jaxpipe.schedules.interleaved import interleaved
from jaxpipe.schedules.one_f_one_b import one_f_one_b
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import Schedule
from jaxpipe.schedules.zero_bubble import zero_bubble


#: ``(num_devices, num_microbatches) -> Schedule``.
ScheduleMaker = Callable[[int, int], Schedule]

#: Schedules by name, each made by ``(num_devices, num_microbatches)``.
BY_NAME: dict[str, ScheduleMaker] = {
    "one_f_one_b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "pipedream": pipedream,
    "double_buffered": double_buffered,
}

#: Other names of schedules, in small letters and without ``-``, ``_`` and blanks.
_ALIASES: dict[str, ScheduleMaker] = {
    "1f1b": one_f_one_b,
    "1f1btextbook": one_f_one_b,
    "interleaved1f1b": interleaved,
    "zb": zero_bubble,
    "zbh1": zero_bubble,
    "zerobubbleh1": zero_bubble,
    "2bw": double_buffered,
    "pipedream2bw": double_buffered,
}

#: The tables that ``schedule="auto"`` chooses from; of two that are as fast, the first.
AUTO: tuple[ScheduleMaker, ...] = (one_f_one_b, zero_bubble, interleaved, gpipe)


def plain_name(name: str) -> str:
    """Return a name in small letters, without ``-``, ``_`` and blanks.

    Example:
      >>> plain_name("Zero-Bubble"), plain_name("zero_bubble")
      ('zerobubble', 'zerobubble')
    """
    return re.sub(r"[-_\s]", "", name.lower())


def schedule_named(name: str) -> ScheduleMaker | None:
    """Return the function that makes the schedule of a name, in any spelling; None if no schedule is called so.

    A name is one of ``BY_NAME``, a common alias such as ``"1f1b"`` or ``"zb"``, or one that a plan prints.
    """
    plain = plain_name(name)
    chunks = re.fullmatch(r"interleaved(\d{1,3})", plain)
    if chunks:
        return functools.partial(interleaved, num_chunks=int(chunks[1]))
    return {**_ALIASES, **{plain_name(name): maker for name, maker in BY_NAME.items()}}.get(plain)


def make_schedules(
    makers: Sequence[ScheduleMaker],
    num_devices: int,
    num_microbatches: int,
    stage_replicas: StageReplicas | None = None,
) -> Iterator[Schedule]:
    """Make tables of some size one by one, those left out that there are not for this size; one at least."""
    first, *others = makers
    size = num_devices, num_microbatches
    yield check_schedule(first(*size), *size, stage_replicas)
    for maker in others if num_devices > 1 else ():
        with contextlib.suppress(ScheduleError):
            yield check_schedule(maker(*size), *size, stage_replicas)


def make_replicated_schedules(
    makers: Sequence[ScheduleMaker], stage_replicas: StageReplicas, num_microbatches: int
) -> list[Schedule]:
    """Return tables for stages with several devices; a micro-batch of the table is a round."""
    widths, rounds = " + ".join(map(str, stage_replicas.per_stage)), stage_replicas.rounds(num_microbatches)
    try:
        schedules = list(make_schedules(makers, len(stage_replicas.per_stage), rounds, stage_replicas))
    except (PartitionError, ScheduleError) as error:
        raise type(error)(
            f"{error} With stages on {widths} devices (devices_per_stage=) a micro-batch of a schedule is a round of "
            f"{stage_replicas.round_size}, the least common multiple of these numbers; so "
            f"num_microbatches={num_microbatches} are {rounds} for it."
        ) from None
    runs = [schedule for schedule in schedules if schedule.num_chunks == 1 and schedule.versions is None]
    if not runs:
        how = "updates weights within a step" if schedules[0].versions is not None else "has several stages on a device"
        raise PartitionError(
            f"schedule= gave {schedules[0].name}, which {how}; with stages on {widths} devices (devices_per_stage=) a "
            "schedule must have one stage for each of them, and update at the end of a step. Use 'auto', "
            "'one_f_one_b', 'gpipe' or 'zero_bubble'."
        )
    return runs


def check_schedule(
    schedule: object, num_devices: int, num_microbatches: int, stage_replicas: StageReplicas | None = None
) -> Schedule:
    """Return what ``schedule(num_devices, num_microbatches)`` has given, if it is a valid table of this size.

    With stages on several devices a micro-batch of the table is a round.
    """
    if not isinstance(schedule, Schedule):
        raise PartitionError(
            f"schedule(num_devices={num_devices}, num_microbatches={num_microbatches}) gave a "
            f"{type(schedule).__name__}; it must give a jaxpipe.schedules.Schedule."
        )
    size = schedule.num_devices, schedule.num_microbatches
    if size != (num_devices, num_microbatches):
        if stage_replicas is None:
            fix = f"num_microbatches={size[1]} and a mesh with {size[0]} stages"
        elif size[0] == num_devices:
            fix = f"num_microbatches={size[1] * stage_replicas.round_size}"
        else:
            fix = f"devices_per_stage= for {size[0]} stages"
        raise PartitionError(
            f"schedule(num_devices={num_devices}, num_microbatches={num_microbatches}) gave {schedule.name} for "
            f"{size[0]} stages and {size[1]} micro-batches. Pass {fix}, or another table."
        )
    schedule.validate()
    if not schedule.has_backward:
        raise PartitionError(f"schedule= gave {schedule.name}, which has no backward work; it must train.")
    return schedule
