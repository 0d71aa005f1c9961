"""The variables of a Linen module, and how to run a user's function on it."""

from collections.abc import Sequence

import flax.linen as nn
import jax
from flax.core import unfreeze
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.graph.sharding_annotations import with_axes
from jaxpipe.models.bound_model import BoundModel, Flat, UserFunction, check_new_state, named
from jaxpipe.models.call_function import call_function
from jaxpipe.models.check_batch import batch_size, shape_of
from jaxpipe.models.example_state import Axes, changed_axes
from jaxpipe.models.linen_facade import TRAINED, Calls, LinenModel, handed_on, without_sown
from jaxpipe.models.linen_variables import make_variables
from jaxpipe.models.new_variables import check_unread
from jaxpipe.models.variable_trees import by_path, is_train_state, merged, plain_tree, select


def bind_linen(
    module: nn.Module, function: UserFunction, microbatch: PyTree, batch: PyTree, variables: PyTree
) -> BoundModel:
    """Find a module's variables, as ``bind``; of one with values, not yet the axes of examples."""
    if isinstance(function, jax.stages.Wrapped):
        raise ModelError(
            "The loss is a function of jax.jit, which takes arrays only, and the model that it gets is none. Pass the "
            "function itself; a step is compiled as a whole."
        )
    examples: Axes | None = None
    if variables is None or is_train_state(variables):  # which may have fields that are no collections
        variables, calls = _found(module, function, microbatch)
        state = _state_of(variables)
        rows, size = batch_size(microbatch), batch_size(batch)
        if rows != size and any(rows in x.shape for x in jax.tree.leaves(state)):
            larger, _ = _found(module, function, batch)
            examples = changed_axes(jax.tree.leaves(state), jax.tree.leaves(_state_of(larger)), (rows, size))
            variables, microbatch = larger, batch
    else:
        given = unfreeze(plain_tree(variables))
        variables = jax.tree.map(shape_of, given if "params" in given else {"params": given})
        calls = _calls_of(module, function, variables, [microbatch, batch])
        variables = without_sown(variables, calls)
    if not variables:
        raise ModelError(
            "The loss does not call the model, so that its variables are not known. Call model(...) in it."
        )
    params, state = variables.get("params", {}), _state_of(variables)
    overwritten = {name: tree for name, tree in variables.items() if name in TRAINED and name != "params"}
    params_def, overwritten_def, state_def = map(jax.tree.structure, (params, overwritten, state))
    count = params_def.num_leaves
    expected = by_path({"params": params}) | by_path(overwritten) | by_path(state)

    def flatten(tree: PyTree) -> Flat:
        tree = unfreeze(plain_tree(tree, [*overwritten, *state]))
        tree = without_sown(tree, calls) if isinstance(tree, dict) else tree
        leaves = select(by_path(tree), expected, [("params",)])
        split = count + overwritten_def.num_leaves
        return leaves[:split], leaves[split:]

    def build(parameters: Sequence[PyTree], state: Sequence[PyTree]) -> PyTree:
        return {
            "params": jax.tree.unflatten(params_def, parameters[:count]),
            **jax.tree.unflatten(overwritten_def, parameters[count:]),
            **jax.tree.unflatten(state_def, state),
        }

    def run(
        function: UserFunction, parameters: Sequence[Array], state: Sequence[Array], key: Array, batch: PyTree
    ) -> tuple[PyTree, list[Array]]:
        def call(variables: PyTree) -> tuple[PyTree, PyTree]:
            model = LinenModel(module, variables, key, calls)
            with handed_on():
                result = call_function(function, model, batch, key)
            return result, model.state

        result, after = call(build(parameters, state))
        before, leaves = by_path(jax.tree.unflatten(state_def, state)), by_path(after)
        check_new_state(before, leaves)
        new = {path: x for path, x in leaves.items() if path not in before}
        if new:

            def call_again(values: Sequence[Array]) -> PyTree:
                given = dict(zip(new, values, strict=True))
                made = jax.tree.unflatten(jax.tree.structure(after), [given.get(p, x) for p, x in leaves.items()])
                result, again = call(merged(made, build(parameters, state)))
                return result, [by_path(again)[path] for path in before]

            check_unread(new, call_again)
        return result, [leaves[path] for path in before]

    def initialize(key: Array, batch: PyTree) -> Flat:
        return flatten(make_variables(module, function, key, batch)[0])

    return BoundModel(
        parameters=(*named(params), *named(overwritten)),
        state=named(state),
        run=run,
        parameter_tree=lambda values: jax.tree.unflatten(params_def, values[:count]),
        variable_tree=build,
        flatten=flatten,
        initialize=initialize,
        batch=microbatch,
        annotated=((*_annotated(params), *_annotated(overwritten)), _annotated(state)),
        overwritten=frozenset(range(count, count + overwritten_def.num_leaves)),
        examples=examples or (None,) * state_def.num_leaves,
    )


def _state_of(variables: PyTree) -> PyTree:
    return {name: tree for name, tree in variables.items() if name not in TRAINED}


def _found(module: nn.Module, function: UserFunction, batch: PyTree, variables: PyTree = None) -> tuple[PyTree, Calls]:
    """Return the shapes of a module's variables, and what a loss's calls do, without computing anything."""
    calls = Calls()

    def make(key: Array, batch: PyTree, variables: PyTree) -> PyTree:
        nonlocal calls
        made, calls = make_variables(module, function, key, batch, variables)
        return made

    shapes = with_axes(lambda: jax.eval_shape(make, jax.random.key(0), batch, variables))
    return shapes, calls


def _calls_of(module: nn.Module, function: UserFunction, variables: PyTree, batches: Sequence[PyTree]) -> Calls:
    """Return what a loss's calls of a module with variables do, for the first batch that these fit."""
    for batch in batches:
        try:
            return _found(module, function, batch, variables)[1]
        except Exception:  # whatever the model raises is raised again where the loss is traced
            continue
    return Calls()


def _annotated(tree: PyTree) -> tuple[P, ...]:
    """The axes that the dimensions of each array of a tree are annotated with."""
    return tuple(jax.tree.leaves(nn.get_partition_spec(tree), is_leaf=lambda x: isinstance(x, P)))
