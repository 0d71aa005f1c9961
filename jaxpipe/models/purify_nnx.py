"""One call of a model as a pure function of arrays.

    Flax NNX, Flax Linen, plain function  --purify-->  function(*leaves) -> [array, ...]

Each leaf has a name, its path in the model's own layout.
Whatever is not an array (flags, strings, functions) stays inside the function. ``finish`` turns the arrays that
the function returns back into what the model would have returned, and writes new state into NNX modules.
"""

import contextlib
import contextvars
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.nnx import graphlib
from jax.core import Tracer

from jaxpipe.array_types import Array, PyTree
from jaxpipe.context_values import holding
from jaxpipe.errors import DifferentiationError, ModelError
from jaxpipe.models.decorated_class import replaced
from jaxpipe.models.variable_trees import by_path
from jaxpipe.text.value_text import shown


@dataclass(frozen=True, eq=False)
class PureCall:
    """One call of a model, as a pure function and its arguments.

    Attributes:
      function: ``(*leaves) -> list of arrays``. To be traced once, before ``finish``.
      parameters: by leaf, whether it is a parameter.
      held: leaves that their owner keeps alive anyway (variables, and arrays inside a container such as a tree of
        parameters), so that to store them costs nothing.
      finish: ``list of arrays -> the model's result``.
    """

    function: Callable[..., list[Array]]
    leaves: tuple[Array, ...]
    names: tuple[str, ...]
    parameters: tuple[bool, ...]
    held: tuple[bool, ...]
    finish: Callable[[Sequence[Array]], PyTree]


