"""Schedules by name, those that ``schedule="auto"`` compares, and tables of a size from functions that make them."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxpipe.errors import PartitionError, ScheduleError
from jaxpipe.schedules import synchronous
from jaxpipe.schedules.asynchronous import double_buffered, local_accumulation, pipedream
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.schedules.table import Schedule


#: ``(num_devices, num_microbatches) -> Schedule``.
ScheduleMaker = Callable[[int, int], Schedule]


class BuiltIn(NamedTuple):
    """A built-in schedule: its function, further names in any spelling, and whether ``schedule="auto"`` compares it."""

    maker: ScheduleMaker
    names: tuple[str, ...] = ()
    in_auto: bool = False


#: Built-in schedules by name, a line for each; of those that are as fast, "auto" takes the first.
BUILT_IN: dict[str, BuiltIn] = {
    "one_f_one_b": BuiltIn(synchronous.one_f_one_b, ("1f1b", "1f1b-textbook"), in_auto=True),
    "zero_bubble": BuiltIn(synchronous.zero_bubble, ("zb", "zb-h1", "zero-bubble-h1"), in_auto=True),
    "interleaved": BuiltIn(synchronous.interleaved, ("interleaved-1f1b",), in_auto=True),
    "gpipe": BuiltIn(synchronous.gpipe, in_auto=True),
    "zero_bubble_v": BuiltIn(synchronous.zero_bubble_v, ("zbv", "zb-v", "zbv-zero-bubble"), in_auto=True),
    "dual_pipe_v": BuiltIn(synchronous.dual_pipe_v),
    "v_half": BuiltIn(synchronous.v_half),
    "pipedream": BuiltIn(pipedream),
    "double_buffered": BuiltIn(double_buffered, ("2bw", "pipedream-2bw")),
    "local_accumulation": BuiltIn(local_accumulation, ("paci",)),
}

#: Their functions by name.
BY_NAME: dict[str, ScheduleMaker] = {name: schedule.maker for name, schedule in BUILT_IN.items()}

#: Those that ``schedule="auto"`` chooses from.
AUTO: tuple[ScheduleMaker, ...] = tuple(schedule.maker for schedule in BUILT_IN.values() if schedule.in_auto)


def plain_name(name: str) -> str:
    """Return a name in small letters, without ``-``, ``_`` and blanks.

    Example:
      >>> plain_name("Zero-Bubble"), plain_name("zero_bubble")
      ('zerobubble', 'zerobubble')
    """
    return re.sub(r"[-_\s]", "", name.lower())


def schedule_named(name: str) -> ScheduleMaker | None:
    """Return the function that makes the schedule of a name, in any spelling; None if no schedule is called so.

    A name is one of ``BUILT_IN``, a common one such as ``"1f1b"`` or ``"zb"``, or one that a plan prints.
    """
    plain = plain_name(name)
    chunks = re.fullmatch(r"interleaved(\d{1,3})", plain)
    if chunks:
        return functools.partial(synchronous.interleaved, num_chunks=int(chunks[1]))
    named = ((known, x.maker) for name, x in BUILT_IN.items() for known in (name, *x.names))
    return next((maker for known, maker in named if plain_name(known) == plain), None)


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
    runs = [x for x in schedules if x.num_chunks == 1 and x.takes_turns and x.versions is None]
    if not runs:
        how = "updates weights within a step" if schedules[0].versions is not None else "has several stages on a device"
        raise PartitionError(
            f"schedule= gave {schedules[0].name}, which {how}; with stages on {widths} devices (devices_per_stage=) a "
            "schedule must have one stage for each of them, in order, and update at the end of a step. Use 'auto', "
            "'one_f_one_b', 'gpipe' or 'zero_bubble'."
        )
    return runs


def check_schedule(
    schedule: object, num_devices: int, num_microbatches: int, stage_replicas: StageReplicas | None = None
) -> Schedule:
    """Return the result of ``schedule(num_devices, num_microbatches)`` if it is a valid table of this size.

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
