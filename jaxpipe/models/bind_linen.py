"""The variables of a Linen module, and how to run a user's function on it."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import flax.linen as nn
import jax
from flax.core import unfreeze
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.sharding_annotations import with_axes
from jaxpipe.models.bound_model import Axes, BoundModel, Called, UserFunction, named
from jaxpipe.models.call_function import call_function
from jaxpipe.models.check_batch import batch_size, shape_key, shape_of
from jaxpipe.models.example_state import changed_axes
from jaxpipe.models.linen_facade import TRAINED, LinenModel, handed_on, make_variables, state_of, without_sown
from jaxpipe.models.microbatch_program import with_rows
from jaxpipe.models.observed_calls import Observed
from jaxpipe.models.variable_trees import Path, by_path, is_train_state, path_text, plain_tree


@dataclass(frozen=True, eq=False)
class _Search:
    """The variables of a module, as shapes.

    Attributes:
      calls: what a loss's calls of the module do.
      batch: the batch that these variables are made for.
      examples: the axes of examples of its state, if they are known.
    """

    variables: PyTree
    calls: Observed
    batch: PyTree
    examples: Axes | None = None


def bind_linen(
    module: nn.Module, function: UserFunction, microbatch: PyTree, batch: PyTree, variables: PyTree, assumed: bool
) -> BoundModel:
    """Find a module's variables, as ``bind``; of one with values, not yet the axes of examples."""
    if isinstance(function, jax.stages.Wrapped):
        raise ModelError(
            "The loss is a function of jax.jit, which takes arrays only, and the model that it gets is none. Pass the "
            "function itself; a step is compiled as a whole."
        )
    if variables is None or is_train_state(variables):  # which may have fields that are no collections
        search = _initial(module, function, microbatch, batch, assumed)
    else:
        search = _given(module, function, microbatch, batch, unfreeze(plain_tree(variables)))
    if not search.variables:
        raise ModelError("The loss does not call the model, so its variables are not known. Call model(...) in it.")
    params, state = search.variables.get("params", {}), state_of(search.variables)
    overwritten = {name: search.variables[name] for name in TRAINED[1:] if name in search.variables}
    params_def, overwritten_def, state_def = map(jax.tree.structure, (params, overwritten, state))
    count, trained = params_def.num_leaves, params_def.num_leaves + overwritten_def.num_leaves

    bound_function, batch_key = function, shape_key(jax.tree.map(shape_of, microbatch))
    once = len(search.calls.assumed) == 1  # no variable follows from the result of another call

    def arrays(tree: PyTree) -> dict[Path, ArrayLike]:
        tree = unfreeze(plain_tree(tree, [*overwritten, *state]))
        return by_path(without_sown(tree, search.calls) if isinstance(tree, dict) else tree)

    def variable_tree(parameters: Sequence[PyTree], state: Sequence[PyTree]) -> PyTree:
        return {
            "params": jax.tree.unflatten(params_def, parameters[:count]),
            **jax.tree.unflatten(overwritten_def, parameters[count:]),
            **jax.tree.unflatten(state_def, state),
        }

    def call(function: UserFunction, variables: PyTree, key: Array, batch: PyTree) -> Called:
        bound = batch_key == shape_key(jax.tree.map(shape_of, batch)) and function is bound_function
        model = LinenModel(module, variables, key, search.calls if bound else search.calls.copy())
        with handed_on():
            result = call_function(function, model, batch, key)
        model.check_all_called()
        if bound:
            search.calls.assumed = ()  # it was as assumed
        left = {**variables, **model.state}
        after = by_path(left)

        def again(values: Mapping[Path, Array]) -> Called:
            other = jax.tree.unflatten(jax.tree.structure(left), [values[path] for path in after])
            return call(function, other, key, batch)

        return Called(result, after, again)

    return BoundModel(
        parameters=(*named(params), *named(overwritten)),
        state=named(state),
        call=call,
        parameter_tree=lambda values: jax.tree.unflatten(params_def, values[:count]),
        variable_tree=variable_tree,
        arrays=arrays,
        levels=(("params",),),
        make=lambda key, batch: make_variables(module, function, key, batch, assumed=once)[0],
        batch=search.batch,
        annotated=((*_annotated(params), *_annotated(overwritten)), _annotated(state)),
        overwritten=frozenset(range(count, trained)),
        examples=search.examples or (None,) * state_def.num_leaves,
    )


