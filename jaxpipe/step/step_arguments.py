"""Arguments of a step: the static ones, whose values count, and all others, of which shapes do."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from jaxpipe import _compat
from jaxpipe.array_types import Device, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import equations_in
from jaxpipe.models.purify_nnx import is_module, is_node, part


@dataclass(frozen=True)
class Compared:
    """A structure as the key of a mapping, which need not be hashable: a module may have a plain dataclass in it."""

    structure: Any

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True)
class Call:
    """A step and the arguments that it is compiled for.

    Attributes:
      step: the function.
      options: arguments of ``jax.jit``.
      args, kwargs: shapes and static values; arrays would be kept on the device.
      device: one of those that it is for.
    """

    step: Callable[..., Any]
    options: Mapping[str, Any]
    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    device: Device


def is_step(step: object) -> bool:
    """Return whether something is a function that can be traced: one of ``jax.stages`` has been."""
    return callable(step) and not isinstance(step, jax.stages.Compiled | jax.stages.Traced)


def jitter(arguments: PyTree) -> Callable[..., Any]:
    """Return the function that compiles a step: ``nnx.jit`` where NNX modules are arguments, else ``jax.jit``."""
    return nnx.jit if any(map(is_module, jax.tree.leaves(arguments, is_leaf=is_module))) else jax.jit


def split_arguments(arguments: PyTree) -> tuple[Hashable, list[Any]]:
    """Return the structure of arguments and their leaves, those of NNX modules and what these share included."""
    leaves, treedef = jax.tree.flatten(arguments)
    if any(map(is_module, {type(x): x for x in leaves}.values())) or _has_modules(Compared(treedef)):
        flat = flat_arguments(arguments)
        return (flat.treedef, flat.graphdef), flat.values
    return treedef, leaves  # as most are


@functools.lru_cache(maxsize=16)  # each call of a step asks
def _has_modules(structure: Compared) -> bool:
    """Return whether there are NNX modules among the nodes of a tree."""
    node, children = structure.structure.node_data(), map(Compared, structure.structure.children())
    return (node is not None and issubclass(node[0], nnx.Pytree)) or any(map(_has_modules.__wrapped__, children))


@dataclass(frozen=True, eq=False)
class FlatArguments:
    """Arguments as arrays: leaves of trees, and the states of NNX modules, which may share variables.

    Beside modules, variables by themselves are treated as these, as under ``nnx.jit``; they change, too.

    Attributes:
      tree: leaves of trees and modules.
      treedef: of these.
      graphdef, state: of all modules.
    """

    tree: Sequence[Any]
    treedef: Any
    graphdef: Any
    state: Any

    @property
    def modules(self) -> tuple[Any, ...]:
        """The modules among them."""
        return tuple(filter(is_node, self.tree))

    @property
    def values(self) -> list[Any]:
        """The arrays."""
        return [*(x for x in self.tree if not is_node(x)), *jax.tree.leaves(self.state)]

    def filled(self, values: Sequence[Any]) -> tuple[PyTree, tuple[Any, ...]]:
        """Return arguments with other arrays, and their new modules."""
        count = len(self.tree) - len(self.modules)
        new = nnx.merge(self.graphdef, jax.tree.unflatten(jax.tree.structure(self.state), values[count:]))
        leaves, modules = iter(values[:count]), iter(new)
        return self.treedef.unflatten([next(modules if is_node(x) else leaves) for x in self.tree]), new


def flat_arguments(arguments: PyTree) -> FlatArguments:
    """Return arguments as arrays."""
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=is_node)
    if not any(map(is_module, leaves)):  # then variables are trees
        leaves, treedef = jax.tree.flatten(arguments)
    return FlatArguments(leaves, treedef, *nnx.split(tuple(filter(is_node, leaves)), graph=True))


def changed(arguments: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """Return arguments with other values, and copies of their NNX modules, which share what these share."""
    flat = flat_arguments(arguments)
    return flat.filled(list(map(change, flat.values)))[0]


def without_values(arguments: PyTree) -> PyTree:
    """Return arguments with shapes in place of arrays, those of NNX modules included."""
    return changed(arguments, _without_value)


def _without_value(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.aval.weak_type)


def shapes_made(make_arguments: Callable[[], PyTree]) -> PyTree:
    """Return what a function makes, with shapes in place of arrays, none of which is allocated; all else stays.

    Raises:
      ModelError: if it places arrays on several devices, which their shapes do not say.
    """
    kept: list[Any] = []

    def arrays() -> list[Any]:
        given, fill = part(make_arguments(), _is_traced, is_module)
        kept[:] = fill, flat_arguments([x for _, x in given])
        return kept[1].values

    program, shapes = jax.make_jaxpr(arrays, return_shape=True)()
    parameters = [x for eqn in equations_in(_compat.open_jaxpr(program)[0].eqns) for x in jax.tree.leaves(eqn.params)]
    if any(getattr(x, "num_devices", 1) > 1 for x in parameters):
        raise ModelError(
            f"{make_arguments.__name__} places arrays on several devices, which is lost in a trace. Return shapes in "
            "their place: jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
        )
    return kept[0](kept[1].filled(shapes)[0])


def _is_traced(value: object) -> bool:
    return any(isinstance(x, Tracer) for x in flat_arguments(value).values)


def split_static(
    step: Callable[..., Any], options: Mapping[str, Any], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> tuple[Hashable, PyTree]:
    """Return static arguments by place or name, and all others, as ``jax.jit`` tells them apart."""
    places, names = _compat.static_arguments(step, options.get("static_argnums"), options.get("static_argnames"))
    places = {place + len(args) if place < 0 else place for place in places}
    static = [(k, type(x), x) for k, x in enumerate(args) if k in places]
    named = [(name, type(x), x) for name, x in sorted(kwargs.items()) if name in names]
    others = tuple(None if k in places else x for k, x in enumerate(args))
    return (*static, *named), (others, {name: x for name, x in kwargs.items() if name not in names})


def with_static(static: Any, others: PyTree) -> PyTree:
    """Return arguments with static ones, as ``split_static`` has them, in their places again."""
    args, kwargs = others
    named = {place: value for place, _, value in static}
    by_name = {k: x for k, x in named.items() if isinstance(k, str)}
    return tuple(named.get(k, x) for k, x in enumerate(args)), {**kwargs, **by_name}
