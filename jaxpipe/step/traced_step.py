"""A training step as JAX traces it for a device, and the role of each of its arguments."""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr

from jaxpipe.array_types import PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import read_graph
from jaxpipe.models.call_function import parameters_of
from jaxpipe.models.purify_nnx import is_array
from jaxpipe.step.budgeted_jit import BudgetedFunction
from jaxpipe.step.step_arguments import is_step, jitter
from jaxpipe.text.value_text import shown


class Role(Enum):
    """The use of an argument."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer state"
    STATE = "other state"
    BATCH = "batch"
    OTHER = "other arguments"


@dataclass(frozen=True)
class Argument:
    """An array among the arguments of a step.

    Attributes:
      name: the parameter of the step, and the path in it, such as ``state.params['Dense_0']['kernel']``.
      position: of the positional argument that it is in; None of a keyword.
      array: its shape, type and sharding.
      donated: whether its memory may be used for a result.
      updated: whether it may be: a result that is computed has its shape and type.
      leaf: of the arguments that the step was given; None if it is not found there.
    """

    name: str
    position: int | None
    array: jax.ShapeDtypeStruct
    role: Role
    donated: bool
    updated: bool
    leaf: Any

    @property
    def shard(self) -> tuple[int, ...]:
        """The shape of what one device has of it."""
        shape, sharding = self.array.shape, self.array.sharding
        return shape if sharding is None else tuple(sharding.shard_shape(shape))

    @property
    def bytes(self) -> int:
        """Bytes on one device."""
        return math.prod(self.shard) * self.array.dtype.itemsize


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step: what is lowered, its program, and its arguments in the order of the program."""

    traced: jax.stages.Traced
    arguments: Sequence[Argument]

    @property
    def program(self) -> ClosedJaxpr:
        """The traced program."""
        return self.traced.jaxpr


def jitted(step: Callable[..., PyTree], args: PyTree, options: Mapping[str, Any]) -> Any:
    """Return a step jitted by ``jax.jit`` or ``nnx.jit``; a step that is jitted already stays as it is.

    Raises:
      ModelError: if it is no function, one of ``jaxpipe.jit``, or one that is jitted and options are given besides; or
        if one of these is none of the jit's.
    """
    if isinstance(step, BudgetedFunction):
        raise ModelError(
            "explain was given a step of jaxpipe.jit, which has a budget already: print(step.lower(...).plan) tells "
            "how it is kept. Pass the function before jaxpipe.jit, and its donate_argnums and the like besides."
        )
    if inspect.isclass(step) or isinstance(step, nn.Module) or not is_step(step):
        raise ModelError(
            f"explain was given {shown(step)} as a step. Pass the function that computes one training step, jitted or "
            "not, and its arguments: explain(step, state, batch)."
        )
    jit = jitter(args)
    unknown = ", ".join(f"{name}=" for name in options if name not in inspect.signature(jit).parameters)
    if unknown:
        raise ModelError(
            f"explain was given {unknown} besides the step and its arguments. It passes keyword arguments to jax.jit, "
            "such as donate_argnums=0. Pass arguments of the step by place, or those that stay the same in "
            "functools.partial(step, name=value)."
        )
    if hasattr(step, "trace") and hasattr(step, "lower"):
        if options:
            raise ModelError(
                f"explain was given a step that is jitted already, and {', '.join(options)} besides. Pass the function "
                "before it is jitted, or leave these out."
            )
        return step
    return jit(step, **options)


def trace_step(step: Any, args: Sequence[PyTree]) -> TracedStep:
    """Trace a jitted step.

    Raises:
      ModelError: if there are no arrays among the arguments.
    """
    traced = step.trace(*args)
    traced = getattr(traced, "traced", traced)  # of nnx.jit
    arrays = jax.tree.leaves(traced.args_info)
    if not arrays:
        raise ModelError(
            "explain was given no array among the arguments of the step. Pass them as the step gets them, such as "
            "explain(step, state, batch); shapes (jax.ShapeDtypeStruct) will do."
        )
    results = Counter(map(_shape_and_type, jax.tree.leaves(traced.out_info)))
    leaves = _traced_leaves(args, traced.jaxpr.in_avals)
    if leaves is None:  # in the structure of nnx.jit
        leaves = [_Leaf(path[1:], None, None) for path, _ in jax.tree_util.tree_leaves_with_path(traced.args_info)]
    roles = _roles(leaves, arrays, results)
    program = read_graph(traced.jaxpr, boundaries=False)
    passed = set(program.inputs) & set(program.outputs)
    unused = Counter(_shape_and_type(program.tensors[t].aval) for t in program.outputs if t not in passed)
    names = [parameter.name for parameter in parameters_of(step)]
    arguments = [
        Argument(
            name=_name(leaf.path, names),
            position=getattr(leaf.path[0], "idx", None),
            array=jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=getattr(leaf.value, "sharding", None)),
            role=role,
            donated=info.donated,
            updated=role is not Role.BATCH and t not in passed and _take(unused, _shape_and_type(info)),
            leaf=leaf.value,
        )
        for leaf, info, role, t in zip(leaves, arrays, roles, program.inputs, strict=True)
    ]
    return TracedStep(traced, arguments)


