"""A Flax model as named variables, and how to run a user's function on it.

    Linen module, NNX module or class, function of variables  --bind-->  BoundModel

A bound model holds no array: it knows the name, shape and place of every variable, how to run
``function(model, batch)`` from flat variables, and how plain initialization makes them.
"""

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import unfreeze
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import is_differentiable
from jaxpipe.graph.sharding_annotations import with_axes
from jaxpipe.graph.stacked_layers import Stacks, uncut
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.joined_replicas import ReplicaAxis
from jaxpipe.models.linen_facade import LinenModel, handed_on, initialized_variables
from jaxpipe.models.purify_nnx import module_scopes
from jaxpipe.models.variable_trees import by_path, common_level, key_name, plain_tree, random_paths, select
from jaxpipe.options import AxisRules
from jaxpipe.text.units import bytes_text
from jaxpipe.text.value_text import shown


#: ``function(model, batch)``: a loss, an evaluation or a prediction.
UserFunction = Callable[[Any, PyTree], PyTree]

#: A Linen module; an NNX module, its class or a ``functools.partial`` of it; ``jax.tree_util.Partial``; or a function.
Model = nn.Module | nnx.Module | Callable[..., PyTree]

#: Parameters and state, as lists.
Flat = tuple[list[ArrayLike], list[ArrayLike]]

#: ``(function, parameters, state, key, batch) -> (result, new state)``.
Run = Callable[[UserFunction, Sequence[Array], Sequence[Array], Array, PyTree], tuple[PyTree, list[Array]]]


@dataclass(frozen=True)
class Variable:
    """One array of a model: its path in the model's own layout, and its shape."""

    name: str
    aval: jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False)
class BoundModel:
    """A model's variables, flat, and the functions that need its structure.

    Attributes:
      state: what calls change or read besides (batch statistics), random streams excluded.
      parameter_tree: flat parameters -> the tree that plain training would hand to optax.
      variable_tree: flat parameters and state -> the model's own variables.
      flatten: a tree of the model's variables (``jaxpipe.models.variable_trees.select``) -> flat parameters and state.
      initialize: ``key -> (parameters, state)`` as plain initialization would make them; None if values are given.
      values: given parameters and state, or None.
      annotated: by parameter and by state variable, the axes that its dimensions are annotated with: of a mesh, or
        logical ones; in the model's own layout.
      replica_axis: what collectives over the user's name of replicas mix, in the model's own layout.
      uncut: of a model whose stacked variables are cut (``unstack``), the model in its own layout. All above is about
        the pieces then, and ``initialize`` and ``values`` are those of the model in its own layout.
      cuts: how its parameters and its state are cut.
    """

    parameters: tuple[Variable, ...]
    state: tuple[Variable, ...]
    run: Run
    parameter_tree: Callable[[Sequence[PyTree]], PyTree]
    variable_tree: Callable[[Sequence[PyTree], Sequence[PyTree]], PyTree]
    flatten: Callable[[PyTree], Flat]
    initialize: Callable[[Array], Flat] | None = None
    values: Flat | None = None
    annotated: tuple[tuple[P, ...], tuple[P, ...]] = ((), ())
    stage_shape: Mapping[str, int] = field(default_factory=dict)
    replica_axis: ReplicaAxis | None = None
    uncut: "BoundModel | None" = None
    cuts: tuple[Stacks, Stacks] | None = None

    @property
    def original(self) -> "BoundModel":
        """The model with its variables in their own layout."""
        return self.uncut or self

    @property
    def joined(self) -> int:
        """Return of how many replicas a micro-batch is."""
        return 1 if self.original.replica_axis is None else self.original.replica_axis.size

    @property
    def stacks(self) -> tuple[Stacks, Stacks]:
        """Return how the leaves of the parameters and of the state in their own layout make those of this model."""
        return self.cuts or (uncut(len(self.parameters)), uncut(len(self.state)))


def unstack(model: BoundModel, parameters: Stacks, state: Stacks) -> BoundModel:
    """Return a model with some stacked variables ``[layers, ...]`` cut into several, each with some of the rows."""

    def flatten(tree: PyTree) -> Flat:
        p, s = model.flatten(tree)
        return parameters.split(p), state.split(s)

    def run(
        function: UserFunction, p: Sequence[Array], s: Sequence[Array], key: Array, batch: PyTree
    ) -> tuple[PyTree, list[Array]]:
        result, new = model.run(function, parameters.join(p), state.join(s), key, batch)
        return result, state.split(new)

    return BoundModel(
        parameters=_pieces(model.parameters, parameters),
        state=_pieces(model.state, state),
        run=run,
        parameter_tree=lambda values: model.parameter_tree(parameters.join(values)),
        variable_tree=lambda p, s: model.variable_tree(parameters.join(p), state.join(s)),
        flatten=flatten,
        stage_shape=model.stage_shape,
        uncut=model,
        cuts=(parameters, state),
    )


