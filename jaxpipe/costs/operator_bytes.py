"""Costs of a program's operators besides time: parameters, residuals, and what is read of each other's results."""

from collections.abc import Iterable

from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.choose_formats import ResidualPlan
from jaxpipe.residuals.stored_formats import stored_bytes


def count_costs(backward_graph: BackwardGraph, plan: ResidualPlan, held: Iterable[int] = ()) -> Profile:
    """A profile of a program without seconds.

    Args:
      backward_graph: the program and what its backward pass needs.
      held: inputs that are kept alive anyway (tensor numbers): they are no residuals.
    """
    graph = backward_graph.source
    position = {t: k for k, op in enumerate(graph.operators) for t in op.outputs}
    size = [tensor.bytes for tensor in graph.tensors]
    nothing = [0.0] * len(graph.operators)
    parameter_bytes = list(nothing)
    edges = []
    unread = set(graph.parameters)
    for k, op in enumerate(graph.operators):
        for t in dict.fromkeys(op.inputs):
            if t in unread:
                unread.remove(t)
                parameter_bytes[k] += size[t]
            if t in position:
                source = position[t]
                edges.append(Edge(source, k, size[t], graph.operators[source].outputs.index(t)))
    return Profile(
        names=tuple(f"{op.path} {op.label}".strip() for op in graph.operators),
        forward_seconds=tuple(nothing),
        backward_seconds=tuple(nothing),
        parameter_bytes=tuple(parameter_bytes),
        residual_bytes=tuple(_residual_bytes(backward_graph, plan, frozenset(held))),
        edges=tuple(edges),
    )


def homes(backward_graph: BackwardGraph) -> dict[int, int]:
    """The operator of the source graph that each tensor of the forward pass counts for.

    What the derivative of an operator adds to the forward pass (a mask, positions in a window), and inputs of the
    program, count for the operator whose backward step needs them.
    """
    graph = backward_graph.graph
    home = {t: k for k, op in enumerate(backward_graph.source.operators) for t in op.outputs}
    for step in backward_graph.steps:
        for t in step.needs:
            home.setdefault(t, home[step.cotangents_in[0]])
    for op in reversed(graph.operators):
        for t in op.inputs:
            home.setdefault(t, max((home[u] for u in op.outputs if u in home), default=0))
    return home


def _residual_bytes(backward_graph: BackwardGraph, plan: ResidualPlan, held: frozenset[int]) -> list[float]:
    """Bytes that a storage plan keeps of each operator's results."""
    home = homes(backward_graph)
    total = [0.0] * len(backward_graph.source.operators)
    for t in plan.stored:
        if t not in held:
            total[home[t]] += stored_bytes(backward_graph.graph.tensors[t], plan.formats[t])
    return total
