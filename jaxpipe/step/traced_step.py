"""A training step as JAX traces it for a device, and the role of each of its arguments."""

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr

from jaxpipe.array_types import PyTree
from jaxpipe.errors import ModelError
from jaxpipe.models.purify_nnx import is_array, is_module
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
      donated: whether its memory may be used for a result.
      updated: whether it may be: a result has its shape and type.
    """

    name: str
    position: int | None
    shape: tuple[int, ...]
    dtype: Any
    role: Role
    donated: bool
    updated: bool

    @property
    def bytes(self) -> int:
        """Bytes of the whole array, all devices counted."""
        return _bytes(self)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step: what is lowered, its program, and its arguments in the order of the program.

    Attributes:
      shapes: of the arguments, with their shardings.
    """

    traced: jax.stages.Traced
    arguments: tuple[Argument, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def program(self) -> ClosedJaxpr:
        """The traced program."""
        return self.traced.jaxpr


def jitted(step: Callable[..., PyTree], args: PyTree, options: Mapping[str, Any]) -> Any:
    """Return what ``jax.jit`` or ``nnx.jit`` makes of a step; a step that is jitted already stays as it is.

    Raises:
      ModelError: if it is no function, or one that is jitted and options are given besides.
    """
    if inspect.isclass(step) or isinstance(step, nn.Module) or not callable(step):
        raise ModelError(
            f"explain was given {shown(step)} as a step. Pass the function that computes one training step, jitted or "
            "not, and its arguments: explain(step, state, batch)."
        )
    if hasattr(step, "trace") and hasattr(step, "lower"):
        if options:
            raise ModelError(
                f"explain was given a step that is jitted already, and {', '.join(options)} besides. Pass the function "
                "before it is jitted, or leave these out."
            )
        return step
    has_modules = any(map(is_module, jax.tree.leaves(args, is_leaf=is_module)))
    return (nnx.jit if has_modules else jax.jit)(step, **options)


def trace_step(step: Any, args: Sequence[PyTree]) -> TracedStep:
    """Trace a jitted step.

    Raises:
      ModelError: if there are no arrays among the arguments.
    """
    traced = step.trace(*args)
    traced = getattr(traced, "traced", traced)  # of nnx.jit
    leaves, _ = jax.tree_util.tree_flatten_with_path(traced.args_info)
    if not leaves:
        raise ModelError(
            "explain was given no array among the arguments of the step. Pass them as the step gets them, such as "
            "explain(step, state, batch); shapes (jax.ShapeDtypeStruct) will do."
        )
    infos = [info for _, info in leaves]
    results = Counter(_shape_and_type(x) for x in jax.tree.leaves(traced.out_info))
    paths = [(path[1:], None) for path, _ in leaves]
    given = list(_arrays(args))
    shapes = [jax.ShapeDtypeStruct(info.shape, info.dtype) for info in infos]
    if [_shape_and_type(x) for *_, x in given] == list(map(_shape_and_type, infos)):
        paths = [(path, kind) for path, kind, _ in given]  # in the caller's own structure, not in that of nnx.jit
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)) for *_, x in given]
    roles = _roles(paths, infos, results)
    names = _parameter_names(step)
    arguments = (
        Argument(
            name=_name(path, names),
            position=getattr(path[0], "idx", None),
            shape=tuple(info.shape),
            dtype=info.dtype,
            role=role,
            donated=info.donated,
            updated=_take(results, _shape_and_type(info)) if role is not Role.BATCH else False,
        )
        for (path, _), info, role in zip(paths, infos, roles, strict=True)
    )
    return TracedStep(traced, tuple(arguments), tuple(shapes))


def _arrays(args: PyTree) -> Iterable[tuple[jax.tree_util.KeyPath, type | None, Any]]:
    """Yield the arrays among arguments, each with its path, and with the class of the NNX variable that holds it."""
    for path, value in jax.tree_util.tree_flatten_with_path(args, is_leaf=lambda x: isinstance(x, nnx.Variable))[0]:
        kind = type(value) if isinstance(value, nnx.Variable) else None
        for leaf in jax.tree.leaves(value):
            if is_array(leaf) or isinstance(leaf, int | float | complex):
                yield path, kind, leaf if is_array(leaf) else jax.eval_shape(lambda x: x, leaf)


def _parameter_names(step: Any) -> list[str]:
    try:
        return list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return []


def _name(path: jax.tree_util.KeyPath, names: Sequence[str]) -> str:
    position = getattr(path[0], "idx", None)
    first = names[position] if position is not None and position < len(names) else str(_key(path[0]))
    return first + jax.tree_util.keystr(tuple(path[1:]))


#: Attributes of the states of optax's transformations.
_OPTAX = {"mu", "nu", "count", "trace", "ema", "v_row", "v_col", "sum_of_squares", "inner_state", "acc_grads", "z", "v"}
_OPTIMIZER = {"opt_state", "optimizer_state", "optimizer", "opt_states"}
_PARAMETERS = {"params", "parameters"}
_STATE = {"batch_stats", "model_state", "extra_variables", "mutable"}


def _roles(
    paths: Sequence[tuple[jax.tree_util.KeyPath, type | None]], infos: Sequence[Any], results: Counter[Hashable]
) -> list[Role]:
    """Return roles by names in paths; where there are none, an argument that is updated is state."""
    named = [_role_by_name(path, kind) for path, kind in paths]
    groups: dict[Hashable, list[int]] = {}
    for k, (path, _) in enumerate(paths):
        groups.setdefault(_key(path[0]), []).append(k)
    roles = dict(enumerate(named))
    for members in groups.values():
        if any(named[k] for k in members):
            rest = Role.OTHER  # such as the number of the step, beside parameters
        elif all(_is_floating(infos[k]) and results[_shape_and_type(infos[k])] for k in members):
            rest = Role.PARAMETERS
        else:
            rest = Role.BATCH if any(infos[k].shape for k in members) else Role.OTHER
        for k in members:
            is_key = jax.dtypes.issubdtype(infos[k].dtype, jax.dtypes.prng_key)
            roles[k] = named[k] or (Role.OTHER if is_key else rest)
    return [roles[k] or Role.OTHER for k in range(len(paths))]


def _role_by_name(path: jax.tree_util.KeyPath, kind: type | None) -> Role | None:
    if kind is not None:
        if issubclass(kind, nnx.Param):
            return Role.PARAMETERS
        of_optimizer = "opt_state" in map(_key, path) or kind.__module__.endswith(".optimizer")
        return Role.OPTIMIZER if of_optimizer else Role.STATE
    keys = set(map(_key, path))
    attributes = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
    if keys & _OPTIMIZER or attributes & _OPTAX:
        return Role.OPTIMIZER
    if keys & _PARAMETERS:
        return Role.PARAMETERS
    return Role.STATE if keys & _STATE else None


def _key(entry: Any) -> Hashable:
    return next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), str(entry))


def _is_floating(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.numpy.floating)


def _shape_and_type(x: Any) -> Hashable:
    return tuple(x.shape), str(x.dtype)


def _take(counts: Counter[Hashable], item: Hashable) -> bool:
    counts[item] -= 1
    return counts[item] >= 0


def _bytes(x: Any) -> int:
    size = 1
    for length in x.shape:
        size *= length
    return size * x.dtype.itemsize
