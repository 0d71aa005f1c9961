"""The features that one program for all devices lacks."""

from collections.abc import Sequence

from jaxpipe.errors import PartitionError
from jaxpipe.planning.check_request import Request
from jaxpipe.schedules import Schedule


def check_runtime_features(request: Request, schedules: Sequence[Schedule]) -> None:
    """Raise ``PartitionError`` if ``runtime="spmd"`` comes with a feature that only ``"mpmd"`` has."""
    if request.runtime == "spmd":
        for feature, rule in _only_in_stage_programs(request, schedules).items():
            raise PartitionError(
                f"runtime='spmd' with {feature}: {rule}. Pass runtime='mpmd', the default: a program for each stage."
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
    if request.submesh.shape:
        axes = ", ".join(map(repr, request.submesh.shape))
        features[f"the mesh axes {axes}"] = "in one program a stage is on one device, not sharded over several"
    if request.options.zero:
        features[f"zero={request.options.zero}"] = "in one program each replica has all of the optimizer state"
    if request.budget is not None:
        features["memory="] = "in one program each device reserves the memory of the largest stage"
    if request.several_sizes:
        features["batches of several sizes"] = "one program has one size"
    return features
