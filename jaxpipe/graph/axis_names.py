"""Axis names of collectives in users' code that nothing binds, as of code written for ``jax.pmap``.

    jax.lax.pmean(x, "batch"), BatchNorm(axis_name="batch")  ──▶ an axis of size 1: x

Each micro-batch is then by itself. The names are found as JAX misses them while it traces, and no equation over them
stays in a program.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array, Equation


T = TypeVar("T")


@dataclass(frozen=True)
class TracedIn:
    """The axes that had to be made to trace a program: ``unbound`` names of collectives, ``explicit`` mesh axes."""

    unbound: tuple[str, ...] = ()
    explicit: tuple[str, ...] = ()


#: Of a program for which no axis had to be made.
NO_AXES = TracedIn()


def with_names(function: Callable[[], T], names: list[str]) -> T:
    """Call a function that traces a model, with axes of size 1 of some names, to which missing ones are added."""
    while True:
        try:
            with bound(names):
                return function()
        except NameError as error:
            missing = re.search(r"unbound axis name: (.+?)(?:\. To fix|$)", str(error))
            if missing is None or missing[1] in names:
                raise
            names.append(missing[1])


def bound(names: Sequence[str]) -> contextlib.AbstractContextManager[object]:
    """Return a context in which axes of these names have the size 1."""
    return _compat.bound_axes(dict.fromkeys(names, 1)) if names else contextlib.nullcontext()


def names_in(eqn: Equation) -> tuple[str, ...]:
    """Return the axis names of a collective; none of other equations."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))


def evaluate_alone(
    eqn: Equation,
    values: Sequence[Array],
    names: Collection[str],
    evaluate: Callable[[Equation, Sequence[Array]], Sequence[Array]],
) -> Sequence[Array]:
    """Evaluate a collective, some of whose axes have the size 1; over all others, ``evaluate`` does."""
    key = "axes" if "axes" in eqn.params else "axis_name"
    axes = eqn.params[key]
    rest = tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis not in names)
    if rest:
        return evaluate(eqn.replace(params={**eqn.params, key: rest}), values)
    shapes = [v.aval.shape for v in eqn.outvars]
    if eqn.primitive.name == "axis_index":
        return [jnp.zeros((), eqn.outvars[0].aval.dtype)]
    if eqn.primitive.name == "ppermute" and not eqn.params["perm"]:  # nobody sends
        return [jnp.zeros_like(x) for x in values]
    return [x if x.shape == shape else jax.lax.reshape(x, shape) for x, shape in zip(values, shapes, strict=True)]
