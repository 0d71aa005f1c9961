"""A Flax model as named variables, and how to run a user's function on it.

    Linen module, NNX module or class, function of variables  --bind-->  BoundModel

A bound model holds no array: it knows the name, shape and place of every variable, how to run
``function(model, batch)`` from flat variables, and how plain initialization makes them.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.errors import BatchError, ModelError
from jaxpipe.graph.graph import live, read_graph
from jaxpipe.graph.stacked_layers import Stacks, uncut
from jaxpipe.models.check_batch import shape_of
from jaxpipe.models.joined_replicas import ReplicaAxis
from jaxpipe.models.variable_trees import Path, by_path, path_text, select
from jaxpipe.options import AxisRules
from jaxpipe.text.value_text import listed, shown


#: ``function(model, batch)``: a loss, an evaluation or a prediction.
UserFunction = Callable[[Any, PyTree], PyTree]

#: A Linen module; an NNX module, its class or a ``functools.partial`` of it; ``jax.tree_util.Partial``; or a function.
Model = nn.Module | nnx.Module | Callable[..., PyTree]

#: By state variable, the axis that has a row for each example of a batch, if it has one.
Axes = tuple[int | None, ...]

#: Parameters and state, as lists.
Flat = tuple[list[ArrayLike], list[ArrayLike]]


class Called(NamedTuple):
    """The result of a call of a user's function, the variables after it by path, and the same call with others.

    And whether it has written parameters, which lifted transformations give new arrays too.
    """

    result: PyTree
    after: Mapping[Path, Array]
    again: Callable[[Mapping[Path, Array]], "Called"]
    writes_parameters: bool = False


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
      call: ``(function, variables, key, batch)``, of variables in the model's own layout.
      parameter_tree: flat parameters -> the tree that plain training would hand to optax.
      variable_tree: flat parameters and state -> the model's own variables.
      arrays: a caller's tree of variables -> its arrays by path, without those that are none of a training state.
      levels: keys that a caller's paths may lack, or have where they are not expected.
      make: ``(key, batch) -> variables`` as plain initialization would make them; None if values are given.
      batch: the shapes of the batch that it is initialized with.
      values: given parameters and state, or None.
      annotated: by parameter and by state variable, the axes that its dimensions are annotated with: of a mesh, or
        logical ones; in the model's own layout.
      overwritten: positions of the parameters whose new value is their gradient, as with the scales of FP8; they are no
        part of ``parameter_tree``.
      examples: by state variable, the axis that has a row for each example of a batch, or None.
      axis_rules: the mesh axes of logical ones; without any, the caller's.
      replica_axis: what collectives over the user's name of replicas mix, in the model's own layout.
      uncut: of a model whose stacked variables are cut (``unstack``), the model in its own layout, to which calls,
        values and annotations belong.
      cuts: how its parameters and its state are cut.
    """

    parameters: tuple[Variable, ...]
    state: tuple[Variable, ...]
    call: Callable[[UserFunction, PyTree, Array, PyTree], Called]
    parameter_tree: Callable[[Sequence[PyTree]], PyTree]
    variable_tree: Callable[[Sequence[PyTree], Sequence[PyTree]], PyTree]
    arrays: Callable[[PyTree], Mapping[Path, ArrayLike]] = by_path
    levels: tuple[Path, ...] = ()
    make: Callable[[Array, PyTree], PyTree] | None = None
    batch: PyTree = None
    values: Flat | None = None
    annotated: tuple[tuple[P, ...], tuple[P, ...]] = ((), ())
    overwritten: frozenset[int] = frozenset()
    examples: Axes = ()
    stage_shape: Mapping[str, int] = field(default_factory=dict)
    axis_rules: AxisRules = ()
    replica_axis: ReplicaAxis | None = None
    uncut: "BoundModel | None" = None
    cuts: tuple[Stacks, Stacks] | None = None

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """By parameter, then by state variable, its path in ``variable_tree``."""
        count, total = len(self.parameters), len(self.parameters) + len(self.state)
        number_at = by_path(self.variable_tree(list(range(count)), list(range(count, total))))
        return tuple(sorted(number_at, key=number_at.__getitem__))

    def flatten(self, tree: PyTree) -> Flat:
        """Return parameters and state from a caller's tree of them (``jaxpipe.models.variable_trees.select``)."""
        avals, count = [v.aval for v in (*self.parameters, *self.state)], len(self.parameters)
        leaves = select(self.arrays(tree), dict(zip(self.paths, avals, strict=True)), self.levels)
        return leaves[:count], leaves[count:]

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """A context in which logical axes stand for those of a mesh."""
        return nn.logical_axis_rules(self.axis_rules) if self.axis_rules else contextlib.nullcontext()

    def run(
        self,
        function: UserFunction,
        parameters: Sequence[Array],
        state: Sequence[Array],
        key: Array,
        batch: PyTree,
        keeps: bool = True,
    ) -> tuple[PyTree, list[Array]]:
        """Call ``function(model, batch)``: its result, and the new state, which the next call gets if it ``keeps`` it.

        Raises:
          ModelError: if the call changes the structure of the state in a way that the next call would see, or
            parameters that are kept.
        """
        variables, paths = self.variable_tree(parameters, state), self.paths[len(parameters) :]
        with self.naming():
            result, after, again, writes = self.call(function, variables, key, batch)
            _check_new_state(dict(zip(paths, state, strict=True)), after)
            before = by_path(variables)
            if writes and keeps:
                _check_parameters({path: x for path, x in before.items() if path not in paths}, after)
            new = {path: x for path, x in after.items() if path not in before}
            if new and keeps:

                def call_again(values: Sequence[Array]) -> PyTree:
                    called = again({**before, **dict(zip(new, values, strict=True))})
                    return called.result, [called.after[path] for path in paths]

                _check_unread(new, call_again)
        return result, [after[path] for path in paths]

    @property
    def original(self) -> "BoundModel":
        """The model with its variables in their own layout."""
        return self.uncut or self

    def check_batch_size(self, size: int) -> None:
        """Raise ``BatchError`` unless state with a row for each example of a batch has as many."""
        for v, axis in zip(self.state, self.examples, strict=True):
            if axis is not None and v.aval.shape[axis] != size:
                raise BatchError(
                    f"The batch has {size} examples, and the state variable {v.name} of shape {list(v.aval.shape)} has "
                    f"a row for each example of a batch of {v.aval.shape[axis]}. Pass batches of "
                    f"{v.aval.shape[axis]} examples."
                )

    @property
    def joined(self) -> int:
        """Return of how many replicas a micro-batch is."""
        return 1 if self.original.replica_axis is None else self.original.replica_axis.size

    @property
    def stacks(self) -> tuple[Stacks, Stacks]:
        """Return how the leaves of the parameters and of the state in their own layout make those of this model."""
        return self.cuts or (uncut(len(self.parameters)), uncut(len(self.state)))

    @property
    def scan_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return where its stacked variables are cut: the first rows of pieces, and the number of rows."""
        return tuple(sorted({bounds for stacks in self.stacks for bounds in stacks.bounds if bounds is not None}))


def unstack(model: BoundModel, parameters: Stacks, state: Stacks) -> BoundModel:
    """Return a model with some stacked variables ``[layers, ...]`` cut into several, each with some of the rows."""
    return replace(
        model,
        parameters=_pieces(model.parameters, parameters),
        state=_pieces(model.state, state),
        parameter_tree=lambda values: model.parameter_tree(parameters.join(values)),
        variable_tree=lambda p, s: model.variable_tree(parameters.join(p), state.join(s)),
        overwritten=frozenset(k for k, leaf in enumerate(parameters.leaf_of) if leaf in model.overwritten),
        examples=tuple(model.examples[leaf] for leaf in state.leaf_of),
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


def named(tree: PyTree) -> tuple[Variable, ...]:
    """Variables with the names that they have without boxes around them, such as ``nn.Partitioned``."""
    check_variables(tree)
    return tuple(Variable("/".join(path), shape_of(x)) for path, x in by_path(tree).items())


def check_variables(tree: PyTree) -> None:
    """Raise ``ModelError`` unless a model's variables are arrays, or shapes of some."""
    for path, x in by_path(tree).items():
        if not hasattr(x, "dtype") or isinstance(x, jax.Ref):
            raise ModelError(
                f"The model's variable {path_text(path)} is {shown(x)}; variables are arrays. Make it one with "
                "jax.numpy.asarray, of a reference (jax.new_ref) with ref[...]; put settings into attributes of the "
                "module, or into the function, with functools.partial."
            )


