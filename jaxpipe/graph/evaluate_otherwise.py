"""Traced programs evaluated with another meaning of some of their equations, in loops and functions too."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Array, Atom, Equation, Literal


def evaluate_otherwise(
    program: AnyJaxpr,
    values: Sequence[Array],
    apply: Callable[[Equation, list[Array]], Sequence[Array]],
    value_of: Callable[[Literal], Array] = operator.attrgetter("val"),
) -> list[Array]:
    """Return the results of a program for some values.

    Args:
      apply: evaluates an equation on all of its operands, literals included.
      value_of: of a literal.

    Example:
      >>> import jax
      >>> apply = lambda equation, operands: [x + 1 for x in operands] if equation.primitive.name == "sin" else [0]
      >>> evaluate_otherwise(jax.make_jaxpr(jax.numpy.sin)(1.0), [5.0], apply)
      [6.0]
    """
    jaxpr, consts = _compat.open_jaxpr(program)
    known = dict[Atom, Array](zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(atoms: Sequence[Atom]) -> list[Array]:
        return [value_of(atom) if _compat.is_literal(atom) else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        known.update(zip(equation.outvars, apply(equation, read(equation.invars)), strict=True))
    return read(jaxpr.outvars)


def with_programs(value: Any, other: Callable[[AnyJaxpr], AnyJaxpr]) -> Any:
    """Return a parameter of an equation with others in place of the programs in it; itself if all stay as they are."""
    if isinstance(value, tuple | list):
        parts = [with_programs(x, other) for x in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    new = other(value) if isinstance(value, ClosedJaxpr | Jaxpr) else value
    if new is value or isinstance(value, ClosedJaxpr):
        return new
    jaxpr, consts = _compat.open_jaxpr(new)
    assert not consts, "a program that has no place for constants was given some"
    return jaxpr
