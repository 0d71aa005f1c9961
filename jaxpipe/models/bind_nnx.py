"""The variables of an NNX module, and how to run a user's function on it."""

import functools
import inspect
import itertools
import math
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, ArrayLike, PyTree, is_key
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import read_graph
from jaxpipe.graph.program_text import program_text
from jaxpipe.models.bound_model import BoundModel, Called, Model, UserFunction, named
from jaxpipe.models.call_function import call_function
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.observed_calls import Observed, observed_calls, parameters_in
from jaxpipe.models.purify_nnx import check_kinds, module_scopes
from jaxpipe.models.variable_trees import Path, by_path, path_text, paths_of
from jaxpipe.text.units import bytes_text
from jaxpipe.text.value_text import listed


def nnx_factory(model: Model) -> Callable[..., nnx.Module] | None:
    """Return an NNX class, or a ``functools.partial`` of one, that was given as a model; None if it is none."""
    factory = model.func if isinstance(model, functools.partial) else model
    return model if inspect.isclass(factory) and issubclass(factory, nnx.Module) else None


def check_factory(factory: Callable[..., nnx.Module]) -> None:
    """Raise ``ModelError`` unless an NNX class can be called with ``rngs=`` alone."""
    partial = factory if isinstance(factory, functools.partial) else functools.partial(factory)
    cls: Any = partial.func
    try:
        inspect.signature(cls.__init__).bind(None, *partial.args, **{**partial.keywords, "rngs": None})
    except TypeError as error:
        raise ModelError(
            f"The NNX class {cls.__name__} is called as {cls.__name__}(rngs=...), which does not fit its __init__: "
            f"{error}. Set other arguments with functools.partial({cls.__name__}, ...), or pass an instance."
        ) from None


def _warn_of_optimizers(model: nnx.Module) -> None:
    """Warn if a module holds the state of optimizers, which training in stages does not use."""
    if kept := nnx.to_flat_state(nnx.state(model, nnx.OptState, graph=True)):
        size = sum(math.prod(x.shape) * x.dtype.itemsize for _, variable in kept for x in jax.tree.leaves(variable))
        warnings.warn(
            f"The model {type(model).__name__} holds an optimizer: {len(kept)} variables of its state, as "
            f"{'.'.join(map(str, kept[0][0]))}, {bytes_text(size)} in all. partition(optimizer=...) keeps optimizer "
            "state of its own; this one is not used, but takes memory on the devices beside the model's other state. "
            "Leave the nnx.Optimizer out of the module; init(key, optimizer_state=optimizer) goes on from its state.",
            stacklevel=2,
        )


#: By path of a random key, the shape of the array of its different keys.
_KeyShapes = dict[tuple[Any, ...], tuple[int, ...]]


def reseed(streams: nnx.State, key: Array, shapes: _KeyShapes | None = None) -> nnx.State:
    """The random streams (an ``nnx.State`` of keys and counts) that a micro-batch with this key uses.

    The i-th key, in the order of paths, becomes ``fold_in(key, i)``; one that is an array of keys, as those of layers
    made by ``nnx.vmap``, becomes ``split(fold_in(key, i), shape)``. Along an axis over which it is one key (a stream
    that is shared, not split), it is one again. Counts start at zero.
    """
    shapes = key_shapes(streams) if shapes is None else shapes
    flat, numbers = [], itertools.count()
    for path, variable in nnx.to_flat_state(streams):
        value = variable.get_raw_value()
        if isinstance(variable, nnx.RngKey):
            typed = is_key(value)
            fresh = jax.random.fold_in(key, next(numbers))
            if shapes[path]:
                fresh = jnp.broadcast_to(jax.random.split(fresh, shapes[path]), value.shape[: None if typed else -1])
            value = fresh if typed else jax.random.key_data(fresh)
        else:
            value = jnp.zeros(value.shape, value.dtype)
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def key_shapes(streams: nnx.State) -> _KeyShapes:
    """Return the shape of each key of some streams, with 1 for axes over which it is known to be one key."""
    shapes: _KeyShapes = {}
    for path, variable in nnx.to_flat_state(streams):
        if isinstance(variable, nnx.RngKey):
            value = variable.get_raw_value()
            shape = value.shape if is_key(value) else value.shape[:-1]  # the last axis of others is a key's words
            if shape and isinstance(value, jax.Array) and not isinstance(value, core.Tracer):
                with jax.ensure_compile_time_eval():
                    words = np.asarray(jax.random.key_data(value) if is_key(value) else value)
                shape = tuple(1 if (words == words.take([0], axis)).all() else n for axis, n in enumerate(shape))
            shapes[path] = shape
    return shapes


