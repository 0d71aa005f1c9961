"""The runtime of a plan."""

from jaxpipe.pipeline.planned import Planned
from jaxpipe.runtime.interface import Runtime
from jaxpipe.runtime.mpmd.runtime import MpmdRuntime
from jaxpipe.runtime.spmd import SpmdRuntime


def runtime_of(planned: Planned) -> Runtime:
    """Return the runtime that a plan was made for; nothing is compiled yet."""
    return MpmdRuntime(planned) if planned.plan.runtime == "mpmd" else SpmdRuntime(planned)
