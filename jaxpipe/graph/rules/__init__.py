"""Derivatives that need less than JAX's own, one file per operator family.

Each rule gives the same cotangents, bit for bit, from smaller residuals. Everything without a rule here uses the
VJP that JAX has for it. All but max-pooling, which may take in the ReLU before it, are registered as those of users.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core.primitives import custom_jvp_call_p, gather_p

from jaxpipe.array_types import AbstractArray, TensorNumber
from jaxpipe.graph.axis_names import NO_AXES, TracedIn
from jaxpipe.graph.derivative_rule import by_rule, register_rule, rule_of
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.operator_vjp import Halves, differentiate
from jaxpipe.graph.rules import max_pool, pick, relu


@dataclass(frozen=True)
class Match:
    """A rule that fits: it replaces ``covers``, from tensor ``operand`` to tensor ``result``."""

    name: str
    covers: tuple[Operator, ...]
    operand: TensorNumber
    result: TensorNumber
    key: Hashable
    halves: Callable[[AbstractArray], Halves]


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
        if not max_pool.applies(op) or not allowed(op) or rule_of(op) is not None:
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
            halves=max_pool.rule(op, before),
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
) -> Halves:
    """The halves of any other operator's VJP: by its rule, or else JAX's."""
    rule = rule_of(op)
    if rule is not None:
        return by_rule(rule, op, avals, varied, useful, traced_in)
    return differentiate(op, avals, varied, useful, shape, traced_in, ruled)


def differs_from_jax(op: Operator) -> bool:
    """Return whether a rule of a user's holds for an operator."""
    return rule_of(op) not in (None, relu.RULE, pick.RULE)


register_rule(custom_jvp_call_p, relu.RULE)
register_rule(gather_p, pick.RULE)
