"""ReLU: its derivative needs one bit for each element, and its output tells that bit.

``x > 0`` and ``relu(x) > 0`` are the same bit for every ``x``, NaN and -0.0 included. JAX tests ``x``; reading the
output instead lets a ReLU whose output is kept anyway (a convolution needs it) store nothing at all.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxpipe.array_types import Array, Equation
from jaxpipe.graph.derivative_rule import DerivativeRule
from jaxpipe.graph.graph import Operator, read_graph
from jaxpipe.graph.operator_vjp import Wanted, differentiate, writes_zeros


#: Answers, which take a derivative to find.
_known = weakref.WeakKeyDictionary[Operator, bool]()


def applies(op: Operator) -> bool:
    """Return whether ``op`` is ``max(x, 0)`` whose derivative is ``where(x > 0, dy, 0)``, as ``jax.nn.relu`` is.

    Recognized by what it computes, not by name: ``jnp.maximum(x, 0)`` halves the cotangent at a tie and is no ReLU
    in this sense; a user's function of the same form is.
    """
    if op not in _known:
        _known[op] = op.name == "custom_jvp_call" and not op.literals and rectifies(op) and _selects(op)
    return _known[op]


def _selects(op: Operator) -> bool:
    """Return whether the derivative of ``op`` is ``where(x > 0, dy, 0)``."""
    halves = differentiate(op, [op.equation.invars[0].aval], Wanted())
    primal = halves.primal
    tests = [part for part in primal.operators if part.name == "gt" and part.inputs == primal.inputs and _is_zero(part)]
    selects = halves.program.operators
    if len(tests) != 1 or [part.name for part in selects] != ["select_n"]:
        return False
    predicate, otherwise, chosen = selects[0].operands
    zeros = {t for part in primal.operators if writes_zeros(part) for t in part.outputs}
    return (
        predicate == tests[0].outputs[0]
        and (_is_zero(selects[0]) if otherwise is None else otherwise in zeros)  # of a scalar, a literal
        and chosen == halves.program.inputs[-1]
    )


def rectifies(op: Operator) -> bool:
    """Return whether ``op`` computes ``max(x, 0)``, whatever its derivative."""
    if op.name == "max":
        return _is_zero(op)
    if op.name != "custom_jvp_call" or len(op.equation.invars) != 1:
        return False
    graph = read_graph(op.params["call_jaxpr"], boundaries=False)
    first, *others = graph.operators or [None]
    return first is not None and not others and graph.outputs == first.outputs and rectifies(first)


def _backward(equation: Equation, kept: Sequence[Array], cotangents: Sequence[Any]) -> list[Array]:
    (positive,), (cotangent,) = kept, cotangents
    return [lax.select(positive, cotangent, lax.full_like(cotangent, 0))]


def _is_zero(op: Operator) -> bool:
    """Return whether the operator's literal operand is zero."""
    return len(op.literals) == 1 and not np.any(op.literals[0])


#: The predicate, of the ReLU's output.
RULE = DerivativeRule(lambda equation, operands, results: [results[0] > 0], _backward, applies)
