"""Derivative rules by primitive: what the backward pass of an operator needs, and the cotangents that follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, Array, Equation
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import Operator, all_operands, is_differentiable, without_literals
from jaxpipe.graph.operator_vjp import Halves, Wanted, from_rule


@dataclass(frozen=True)
class DerivativeRule:
    """A derivative of an operator: what its backward pass needs in place of what JAX keeps, and does with it.

    Attributes:
      keep: ``(equation, operands, results) -> arrays``: what the backward pass needs. What is an operand or a result is
        stored once with it; booleans take 1 bit. ``equation`` is that of the jaxpr, with ``params`` and ``invars``.
      backward: ``(equation, kept, cotangents) -> cotangents``: one for each operand, None for zero or an integer, from
        one for each result, None for one that has none.
      applies: ``operator -> bool``: whether the rule holds for an operator, by its ``params``, ``equation`` and
        ``path``; else it is differentiated as JAX does.
    """

    keep: Callable[[Equation, Sequence[Array], Sequence[Array]], Sequence[Array]]
    backward: Callable[[Equation, Sequence[Array], Sequence[Any]], Sequence[Any]]
    applies: Callable[[Operator], bool] = lambda op: True


_rules: dict[Primitive, DerivativeRule] = {}


def register_rule(primitive: Primitive, rule: DerivativeRule, *, replace: bool = False) -> None:
    """Let all operators of a primitive be differentiated by a rule, in programs that are traced from now on.

    Loops, branches, ``jax.checkpoint`` and functions with a derivative of their own are differentiated as a whole, by
    JAX: rules do not hold inside them.

    It is to give the cotangents that JAX gives, from less: gradients are then the same, and fewer bytes are stored. For
    a primitive for which JAX has no derivative it is the derivative of decorated functions; ``residual_report`` and
    ``jit``, which compare with the undecorated ones, need JAX's.

    Args:
      primitive: one of JAX's (``jax.lax.max_p``), or one of your own.
      rule: the rule.
      replace: whether it takes the place of a rule that is there already.

    Raises:
      ModelError: if ``primitive`` or ``rule`` is something else, or there is a rule. When a program is differentiated:
        if the rule returns other than a list of arrays, or a cotangent that is not as its operand.

    Example:
      >>> import jax, jax.numpy as jnp, jaxpipe
      >>> def keep(equation, operands, results):  # JAX compares for each operand anew
      ...     return [operand == results[0] for operand in operands]
      >>> def backward(equation, kept, cotangents):
      ...     pairs = (kept, kept[::-1])
      ...     return [jnp.where(wins, 1.0, 0.0) / jnp.where(other, 2.0, 1.0) * cotangents[0] for wins, other in pairs]
      >>> def loss(x, y):
      ...     return jnp.maximum(2 * x, 3 * y).sum()
      >>> before = jaxpipe.residual_report(loss, jnp.ones(64), jnp.ones(64))
      >>> register_rule(jax.lax.max_p, DerivativeRule(keep, backward))
      >>> after = jaxpipe.residual_report(loss, jnp.ones(64), jnp.ones(64))
      >>> before.total_bytes, after.total_bytes
      (32, 16)
      >>> unregister_rule(jax.lax.max_p)
    """
    if not isinstance(primitive, Primitive) or not isinstance(rule, DerivativeRule):
        raise ModelError(
            f"register_rule was given {primitive!r} and {rule!r}. It takes a primitive of JAX, such as jax.lax.tanh_p, "
            "and a rule: register_rule(jax.lax.tanh_p, jaxpipe.graph.DerivativeRule(keep, backward))."
        )
    try:
        hash(rule)
    except TypeError as error:
        raise ModelError(f"register_rule was given {rule!r}, which has no hash ({error}). Pass functions.") from error
    if primitive in _rules and not replace:
        raise ModelError(
            f"register_rule was given a rule for {primitive.name}, which has one ({rule_name(_rules[primitive])}). "
            "Pass replace=True to put it in its place."
        )
    _rules[primitive] = rule


def unregister_rule(primitive: Primitive) -> None:
    """Let operators of a primitive be differentiated as JAX does.

    Args:
      primitive: one that may have a rule.
    """
    _rules.pop(primitive, None)


def registered() -> tuple[tuple[Primitive, DerivativeRule], ...]:
    """Return all rules there are."""
    return tuple(_rules.items())


def rule_name(rule: DerivativeRule | None) -> str:
    """Return a word for a rule, equal in all processes; none without a rule."""
    parts = [] if rule is None else [rule.keep, rule.backward]
    return " ".join(f"{part.__module__}.{getattr(part, '__qualname__', type(part).__name__)}" for part in parts)


def rule_of(op: Operator) -> DerivativeRule | None:
    """Return the rule that holds for an operator."""
    rule = None if op.equation is None else _rules.get(op.equation.primitive)
    return rule if rule is not None and rule.applies(op) else None


def by_rule(rule: DerivativeRule, op: Operator, avals: Sequence[AbstractArray], wanted: Wanted) -> Halves:
    """Return the halves of an operator's VJP by a rule; arguments as ``differentiate`` has them."""
    equation = _compat.without_scope(op.equation)

    def forward(*operands: Array) -> tuple[Sequence[Array], Sequence[Array]]:
        values, results = all_operands(equation, operands), _compat.evaluate_equation(equation, operands)
        return results, _list(equation, "keep", rule.keep(equation, values, results))

    def backward(kept: Sequence[Array], cotangents: Sequence[Array | None]) -> list[Array | None]:
        gradients = _list(equation, "backward", rule.backward(equation, kept, cotangents))
        _check(equation, gradients)
        return without_literals(equation, gradients)

    return from_rule(forward, backward, avals, wanted)


def _list(equation: Equation, function: str, values: Any) -> list[Any]:
    if isinstance(values, list | tuple):
        return list(values)
    raise ModelError(
        f"The derivative rule of {equation.primitive.name}: {function} returned {values!r}. It returns a list of "
        "arrays, one for each value."
    )


def _check(equation: Equation, gradients: Sequence[Array | None]) -> None:
    """Raise ``ModelError`` unless cotangents are as the operands of an equation."""
    head, avals = f"The derivative rule of {equation.primitive.name}: backward", [a.aval for a in equation.invars]
    if len(gradients) != len(avals):
        raise ModelError(f"{head} returned {len(gradients)} cotangents for {len(avals)} operands; None is zero.")
    for k, (gradient, aval) in enumerate(zip(gradients, avals, strict=True)):
        if gradient is None or _compat.is_literal(equation.invars[k]):
            continue
        given = jax.typeof(gradient)
        if not is_differentiable(aval) or (given.shape, given.dtype) != (aval.shape, aval.dtype):
            expected = aval.str_short() if is_differentiable(aval) else f"{aval.str_short()}, whose cotangent is None"
            raise ModelError(f"{head} returned {given.str_short()} as the cotangent of operand {k}, {expected}.")
