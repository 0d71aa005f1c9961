"""A user's function of one micro-batch, as a graph."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, PyTree, PyTreeDef, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph import sharding_annotations
from jaxpipe.graph.graph import Graph, behind_rules, dependents, is_differentiable, live, read_graph, with_copies
from jaxpipe.graph.operator_order import parameter_work_in_place
from jaxpipe.graph.sharding_annotations import Annotations
from jaxpipe.graph.split_scan import MixedRowsError, split_rows, with_layer_paths
from jaxpipe.graph.stacked_layers import Stacks
from jaxpipe.models import joined_replicas
from jaxpipe.models.bound_model import Axes, BoundModel, UserFunction
from jaxpipe.models.check_arguments import check_predicted, returned_parts
from jaxpipe.models.check_batch import batch_size, has_examples
from jaxpipe.models.combine_metrics import Metric, addable, flatten_metrics, returned_metric


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicrobatchProgram:
    """A loss, an evaluation or a prediction of one micro-batch.

    Attributes:
      model: whose it is: its parameters and its state are those of the program, in this order.
      parameters, state, key, batch: tensor numbers of the inputs.
      index: the number of the micro-batch among those of all replicas, where state has a row for each example.
      results: tensor numbers: loss, weight, then metrics, and, if it is ``weighted``, the weight again, whose sum is
        reported as that of a metric; or the leaves of a prediction.
      new_state: tensor numbers, one for each state variable.
      frozen: the parameters whose gradient nobody needs.
      overwritten: the parameters whose new value is their gradient.
      metrics_only: whether an evaluation returned metrics and no loss.
      microbatch: the shapes that it was traced for.
      retrace: traces the same function for other shapes, without a check of what it returns.
    """

    graph: Graph
    model: BoundModel
    parameters: tuple[TensorNumber, ...]
    state: tuple[TensorNumber, ...]
    key: TensorNumber
    batch: tuple[TensorNumber, ...]
    results: tuple[TensorNumber, ...]
    new_state: tuple[TensorNumber, ...]
    microbatch: PyTree
    retrace: Callable[[PyTree], "MicrobatchProgram"]
    tree: PyTreeDef
    metrics_only: bool = False
    weighted: bool = False
    annotations: Annotations = field(default_factory=Annotations)
    frozen: frozenset[TensorNumber] = frozenset()
    summed: tuple[bool, ...] = ()
    index: TensorNumber | None = None
    overwritten: frozenset[TensorNumber] = frozenset()

    @cached_property
    def names(self) -> dict[TensorNumber, str]:
        """The names of its parameters and state variables."""
        variables = (*self.model.parameters, *self.model.state)
        return {t: v.name for t, v in zip((*self.parameters, *self.state), variables, strict=True)}

    @cached_property
    def text(self) -> str:
        """Its operators, a line for each, the same in every process: without addresses of objects."""
        return re.sub(r"0x[0-9a-f]+", "", str(self.graph))

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results."""
        return [self.graph.tensors[t].shape for t in self.results]

    @property
    def given(self) -> tuple[TensorNumber, ...]:
        """The inputs of every stage: the micro-batch, its key, its number."""
        return (*self.batch, self.key, *(() if self.index is None else (self.index,)))

    @property
    def differentiated(self) -> tuple[TensorNumber, ...]:
        """The parameters that receive a gradient."""
        tensors = self.graph.tensors
        return tuple(t for t in self.parameters if t not in self.frozen and is_differentiable(tensors[t].aval))

    def with_examples(self, rows: int) -> "MicrobatchProgram | None":
        """Trace the function for another number of examples; None of one that is made for batches of one size."""
        try:
            return self.retrace(with_rows(self.microbatch, rows))
        except Exception:  # whatever such a function raises
            return None

    def training(self, trained: Sequence[bool]) -> "MicrobatchProgram":
        """A copy of which only some parameters are trained."""
        left = (t for t, kept in zip(self.parameters, trained, strict=True) if not kept)
        return replace(self, frozen=frozenset(left))


def trace_loss(model: BoundModel, function: UserFunction, batch: PyTree, name: str = "loss") -> MicrobatchProgram:
    """Trace ``function(model, batch)``, which returns a scalar, ``(scalar, metrics)`` or ``(sum, weight, metrics)``.

    The results are a loss, a weight and the metrics; without a weight of its own a micro-batch weighs 1.

    Raises:
      PartitionError: if what is returned has another form, metrics are not reduced over the examples, or a loss that
        is trained depends on no parameter, or its weight does.
    """
    return checked_loss(_trace(model, function, batch, _reduced, name), name)


