"""Derivatives that need less than JAX's own, one file per operator family.

Each rule gives the same cotangents, bit for bit, from smaller residuals. Everything without a rule here uses the
VJP that JAX has for it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from jaxpipe.array_types import AbstractArray, TensorNumber
from jaxpipe.graph.axis_names import NO_AXES, TracedIn
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.operator_vjp import Cut, differentiate
from jaxpipe.graph.rules import max_pool, pick, relu
from jaxpipe.targets.building import current


@dataclass(frozen=True)
class Match:
    """A rule that fits: it replaces ``covers``, from tensor ``operand`` to tensor ``result``."""

    name: str
    covers: tuple[Operator, ...]
    operand: TensorNumber
    result: TensorNumber
    key: Hashable
    cut: Callable[[AbstractArray], Cut]


def find(graph: Graph, allowed: Callable[[Operator], bool]) -> Mapping[Operator, Match]:
    """Max-pools of the graph that can keep window positions, each with the ReLU before it if only it reads that.

    Keyed by the first operator that the match covers. ``allowed`` says whether a max-pool may be matched.
    """
    producers = {t: op for op in graph.operators for t in op.outputs}
    readers: dict[TensorNumber, int] = {}
    for t in (*graph.outputs, *(t for op in graph.operators for t in op.inputs)):
        readers[t] = readers.get(t, 0) + 1
    matches = {}
    for op in graph.operators:
        if not max_pool.applies(op) or not allowed(op):
            continue
        before = producers.get(op.inputs[0])
        if before is None or readers[op.inputs[0]] > 1 or not relu.applies(before):
            before = None
        covers = (op,) if before is None else (before, op)
        matches[covers[0]] = Match(
            name="max_pool" if before is None else "relu, max_pool",
            covers=covers,
            operand=covers[0].inputs[0],
            result=op.outputs[0],
            key=tuple(sorted((k, v) for k, v in op.params.items())),
            cut=max_pool.rule(op, before),
        )
    return matches


def derive(
    op: Operator,
    avals: list[AbstractArray],
    varied: tuple[int, ...],
    useful: tuple[int, ...],
    shape: Mapping[str, int] | None = None,
    traced_in: TracedIn = NO_AXES,
    ruled: Sequence[int] = (),
) -> Cut:
    """The cut of any other operator: JAX's VJP, but for a ReLU's predicate, and on GPUs for picks of one element a row.

    XLA:CPU adds up the rows of what is fused with a comparison in another order.
    """
    cut = differentiate(op, avals, varied, useful, shape, traced_in, ruled)
    if pick.applies(op) and not current().runs_early:
        return pick.as_comparison(op, cut)
    return relu.from_output(cut) if relu.applies(op) else cut
