"""The choice between a program for each stage and one program for all devices."""

from collections.abc import Sequence

from jaxpipe.errors import PartitionError
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.cuts.placed_stages import Partition, stage_speeds
from jaxpipe.planning.describe_plan import RuntimeChoice, runtime_timeline, stage_seconds, step_seconds
from jaxpipe.planning.dispatch_timeline import call_seconds
from jaxpipe.runtime.program import Program
from jaxpipe.schedules import Schedule
from jaxpipe.text.units import seconds_text


def check_runtime_features(request: Request, schedules: Sequence[Schedule]) -> None:
    """Raise ``PartitionError`` if ``runtime="spmd"`` comes with a feature that only ``"mpmd"`` has."""
    for feature, rule in _only_in_stage_programs(request, schedules).items():
        if request.runtime == "spmd":
            raise PartitionError(
                f"runtime='spmd' with {feature}: {rule}. Pass runtime='mpmd', which has a program for each stage, or "
                "leave runtime= out."
            )


def _only_in_stage_programs(request: Request, schedules: Sequence[Schedule]) -> dict[str, str]:
    """Return the requested features that one program for all devices lacks, each with its rule."""
    features = {
        f"schedule={schedule.name}": "one program updates weights at the end of a step, not between micro-batches"
        for schedule in schedules
        if schedule.versions is not None
    }
    if request.devices_per_stage:
        features[f"devices_per_stage={request.devices_per_stage}"] = (
            "in one program each stage of a pipeline is on one device"
        )
    if request.host is not None:
        features["host_memory="] = "one program keeps stashes in the devices' own memory"
    if request.replica_axis is not None:
        features[f"PlanOptions(axis_name={request.replica_axis.name!r})"] = (
            "in one program each replica computes its micro-batches by itself"
        )
    elif request.submesh.shape:
        axes = ", ".join(map(repr, request.submesh.shape))
        features[f"the mesh axes {axes}"] = "in one program a stage is on one device, not sharded over several"
    if request.options.zero:
        features[f"zero={request.options.zero}"] = "in one program each replica has all of the optimizer state"
    if request.budget is not None:
        features["memory="] = "in one program each device reserves the memory of the largest stage"
    if request.several_sizes:
        features["batches of several sizes"] = "one program has one size"
    return features


def choose_runtime(request: Request, program: Program, partition: Partition) -> RuntimeChoice:
    """Return the requested runtime, or the only one that supports a program, or the faster one.

    Of the two that could do it, ``"auto"`` takes stage programs (``"mpmd"``), which need less memory. It takes one
    program (``"spmd"``) only if the work of every stage on a micro-batch is shorter than the host's calls and sends for
    it, and the step is predicted to be shorter.
    """
    needed = _only_in_stage_programs(request, [program.schedule])
    runtimes = ("mpmd",) if needed else ("mpmd", "spmd")
    predicted = {name: _step(request, program, partition, name) for name in runtimes}
    if request.runtime != "auto":
        return RuntimeChoice(request.runtime, "as asked for", predicted)
    if needed:
        return RuntimeChoice("mpmd", f"only stage programs have {next(iter(needed))}", predicted)
    seconds = zip(stage_seconds(program, partition, own_sums=True), stage_speeds(partition), strict=True)
    work = max((stage.forward + stage.backward) / speed for stage, speed in seconds)
    calls = call_seconds(program.schedule)
    texts = {name: seconds_text(seconds) for name, seconds in predicted.items()}
    compared = f"a stage works up to {seconds_text(work)} on a micro-batch, its calls take {seconds_text(calls)}"
    if work < calls and predicted["spmd"] < predicted["mpmd"]:
        reason = f"{compared}; predicted step {texts['spmd']}, {texts['mpmd']} with a program for each stage"
        return RuntimeChoice("spmd", reason, predicted)
    return RuntimeChoice("mpmd", compared, predicted)


def _step(request: Request, program: Program, partition: Partition, runtime: str) -> float:
    seconds = stage_seconds(program, partition, own_sums=runtime == "mpmd")
    return step_seconds(program, partition, runtime_timeline(request, program, partition, seconds, runtime))