def checked_loss(objective: MicrobatchProgram, name: str = "loss") -> MicrobatchProgram:
    """Return a loss; raises as ``trace_loss`` if metrics are not reduced, or nothing is trained, or its weight is."""
    if any(objective.result_shapes):
        _check_reduced(objective, name)
    if name == "loss":
        _check_trained(objective)
        _check_weight(objective)
    return objective


def _reduced(returned: PyTree, name: str) -> tuple[list[Array], dict[str, Any]]:
    """Return the loss, the weight and the metrics that a function has returned, and what is known of them."""
    loss, weight, rest = returned_parts(returned, name)
    weighted = weight is not None
    metrics, tree = flatten_metrics(rest, name, weighted)
    weight = addable(jnp.asarray(weight)) if weighted else jnp.asarray(1.0, jnp.float32)
    metrics += [Metric("weight", True, weight)] if weighted else []
    arrays = [addable(jnp.asarray(0.0 if loss is None else loss)), weight, *(x.value for x in metrics)]
    summed = tuple(x.summed for x in metrics)
    return arrays, {"tree": tree, "metrics_only": loss is None, "weighted": weighted, "summed": summed}


def trace_prediction(
    model: BoundModel, function: UserFunction, batch: PyTree, name: str = "predict"
) -> MicrobatchProgram:
    """Trace ``function(model, batch)``, which returns a tree of arrays with one row for each example.

    Of a batch that has no axis of examples, arrays may have any first axis.
    """
    program, rows = _trace(model, function, batch, _predicted, name), batch_size(batch)
    for shape in program.result_shapes:
        if not shape or (shape[0] != rows and has_examples(batch)):
            raise PartitionError(
                f"{name} returned an array of shape {shape} for {rows} examples; the first axis of everything it "
                "returns must be the examples."
            )
    return program


def _predicted(returned: PyTree, name: str) -> tuple[list[Array], dict[str, Any]]:
    """Return the leaves of a prediction, and their structure."""
    check_predicted(returned, name)
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, returned))
    return leaves, {"tree": tree}


def check_rows(program: MicrobatchProgram, name: str) -> None:
    """Raise ``PartitionError`` if a prediction's arrays are as long as a micro-batch of several examples by chance."""
    larger = program.with_examples(2 * batch_size(program.microbatch))
    for shape, other in zip(program.result_shapes, larger.result_shapes if larger else (), strict=False):
        if other != (2 * shape[0], *shape[1:]):
            raise PartitionError(
                f"{name} returned an array of shape {shape} for a micro-batch, and {other} for one of twice the "
                "examples. Micro-batches are put together along the first axis: it must be the examples, and no other."
            )


def trace_call(model: BoundModel, function: UserFunction, batch: PyTree) -> MicrobatchProgram:
    """Trace ``function(model, batch)`` for what becomes of the state, whatever it returns."""

    def results(returned: PyTree, _: str) -> tuple[list[Array], dict[str, Any]]:
        arrays, tree = jax.tree.flatten([x for x in jax.tree.leaves(returned) if isinstance(x, jax.Array)])
        return arrays, {"tree": tree}

    return _trace(model, function, batch, results, "")


def with_rows(batch: PyTree, rows: int) -> PyTree:
    """The shapes of a batch with another number of examples, those of a micro-batch for example, if it has examples."""
    if not has_examples(batch):
        return batch
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if x.shape else x, batch)


def _check_reduced(objective: MicrobatchProgram, name: str) -> None:
    """Raise ``PartitionError`` if a metric has an axis of examples: another shape for another number of examples."""
    rows, shapes, tree = batch_size(objective.microbatch), objective.result_shapes[2:], objective.tree
    others = [(2 * rows, *shape[1:]) if shape[:1] == (rows,) else shape for shape in shapes]
    larger = objective.with_examples(2 * rows)
    if larger is not None:  # else a first axis as long as the micro-batch is its examples
        others = larger.result_shapes[2:]
    paths = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))
    for (path, _), shape, other in zip(paths, shapes, others, strict=False):  # behind them may be the weight
        if shape != other:
            raise PartitionError(
                f"{returned_metric(name, jax.tree_util.keystr(path))} of shape {shape} for a micro-batch of {rows} "
                f"examples, and {other} for {2 * rows}: it has values of single examples. Metrics are averaged over "
                "micro-batches (jaxpipe.Sum(value): added up), which mixes examples. Reduce it over the examples, as "
                "value.mean(0) does; to get a value for each example, use predict."
            )