def _pieces(variables: Sequence[Variable], stacks: Stacks) -> tuple[Variable, ...]:
    shapes = stacks.shapes([v.aval for v in variables])
    names = [
        variables[k].name if rows is None else f"{variables[k].name}[{rows.start}:{rows.stop}]"
        for k, rows in zip(stacks.leaf_of, stacks.rows_of, strict=True)
    ]
    return tuple(Variable(name, aval) for name, aval in zip(names, shapes, strict=True))


def needs_variables(model: Model) -> bool:
    """Return whether a model's shapes are only known once its variables are given."""
    return not isinstance(model, (nn.Module, nnx.Module, jax.tree_util.Partial)) and _nnx_factory(model) is None


def check_model(model: Model) -> None:
    """Raise ``ModelError`` unless a model is of a kind that ``bind`` knows."""
    if not needs_variables(model):
        return
    cls = model.func if isinstance(model, functools.partial) else model
    if inspect.isclass(cls) and issubclass(cls, nn.Module):
        raise ModelError(
            f"partition was given the Linen class {cls.__name__} as its model; it needs a module, which is an "
            f"instance: partition({cls.__name__}(...), ...)."
        )
    if isinstance(getattr(model, "module", None), nn.Module):
        kind = type(model).__name__
        raise ModelError(
            f"partition was given a {kind}, which holds a Linen module and its parameters, as its model. Give it the "
            f"module, and init the parameters: partition(model.module, ...), then pipeline.init(key, variables="
            "{'params': model.params})."
        )
    if isinstance(model, nnx.Optimizer):
        raise ModelError(
            f"partition was given an nnx.{type(model).__name__} as its model. Pass the nnx.Module itself, and the "
            "optax transformation as optimizer=."
        )
    if not callable(model):
        raise ModelError(
            f"partition was given {shown(model)} as its model. A model is a flax.linen.Module, a "
            "flax.nnx.Module (or its class), a function of variables, or jax.tree_util.Partial(function, variables)."
        )


def bind(
    model: Model,
    function: UserFunction,
    batch: PyTree,
    variables: PyTree = None,
    stage_shape: Mapping[str, int] | None = None,
    axis_rules: AxisRules = (),
) -> BoundModel:
    """Find a model's variables.

    Args:
      model: a Linen module; an NNX module, with values or abstract; an NNX class or ``functools.partial`` of one, to
        be called with ``rngs=``; ``jax.tree_util.Partial(f, params)``; or a function ``f(variables, *args)``, for
        which ``variables`` must be given.
      function: how the model is called: ``function(model, batch)``. Linen variables are those it touches.
      variables: values to use instead of initializing, in the model's own layout.
      stage_shape: the mesh axes over which stages are sharded, and their sizes.
      axis_rules: the mesh axes of logical ones, for a model that names such (``flax.linen.logical_axis_rules``).

    Raises:
      ModelError: if the model is of another kind, or its variables are missing or do not fit.
    """
    check_model(model)
    with _naming(axis_rules):
        bound = _bind(model, function, batch, variables)
    own_run = bound.run

    def run(
        function: UserFunction, parameters: Sequence[Array], state: Sequence[Array], key: Array, batch: PyTree
    ) -> tuple[PyTree, list[Array]]:
        with _naming(axis_rules):
            return own_run(function, parameters, state, key, batch)

    bound = replace(bound, run=run, stage_shape=stage_shape or {})
    return bound if variables is None else with_values(bound, variables)


def _naming(axis_rules: AxisRules) -> contextlib.AbstractContextManager[None]:
    """A context in which logical axes stand for those of a mesh; without rules of its own, the caller's."""
    return nn.logical_axis_rules(axis_rules) if axis_rules else contextlib.nullcontext()


def _bind(model: Model, function: UserFunction, batch: PyTree, variables: PyTree) -> BoundModel:
    if isinstance(model, nn.Module):
        return _bind_linen(model, function, batch, variables)
    if isinstance(model, nnx.Module):
        return _bind_nnx(model, None)
    if (factory := _nnx_factory(model)) is not None:
        _check_factory(factory)
        return _bind_nnx(with_axes(lambda: nnx.eval_shape(lambda: factory(rngs=nnx.Rngs(0)))), factory)
    if isinstance(model, jax.tree_util.Partial):
        return _bind_tree(model, lambda tree: tree)
    if variables is None:
        raise ModelError(
            f"The model is {shown(model)}, and its variables are not known. Pass them to pipeline.init(key, batch, "
            "variables=...), or give partition jax.tree_util.Partial(function, variables)."
        )
    return _bind_tree(variables, lambda tree: functools.partial(model, tree))