def _check_new_state(before: Mapping[Path, ArrayLike], after: Mapping[Path, ArrayLike]) -> None:
    """Raise ``ModelError`` unless a call has left each state variable with the shape and type that it had."""
    for path, old in before.items():
        new = after.get(path)
        if new is None:
            raise ModelError(
                f"The call removes the state variable {path_text(path)}. A step is compiled once, for a structure of "
                "variables that no call changes: leave the variable where it is, and give it a value that stands for "
                "none."
            )
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ModelError(
                f"The call changes the state variable {path_text(path)} from {old.dtype}{list(old.shape)} to "
                f"{new.dtype}{list(new.shape)}. A step is compiled once, for variables that keep shape and type: make "
                "it as large as it gets, in the type that it gets, when it is initialized."
            )


def _check_parameters(before: Mapping[Path, ArrayLike], after: Mapping[Path, ArrayLike]) -> None:
    """Raise ``ModelError`` if a call has written other values into parameters: plain training goes on from them."""
    names = [path_text(path) for path, old in before.items() if after.get(path, old) is not old]
    if names:
        raise ModelError(
            f"The call writes the parameter{'s' if len(names) > 1 else ''} {listed(names, 3)}, as nnx.WeightNorm and "
            "nnx.SpectralNorm do. Only the optimizer changes parameters: all micro-batches of a step share them. Keep "
            "what a call changes in another nnx.Variable, such as nnx.BatchStat, compute with values that are not "
            "written back, write back nnx.filter_state(state, nnx.Not(nnx.Param)) of a whole state, or call a copy, "
            "nnx.clone(self.layer)(x). Linen's WeightNorm and SpectralNorm write none."
        )