def _check_trained(objective: MicrobatchProgram) -> None:
    """Raise ``PartitionError`` if a loss depends on no parameter."""
    if objective.results[0] in dependents(objective.graph.operators, objective.parameters):
        return
    if not objective.parameters:
        raise PartitionError(
            "The model has no parameters, so there is nothing to train. Parameters are nnx.Param variables, the "
            "collection 'params' of a Linen module, or the floating-point arrays of a function's variables."
        )
    raise PartitionError(
        f"The loss depends on none of the model's {len(objective.parameters)} parameters "
        f"({objective.names[objective.parameters[0]]}, ...), so every gradient would be zero. Compute it with the "
        "model that the loss is given as its first argument, loss(model, batch), not with a module or variables from "
        "outside."
    )


def _check_weight(objective: MicrobatchProgram) -> None:
    """Raise ``PartitionError`` if a weight has a derivative with respect to parameters, which would be left out."""
    if _is_trained(objective, objective.results[1]):
        raise PartitionError(
            "loss returned a weight that depends on the model's parameters. Loss and gradient of a batch are divided "
            "by the total weight as by a constant, so that its own derivative would be left out. Return "
            "jax.lax.stop_gradient(weight) if that is meant; else return the quotient, (sum / weight, metrics), of "
            "which the mean over micro-batches is trained."
        )


def _is_trained(objective: MicrobatchProgram, result: TensorNumber) -> bool:
    """Return whether JAX has a derivative of a result with respect to parameters; zeros do not read its cotangent."""
    graph, trained = objective.graph, objective.differentiated
    if result not in dependents(graph.operators, trained) or not is_differentiable(graph.tensors[result].aval):
        return False
    part = replace(graph, operators=live(graph.operators, [result]), outputs=(result,))
    places = [graph.inputs.index(t) for t in trained]

    def gradients(cotangent: Array, *values: Array) -> Sequence[Array]:
        def run(*parameters: Array) -> Array:
            given = dict(enumerate(values)) | dict(zip(places, parameters, strict=True))
            return part.evaluate(list(given.values()))[0]

        return jax.vjp(run, *(values[k] for k in places))[1](cotangent)

    shapes = [sharding_annotations.without_mesh(graph.tensors[t].aval) for t in (result, *graph.inputs)]
    trace = jax.make_jaxpr(gradients)
    (closed,) = sharding_annotations.rule_within_stage("a weight", lambda: [trace(*shapes)], {}, graph.traced_in)
    derived = read_graph(closed)
    return not dependents(derived.operators, derived.inputs[:1]).isdisjoint(derived.outputs)


