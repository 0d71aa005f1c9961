"""Seconds of operators from the rates of a device: the larger of arithmetic and memory time, for each kernel."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxpipe.array_types import TensorNumber
from jaxpipe.costs.equal_operators import averaged, equal_operators
from jaxpipe.costs.kernels import Body, operator_work, owner_seconds
from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.choose_formats import ResidualPlan, default_plan
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
    source = backward_graph.source
    passes = forward_seconds(backward_graph, plan, rates), backward_seconds(backward_graph, plan, rates)
    kinds = equal_operators(backward_graph)
    forward, backward = (averaged(np.array(each), equal) for each, equal in zip(passes, kinds, strict=True))
    return dataclasses.replace(
        count_costs(backward_graph, plan, held),
        forward_seconds=tuple(forward.tolist()),
        backward_seconds=tuple(backward.tolist()),
        forward_flops=tuple(operator_work(op, source.tensors, rates).flops for op in source.operators),
        source="analytic",
        device_kind=device_kind,
        rates=rates,
    )


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
            results.append(number[t] if codec == KEEP else body.convert(number[t], size, home[t]))
    return owner_seconds(body, results, len(backward_graph.source.operators))


def backward_seconds(backward_graph: BackwardGraph, plan: ResidualPlan, rates: Rates) -> list[float]:
    """Seconds of the backward pass for each operator of the source graph, what is computed again included."""
    graph, source = backward_graph.graph, backward_graph.source
    home = {t: k for k, op in enumerate(source.operators) for t in op.outputs}
    producers = {t: op for op in graph.operators for t in op.outputs}
    body, number, cotangents = Body(rates), dict[TensorNumber, int](), dict[TensorNumber, int]()

    def rematerialize(t: TensorNumber, owner: int) -> int:
        """The value of a tensor of the forward pass: stored, there anyway, or computed again."""
        pending = [t]
        while pending:
            u = pending[-1]
            if u in number:
                pending.pop()
            elif plan.is_stored(u):
                value = body.value(stored_bytes(graph.tensors[u], plan.codecs[u]))
                plain = plan.codecs[u] == KEEP
                number[u] = value if plain else body.convert(value, graph.tensors[u].bytes, owner)
            elif u in producers and (missing := [v for v in producers[u].inputs if v not in number]):
                pending += missing
            elif u in producers:
                body.add(producers[u], graph.tensors, number, owner)
            else:
                body.known(u, graph.tensors, number)
        return number[t]

    for step in reversed(backward_graph.steps):
        owner, program = home[step.cotangents_in[0]], step.program
        given = [rematerialize(t, owner) for t in step.needs]
        given += [body.known(t, source.tensors, cotangents) for t in step.cotangents_in]
        local = dict(zip(program.inputs, given, strict=True))
        for op in program.operators:
            body.add(op, program.tensors, local, owner)
        for t, result in zip(step.cotangents_out, program.outputs, strict=True):
            value = body.known(result, program.tensors, local)
            cotangents[t] = body.join(cotangents[t], value, owner) if t in cotangents else value
    return owner_seconds(body, [cotangents[t] for t in backward_graph.wrt if t in cotangents], len(source.operators))


def count_costs(backward_graph: BackwardGraph, plan: ResidualPlan, held: Iterable[TensorNumber] = ()) -> Profile:
    """A profile without seconds of a program; inputs that are ``held`` anyway are no residuals."""
    graph = backward_graph.source
    position = {t: k for k, op in enumerate(graph.operators) for t in op.outputs}
    size = [tensor.bytes for tensor in graph.tensors]
    nothing = (0.0,) * len(graph.operators)
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
    home, held, residual_bytes = homes(backward_graph), frozenset(held), list(nothing)
    for t in plan.stored:
        if t not in held:
            residual_bytes[home[t]] += stored_bytes(backward_graph.graph.tensors[t], plan.formats[t])
    names = tuple(f"{op.path} {op.label}".strip() for op in graph.operators)
    return Profile(names, nothing, nothing, tuple(parameter_bytes), tuple(residual_bytes), tuple(edges))


def homes(backward_graph: BackwardGraph) -> dict[TensorNumber, int]:
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
