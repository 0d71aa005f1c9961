"""Stages of a traced program and their devices: the shortest step with the operators in their order."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.costs.assumed_links import slowest_used
from jaxpipe.costs.network import Network
from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError
from jaxpipe.graph.operator_order import allowed_cuts
from jaxpipe.planning.cuts.balance_chain import balanced
from jaxpipe.planning.cuts.partition_layers import partition_layers
from jaxpipe.planning.cuts.placed_stages import Partition, on_devices, stage_work
from jaxpipe.planning.dispatch_timeline import Dispatching, dispatched_timeline
from jaxpipe.planning.trace_request import Traced
from jaxpipe.runtime.stages import variable_spans
from jaxpipe.schedules import Schedule
from jaxpipe.schedules.replicas import StageReplicas
from jaxpipe.sharding.mesh_axes import stage_places
from jaxpipe.text.progress import phase


#: How much longer a step may be than the shortest, if that makes less to send: profiles are no better than this.
CUT_SLACK = 0.02

#: By what share a step must be shorter with the second answer.
SHORTER = 0.01

#: Bytes per second from a device to itself.
NO_LINK = 1e12


@phase("cut")
def place_stages(
    traced: Traced,
    profile: Profile,
    replicate: bool | tuple[int, ...],
    num_chunks: int = 1,
    straight: Partition | None = None,
) -> tuple[Partition, ...]:
    """Return stages, ``num_chunks`` on each device in turn, and their devices: several if ``replicate`` says so.

    With one device for each stage there may be a second answer, balanced whatever the step's beginning and end take.
    For one program, whose devices walk in step, it is the only one. Several stages on a device follow the devices of
    ``straight``, the answer for one stage on each, which is searched for if it is left out.
    """
    request, objective = traced.request, traced.objective
    network = request.network or slowest_used(traced.links, request.mesh)
    spans = tuple(itertools.chain.from_iterable(variable_spans(objective).values()))
    profile = replace(profile, together=tuple(dict.fromkeys((*profile.together, *spans))))
    places = sum(allowed_cuts(objective.graph, spans)[1:-1])
    stages = len(replicate) if isinstance(replicate, tuple) else 1 if replicate else request.num_devices * num_chunks
    if stages > places + 1:
        raise PartitionError(
            f"The plan needs {stages} stages, but the model has {len(profile.names)} "
            f"operators with {places} places where it may be cut, so it makes between 1 and {places + 1} stages. "
            f"{_obstacle(traced)}".rstrip()
        )
    asked = {
        "num_microbatches": traced.batching.num_microbatches * request.replicas,
        "reorder": False,
        "slack": CUT_SLACK,
        "starts": tuple(traced.cuts.values()),
    }
    if stages <= len(traced.cuts) and replicate is not True:
        chunks = -(-(len(traced.cuts) + 1) * num_chunks // stages)
        more = "" if replicate else f", or use a schedule with more stages on a device, such as 'interleaved {chunks}'"
        raise PartitionError(
            f"cuts= has {len(traced.cuts)} names, which make at least {len(traced.cuts) + 1} stages, and there are "
            f"{stages}: {num_chunks} on each of {stages // num_chunks} devices, or groups of devices. Leave out "
            f"{len(traced.cuts) + 1 - stages} of the names{more}."
        )
    if replicate:
        return (partition_layers(profile, network, replicate=replicate, idle=False, **asked),)
    asked["replicate"] = request.replicas
    if straight is None:
        free = {} if num_chunks == 1 else {"starts": ()}
        straight = partition_layers(profile, network, num_stages=request.num_devices, **{**asked, **free})
        if request.network is None:
            straight = on_devices(straight, stage_places(request.mesh), traced.links)  # all are alike: each stays
    if num_chunks > 1:
        # Cuts are those for devices that are all alike, as every device has stages from each part of the program.
        groups = num_chunks * [stage.devices for stage in straight.stages]
        bandwidth = straight.network.bandwidth
        rates = bandwidth[np.isfinite(bandwidth) & (bandwidth > 0)]
        copies = Network.uniform(len(groups) * len(groups[0]), float(rates.min()) if rates.size else NO_LINK)
        chunks = partition_layers(straight.profile, copies, num_stages=len(groups), **asked)
        return (on_devices(chunks, groups, straight.network),)
    even = balanced(straight)
    return (even,) if request.runtime == "spmd" else tuple(dict.fromkeys((straight, even)))


def best_placed(schedule: Schedule, partitions: Sequence[Partition]) -> int:
    """Return the number of the partition with the shortest step of a schedule, half of backward work for weights."""
    if len(partitions) == 1:
        return 0

    def seconds(partition: Partition) -> float:
        forward, backward = stage_work(partition)
        half = [b / 2 for b in backward]
        sends = [stage.communication_seconds / 2 for stage in partition.stages]
        devices = range(schedule.num_devices)
        dispatching = Dispatching([(s, s) for s in sends], [(0,) for _ in devices], StageReplicas((1,) * len(devices)))
        return dispatched_timeline(schedule, (forward, half, half), dispatching).makespan

    first, second = map(seconds, partitions)
    return int(second < (1 - SHORTER) * first)


def _obstacle(traced: Traced) -> str:
    """Return why layers are one operator, or which variable keeps most operators in one stage."""
    objective, model = traced.objective, traced.model
    if traced.notes and not model.cuts:
        return f"{'; '.join(traced.notes)}."
    spans = [(high - low, t, low, high) for t, groups in variable_spans(objective).items() for low, high in groups]
    length, t, low, high = max(spans, default=(0, None, 0, 0))
    if t is None or length < 2:
        return ""
    names = dict(zip((*objective.parameters, *objective.state), (*model.parameters, *model.state), strict=True))
    path = objective.graph.operators[low].path, objective.graph.operators[high].path
    return (
        f"Variable {names[t].name} is used from operator {low} ({path[0]}) to operator {high} ({path[1]}), and a "
        "variable lives in one stage, with all that is between its uses. Untie it, or use fewer stages."
    )
