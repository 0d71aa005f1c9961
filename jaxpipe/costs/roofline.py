"""Seconds of operators from the rates of a device: the larger of arithmetic and memory time, for each kernel."""

from collections.abc import Iterable

import numpy as np

from jaxpipe.array_types import TensorNumber
from jaxpipe.costs.equal_operators import averaged, equal_operators
from jaxpipe.costs.kernels import Body, operator_work, owner_seconds
from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.graph.graph import Graph
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.choose_formats import ResidualPlan, default_plan, recomputation
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.stored_formats import stored_bytes
from jaxpipe.targets.rates import Rates


def analytic(
    backward_graph: BackwardGraph, rates: Rates, *, held: Iterable[TensorNumber] = (), device_kind: str = ""
) -> Profile:
    """A roofline estimate of every operator and of its backward program; ``held`` inputs are kept alive anyway.

    Operators of equal work have the mean of what all of them take.
    """
    held = tuple(held)
    plan = default_plan(backward_graph, held=held)
    graph, home = backward_graph.source, homes(backward_graph)
    passes = forward_seconds(backward_graph, plan, rates), backward_seconds(backward_graph, plan, rates)
    kinds = equal_operators(backward_graph)
    forward, backward = (averaged(np.array(each), equal) for each, equal in zip(passes, kinds, strict=True))
    position = {t: k for k, op in enumerate(graph.operators) for t in op.outputs}
    parameter_bytes, residual_bytes = ([0.0] * len(graph.operators) for _ in range(2))
    edges, unread = [], set(graph.parameters)
    for k, op in enumerate(graph.operators):
        for t in dict.fromkeys(op.inputs):
            if t in unread:
                unread.remove(t)
                parameter_bytes[k] += graph.tensors[t].bytes
            if t in position:
                source = position[t]
                edges.append(Edge(source, k, graph.tensors[t].bytes, graph.operators[source].outputs.index(t)))
    for t in plan.stored:
        if t not in held:
            residual_bytes[home[t]] += stored_bytes(backward_graph.graph.tensors[t], plan.formats[t])
    names, flops = names_and_work(graph, rates)
    return Profile(
        names,
        tuple(forward.tolist()),
        tuple(backward.tolist()),
        tuple(parameter_bytes),
        tuple(residual_bytes),
        tuple(edges),
        forward_flops=flops,
        source="analytic",
        device_kind=device_kind,
        rates=rates,
    )


def names_and_work(graph: Graph, rates: Rates) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the names of the operators of a graph in a profile, and their floating-point operations."""
    names = tuple(f"{op.path} {op.label}".strip() for op in graph.operators)
    return names, tuple(operator_work(op, graph.tensors, rates).flops for op in graph.operators)


def forward_seconds(backward_graph: BackwardGraph, plan: ResidualPlan, rates: Rates) -> list[float]:
    """Seconds of each operator of the source graph, in a forward pass that stores what a plan says."""
    graph, home = backward_graph.graph, homes(backward_graph)
    body, number = Body(rates), dict[TensorNumber, int]()
    owner = 0
    for op in graph.operators:
        owner = next((home[t] for t in op.outputs if t in home), owner)
        body.add(op, graph.tensors, number, owner)
    results = [body.known(t, graph.tensors, number) for t in graph.outputs]
    for t, codec in plan.codecs.items():
        if t in number and t not in graph.inputs:
            size = stored_bytes(graph.tensors[t], codec)
            results.append(number[t] if codec == KEEP else body.fuse([number[t]], size, home[t]))
    return owner_seconds(body, results, len(backward_graph.source.operators))


def backward_seconds(backward_graph: BackwardGraph, plan: ResidualPlan, rates: Rates) -> list[float]:
    """Seconds of the backward pass for each operator of the source graph, what is computed again included."""
    graph, source = backward_graph.graph, backward_graph.source
    home = {t: k for k, op in enumerate(source.operators) for t in op.outputs}
    body, number, cotangents = Body(rates), dict[TensorNumber, int](), dict[TensorNumber, int]()
    for step in reversed(backward_graph.steps):
        owner, program = home[step.cotangents_in[0]], step.program
        again, loads = recomputation(graph, step.needs, plan, number)
        for t in loads:
            stored = body.value(stored_bytes(graph.tensors[t], plan.codecs[t]))
            plain = plan.codecs[t] == KEEP
            number[t] = stored if plain else body.fuse([stored], graph.tensors[t].bytes, owner)
        for op in again:
            body.add(op, graph.tensors, number, owner)
        given = [body.known(t, graph.tensors, number) for t in step.needs]
        given += [body.known(t, source.tensors, cotangents) for t in step.cotangents_in]
        local = dict(zip(program.inputs, given, strict=True))
        for op in program.operators:
            body.add(op, program.tensors, local, owner)
        for t, result in zip(step.cotangents_out, program.outputs, strict=True):
            value = body.known(result, program.tensors, local)
            if t in cotangents:
                value = body.fuse([cotangents[t], value], body.sizes[value], owner)
            cotangents[t] = value
    return owner_seconds(body, [cotangents[t] for t in backward_graph.wrt if t in cotangents], len(source.operators))


def homes(backward_graph: BackwardGraph) -> dict[TensorNumber, int]:
    """The operator of the source graph that each tensor of the forward pass counts for.

    What the derivative of an operator adds to the forward pass (a mask, positions in a window), and inputs of the
    program, count for the operator whose backward step needs them.
    """
    home = {t: k for k, op in enumerate(backward_graph.source.operators) for t in op.outputs}
    for step in backward_graph.steps:
        for t in step.needs:
            home.setdefault(t, home[step.cotangents_in[0]])
    for op in reversed(backward_graph.graph.operators):
        for t in op.inputs:
            home.setdefault(t, max((home[u] for u in op.outputs if u in home), default=0))
    return home
