"""The runtime of a plan."""

from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.interface import Runtime
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.runtime.spmd.spmd_runtime import SpmdRuntime


def runtime_of(planned: ExecutablePlan) -> Runtime:
    """Return the runtime that a plan was made for; nothing is compiled yet."""
    return MpmdRuntime(planned) if planned.plan.runtime == "mpmd" else SpmdRuntime(planned)
