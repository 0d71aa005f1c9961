"""A conditional over stages in which stages that compute the same share one branch, so that it is compiled once.

    each stage's branch ──trace──▶ program ──form──▶ equal forms: one branch ──▶ lax.switch over what is left

A form is all that decides what a program computes: primitives, parameters, types, who reads what, and every constant
and literal bit by bit. Names of variables, modules and source lines are not in it. The numbers that random keys are
folded with may differ (each layer has its own): they are looked up by stage and handed to the shared branch.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import _compat


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """``lax.switch`` in which branches that compute the same are one; without any conditional if all do.

    The branches are not differentiated: derivative rules in them (``custom_jvp``, ``custom_vjp``) are not compared.
    """
    chosen, shared, row = _grouped(index, branches, operands)
    if len(shared) == 1:
        return shared[0](row, *operands)
    return lax.switch(chosen, shared, row, *operands)


def overwrite(
    index: Any, branches: Sequence[Callable[..., Any]], own: Any, arrays: Sequence[Any], unless: Any = None
) -> Any:
    """``switch`` for branches ``(own, arrays, turn) -> own`` that write over what they are given.

    XLA copies what the branch of a conditional changes, and does so when the program begins. It does not copy what a
    loop carries, so each branch is a loop of one turn or of none.

    Args:
      index: which branch.
      branches: what they return has the shapes of ``own``.
      own: arrays that are written over.
      arrays: others that all branches read. XLA takes out of a loop what is computed from them alone, in every branch:
        a branch lets it all depend on the number of the turn.
      unless: whether ``own`` stays as it is.
    """
    chosen, shared, row = _grouped(index, branches, (own, arrays, jnp.int32(0)))
    if unless is None and len(shared) == 1:
        # A loop that XLA knows to run once would be taken apart.
        unless = _compat.hidden_zero([*arrays, *jax.tree.leaves(own)])
    for number, branch in enumerate(shared):
        here = jnp.bool_(True) if len(shared) == 1 else chosen == number
        turns = (here if unless is None else here & (unless == 0)).astype(jnp.int32)
        own = _loop(turns, functools.partial(branch, row), own, arrays)
    return own


def _loop(turns: Any, function: Callable[..., Any], own: Any, arrays: Sequence[Any]) -> Any:
    def turn(carry: Any) -> Any:
        number, own = carry
        return number + 1, function(own, arrays, number)

    return lax.while_loop(lambda carry: carry[0] < turns, turn, (jnp.int32(0), own))[1]


def _grouped(
    index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> tuple[Any, list[Callable[..., Any]], Any]:
    """Which of the branches that differ it is, these branches, and the numbers that they are given."""
    programs = [_trace(branch, operands) for branch in branches]
    groups: dict[Hashable, list[int]] = {}
    for k, program in enumerate(programs):
        groups.setdefault(program.form, []).append(k)
    place = np.empty(len(programs), np.int32)
    table = np.zeros((len(programs), max(len(program.folds) for program in programs)), np.uint32)
    for number, members in enumerate(groups.values()):
        place[members] = number
    for k, program in enumerate(programs):
        table[k, : len(program.folds)] = [value for _, value in program.folds]
    shared = [_shared([programs[k] for k in members]) for members in groups.values()]
    chosen = index if len(shared) == len(programs) else jnp.asarray(place)[index]
    return chosen, shared, jnp.asarray(table)[index]


@dataclass(frozen=True, eq=False)
class _Program:
    """A traced branch.

    Attributes:
      closed, tree: the program, and the structure of what it returns.
      form: equal for programs that compute the same, but for ``folds``.
      folds: literals that keys are folded with: the equation that does, and the number.
    """

    closed: Any
    tree: Any
    form: Hashable
    folds: tuple[tuple[int, int], ...]


def _trace(branch: Callable[..., Any], operands: Sequence[Any]) -> _Program:
    closed, shapes = jax.make_jaxpr(branch, return_shape=True)(*operands)
    jaxpr, consts = _compat.open_jaxpr(closed)
    tree = jax.tree.structure(shapes)
    folds = {k: int(value) for k, eqn in enumerate(jaxpr.eqns) if (value := _folded(eqn)) is not None}
    return _Program(closed, tree, (tree, _form(jaxpr, consts, folds)), tuple(folds.items()))


def _shared(programs: Sequence[_Program]) -> Callable[..., Any]:
    """One branch for programs of equal form, ``(numbers to fold keys with, operands) -> what they return``."""
    first = programs[0]
    varying = [h for h, numbers in enumerate(zip(*(p.folds for p in programs), strict=True)) if len(set(numbers)) > 1]
    program = _compat.literals_as_arguments(first.closed, [(first.folds[h][0], 1) for h in varying])

    def branch(row: Any, *operands: Any) -> Any:
        found = _compat.evaluate_jaxpr(program, *(row[h] for h in varying), *jax.tree.leaves(operands))
        return jax.tree.unflatten(first.tree, found)

    return branch


def _folded(equation: Any) -> Any | None:
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


def _form(jaxpr: Any, consts: Sequence[Any], folds: Mapping[int, int] | None = None) -> Hashable:
    """What a program computes, as a value; equations ``folds`` without the number that they fold a key with."""
    number: dict[Any, int] = {}

    def name(variables: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((number.setdefault(v, len(number)), v.aval) for v in variables)

    def read(atom: Any) -> Hashable:
        return ("literal", atom.aval, _value(atom.val)) if _compat.is_literal(atom) else number[atom]

    head = name(jaxpr.constvars), tuple(map(_value, consts)), name(jaxpr.invars)
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
        return _value(x)
    try:
        hash(x)
    except TypeError:
        return "itself", id(x)
    return type(x), x


def _value(x: Any) -> Hashable:
    """An array or a number with all its bits, signs of zero and NaN included."""
    if _compat.is_closed_over_tracer(x):
        return "itself", id(x)
    if jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(x)), _value(jax.random.key_data(x))
    found = np.asarray(x)
    return found.dtype.name, found.shape, found.tobytes()
