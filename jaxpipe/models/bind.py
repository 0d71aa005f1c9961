"""The variables of a Flax model or a function, and how to run a user's function on it."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import flax.linen as nn
import jax
from flax import nnx

from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import is_differentiable
from jaxpipe.graph.sharding_annotations import with_axes
from jaxpipe.models.bind_linen import bind_linen
from jaxpipe.models.bind_nnx import bind_nnx, check_factory, nnx_factory
from jaxpipe.models.bound_model import BoundModel, Called, Model, UserFunction, Variable, check_variables, with_values
from jaxpipe.models.call_function import call_function
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.example_state import example_axes
from jaxpipe.models.variable_trees import by_path, common_level, is_train_state, key_name, plain_tree
from jaxpipe.options import AxisRules
from jaxpipe.text.value_text import shown


def needs_variables(model: Model) -> bool:
    """Return whether a model's shapes are only known once its variables are given."""
    return not isinstance(model, (nn.Module, nnx.Module, jax.tree_util.Partial)) and nnx_factory(model) is None


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
    if isinstance(model, nnx.Optimizer) or is_train_state(model):
        kind, module, way = f"a {type(model).__name__}", "module", "variables=train_state"
        if isinstance(model, nnx.Optimizer):
            kind, module = f"an nnx.{type(model).__name__}", "nnx.Module"
            way = "variables=model, optimizer_state=optimizer"
        raise ModelError(
            f"partition was given {kind} as its model. Pass the {module} itself, and the optax transformation as "
            f"optimizer=; then pipeline.init(key, {way}) goes on from it."
        )
    if not callable(model):
        raise ModelError(
            f"partition was given {shown(model)} as its model. A model is a flax.linen.Module, a "
            "flax.nnx.Module (or its class), a function of variables, or jax.tree_util.Partial(function, variables)."
        )


def bind(
    model: Model,
    function: UserFunction,
    microbatch: PyTree,
    variables: PyTree = None,
    stage_shape: Mapping[str, int] | None = None,
    axis_rules: AxisRules = (),
    batch: PyTree = None,
    assumed: bool = False,
) -> BoundModel:
    """Find a model's variables.

    Args:
      model: a Linen module; an NNX module, with values or abstract; an NNX class or ``functools.partial`` of one, to
        be called with ``rngs=``; ``jax.tree_util.Partial(f, params)``; or a function ``f(variables, *args)``, for
        which ``variables`` must be given.
      function: how the model is called: ``function(model, microbatch)``. Linen variables are those it touches.
      variables: values to use instead of initializing, in the model's own layout.
      stage_shape: the mesh axes over which stages are sharded, and their sizes.
      axis_rules: the mesh axes of logical ones, for a model that names such (``flax.linen.logical_axis_rules``).
      batch: shapes of the whole batch, of which state may have a row for each example; left out: as ``microbatch``.
      assumed: whether each call of a Linen module may be taken to return what its initialization does, which saves a
        trace of it. ``function`` raises ``ReturnsOtherError`` when it is traced if that is wrong; then bind without.

    Raises:
      ModelError: if the model is of another kind, or its variables are missing or do not fit.
    """
    check_model(model)
    batch = microbatch if batch is None else batch
    with nn.logical_axis_rules(axis_rules) if axis_rules else contextlib.nullcontext():
        bound = _bind(model, function, microbatch, batch, variables, assumed)
    bound = replace(bound, axis_rules=axis_rules, stage_shape=stage_shape or {})
    given = variables is not None or not isinstance(model, nn.Module)
    if given or (bound.batch is batch and not any(axis is not None for axis in bound.examples)):
        bound = replace(bound, examples=example_axes(bound, function, microbatch, batch))
    return bound if variables is None else with_values(bound, variables)


def _bind(
    model: Model, function: UserFunction, microbatch: PyTree, batch: PyTree, variables: PyTree, assumed: bool
) -> BoundModel:
    if isinstance(model, nn.Module):
        return bind_linen(model, function, microbatch, batch, variables, assumed)
    if isinstance(model, nnx.Module):
        return bind_nnx(model, None)
    if (factory := nnx_factory(model)) is not None:
        check_factory(factory)
        return bind_nnx(with_axes(lambda: nnx.eval_shape(lambda: factory(rngs=nnx.Rngs(0))))[0], factory)
    if isinstance(model, jax.tree_util.Partial):
        return _bind_tree(model, lambda tree: tree)
    if variables is None:
        raise ModelError(
            f"The model is {shown(model)}, and its variables are not known. Pass them to pipeline.init(key, batch, "
            "variables=...), or give partition jax.tree_util.Partial(function, variables)."
        )
    if is_train_state(variables):
        variables = plain_tree(variables)
    return _bind_tree(variables, lambda tree: functools.partial(model, tree))


def _bind_tree(tree: PyTree, model_of: Callable[[PyTree], Callable[..., PyTree]]) -> BoundModel:
    """Floating leaves of a tree are parameters, others state that nothing changes."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    check_variables(tree)
    trained = [is_differentiable(x) for _, x in flat]
    named = [Variable("/".join(map(key_name, path)), shape_of(x)) for path, x in flat]
    paths = list(by_path(tree))

    def build(parameters: Sequence[PyTree], state: Sequence[PyTree]) -> PyTree:
        sources = {True: iter(parameters), False: iter(state)}
        return jax.tree.unflatten(treedef, [next(sources[flag]) for flag in trained])

    def call(function: UserFunction, variables: PyTree, key: Array, batch: PyTree) -> Called:
        after = dict(zip(paths, jax.tree.leaves(variables), strict=True))  # whatever the function does to boxes
        result = call_function(function, model_of(variables), batch, key)
        return Called(result, after, lambda _: call(function, variables, key, batch))

    fixed = tuple(v for v, flag in zip(named, trained, strict=True) if not flag)
    bound = BoundModel(
        parameters=tuple(v for v, flag in zip(named, trained, strict=True) if flag),
        state=fixed,
        call=call,
        parameter_tree=lambda values: build(values, [None] * len(fixed)),
        variable_tree=build,
        levels=(common_level(paths),),
    )
    return replace(bound, values=bound.flatten(tree))
