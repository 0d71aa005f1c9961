"""Programs as values: two that compute the same have equal forms, and can share one compiled program.

A form is all that decides what a program computes: primitives, parameters, types, who reads what, and every constant
and literal bit by bit. Names of variables, modules and source lines are not in it. The numbers that random keys are
folded with may differ (each layer has its own): a shared program takes them as its first argument.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr

from jaxpipe import _compat
from jaxpipe.array_types import Array, Atom, Equation, OpenJaxpr, PyTree, PyTreeDef


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """A traced function, and the tree of what it returns."""

    closed: ClosedJaxpr
    tree: PyTreeDef

    @cached_property
    def form(self) -> Hashable:
        """A value that is equal for programs that compute the same, but for the numbers that keys are folded with."""
        jaxpr, consts = _compat.open_jaxpr(self.closed)
        return self.tree, _form(jaxpr, consts, dict(self.folds))

    @cached_property
    def folds(self) -> tuple[tuple[int, int], ...]:
        """The literals that keys are folded with: pairs of an equation's position and a number."""
        numbers = enumerate(map(_folded, _compat.open_jaxpr(self.closed)[0].eqns))
        return tuple((k, int(value)) for k, value in numbers if value is not None)


def trace_program(function: Callable[..., PyTree], operands: Sequence[PyTree]) -> TracedProgram:
    """Trace a function of operands that returns a tree of arrays."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    return TracedProgram(closed, jax.tree.structure(shapes))


def shared_program(programs: Sequence[TracedProgram]) -> Callable[..., PyTree]:
    """One branch for programs of equal form, ``(numbers to fold keys with, operands) -> what they return``."""
    first = programs[0]
    varying = [h for h, numbers in enumerate(zip(*(p.folds for p in programs), strict=True)) if len(set(numbers)) > 1]
    program = _folds_as_arguments(first.closed, [first.folds[h][0] for h in varying])

    def branch(row: Array, *operands: PyTree) -> PyTree:
        leaves = _compat.evaluate_jaxpr(program, *(row[h] for h in varying), *jax.tree.leaves(operands))
        return jax.tree.unflatten(first.tree, leaves)

    return branch


def _folds_as_arguments(closed: ClosedJaxpr, places: Sequence[int]) -> ClosedJaxpr:
    """Return a program that gets the numbers that equations at some places fold keys with as its first arguments."""
    jaxpr, consts = _compat.open_jaxpr(closed)
    equations, arguments = list(jaxpr.eqns), []
    for k in places:
        key, number = equations[k].invars
        arguments.append(_compat.variable(number.aval))
        equations[k] = equations[k].replace(invars=[key, arguments[-1]])
    inputs = [*arguments, *jaxpr.invars]
    return _compat.rebuilt(jaxpr, jaxpr.constvars, consts, inputs, equations, jaxpr.outvars)


def _folded(equation: Equation) -> Array | None:
    """The number that an equation folds a key with, if it is a literal."""
    if equation.primitive.name != "random_fold_in" or not _compat.is_literal(equation.invars[1]):
        return None
    aval = equation.invars[1].aval
    return equation.invars[1].val if aval.shape == () and aval.dtype == np.uint32 else None


#: Parameters that only matter when a call is differentiated.
_DERIVATIVES = {
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}


def _form(jaxpr: OpenJaxpr, consts: Sequence[Array], folds: Mapping[int, int] | None = None) -> Hashable:
    """Return a value that equal programs share; equations ``folds`` are taken without the number that they fold in."""
    number: dict[Atom, int] = {}

    def name(variables: Sequence[Atom]) -> tuple[Hashable, ...]:
        return tuple((number.setdefault(v, len(number)), v.aval) for v in variables)

    def read(atom: Atom) -> Hashable:
        return ("literal", atom.aval, bits_of(atom.val)) if _compat.is_literal(atom) else number[atom]

    head = name(jaxpr.constvars), tuple(map(bits_of, consts)), name(jaxpr.invars)
    body = []
    for k, eqn in enumerate(jaxpr.eqns):
        reads = eqn.invars[:1] if folds is not None and k in folds else eqn.invars
        ignored = _DERIVATIVES.get(eqn.primitive.name, ())
        params = tuple((key, _setting(x)) for key, x in sorted(eqn.params.items()) if key not in ignored)
        effects = frozenset(map(_setting, eqn.effects))
        operands = tuple(map(read, reads))
        body.append((eqn.primitive, params, operands, name(eqn.outvars), effects, _setting(eqn.ctx)))
    return head, tuple(body), tuple(map(read, jaxpr.outvars))


def _setting(x: Any) -> Hashable:
    """A parameter of an equation. What cannot be compared is equal to itself only."""
    jaxpr, consts = _compat.open_jaxpr(x)
    if hasattr(jaxpr, "eqns"):
        return _form(jaxpr, consts)
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_setting, x))
    if isinstance(x, Mapping):
        return type(x), tuple((key, _setting(x[key])) for key in sorted(x, key=repr))
    if isinstance(x, (np.ndarray, np.generic, jax.Array, float, complex)):
        return bits_of(x)
    return (type(x), x) if is_hashable(x) else ("itself", id(x))


def is_hashable(x: object) -> bool:
    """Return whether a value can be compared, with all that is in it."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def bits_of(x: jax.typing.ArrayLike | np.generic) -> Hashable:
    """Return an array or a number with all its bits, signs of zero and NaN included."""
    if isinstance(x, core.Tracer):
        return "itself", id(x)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(x)), bits_of(jax.random.key_data(x))
    array = np.asarray(x)
    return array.dtype.name, array.shape, array.tobytes()