def with_values(bound: BoundModel, variables: PyTree) -> BoundModel:
    """Return the same model with given values, checked against its variables."""
    if bound.cuts is not None:
        return unstack(with_values(bound.original, variables), *bound.stacks)
    return replace(bound, values=bound.flatten(variables), initialize=None)


def _named(tree: PyTree) -> tuple[Variable, ...]:
    """Variables with the names that they have without boxes around them, such as ``nn.Partitioned``."""
    return tuple(Variable("/".join(path), shape_of(x)) for path, x in by_path(tree).items())


def _path_name(path: jax.tree_util.KeyPath) -> str:
    return "/".join(map(key_name, path))


# Linen


def _bind_linen(module: nn.Module, function: UserFunction, batch: PyTree, variables: PyTree) -> BoundModel:
    if isinstance(function, jax.stages.Wrapped):
        raise ModelError(
            "The loss is a function of jax.jit, which takes arrays only, and the model that it gets is none. Pass the "
            "function itself; a step is compiled as a whole."
        )

    make = functools.partial(initialized_variables, module, function)
    if variables is None:
        shapes = with_axes(lambda: jax.eval_shape(make, jax.random.key(0), batch))
    else:
        given = unfreeze(plain_tree(variables))
        shapes = jax.tree.map(shape_of, given if "params" in given else {"params": given})
    if not shapes:
        raise ModelError(
            "The loss does not call the model, so that its variables are not known. Call model(...) in it."
        )
    params = shapes.get("params", {})
    rest = {name: tree for name, tree in shapes.items() if name != "params"}
    params_def, rest_def = jax.tree.structure(params), jax.tree.structure(rest)

    expected = by_path({"params": params}) | by_path(rest)

    def flatten(tree: PyTree) -> Flat:
        leaves = select(tree, expected, [("params",)])
        return leaves[: params_def.num_leaves], leaves[params_def.num_leaves :]

    def build(parameters: Sequence[PyTree], state: Sequence[PyTree]) -> PyTree:
        return {"params": jax.tree.unflatten(params_def, parameters), **jax.tree.unflatten(rest_def, state)}

    def run(
        function: UserFunction, parameters: Sequence[Array], state: Sequence[Array], key: Array, batch: PyTree
    ) -> tuple[PyTree, list[Array]]:
        model = LinenModel(module, build(parameters, state), key)
        with handed_on():
            result = function(model, batch)
        return result, jax.tree.leaves({name: model.variables[name] for name in rest})

    def initialize(key: Array) -> Flat:
        zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), batch)
        return flatten(make(key, zeros))

    return BoundModel(
        parameters=_named(params),
        state=_named(rest),
        run=run,
        parameter_tree=lambda values: jax.tree.unflatten(params_def, values),
        variable_tree=build,
        flatten=flatten,
        initialize=initialize,
        annotated=(_annotated(params), _annotated(rest)),
    )


def _annotated(tree: PyTree) -> tuple[P, ...]:
    """The axes that the dimensions of each array of a tree are annotated with."""
    return tuple(jax.tree.leaves(nn.get_partition_spec(tree), is_leaf=lambda x: isinstance(x, P)))


# NNX


def _nnx_factory(model: Model) -> Callable[..., nnx.Module] | None:
    factory = model.func if isinstance(model, functools.partial) else model
    return model if inspect.isclass(factory) and issubclass(factory, nnx.Module) else None


def _check_factory(factory: Callable[..., nnx.Module]) -> None:
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
    kept = nnx.to_flat_state(nnx.state(model, nnx.OptState))
    if kept:
        size = sum(math.prod(x.shape) * x.dtype.itemsize for _, variable in kept for x in jax.tree.leaves(variable))
        warnings.warn(
            f"The model {type(model).__name__} holds an optimizer: {len(kept)} variables of its state, as "
            f"{'.'.join(map(str, kept[0][0]))}, {bytes_text(size)} in all. partition(optimizer=...) keeps optimizer "
            "state of its own; this one is not used, but takes memory on the devices beside the model's other state. "
            "Leave the nnx.Optimizer out of the module.",
            stacklevel=2,
        )


def reseed(streams: nnx.State, key: Array) -> nnx.State:
    """The random streams (an ``nnx.State`` of keys and counts) that a micro-batch with this key uses.

    The i-th key, in the order of paths, becomes ``fold_in(key, i)``; counts start at zero.
    """
    number = 0
    flat = []
    for path, variable in nnx.to_flat_state(streams):
        value = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            fresh = jax.random.fold_in(key, number)
            number += 1
            value = fresh if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else jax.random.key_data(fresh)
        else:
            value = jax.numpy.zeros(value.shape, value.dtype)
        flat.append((path, variable.replace(value)))
    return nnx.from_flat_state(flat)


