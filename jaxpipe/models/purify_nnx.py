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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from jaxpipe.array_types import Array, PyTree, PyTreeDef
from jaxpipe.errors import DifferentiationError, ModelError
from jaxpipe.models.decorated_class import twin_class
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
    split into their variables, and receive their new state in ``finish``.

    Example:
      >>> import jax.numpy as jnp
      >>> call = purify(lambda p, x: x @ p["w"], {"w": jnp.ones((3, 2))}, jnp.ones((1, 3)))
      >>> dict(zip(call.names, call.held))
      {"0['w']": True, '1': False}
    """
    _check_target(function)
    if isinstance(function, nnx.Pytree):
        args, function = (function, *args), _call
    flat, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_module)
    modules = [leaf for _, leaf in flat if is_module(leaf)]
    inputs = Leaves([(_name(path), leaf) for path, leaf in flat if not is_module(leaf)])
    variables = _Variables(modules)
    in_container = [len(path) > 2 for path, leaf in flat if is_array(leaf)]
    result = Result()

    def pure(*leaves: Array) -> list[Array]:
        count = len(variables.values)
        copies: Sequence[PyTree] = variables.build(leaves[:count])
        rebuilt, rest = iter(copies), iter(inputs.fill(leaves[count:]))
        values = [next(rebuilt) if is_module(leaf) else next(rest) for _, leaf in flat]
        new_args, new_kwargs = jax.tree_util.tree_unflatten(treedef, values)
        with module_scopes(copies):
            output = function(*new_args, **new_kwargs)
        return result.take(output) + variables.changes(copies, leaves[:count])

    def finish(outputs: Sequence[Array]) -> PyTree:
        count = result.count
        variables.write(outputs[count:])
        return result.give(outputs[:count])

    return PureCall(
        function=pure,
        leaves=(*variables.values, *inputs.arrays),
        names=(*variables.names, *inputs.names),
        parameters=(*variables.parameters, *(False for _ in in_container)),
        held=(*(True for _ in variables.values), *in_container),
        finish=finish,
    )


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


def _call(module: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
    return module(*args, **kwargs)


def is_array(value: object) -> TypeGuard[Array]:
    """Return whether a leaf of the arguments is data: an array, a tracer or a shape. Python numbers are static."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_module(value: object) -> bool:
    """Return whether a value holds NNX variables and is to be split: a module, ``nnx.Rngs``, an NNX optimizer."""
    return isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Variable)


class Leaves:
    """Named leaves, parted into arrays and static values."""

    def __init__(self, named: Sequence[tuple[str, PyTree]]):
        for name, value in named:
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSUMm":
                raise DifferentiationError(
                    f"Argument {name} is a NumPy array of dtype {value.dtype}, which JAX cannot trace. Pass numbers "
                    "as a numeric array, and anything static as a plain Python value."
                )
        self._named = named
        self.names = tuple(name for name, value in named if is_array(value))
        self.arrays = tuple(value for _, value in named if is_array(value))

    def fill(self, arrays: Sequence[Array]) -> list[PyTree]:
        """All leaves, with other arrays."""
        new = iter(arrays)
        return [next(new) if is_array(value) else value for _, value in self._named]


