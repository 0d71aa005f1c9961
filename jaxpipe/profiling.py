"""Seconds of every operator, forward and backward, measured or estimated.

A measured profile runs each operator that does real work (products, convolutions, reductions, control flow) by
itself, once for all operators that are alike; what XLA fuses into its neighbours is charged for the bytes it
writes. An analytic profile is a roofline: the larger of arithmetic over peak rate and bytes over bandwidth.
"""

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.demand import Backward, Linearization, equality_key
from jaxpipe.graph import Graph, Operator, itemsize
from jaxpipe.profile import Edge, Profile
from jaxpipe.work import contraction, weight


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device: floating-point operations and bytes in a second."""

    flops: float
    bytes: float


#: Peak float32 (TF32 where there are tensor cores) and memory rates from the vendors' data sheets, by part of the
#: device kind. The last entry stands for any other device, and for one CPU core.
RATES = (
    ("H200", Rates(494e12, 4.8e12)),
    ("H100", Rates(494e12, 3.35e12)),
    ("A100", Rates(156e12, 1.9e12)),
    ("V100", Rates(15.7e12, 0.9e12)),
    ("L4", Rates(60e12, 0.3e12)),
    ("", Rates(5e10, 1e10)),
)


def rates_of(device: Any) -> Rates:
    """The rates of a device, by its kind."""
    return next(rates for kind, rates in RATES if kind in device.device_kind)


def analytic(linearization: Linearization, rates: Rates) -> Profile:
    """A roofline estimate of every operator of a graph and of its backward program."""
    graph = linearization.source
    return _by_operator(
        "analytic",
        linearization,
        [_roofline([op], graph, rates) for op in graph.operators],
        [_roofline(step.program.operators, step.program, rates) for step in linearization.backward],
    )


def measure(linearization: Linearization, device: Any, repeats: int = 5) -> Profile:
    """Run operators on a device: the fastest of ``repeats`` runs after one that does not count."""
    graph, rates = linearization.source, rates_of(device)
    seen: dict[Hashable, float] = {}
    forward = [_operator_seconds(op, graph, rates, device, repeats, seen) for op in graph.operators]
    backward = [_step_seconds(step, rates, device, repeats, seen) for step in linearization.backward]
    return _by_operator("measured", linearization, forward, backward)


def _by_operator(
    source: str, linearization: Linearization, forward: Sequence[float], backward: Sequence[float]
) -> Profile:
    graph = linearization.source
    position = {t: k for k, op in enumerate(graph.operators) for t in op.outputs}
    spent = [0.0] * len(graph.operators)
    for step, seconds in zip(linearization.backward, backward, strict=True):
        spent[position[step.cotangents_in[0]]] += seconds
    parameter_bytes = [0.0] * len(graph.operators)
    residual_bytes = [0.0] * len(graph.operators)
    edges = []
    unread = set(graph.parameters)
    for k, op in enumerate(graph.operators):
        for t in dict.fromkeys(op.inputs):
            if t in unread:
                unread.remove(t)
                parameter_bytes[k] += _bytes(graph.tensors[t].aval)
            if t in position:
                made_by = position[t]
                output = graph.operators[made_by].outputs.index(t)
                edges.append(Edge(made_by, k, _bytes(graph.tensors[t].aval), output))
    return Profile(
        names=tuple(op.label for op in graph.operators),
        forward_seconds=tuple(forward),
        backward_seconds=tuple(spent),
        parameter_bytes=tuple(parameter_bytes),
        residual_bytes=tuple(residual_bytes),
        edges=tuple(edges),
        source=source,
    )


def _is_heavy(op: Operator) -> bool:
    return weight(op) is None and not op.has_effects


def _operator_seconds(
    op: Operator, graph: Graph, rates: Rates, device: Any, repeats: int, seen: dict[Hashable, float]
) -> float:
    if not _is_heavy(op):
        return _roofline([op], graph, rates)
    avals = [graph.tensors[t].aval for t in op.inputs]
    key = ("forward", equality_key(op, avals))
    if key not in seen:
        seen[key] = _time(op.evaluate, avals, device, repeats)
    return seen[key]


def _step_seconds(step: Backward, rates: Rates, device: Any, repeats: int, seen: dict[Hashable, float]) -> float:
    program = step.program
    if not any(_is_heavy(op) for op in program.operators):
        return _roofline(program.operators, program, rates)
    avals = [program.tensors[t].aval for t in program.inputs]
    key = ("backward", id(program))
    if key not in seen:
        seen[key] = _time(lambda *values: program.evaluate(values), avals, device, repeats)
    return seen[key]


def _time(function: Any, avals: Sequence[Any], device: Any, repeats: int) -> float:
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)).compile()
    with jax.default_device(device):
        values = [_example(a) for a in avals]
        jax.block_until_ready(compiled(*values))
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*values))
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _example(aval: Any) -> jax.Array:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), math.prod(aval.shape)).reshape(aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


def _roofline(operators: Sequence[Operator], graph: Graph, rates: Rates) -> float:
    """The larger of arithmetic and memory time, for each operator that does real work; else the bytes it writes."""
    total = 0.0
    for op in operators:
        written = sum(_bytes(graph.tensors[t].aval) for t in op.outputs)
        cost = weight(op)
        if cost == 0:
            continue
        if cost is not None:
            total += max(cost * sum(graph.tensors[t].size for t in op.outputs) / rates.flops, written / rates.bytes)
            continue
        read = sum(_bytes(graph.tensors[t].aval) for t in op.inputs)
        total += max(equation_flops(op.equation) / rates.flops, (read + written) / rates.bytes)
    return total


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * itemsize(aval.dtype)


def equation_flops(equation: Any) -> float:
    """Floating-point operations of one equation; those of the programs inside it, where it has any."""
    name, params = equation.primitive.name, equation.params
    out = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
    if name in ("dot_general", "conv_general_dilated"):
        return 2.0 * out * contraction(equation)
    inner = _compat.inner_programs(equation)
    if inner:
        times = params.get("length", 1) or 1
        return times * sum(equation_flops(e) for program in inner for e in _compat.open_jaxpr(program)[0].eqns)
    return float(sum(math.prod(a.aval.shape) for a in (*equation.invars, *equation.outvars)))