def _trace(
    model: BoundModel,
    function: UserFunction,
    batch: PyTree,
    results: Callable[[PyTree, str], tuple[list[Array], dict[str, Any]]],
    name: str,
) -> MicrobatchProgram:
    """Trace a function, of whose returned values ``results`` makes arrays, and fields of the program."""
    batch_leaves, batch_tree = jax.tree.flatten(batch)
    original = model.original
    parameters, state = ([v.aval for v in variables] for variables in (original.parameters, original.state))
    rows, axes = batch_size(batch), original.examples
    indexed = any(axis is not None for axis in axes)
    counts = [len(parameters), len(state), 1, int(indexed), len(batch_leaves)]
    number, returns = 0, dict[str, Any]()

    def body(*leaves: Array) -> list[Array]:
        nonlocal number
        p, s, (key,), index, b = split(leaves, counts)
        state_rows = _rows_of(s, axes, rows, index[0]) if indexed else s

        def run(key: Array, b: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            microbatch, keeps = jax.tree.unflatten(batch_tree, b), name != "predict"
            returned, new_state = original.run(function, p, state_rows, key, microbatch, keeps)
            arrays, fields = results(returned, name)
            returns.update(fields)
            return arrays, new_state

        if original.replica_axis is None:
            result_leaves, new_state = run(key, b)
        else:
            result_leaves, new_state = joined_replicas.run_replicas(original.replica_axis, run, s, key, b)
            result_leaves = _joined(result_leaves, **returns)
        new_state = _with_rows_of(s, new_state, axes, rows, index[0]) if indexed else new_state
        number = len(result_leaves)
        return [*result_leaves, *new_state]

    key = jax.eval_shape(lambda: jax.random.key(0))
    shape = model.stage_shape
    numbers = [jax.ShapeDtypeStruct((), jnp.int32)] * counts[3]
    closed, mentioned = sharding_annotations.trace(body, *parameters, *state, key, *numbers, *batch_leaves, shape=shape)
    _check_references(closed.consts, name)
    graph = read_graph(closed)
    graph = with_layer_paths(graph, dict(zip(graph.inputs, (v.name for v in original.parameters), strict=False)))
    if model.cuts is not None:
        graph = _cut(graph, model, counts, number, name)
        counts[:2] = len(model.parameters), len(model.state)
        parameters = model.parameters
    # State that becomes another variable, maybe of another stage, is made by an operator of its own stage, as any.
    variables = graph.inputs[: sum(counts[:2])]
    pairs = enumerate(zip(variables[counts[0] :], graph.outputs[number:], strict=True), number)
    graph = with_copies(graph, [k for k, (t, new) in pairs if new != t and new in variables])
    graph = graph.with_parameters([k < len(parameters) for k in range(sum(counts))])
    graph = parameter_work_in_place(graph, [graph.inputs[len(parameters) + len(state)]])
    p, s, (k,), i, b = map(tuple, split(graph.inputs, counts))
    unbound = tuple(axis for axis in mentioned.traced_in.unbound if axis not in dict(mentioned.mapped))
    traced_in, ruled = replace(mentioned.traced_in, unbound=unbound), frozenset(behind_rules(graph.operators))
    return MicrobatchProgram(
        replace(graph, stage_shape=shape, traced_in=traced_in, ruled=ruled),
        model,
        p,
        s,
        k,
        b,
        graph.outputs[:number],
        graph.outputs[number:],
        batch,
        lambda other: _trace(model, function, other, results, name),
        **returns,
        annotations=mentioned,
        index=next(iter(i), None),
        overwritten=frozenset(p[position] for position in model.overwritten),
    )


def _rows_of(state: Sequence[Array], axes: Axes, rows: int, index: Array) -> list[Array]:
    """Return the state of a micro-batch, by its number in the batch."""
    pairs = zip(state, axes, strict=True)
    return [x if axis is None else lax.dynamic_slice_in_dim(x, index * rows, rows, axis) for x, axis in pairs]


def _with_rows_of(state: Sequence[Array], new: Sequence[Array], axes: Axes, rows: int, index: Array) -> list[Array]:
    """Return the state of a batch after a micro-batch has left new rows."""
    return [
        after if axis is None else lax.dynamic_update_slice_in_dim(before, after, index * rows, axis)
        for before, after, axis in zip(state, new, axes, strict=True)
    ]


def _joined(
    values: Sequence[Array], summed: Sequence[bool] | None = None, weighted: bool = False, **_: Any
) -> list[Array]:
    """Return results without their axis of replicas: totals or means of a loss's, rows of a prediction's."""
    if summed is None:
        return list(map(joined_replicas.rows, values))
    added = [weighted or flag for flag in (False, False, *summed)]
    return list(map(joined_replicas.total, values, added))


def _check_references(constants: Sequence[object], name: str) -> None:
    """Raise ``PartitionError`` if there are references among what a traced function closes over."""
    if any(isinstance(x, jax.Ref) for x in constants):
        raise PartitionError(
            f"{name} or the model reads or writes a reference (jax.new_ref) that was made outside, and each stage may "
            "run on a device of its own. Make the reference in the model, or keep the value in a variable of it."
        )


def _cut(graph: Graph, model: BoundModel, counts: Sequence[int], number: int, name: str) -> Graph:
    """The program of a model's own variables as one of their pieces."""
    parameters, state = model.stacks
    inputs = Stacks((*parameters.bounds, *state.bounds, *(None,) * sum(counts[2:])))
    try:
        return split_rows(graph, inputs, Stacks((*(None,) * number, *state.bounds)))
    except MixedRowsError as error:
        names = [v.name for v in (*model.original.parameters, *model.original.state)]
        whole = ", ".join(names[k] for k in sorted(error.sources))
        raise PartitionError(
            f"{name} uses {whole} as a whole ({error.where}), but its layers are cut apart, as the loss has them in a "
            "scan. Use it as the loss does, or pass options=jaxpipe.PlanOptions(unroll_scans=False)."
        ) from None


def split(values: Sequence[T], counts: Sequence[int]) -> list[list[T]]:
    """Cut a sequence into pieces of given lengths."""
    rest = iter(values)
    return [list(itertools.islice(rest, count)) for count in counts]