@dataclass(frozen=True)
class _Leaf:
    """A leaf of arguments, its path, and the class of the NNX variable that holds it."""

    path: jax.tree_util.KeyPath
    variable: type | None
    value: Any


def _traced_leaves(args: PyTree, inputs: Sequence[Any]) -> list[_Leaf] | None:
    """Return those leaves of arguments that a traced program has: numbers, of weak types, may be static."""
    traced, wanted = list[_Leaf](), [(_shape_and_type(x), x.weak_type) for x in inputs]
    for leaf in _leaves(args):
        if not is_array(leaf.value) and not isinstance(leaf.value, int | float | complex):
            continue
        x = jax.eval_shape(lambda x: x, leaf.value)
        if len(traced) < len(wanted) and (_shape_and_type(x), x.weak_type) == wanted[len(traced)]:
            traced.append(leaf)
        elif is_array(leaf.value):
            return None
    return traced if len(traced) == len(wanted) else None


def _leaves(args: PyTree) -> Iterator[_Leaf]:
    """Yield the leaves of arguments; a variable that NNX modules share, once, in its first place, as ``nnx.jit``."""
    shares, met = jitter(args) is nnx.jit, set[int]()
    for path, held in jax.tree_util.tree_flatten_with_path(args, is_leaf=lambda x: isinstance(x, nnx.Variable))[0]:
        variable = type(held) if isinstance(held, nnx.Variable) else None
        if variable is None or not shares or id(held) not in met:
            met.add(id(held))
            for inner, value in jax.tree_util.tree_flatten_with_path(held)[0]:
                yield _Leaf((*path, *inner), variable, value)


def _name(path: jax.tree_util.KeyPath, names: Sequence[str]) -> str:
    first: Any = _key(path[0])
    if isinstance(path[0], jax.tree_util.SequenceKey) and path[0].idx < len(names):
        first = names[path[0].idx]
    return f"{first}{jax.tree_util.keystr(tuple(path[1:]))}"


#: Attributes of the states of optax's transformations.
_OPTAX = {"mu", "nu", "count", "trace", "ema", "v_row", "v_col", "sum_of_squares", "inner_state", "acc_grads", "z", "v"}
_OPTIMIZER = {"opt_state", "optimizer_state", "optimizer", "opt_states"}
_PARAMETERS = {"params", "parameters"}
_STATE = {"batch_stats", "model_state", "extra_variables", "mutable"}


def _roles(leaves: Sequence[_Leaf], arrays: Sequence[Any], results: Counter[Hashable]) -> list[Role]:
    """Return roles by names in paths; without names, an argument that is updated is state."""
    named, first = [_role_by_name(leaf) for leaf in leaves], [_key(leaf.path[0]) for leaf in leaves]
    results = results - Counter(_shape_and_type(x) for x, role in zip(arrays, named, strict=True) if role)
    with_names = {key for key, role in zip(first, named, strict=True) if role}
    with_parameters = {key for key, role in zip(first, named, strict=True) if role is Role.PARAMETERS}
    with_axes = {key for key, x in zip(first, arrays, strict=True) if x.shape}
    changing = [jax.dtypes.issubdtype(x.dtype, np.inexact) and results[_shape_and_type(x)] > 0 for x in arrays]
    updated = set(first) - {key for key, changes in zip(first, changing, strict=True) if not changes}
    roles = list[Role]()
    for key, x, role, changes in zip(first, arrays, named, changing, strict=True):
        rest = Role.PARAMETERS if key in updated else Role.BATCH if key in with_axes else Role.OTHER
        if key in with_names:  # beside optimizer states alone, what changes is parameters
            rest = Role.PARAMETERS if changes and key not in with_parameters else Role.OTHER
        # The second is what jax.random.PRNGKey returns; the third such as the number of the step, beside parameters.
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) or _shape_and_type(x) == ((2,), "uint32")
        roles.append(role or (Role.OTHER if is_key else rest))
    return roles


def _role_by_name(leaf: _Leaf) -> Role | None:
    keys, kind, path = set(map(_key, leaf.path)), leaf.variable, leaf.path
    if kind is not None:  # modules have attributes, too; their states, which optax may hold, are dictionaries
        path = [x for x, inner in pairwise(path) if isinstance(inner, jax.tree_util.DictKey)]
    attributes = {x.name for x in path if isinstance(x, jax.tree_util.GetAttrKey)}
    if kind is not None and not attributes & _OPTAX:
        if issubclass(kind, nnx.Param):
            return Role.PARAMETERS
        return Role.OPTIMIZER if "opt_state" in keys or kind.__module__.endswith(".optimizer") else Role.STATE
    if keys & _OPTIMIZER or attributes & _OPTAX:
        return Role.OPTIMIZER
    return Role.PARAMETERS if keys & _PARAMETERS else Role.STATE if keys & _STATE else None


def _key(entry: Any) -> Hashable:
    return next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), str(entry))


def _shape_and_type(x: Any) -> Hashable:
    return tuple(x.shape), str(x.dtype)


def _take(counts: Counter[Hashable], item: Hashable) -> bool:
    counts[item] -= 1
    return counts[item] >= 0