def bind_nnx(model: nnx.Module, factory: Callable[..., nnx.Module] | None) -> BoundModel:
    """Find a module's variables, as ``bind``; ``factory`` makes it with values, if it has none."""
    model = nnx.clone(model, graph=True)
    nnx.pop(model, lambda _, x: isinstance(x, nnx.Intermediate) and isinstance(x.get_raw_value(), tuple))  # sown before
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ..., graph=True)
    check_kinds(nnx.merge_state(params, streams, rest), ("hijax", "ref"))
    _warn_of_optimizers(model)
    params_def, rest_def = jax.tree.structure(params), jax.tree.structure(rest)
    keys, shapes = key_shapes(streams), jax.tree.map(shape_of, streams)
    leaves = jax.tree.leaves((params, rest))
    concrete = factory is None and not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    random, known = paths_of(streams, nnx.RngState), by_path(params) | by_path(rest)

    def arrays(tree: PyTree) -> dict[Path, ArrayLike]:
        others = random | paths_of(tree, (nnx.RngState, nnx.Intermediate))
        return {path: x for path, x in by_path(tree).items() if path in known or path not in others}

    def call(function: UserFunction, variables: PyTree, key: Array, batch: PyTree) -> Called:
        streams, state = reseed(shapes, key, keys), nnx.filter_state(variables, nnx.Not(nnx.Param))

        def run(graphdef: nnx.GraphDef, variables: nnx.State) -> tuple[Called, list[Path]]:
            make = functools.partial(nnx.merge, graphdef, variables, streams, copy=True)
            model, result, after, settings, writes = _call(function, batch, key, state, make)
            structure, _, left = nnx.split(model, lambda path, _: tuple(map(str, path)) in random, ..., graph=True)
            kept = {path: x for path, x in after.items() if path not in random}
            return Called(result, kept, with_others(structure, left), writes), settings

        def with_others(graphdef: nnx.GraphDef, variables: nnx.State) -> Callable[[Mapping[Path, Array]], Called]:
            leaves, structure = by_path(variables), jax.tree.structure(variables)
            return lambda values: run(graphdef, structure.unflatten(map(values.get, leaves, leaves.values())))[0]

        called, settings = run(graphdef, variables)
        if settings:
            calls = with_others(graphdef, variables), called.again
            first, second = (_program(call, by_path(variables), list(by_path(state))) for call in calls)
            if first != second:
                raise ModelError(_settings_text(settings))
        return called

    def make(key: Array, batch: PyTree) -> nnx.Module:
        if factory is None:
            raise ModelError(
                "The NNX module is abstract, so how to initialize it is not known. Give partition its class (or "
                "functools.partial of it), or pass pipeline.init(key, variables=...)."
            )
        return factory(rngs=nnx.Rngs(key))

    return BoundModel(
        parameters=named(params),
        state=named(rest),
        call=call,
        parameter_tree=lambda values: jax.tree.unflatten(params_def, values),
        variable_tree=lambda p, s: nnx.merge_state(jax.tree.unflatten(params_def, p), jax.tree.unflatten(rest_def, s)),
        arrays=arrays,
        make=None if concrete else make,
        annotated=(_nnx_annotated(params), _nnx_annotated(rest)),
        values=(jax.tree.leaves(params), jax.tree.leaves(rest)) if concrete else None,
    )


