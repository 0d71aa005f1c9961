"""Costs of a stage whose work a group of devices shares: a profile of one device, divided, with what they exchange."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import TensorNumber
from jaxpipe.costs.network import Link, Network
from jaxpipe.costs.profile import Profile
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.sharding_propagation import Propagated
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.sharding.mesh_axes import Submesh, axes_by_dimension


def groups_of(network: Network, mesh: Mesh, outer: Mesh, submesh: Submesh) -> tuple[Network, Link]:
    """Return the network of groups of devices, numbered as in ``outer``, and the slowest link within one.

    Devices of two groups exchange messages in pairs, those at the same places: the slowest pair counts.
    """
    position = {d: k for k, d in enumerate(mesh.devices.flat)}
    groups = np.array([[position[d] for d in submesh.group(first)] for first in outer.devices.flat])
    between = groups[:, None, :], groups[None, :, :]
    rates, delays = zip(*map(network.slowest_link, groups), strict=True)
    bandwidth, latency = network.bandwidth[between].min(-1), network.latency[between].max(-1)
    np.fill_diagonal(bandwidth, 0.0)
    np.fill_diagonal(latency, 0.0)
    fields = "speed", "memory_bytes", "host_bandwidth_bytes_per_second"
    slowest = {field: np.array(getattr(network, field))[groups].min(1) for field in fields}
    slowest["host_latency_seconds"] = np.array(network.host_latency_seconds)[groups].max(1)
    names = tuple(network.names[group[0]] for group in groups)
    return Network(bandwidth, latency, names=names, **slowest), Link(min(rates), max(delays))  # type: ignore[arg-type]


def divided(profile: Profile, objective: MicrobatchProgram, split: Propagated, submesh: Submesh, link: Link) -> Profile:
    """Return a profile of groups of devices that share each operator's work, as ``split`` says."""
    graph, shape = objective.graph, submesh.shape

    def shards(t: TensorNumber) -> int:
        return submesh.shards(split.specs.get(t, P()))

    forward, backward, parameters, residuals = [], [], [], []
    unread = set(graph.parameters)
    for k, op in enumerate(graph.operators):
        parts = math.prod(shape[axis] for axis in split.products.get(k, ()))
        sums = _sums(op, graph, split.specs, shape)
        seconds = [link.all_reduce_seconds(size / shards(t), parts) if size else 0.0 for t, size, parts in sums]
        ahead = sum(s for s, (t, _, _) in zip(seconds, sums, strict=True) if t in op.outputs)
        forward.append(profile.forward_seconds[k] / parts + ahead)
        backward.append(profile.backward_seconds[k] / parts + sum(seconds) - ahead)
        first = [t for t in dict.fromkeys(op.inputs) if t in unread]
        unread.difference_update(first)
        parameters.append(sum(graph.tensors[t].bytes / shards(t) for t in first))
        residuals.append(profile.residual_bytes[k] / max(map(shards, op.outputs), default=1))
    edges = [
        edge._replace(bytes=edge.bytes / shards(graph.operators[edge.source].outputs[edge.output]))
        for edge in profile.edges
    ]
    return replace(
        profile,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        parameter_bytes=tuple(parameters),
        residual_bytes=tuple(residuals),
        edges=tuple(edges),
    )


def _sums(
    op: Operator, graph: Graph, specs: Mapping[TensorNumber, P], shape: Mapping[str, int]
) -> list[tuple[TensorNumber, int, int]]:
    """Return the sums over devices in a product and its derivatives: a tensor, its bytes, the number of devices."""
    if op.name != "dot_general" or len(op.inputs) != 2:
        return []
    (left, right), (left_batch, right_batch) = op.params["dimension_numbers"]
    (a, b), (out,) = op.inputs, op.outputs
    ndims = [len(graph.tensors[t].shape) for t in (a, b)]
    axes = [axes_by_dimension(specs.get(t, P()), n) for t, n in zip((a, b), ndims, strict=True)]
    result = _all(axes_by_dimension(specs.get(out, P()), len(graph.tensors[out].shape)))
    inner = _all([axes[0][d] for d in left]) | _all([axes[1][d] for d in right])
    free = [
        _all([axes[0][d] for d in range(ndims[0]) if d not in (*left, *left_batch)]),
        _all([axes[1][d] for d in range(ndims[1]) if d not in (*right, *right_batch)]),
    ]
    sums = [(out, inner - result), (a, (free[1] & result) - _all(axes[0])), (b, (free[0] & result) - _all(axes[1]))]
    return [(t, graph.tensors[t].bytes, math.prod(shape[x] for x in over)) for t, over in sums if over]


def _all(dimensions: Iterable[tuple[str, ...]]) -> set[str]:
    return {axis for axes in dimensions for axis in axes}
