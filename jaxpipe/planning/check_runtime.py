"""The features that one program for all devices lacks."""

from collections.abc import Sequence

import jax

from jaxpipe.errors import PartitionError
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.planning.check_request import Request
from jaxpipe.schedules import Schedule


def check_runtime_features(request: Request, schedules: Sequence[Schedule]) -> None:
    """Raise ``PartitionError`` if ``runtime="spmd"`` comes with a feature that only ``"mpmd"`` has."""
    if request.runtime != "spmd":
        return
    features = {
        f"schedule={schedule.name}": "one program updates weights at the end of a step, not between micro-batches"
        for schedule in schedules
        if schedule.versions is not None
    }
    features |= {
        f"schedule={schedule.name}": "the devices of one program pass messages around a ring, where they take turns"
        for schedule in schedules
        if not schedule.takes_turns
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
    for feature, rule in features.items():
        raise PartitionError(
            f"runtime='spmd' with {feature}: {rule}. Pass runtime='mpmd', the default: a program for each stage."
        )


def check_model_features(request: Request, model: BoundModel) -> None:
    """Raise ``PartitionError`` if a model has variables that what was requested cannot train."""
    names = [model.parameters[k].name for k in sorted(model.overwritten)][:1]
    rows = [v.name for v, axis in zip(model.state, model.examples, strict=True) if axis is not None][:1]
    keys = [v.name for v in model.state if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)][:1]
    reasons = {
        "becomes its gradient, and one program adds up gradients": names,
        "has a row for each example": rows,
        "is a typed random key (jax.random.key_data makes numbers of it)": keys,
    }
    for reason, refused in reasons.items():
        if request.runtime == "spmd" and refused:
            raise PartitionError(
                f"runtime='spmd' with the variable {refused[0]}: it {reason}, which only stage programs keep apart. "
                "Leave runtime= out."
            )
    if names and request.exchange is not None:
        raise PartitionError(
            f"gradient_exchange=block_sparse(...) with the variable {names[0]}: it becomes its gradient, of which no "
            "block may be left out. Use gradient_exchange='dense'."
        )
    if rows and request.replica_axis is not None:
        raise PartitionError(
            f"PlanOptions(axis_name={request.replica_axis.name!r}) with the state variable {rows[0]}, which has a row "
            "for each example of a batch: a micro-batch of several replicas has no rows side by side. Leave out one."
        )
    if rows and request.several_sizes:
        raise PartitionError(
            f"Batches of several sizes with the state variable {rows[0]}, which has a row for each example of a batch: "
            "it has one size. Pass batches of one size."
        )