def purify(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PureCall:
    """Make one call of ``function`` pure.

    Arrays among the arguments become leaves. NNX modules (anywhere in the arguments; ``function`` may be one) are
    split into their variables, and receive their new state in ``finish``; so do variables by themselves.

    Example:
      >>> import jax.numpy as jnp
      >>> call = purify(lambda p, x: x @ p["w"], {"w": jnp.ones((3, 2))}, jnp.ones((1, 3)))
      >>> dict(zip(call.names, call.held))
      {"0['w']": True, '1': False}
    """
    _check_target(function)
    if isinstance(function, nnx.Pytree):
        args, function = (function, *args), operator.call
    given, fill = part((args, kwargs), lambda x: is_node(x) or is_array(x), is_node)
    inputs = [(path, x) for path, x in given if not is_node(x)]
    names = [_name(path) for path, _ in inputs]
    check_numeric(names, [x for _, x in inputs])
    modules = tuple(x for _, x in given if is_node(x))
    alone = sum(map(is_module, modules)) == 1
    prefixes = [() if alone and is_module(x) else (_name(path),) for path, x in given if is_node(x)]
    graphdef, state = nnx.split(modules, graph=True)
    check_kinds(state, ("hijax",))
    values, structure = by_path(state), jax.tree.structure(state)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    parameters = [isinstance(x, nnx.Param) for x in variables for _ in jax.tree.leaves(x)]
    count = len(values)
    finished: tuple[int, Callable[[Sequence[Array]], PyTree], Callable[[Sequence[Array]], None]]

    def pure(*leaves: Array) -> list[Array]:
        nonlocal finished
        old = jax.tree.unflatten(structure, leaves[:count])
        numbers = graphlib.IndexMap()
        copies = graphlib.unflatten(graphdef, old, index_ref=numbers)
        rebuilt, rest = iter(copies), iter(leaves[count:])
        new_args, new_kwargs = fill([next(rebuilt if is_node(x) else rest) for _, x in given])
        with module_scopes(copies):
            output, give = part_results(function(*new_args, **new_kwargs))
        is_same = nnx.graphdef(copies, graph=True) == graphdef
        origin = graphlib.RefMap.from_indexmap(numbers)
        new_graphdef, state = graphlib.flatten(copies, ref_outer_index=origin, graph=True)
        origins = [origin.get(x) for x in state.leaves]
        kept = {id(x): value for x, value in zip(leaves, values.values(), strict=False)}
        same = set(map(id, values.values()))
        leaves_now = jax.tree.map(lambda x: kept.get(id(x), x), list(state.leaves))  # holds no tracer of what is kept
        new, fill_changed = part(leaves_now, lambda x: id(x) not in same)

        def write_back(arrays: Sequence[Array]) -> None:
            if arrays or not is_same:
                _restructure(modules, new_graphdef, fill_changed(arrays), origins)

        finished = len(output), give, write_back
        return [x for _, x in (*output, *new)]

    def finish(outputs: Sequence[Array]) -> PyTree:
        size, give, write_back = finished
        write_back(outputs[size:])
        return give(outputs[:size])

    return PureCall(
        function=pure,
        leaves=(*values.values(), *(x for _, x in inputs)),
        names=(*("/".join((*prefixes[int(place)], *path)) for place, *path in values), *names),
        parameters=(*parameters, *(False for _ in inputs)),
        held=(*(True for _ in values), *(len(path) > 2 for path, _ in inputs)),
        finish=finish,
    )


def _restructure(
    modules: tuple[nnx.Pytree, ...], graphdef: nnx.GraphDef, variables: list[Any], origins: Sequence[int | None]
) -> None:
    """Make modules, in place, what a call has made of copies of them; ``origins`` has the numbers of old variables.

    Variables with their old values stay untouched: Flax refuses to set those of an outer transformation.
    """
    numbers = graphlib.RefMap()
    graphlib.flatten(modules, ref_index=numbers, graph=True)
    same = {number: x for x, number in numbers.items()}
    for k, (variable, number) in enumerate(zip(variables, origins, strict=True)):
        if number is not None and _numbers_of(variable) == _numbers_of(same[number]):
            variables[k] = same.pop(number)
    graphlib.unflatten(graphdef, variables, outer_index_outer_ref=graphlib.IndexMap(same))


def _numbers_of(variable: PyTree) -> list[int]:
    return list(map(id, jax.tree.leaves(variable)))


def _check_target(function: object) -> None:
    """Raise ``ModelError`` unless a call of ``function`` computes something: a function, or an NNX module."""
    if isinstance(function, nn.Module) and function.scope is None:
        raise ModelError(
            f"The Linen module {type(function).__name__} was given as a function, but it has no variables by itself. "
            "Pass a function that applies it: lambda variables, x: module.apply(variables, x), and its variables."
        )
    if inspect.isclass(function) and issubclass(function, nn.Module | nnx.Module):
        raise ModelError(f"The class {function.__name__} was given as a function. Pass a module of it, or a function.")
    if not callable(function):
        raise ModelError(f"{shown(function)} was given as a function. Pass a function or an NNX module.")


def check_kinds(state: nnx.State, kinds: Sequence[str]) -> None:
    """Raise ``ModelError`` if NNX variables are of some kinds: ``"hijax"``, ``"ref"``."""
    for path, variable in nnx.to_flat_state(state):
        for kind in kinds:
            if isinstance(variable, nnx.Variable) and variable.get_metadata().get(kind):
                raise ModelError(
                    f"The NNX variable {'.'.join(map(str, path))} was made with {kind}=True, so that it changes while "
                    f"JAX runs, outside of the values that a program returns. Use nnx.vars_as(module, {kind}=False), "
                    f"or leave {kind}=True out of the variable or nnx.var_defaults."
                )


def is_array(value: object) -> TypeGuard[Array]:
    """Return whether a leaf of the arguments is data: an array, a tracer or a shape. Python numbers are static."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_module(value: object) -> bool:
    """Return whether a value holds NNX variables and is to be split: a module, ``nnx.Rngs``, an NNX optimizer."""
    return isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Variable)


def is_node(value: object) -> bool:
    """Return whether a value may change in place: a module, or a variable by itself."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def part(
    tree: PyTree, wanted: Callable[[Any], bool] = is_array, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[jax.tree_util.KeyPath, Any]], Callable[[Sequence[Any]], PyTree]]:
    """Part a tree: the leaves that are ``wanted``, each with its path, and the tree with others in their places."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    rest = [None if wanted(x) else (x,) for _, x in flat]

    def fill(values: Sequence[Any]) -> PyTree:
        new = iter(values)
        return jax.tree.unflatten(treedef, [next(new) if x is None else x[0] for x in rest])

    return [(path, x) for path, x in flat if wanted(x)], fill


def part_results(results: PyTree) -> tuple[list[tuple[jax.tree_util.KeyPath, Any]], Callable[[Sequence[Any]], PyTree]]:
    """Part what a traced call returned; raise ``ModelError`` for an object with arrays in it that is no pytree."""
    for x in jax.tree.leaves(results):
        held = {} if is_array(x) else getattr(x, "__dict__", {})
        names = [name for name, value in held.items() if any(isinstance(y, Tracer) for y in jax.tree.leaves(value))]
        if names:
            raise ModelError(
                f"The call returned an object of class {type(x).__name__}, which is no pytree, with traced arrays in "
                f"it ({', '.join(names)}). Make its class a pytree, with flax.struct.dataclass or "
                "jax.tree_util.register_dataclass, or return the arrays."
            )
    return part(results)


def check_numeric(names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Raise ``DifferentiationError`` if arguments of some names are NumPy arrays of what is no number."""
    for name, x in zip(names, arrays, strict=True):
        if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "OSUMm":
            raise DifferentiationError(
                f"Argument {name} is a NumPy array of dtype {x.dtype}, which JAX cannot trace. Pass numbers as a "
                "numeric array, and anything static as a plain Python value."
            )


