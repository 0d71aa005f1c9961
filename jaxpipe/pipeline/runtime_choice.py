"""The choice between a program for each stage and one program for all devices."""

from collections.abc import Sequence

from jaxpipe.errors import PartitionError
from jaxpipe.pipeline.describe import RuntimeChoice, StageSeconds, runtime_timeline, stage_seconds, step_seconds
from jaxpipe.pipeline.program import Program
from jaxpipe.pipeline.request import Request
from jaxpipe.planning.dispatched import call_seconds
from jaxpipe.planning.placed import Partition
from jaxpipe.units import seconds_text


def choose_runtime(request: Request, program: Program, found: Partition) -> RuntimeChoice:
    """Return the runtime that was asked for, or the one that does what a program needs, or the faster one.

    Of the two that could do it, ``"auto"`` takes stage programs (``"mpmd"``), which need less memory. It takes one
    program (``"spmd"``) only if there is no budget, batches have one size, the work of every stage on a micro-batch is
    shorter than the host's calls and sends for it, and the step is predicted to be shorter.

    Raises:
      PartitionError: if the program needs what only the other runtime has.
    """
    needs = {
        f"schedule={program.schedule.name}, which updates weights during a step": program.schedule.versions is not None,
        f"several devices in a stage ({program.teams.widths})": not program.teams.single,
        "host_memory=": request.host is not None,
        "a list of batches of several sizes": request.several_sizes,
    }
    needed = [name for name, wanted in needs.items() if wanted]
    if request.runtime == "spmd" and needed:
        raise PartitionError(
            f"runtime='spmd' was passed with {needed[0]}. One program for all devices has batches of one size, one "
            "device for each stage of a replica, updates at the end of a step, and stashes in the devices' own memory. "
            "Pass runtime='mpmd', or leave runtime= out."
        )
    runtimes = ("mpmd",) if needed else ("mpmd", "spmd")
    predicted = {name: _step(request, program, found, name) for name in runtimes}
    if request.runtime != "auto":
        return RuntimeChoice(request.runtime, "as asked for", predicted)
    if needed:
        return RuntimeChoice("mpmd", f"only stage programs have {needed[0]}", predicted)
    if request.budget is not None:
        return RuntimeChoice("mpmd", "each device needs the memory of its own stage only", predicted)
    work = _longest(stage_seconds(program, found, own_sums=True), found)
    calls = call_seconds(program.schedule)
    texts = {name: seconds_text(seconds) for name, seconds in predicted.items()}
    compared = f"a stage works up to {seconds_text(work)} on a micro-batch, its calls take {seconds_text(calls)}"
    if work < calls and predicted["spmd"] < predicted["mpmd"]:
        reason = f"{compared}; predicted step {texts['spmd']}, {texts['mpmd']} with a program for each stage"
        return RuntimeChoice("spmd", reason, predicted)
    return RuntimeChoice("mpmd", compared, predicted)


def _step(request: Request, program: Program, found: Partition, runtime: str) -> float:
    seconds = stage_seconds(program, found, own_sums=runtime == "mpmd")
    return step_seconds(program, found, runtime_timeline(request, program, found, seconds, runtime))


def _longest(seconds: Sequence[StageSeconds], found: Partition) -> float:
    """The work of the slowest stage on a micro-batch."""
    speed = [min(found.network.speed[d] for d in stage.devices) for stage in found.stages]
    return max((stage.forward + stage.backward) / s for stage, s in zip(seconds, speed, strict=True))
