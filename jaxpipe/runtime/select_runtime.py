"""The runtime of a plan, and the questions that only one runtime answers; no other module imports ``runtime.spmd``."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from jaxpipe.array_types import Shaped
from jaxpipe.runtime.executable_plan import ExecutablePlan, Update
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.spmd.pair_ticks import makers_in_step
from jaxpipe.runtime.spmd.predictions import lockstep_timeline as lockstep_timeline
from jaxpipe.runtime.spmd.predictions import predict
from jaxpipe.runtime.spmd.spmd_runtime import SpmdRuntime
from jaxpipe.runtime.stages import Program
from jaxpipe.schedules.schedule_makers import ScheduleMaker


#: A plan as programs on devices. A place is what holds variables together: a stage, or a device with several.
Runtime: TypeAlias = MpmdRuntime | SpmdRuntime

#: Stage programs, or one program for all devices.
RuntimeName: TypeAlias = Literal["mpmd", "spmd"]


def runtime_of(planned: ExecutablePlan) -> Runtime:
    """Return the runtime that a plan was made for; nothing is compiled yet."""
    return MpmdRuntime(planned) if planned.plan.runtime == "mpmd" else SpmdRuntime(planned)


def makers_for(runtime: RuntimeName, makers: Sequence[ScheduleMaker]) -> tuple[ScheduleMaker, ...]:
    """Return the makers of the tables that a runtime runs, for the requested ones."""
    return tuple(makers) if runtime == "mpmd" else makers_in_step(makers)


def bytes_by_component(
    runtime: RuntimeName, program: Program, update: Update, batch: Sequence[Shaped]
) -> dict[str, int]:
    """Return the bytes that every device reserves alike, by component; of stage programs, none."""
    return {} if runtime == "mpmd" else predict(program, update, batch)