def _name(path: jax.tree_util.KeyPath) -> str:
    """Name of an argument: ``0['w']`` for ``args[0]["w"]``, ``train`` for a keyword."""
    first, rest = path[1], path[2:]
    return str(getattr(first, "idx", getattr(first, "key", first))) + jax.tree_util.keystr(tuple(rest))


_scopes: contextvars.ContextVar[Mapping[int, tuple[str, ...]]] = contextvars.ContextVar(
    "scopes", default=MappingProxyType({})
)
# JAX's tracing caches know of it: what was traced without names is traced anew.
_named = jax.make_user_context(default_value=False)
#: Where a call is inside a root module, whose own path is empty.
_ROOT = ("",)
_here: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("here", default=())


@contextlib.contextmanager
def module_scopes(modules: Sequence[Any]) -> Iterator[None]:
    """Run every NNX module's ``__call__`` under a ``jax.named_scope`` of its path, as Linen does by itself.

    For the time of the call their classes open the scopes. The modules have no others: some programs ask for them.
    """
    members = [(path, module) for root in modules for path, module in nnx.iter_modules(root, graph=True)]
    scopes = {**_scopes.get(), **{id(module): tuple(map(str, path)) for path, module in members}}
    with holding(_scopes, scopes), _named(bool(scopes)), contextlib.ExitStack() as stack:
        for cls in dict.fromkeys(type(module) for _, module in members if callable(module)):
            if getattr(cls.__call__, _SCOPED, None) is not cls:
                stack.enter_context(replaced(cls, "__call__", _scoped_call(cls)))
        yield


@contextlib.contextmanager
def root_scope(cls: type) -> Iterator[None]:
    """The named scope of an NNX module that is called from outside any other."""
    with contextlib.nullcontext() if _here.get() else jax.named_scope(cls.__name__):
        yield


#: Of a method that ``_scoped_call`` has made: whose it is.
_SCOPED = "_jaxpipe_scoped"


def _scoped_call(cls: Any) -> Callable[..., PyTree]:
    run = cls.__call__

    @functools.wraps(run)
    def __call__(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        paths, here = _scopes.get(), _here.get()
        if type(self) is not cls or not paths:  # called by super(), or in another thread
            return run(self, *args, **kwargs)
        path = paths.get(id(self), ())
        below = path[len(here) :] if path[: len(here)] == here else path
        with holding(_here, path or here or _ROOT), jax.named_scope("/".join(below) or cls.__name__):
            return run(self, *args, **kwargs)

    setattr(__call__, _SCOPED, cls)
    return __call__