def _call(
    function: UserFunction, batch: PyTree, key: Array, state: nnx.State, make: Callable[[], nnx.Module]
) -> tuple[nnx.Module, PyTree, dict[Path, Array], list[Path], bool]:
    """Call a function: the module without what it has sown, the result, the variables after it, the settings changed.

    And whether it writes parameters.

    A variable of its state that is sown to begins empty, and is left as it was.
    """
    variables = nnx.to_flat_state(state)
    kinds, known = {(type(x), path[-1]) for path, x in variables}, [path for path, _ in variables]
    sown: set[tuple[type[nnx.Variable], object]] = set()
    while True:
        model = make()
        nnx.pop(model, _of_kinds(sown))
        observed, settings, parameters = Observed(), _settings(model), parameters_in(model)
        with module_scopes([model]), observed_calls(observed):
            result = call_function(function, model, batch, key)
        if observed.sown_variables & kinds <= sown:
            break
        sown |= observed.sown_variables & kinds
    made_in_call = nnx.All(nnx.Intermediate, lambda path, _: path not in known)
    nnx.pop(model, nnx.Any(made_in_call, _of_kinds(observed.sown_variables)))
    left = nnx.from_flat_state([(path, x) for path, x in variables if (type(x), path[-1]) in sown])
    left_behind = _settings(model)
    changed = [k for k in sorted({*settings, *left_behind}) if settings.get(k, []) != left_behind.get(k, [])]
    writes = observed.writes_parameters or any(parameters_in(model).get(p) is not x for p, x in parameters.items())
    return model, result, by_path(left) | by_path(nnx.state(model, graph=True)), changed, writes


#: What is not compared: arrays, and what is looked at for itself.
_HOLDS_ARRAYS = nnx.Pytree, nnx.Variable, jax.Array, np.ndarray


def _settings(model: nnx.Module) -> dict[Path, object]:
    """Return the attributes of a module and of those in it by path, as they are now, without arrays."""
    return {
        (*map(str, path), name): _settled(value)
        for path, module in nnx.iter_modules(model, graph=True)
        for name, value in vars(module).items()
        if not name.startswith("_pytree__")
    }


def _settled(value: object) -> list[object]:
    """Return what an attribute holds, to compare with later: a call may change a list, a dictionary or an object."""
    held, seen = [value], set[int]()
    for x in held:  # which grows
        if id(x) not in seen and not isinstance(x, (*_HOLDS_ARRAYS, type, types.ModuleType)):
            seen.add(id(x))
            inside = x if isinstance(x, Mapping | list | tuple | Set) else getattr(x, "__dict__", {})
            held += [*inside, *inside.values()] if isinstance(inside, Mapping) else inside
    return [x for x in held if not isinstance(x, (*_HOLDS_ARRAYS, Mapping, list, tuple, Set))]


def _of_kinds(kinds: Collection[tuple[type[nnx.Variable], object]]) -> Callable[[Sequence[object], object], bool]:
    """Return a filter for variables of some types and names."""
    return lambda path, x: (type(x), path[-1]) in kinds


def _program(call: Callable[[Mapping[Path, Array]], Called], variables: Mapping[Path, Array], kept: list[Path]) -> str:
    """Return what a call computes of variables, as text: its result, and the variables that are kept."""

    def results(values: Mapping[Path, Array]) -> PyTree:
        called = call(values)
        return called.result, [called.after.get(path) for path in kept]

    shapes = {path: shape_of(x) for path, x in variables.items()}
    return program_text(read_graph(jax.make_jaxpr(results)(shapes)), values=True)


def _settings_text(settings: Sequence[Path]) -> str:
    return (
        f"A call changes the attribute{'s' if len(settings) > 1 else ''} {listed(list(map(path_text, settings)), 3)} "
        "of the model, and the next call computes something else for that. A step is compiled once, and every "
        "micro-batch begins with the attributes that the model has: keep a number that changes in an nnx.Variable, and "
        "let the function set the mode before its calls, with model.train() or model.eval()."
    )


def _nnx_annotated(state: nnx.State) -> tuple[P, ...]:
    specs = []
    for _, variable in nnx.to_flat_state(state):
        # An array without a variable has no annotation.
        spec = getattr(nnx.get_partition_spec(variable), "get_raw_value", P)()
        specs += [spec or P()] * len(jax.tree.leaves(variable))
    return tuple(specs)
