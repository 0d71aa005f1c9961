"""Seconds of operators from the peak rates of a device: the larger of arithmetic and memory time."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe import _compat
from jaxpipe.demand import Linearization
from jaxpipe.errors import ProfileError
from jaxpipe.graph import Graph, Operator
from jaxpipe.profile import Profile
from jaxpipe.profiling.costs import by_operator, count_costs
from jaxpipe.work import contraction, weight


@dataclass(frozen=True)
class Rates:
    """Peak rates of a device: floating-point operations and bytes in a second."""

    flops: float
    bytes: float


#: Peak float32 (dense TF32 where there are tensor cores) and memory rates from the vendors' data sheets, by the word in
#: a device kind that names the model.
RATES = {
    "H200": Rates(494e12, 4.8e12),
    "H100": Rates(494e12, 3.35e12),
    "A100": Rates(156e12, 1.9e12),
    "V100": Rates(15.7e12, 0.9e12),
    "L40S": Rates(183e12, 0.864e12),
    "L4": Rates(60e12, 0.3e12),
    "T4": Rates(8.1e12, 0.32e12),
}

#: What any other device is taken for, and one CPU core: of the right order for the proportions of operators.
OTHER = Rates(5e10, 1e10)


def rates_of(device: Any) -> Rates:
    """The rates of a device, by its kind."""
    return next((RATES[word] for word in re.findall(r"\w+", device.device_kind) if word in RATES), OTHER)


def rates_of_kind(kind: str) -> Rates:
    """The rates of the devices of a kind, such as ``"H100"`` or ``"cpu"``.

    Raises:
      ProfileError: if they are not known.

    Example:
      >>> rates_of_kind("V100")
      Rates(flops=15700000000000.0, bytes=900000000000.0)
    """
    rates = {**RATES, "cpu": OTHER}
    if kind not in rates:
        raise ProfileError(
            f"device={kind!r}: its peak rates are not known, only those of {', '.join(rates)}. Use the nearest of them "
            "and edit the profile, or give a jax.Device."
        )
    return rates[kind]


def analytic(linearization: Linearization, rates: Rates, *, held: Iterable[int] = (), device_kind: str = "") -> Profile:
    """A roofline estimate of every operator of a graph and of its backward program.

    Args:
      linearization: the program.
      rates: of the device.
      held: inputs that are kept alive anyway (tensor numbers).
      device_kind: for the record.
    """
    forward, backward = estimates(linearization, rates)
    return dataclasses.replace(
        count_costs(linearization, held),
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        forward_flops=tuple(map(flops, linearization.source.operators, [linearization.source] * len(forward))),
        source="analytic",
        device_kind=device_kind,
    )


def estimates(linearization: Linearization, rates: Rates) -> tuple[list[float], list[float]]:
    """Seconds of each operator of the source graph, forward and backward."""
    graph = linearization.source
    forward = [seconds([op], graph, rates) for op in graph.operators]
    steps = [seconds(step.program.operators, step.program, rates) for step in linearization.backward]
    return forward, by_operator(linearization, steps)


def seconds(operators: Sequence[Operator], graph: Graph, rates: Rates) -> float:
    """The larger of arithmetic and memory time, for each operator that does real work; else the bytes it writes."""
    total = 0.0
    for op in operators:
        moved = sum(graph.tensors[t].bytes for t in op.outputs)
        if weight(op) is None:
            moved += sum(graph.tensors[t].bytes for t in op.inputs)
        if weight(op) != 0:
            total += max(flops(op, graph) / rates.flops, moved / rates.bytes)
    return total


def flops(op: Operator, graph: Graph) -> float:
    """Floating-point operations of one operator; of cheap arithmetic, those for each element it writes."""
    cost = weight(op)
    if cost is None:
        return equation_flops(op.equation)
    return float(cost * sum(graph.tensors[t].size for t in op.outputs))


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