def _check_unread(new: Mapping[Path, ArrayLike], call_again: Callable[[Sequence[Array]], PyTree]) -> None:
    """Raise ``ModelError`` if the next call would read variables that a call has made.

    What a micro-batch makes is gone after it, as what ``sow`` collects. That changes nothing where no later call reads
    it.

    Args:
      new: the variables that it has made.
      call_again: the results of the same call, of a model that has these variables from the beginning.
    """
    graph = read_graph(jax.make_jaxpr(call_again)([shape_of(x) for x in new.values()]))
    read = {t for op in live(graph.operators, graph.outputs) for t in op.inputs} | set(graph.outputs)
    names = [path_text(path) for path, t in zip(new, graph.inputs, strict=True) if t in read]
    if names:
        raise ModelError(
            f"A call makes the state variable{'s' if len(names) > 1 else ''} {listed(names, 3)}, "
            "which the model does not have before, and the next call reads "
            "it. A step is compiled once, for a structure of variables that no call changes: make the variable when "
            "the model is initialized (Linen: before `if self.is_initializing()`; NNX: in __init__)."
        )


def with_values(bound: BoundModel, variables: PyTree) -> BoundModel:
    """Return the same model with given values, checked against its variables."""
    if bound.cuts is not None:
        return unstack(with_values(bound.original, variables), *bound.stacks)
    return replace(bound, values=bound.flatten(variables), make=None)