def _initial(module: nn.Module, function: UserFunction, microbatch: PyTree, batch: PyTree, assumed: bool) -> _Search:
    """Find the variables that calls need; of state that is longer for a batch, those for the batch."""
    try:
        variables, calls = _shapes(module, function, microbatch, assumed=assumed)
    except Exception:  # of a module whose state has a row for each example of the batch
        if shape_key(microbatch) == shape_key(batch):
            raise
        return _Search(*_shapes(module, function, batch), batch)
    search = _Search(variables, calls, microbatch)
    rows, size = batch_size(microbatch), batch_size(batch)
    state = by_path(state_of(search.variables))
    statistics = {path for path in state if path[0] == "batch_stats"}  # by feature, as a rule
    sizes = ((n, path) for path, x in state.items() for n in x.shape if n)
    if rows == size or not any(n == rows or (n % rows == 0 and path not in statistics) for n, path in sizes):
        return search
    try:
        larger = _Search(_shapes(module, function, batch, assumed=assumed)[0], calls, batch)
    except Exception:  # a loss that is made for the micro-batch
        return search
    grown = by_path(state_of(larger.variables))
    names, after = list(map(path_text, state)), [grown.get(path, x) for path, x in state.items()]
    examples = changed_axes(names, list(state.values()), after, (rows, size))
    if any(axis is not None for axis in examples):
        return replace(larger, examples=examples)
    try:
        if rows == 1:  # which is broadcast over state that has a row for each example of the batch
            _shapes(module, function, with_rows(batch, 2 if size > 2 else 3))
    except Exception:  # of a module that is made for the batch
        return larger
    return search


def _given(module: nn.Module, function: UserFunction, microbatch: PyTree, batch: PyTree, variables: PyTree) -> _Search:
    """Find what calls do to variables that are given, for a micro-batch or, if it does not fit these, for a batch."""
    shapes = jax.tree.map(shape_of, variables if "params" in variables else {"params": variables})
    for some in (microbatch, batch):
        try:
            _, calls = _shapes(module, function, some, shapes)
        except Exception:  # whatever the model raises is raised again where the loss is traced
            continue
        return _Search(without_sown(shapes, calls), calls, batch)
    return _Search(shapes, Observed(), batch)


def _shapes(
    module: nn.Module, function: UserFunction, batch: PyTree, variables: PyTree = None, assumed: bool = False
) -> tuple[PyTree, Observed]:
    """Return the shapes of a module's variables, and what a loss's calls do, without computing anything.

    If the loss fails with what is ``assumed`` of the calls, that is not assumed.
    """
    calls = Observed()

    def make(key: Array, batch: PyTree, variables: PyTree) -> PyTree:
        nonlocal calls
        result, calls = make_variables(module, function, key, batch, variables, assumed)
        return result

    key = jax.random.key(0)  # an array, which is made outside of the axes
    with contextlib.suppress(*([Exception] if assumed else ())):
        shapes, _ = with_axes(lambda: jax.eval_shape(make, key, batch, variables))
        return shapes, calls
    return _shapes(module, function, batch, variables)


def _annotated(tree: PyTree) -> tuple[P, ...]:
    """The axes that the dimensions of each array of a tree are annotated with."""
    return tuple(jax.tree.leaves(nn.get_partition_spec(tree), is_leaf=lambda x: isinstance(x, P)))