class Result:
    """The structure of a result and its static leaves, remembered while the function is traced."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, output: PyTree) -> list[Array]:
        """The arrays of a result."""
        leaves, self._treedef = jax.tree.flatten(output)
        self._static = [None if is_array(x) else (x,) for x in leaves]
        arrays = [x for x in leaves if is_array(x)]
        self.count = len(arrays)
        return arrays

    def give(self, arrays: Sequence[Array]) -> PyTree:
        """The result with other arrays."""
        new = iter(arrays)
        return jax.tree.unflatten(self._treedef, [next(new) if s is None else s[0] for s in self._static])


#: The path of an NNX variable.
_Keys = tuple[Any, ...]


class _Variables:
    """The variables of some NNX modules as flat arrays."""

    def __init__(self, modules: Sequence[nnx.Pytree]):
        self._modules = tuple(modules)
        self._graphdef, state = nnx.split(self._modules)
        flat = nnx.to_flat_state(state)
        self._trees = [(path, jax.tree.structure(variable)) for path, variable in flat]
        names, values, parameters = [], [], []
        for path, variable in flat:
            for inner, value in jax.tree_util.tree_flatten_with_path(variable)[0]:
                keys = [*path, *(entry.key for entry in inner if isinstance(entry, jax.tree_util.DictKey))]
                names.append("/".join(map(str, keys[1:] if len(modules) == 1 else keys)))
                values.append(value)
                parameters.append(isinstance(variable, nnx.Param))
        self.names, self.values, self.parameters = tuple(names), tuple(values), tuple(parameters)
        self._changed: list[tuple[_Keys, PyTreeDef]] = []

    def _state(self, values: Sequence[Array]) -> nnx.State:
        return nnx.from_flat_state(_filled(self._trees, values))

    def build(self, values: Sequence[Array]) -> Sequence[nnx.Pytree]:
        """New modules with other values."""
        return nnx.merge(self._graphdef, self._state(values), copy=True) if self._modules else ()

    def changes(self, copies: Sequence[nnx.Pytree], old: Sequence[Array]) -> list[Array]:
        """The values of variables that a call has set or added; remembers which."""
        before = {path: jax.tree.leaves(variable) for path, variable in _filled(self._trees, old)}
        self._changed = []
        arrays = []
        for path, variable in nnx.to_flat_state(nnx.split(tuple(copies))[1]):
            leaves, treedef = jax.tree.flatten(variable)
            previous = before.get(path)
            if previous is None or any(a is not b for a, b in zip(leaves, previous, strict=True)):
                self._changed.append((path, treedef))
                arrays.extend(leaves)
        return arrays

    def write(self, arrays: Sequence[Array]) -> None:
        """Set the variables that a call has changed to their new values, and add the new ones."""
        known = dict(nnx.to_flat_state(nnx.split(self._modules)[1]))
        updated = []
        for path, variable in _filled(self._changed, arrays):
            if path in known:
                updated.append((path, variable))
            else:
                owner: PyTree = self._modules
                for key in path[:-1]:
                    owner = owner[key] if isinstance(key, int) else getattr(owner, key)
                setattr(owner, path[-1], variable)
        if updated:
            nnx.update(self._modules, nnx.from_flat_state(updated))


def _filled(trees: Sequence[tuple[_Keys, PyTreeDef]], values: Sequence[Array]) -> list[tuple[_Keys, PyTree]]:
    """Return the variables of some structures by path, with values."""
    new = iter(values)
    return [(path, jax.tree.unflatten(tree, [next(new) for _ in range(tree.num_leaves)])) for path, tree in trees]


def _name(path: jax.tree_util.KeyPath) -> str:
    """Name of an argument: ``0['w']`` for ``args[0]["w"]``, ``train`` for a keyword."""
    first, rest = path[1], path[2:]
    return str(getattr(first, "idx", getattr(first, "key", first))) + jax.tree_util.keystr(tuple(rest))


_scopes: contextvars.ContextVar[Mapping[int, tuple[str, ...]]] = contextvars.ContextVar(
    "scopes", default=MappingProxyType({})
)
#: Where a call is inside a root module, whose own path is empty.
_ROOT = ("",)
_here: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("here", default=())


@contextlib.contextmanager
def module_scopes(modules: Sequence[nnx.Module]) -> Iterator[None]:
    """Run every NNX module's ``__call__`` under a ``jax.named_scope`` of its path, as Linen does by itself.

    The modules are private copies: for the time of the call their class is one that opens the scope.
    """
    paths: dict[int, tuple[str, ...]] = {}
    swapped = []
    for root in modules:
        for path, module in nnx.iter_modules(root):
            paths[id(module)] = tuple(map(str, path))
            if callable(module) and not hasattr(type(module), _SCOPED):
                swapped.append((module, type(module)))
                object.__setattr__(module, "__class__", _scoped_class(type(module)))
    token = _scopes.set({**_scopes.get(), **paths})
    try:
        yield
    finally:
        _scopes.reset(token)
        for module, cls in swapped:
            object.__setattr__(module, "__class__", cls)


@contextlib.contextmanager
def root_scope(cls: type) -> Iterator[None]:
    """The named scope of an NNX module that is called from outside any other."""
    with contextlib.nullcontext() if _here.get() else jax.named_scope(cls.__name__):
        yield


#: Marks classes made by ``_scoped_class``.
_SCOPED = "_jaxpipe_scoped"


@functools.cache
def _scoped_class(cls: type) -> type:
    def __call__(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        path = _scopes.get().get(id(self), ())
        here = _here.get()
        below = path[len(here) :] if path[: len(here)] == here else path
        token = _here.set(path or here or _ROOT)
        try:
            with jax.named_scope("/".join(below) or cls.__name__):
                return cls.__call__(self, *args, **kwargs)
        finally:
            _here.reset(token)

    return twin_class(cls, {"__call__": __call__, _SCOPED: True})
