"""Prices of storage for a program on its devices, from its profile."""

from jaxpipe.costs.kernels import program_cost
from jaxpipe.graph.op_cost import weight
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.cuts.placed_stages import Partition, stage_speeds
from jaxpipe.planning.describe_plan import stage_seconds
from jaxpipe.planning.storage.choose_swaps import Links
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.trace_request import rates_in
from jaxpipe.runtime.stages import Program


def price_storage(program: Program, partition: Partition) -> Prices:
    """Return the prices of computing an operator again and of encoding."""
    graph, profile = program.objective.graph, partition.profile
    _, estimated = program_cost(graph, rates_in(profile))
    profiled = {
        (t, op.name): seconds
        for op, seconds in zip(graph.operators, profile.forward_seconds, strict=True)
        for t in op.outputs
        if weight(op) is None
    }
    scale = sum(profile.forward_seconds) / estimated if estimated else 1.0
    return Prices(
        rates_in(profile), profiled, scale, _slowness(program, partition), longest_microbatch(program, partition)
    )


def swap_links(request: Request, partition: Partition) -> Links:
    """Return the links for swaps. Without a network nobody has said that devices exchange more than messages."""
    host_bytes = 0 if request.host is None or request.host.refused else request.host.budget
    devices = tuple(stage.devices for stage in partition.stages)
    return Links(partition.network, devices, request.network is not None, host_bytes)


def longest_microbatch(program: Program, partition: Partition) -> float:
    """Return the seconds of a micro-batch on the slowest stage."""
    work = zip(stage_seconds(program, partition), _slowness(program, partition), strict=True)
    return max((stage.forward_seconds + stage.backward_seconds) * slow for stage, slow in work)


def _slowness(program: Program, partition: Partition) -> tuple[float, ...]:
    """Return, by stage, how many times slower than the profiled device its own is, or are together."""
    widths = program.stage_replicas.per_stage
    return tuple(
        1 / (widths[program.device(s)] * speed)
        for s, speed in zip(program.stage_numbers, stage_speeds(partition), strict=True)
    )
