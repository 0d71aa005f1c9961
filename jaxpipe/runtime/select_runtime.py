"""The runtime of a plan: all that is asked of one runtime and not of the other is asked here."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from jaxpipe.array_types import Shaped
from jaxpipe.runtime.executable_plan import ExecutablePlan, Update
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.lockstep_seconds import lockstep_timeline
from jaxpipe.runtime.spmd.pair_ticks import makers_in_step
from jaxpipe.runtime.spmd.predicted_bytes import predict
from jaxpipe.runtime.spmd.spmd_runtime import SpmdRuntime
from jaxpipe.schedules.schedule_makers import ScheduleMaker
from jaxpipe.schedules.simulate import Timeline


#: A plan as programs on devices. A place is what holds variables together: a stage, or a device with several.
Runtime: TypeAlias = MpmdRuntime | SpmdRuntime

#: Stage programs, or one program for all devices.
RuntimeName: TypeAlias = Literal["mpmd", "spmd"]


def runtime_of(planned: ExecutablePlan) -> Runtime:
    """Return the runtime that a plan was made for; nothing is compiled yet."""
    return MpmdRuntime(planned) if planned.plan.runtime == "mpmd" else SpmdRuntime(planned)


def makers_for(runtime: RuntimeName, makers: Sequence[ScheduleMaker]) -> tuple[ScheduleMaker, ...]:
    """Return what makes the tables that a runtime runs, for what was asked."""
    return tuple(makers) if runtime == "mpmd" else makers_in_step(makers)


def timeline_in_step(
    program: Program, work: Sequence[Sequence[float]], send: Callable[[int], float], bytes_per_second: float
) -> Timeline:
    """Return the timeline of one program for all devices; arguments as ``lockstep_timeline`` takes them."""
    return lockstep_timeline(program, work, send, bytes_per_second)


def bytes_by_component(
    runtime: RuntimeName, program: Program, update: Update, batch: Sequence[Shaped]
) -> dict[str, int]:
    """Return the bytes that every device reserves alike, by component; of stage programs, none."""
    return {} if runtime == "mpmd" else predict(program, update, batch)