def _bind_nnx(model: nnx.Module, factory: Callable[..., nnx.Module] | None) -> BoundModel:
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    _warn_of_optimizers(model)
    params_def, rest_def = jax.tree.structure(params), jax.tree.structure(rest)
    shapes = jax.tree.map(shape_of, streams)
    leaves = jax.tree.leaves((params, rest))
    concrete = factory is None and not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    known = [path for path, _ in nnx.to_flat_state(rest)]

    expected = by_path(params) | by_path(rest)
    random = random_paths(streams)

    def flatten(tree: PyTree) -> Flat:
        leaves = select(tree, expected, ignored=random | random_paths(tree))
        return leaves[: params_def.num_leaves], leaves[params_def.num_leaves :]

    def run(
        function: UserFunction, parameters: Sequence[Array], state: Sequence[Array], key: Array, batch: PyTree
    ) -> tuple[PyTree, list[Array]]:
        variables = jax.tree.unflatten(params_def, parameters), jax.tree.unflatten(rest_def, state)
        model = nnx.merge(graphdef, variables[0], reseed(shapes, key), variables[1], copy=True)
        with module_scopes([model]):
            result = function(model, batch)
        after = dict(nnx.to_flat_state(nnx.state(model)))
        return result, [x for path in known for x in jax.tree.leaves(after[path])]

    def initialize(key: Array) -> Flat:
        if factory is None:
            raise ModelError(
                "The NNX module is abstract, so how to initialize it is not known. Give partition its class (or "
                "functools.partial of it), or pass pipeline.init(key, variables=...)."
            )
        return flatten(factory(rngs=nnx.Rngs(key)))

    return BoundModel(
        parameters=_named(nnx.to_pure_dict(params)),
        state=_named(nnx.to_pure_dict(rest)),
        run=run,
        parameter_tree=lambda values: jax.tree.unflatten(params_def, values),
        variable_tree=lambda p, s: nnx.merge_state(jax.tree.unflatten(params_def, p), jax.tree.unflatten(rest_def, s)),
        flatten=flatten,
        initialize=None if concrete else initialize,
        annotated=(_nnx_annotated(params), _nnx_annotated(rest)),
        values=(jax.tree.leaves(params), jax.tree.leaves(rest)) if concrete else None,
    )


def _nnx_annotated(state: nnx.State) -> tuple[P, ...]:
    specs = (nnx.get_partition_spec(variable) for _, variable in nnx.to_flat_state(state))
    leaves = (jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, P)) for spec in specs)
    return tuple(spec for some in leaves for spec in some)


# Functions


def _bind_tree(tree: PyTree, model_of: Callable[[PyTree], Callable[..., PyTree]]) -> BoundModel:
    """Floating leaves of a tree are parameters, others state that nothing changes."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for path, x in flat:
        if not hasattr(x, "dtype"):
            raise ModelError(
                f"The model's variable {_path_name(path)} is {x!r} ({type(x).__name__}); variables are arrays. Put "
                "settings into the function, with functools.partial."
            )
    trained = [is_differentiable(x) for _, x in flat]
    named = [Variable(_path_name(path), shape_of(x)) for path, x in flat]

    def build(parameters: Sequence[PyTree], state: Sequence[PyTree]) -> PyTree:
        sources = {True: iter(parameters), False: iter(state)}
        return jax.tree.unflatten(treedef, [next(sources[flag]) for flag in trained])

    expected = {path: v.aval for path, v in zip(by_path(tree), named, strict=True)}
    level = common_level(expected)

    def flatten(tree: PyTree) -> Flat:
        leaves = select(tree, expected, [level])
        pairs = list(zip(leaves, trained, strict=True))
        return [x for x, flag in pairs if flag], [x for x, flag in pairs if not flag]

    def run(
        function: UserFunction, parameters: Sequence[Array], state: Sequence[Array], key: Array, batch: PyTree
    ) -> tuple[PyTree, list[Array]]:
        return function(model_of(build(parameters, state)), batch), list(state)

    return BoundModel(
        parameters=tuple(v for v, flag in zip(named, trained, strict=True) if flag),
        state=tuple(v for v, flag in zip(named, trained, strict=True) if not flag),
        run=run,
        parameter_tree=lambda values: build(values, [None] * (len(trained) - sum(trained))),
        variable_tree=build,
        flatten=flatten,
        values=flatten(tree),
    )
