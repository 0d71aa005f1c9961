"""Seconds of operators from the rates of a device: the larger of arithmetic and memory time, for each kernel."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxpipe import _compat
from jaxpipe.array_types import Equation, TensorNumber
from jaxpipe.costs.device_rates import Rates
from jaxpipe.costs.kernels import Body, elementwise_work, owner_seconds, product_flops, product_rate
from jaxpipe.costs.profile import Edge, Profile
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.op_cost import is_product, weight
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.residuals.choose_formats import ResidualPlan, default_plan
from jaxpipe.residuals.stored_formats import Format, stored_bytes


def analytic(
    backward_graph: BackwardGraph, rates: Rates, *, held: Iterable[TensorNumber] = (), device_kind: str = ""
) -> Profile:
    """A roofline estimate of every operator and of its backward program; ``held`` inputs are kept alive anyway."""
    held = tuple(held)
    plan = default_plan(backward_graph, held=held)
    operators = backward_graph.source.operators
    return dataclasses.replace(
        count_costs(backward_graph, plan, held),
        forward_seconds=tuple(forward_seconds(backward_graph, plan, rates)),
        backward_seconds=tuple(backward_seconds(backward_graph, plan, rates)),
        forward_flops=tuple(flops(op, backward_graph.source) for op in operators),
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
        body.add(op, graph, number, owner)
    results = [body.known(t, graph.tensors, number) for t in graph.outputs]
    for t in plan.stored:
        if t in number and t not in graph.inputs:
            kept = plan.formats[t].format is Format.KEEP
            size = stored_bytes(graph.tensors[t], plan.formats[t])
            results.append(number[t] if kept else body.convert(number[t], size, home[t]))
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
                value = body.value(stored_bytes(graph.tensors[u], plan.formats[u]))
                plain = plan.formats[u].format is Format.KEEP
                number[u] = value if plain else body.convert(value, graph.tensors[u].bytes, owner)
            elif u in producers and (missing := [v for v in producers[u].inputs if v not in number]):
                pending += missing
            elif u in producers:
                body.add(producers[u], graph, number, owner)
            else:
                body.known(u, graph.tensors, number)
        return number[t]

    for step in reversed(backward_graph.steps):
        owner, program = home[step.cotangents_in[0]], step.program
        given = [rematerialize(t, owner) for t in step.needs]
        given += [body.known(t, source.tensors, cotangents) for t in step.cotangents_in]
        local = dict(zip(program.inputs, given, strict=True))
        for op in program.operators:
            body.add(op, program, local, owner)
        for t, result in zip(step.cotangents_out, program.outputs, strict=True):
            value = body.known(result, program.tensors, local)
            cotangents[t] = body.join(cotangents[t], value, owner) if t in cotangents else value
    return owner_seconds(body, [cotangents[t] for t in backward_graph.wrt if t in cotangents], len(source.operators))


def seconds(operators: Sequence[Operator], graph: Graph, rates: Rates) -> float:
    """The larger of arithmetic and memory time, for each operator that does real work; else the bytes it writes.

    This is what operators take that run again here and there, each by itself: whole programs take less (``kernels``).
    """
    total = 0.0
    for op in operators:
        moved = sum(graph.tensors[t].bytes for t in op.outputs)
        if weight(op) is None:
            moved += sum(graph.tensors[t].bytes for t in op.inputs)
        if weight(op) != 0:
            rate = product_rate(op, rates) if is_product(op) else rates.element_flops
            total += max(flops(op, graph) / rate, moved / rates.bytes)
    return total


def flops(op: Operator, graph: Graph) -> float:
    """Floating-point operations of one operator; of cheap arithmetic, those for each element it writes."""
    cost = elementwise_work(op)
    if cost is None:
        return equation_flops(op.equation)
    return float(cost * sum(graph.tensors[t].size for t in op.outputs))


def equation_flops(equation: Equation) -> float:
    """Floating-point operations of one equation; those of the programs inside it, where it has any."""
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated"):
        return product_flops(equation)
    inner = _compat.inner_programs(equation)
    if inner:
        times = params.get("length", 1) or 1
        return times * sum(equation_flops(e) for program in inner for e in _compat.open_jaxpr(program)[0].eqns)
    return float(sum(math.prod(a.aval.shape) for a in (*equation.invars, *equation.outvars)))


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
