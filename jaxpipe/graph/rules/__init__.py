"""Derivatives that need less than JAX's own, one file per operator family.

Each rule gives the same cotangents, bit for bit, from smaller residuals. Everything without a rule here uses the
VJP that JAX has for it. All but max-pooling, which may take in the ReLU before it, are registered as those of users.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.extend.core.primitives import custom_jvp_call_p, gather_p

from jaxpipe.array_types import AbstractArray
from jaxpipe.graph.derivative_rule import by_rule, register_rule, rule_of
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.operator_vjp import Halves, Wanted, differentiate
from jaxpipe.graph.rules import max_pool, pick, relu


@dataclass(frozen=True, eq=False)
class Match(Operator):
    """A max-pool, and maybe the ReLU before it: one operator in the place of those that it ``covers``.

    Its equation is the max-pool's, its path and its policy those of the first.
    """

    covers: tuple[Operator, ...] = ()

    @functools.cached_property
    def name(self) -> str:
        """The operators."""
        return "relu, max_pool" if len(self.covers) > 1 else "max_pool"


def matched(graph: Graph, allowed: Callable[[Operator], bool]) -> list[Operator]:
    """Return the operators of a graph, a ``Match`` in the place of each max-pool that can keep window positions.

    It has the ReLU before it, too, if only the max-pool reads that. ``allowed`` says whether a max-pool may be matched.
    """
    reads = Counter((*graph.outputs, *(t for op in graph.operators for t in op.inputs)))
    matches: dict[Operator, Match] = {}
    for op in graph.operators:
        if not max_pool.applies(op) or not allowed(op) or rule_of(op) is not None:
            continue
        before = graph.producers.get(op.inputs[0])
        is_apart = before is None or reads[op.inputs[0]] > 1 or not relu.applies(before)
        covers = (op,) if before is None or is_apart else (before, op)
        first = covers[0]
        matches[first] = Match(op.equation, first.inputs, op.outputs, first.path, policy=first.policy, covers=covers)
    covered = {op for match in matches.values() for op in match.covers}
    return [matches.get(op, op) for op in graph.operators if op in matches or op not in covered]


def derive(op: Operator, avals: Sequence[AbstractArray], wanted: Wanted) -> Halves:
    """The halves of an operator's VJP: by its rule, or else JAX's."""
    if isinstance(op, Match):
        *before, pool = op.covers
        return max_pool.derive(pool, before[0] if before else None, avals[0])
    rule = rule_of(op)
    return differentiate(op, avals, wanted) if rule is None else by_rule(rule, op, avals, wanted)


def differs_from_jax(op: Operator) -> bool:
    """Return whether a rule of a user's holds for an operator."""
    return rule_of(op) not in (None, relu.RULE, pick.RULE)


register_rule(custom_jvp_call_p, relu.RULE)
register_rule(gather_p, pick.RULE)
