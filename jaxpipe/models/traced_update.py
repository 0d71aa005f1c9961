"""An optimizer traced on the whole tree of parameters, whatever stages these will be in.

    optimizer.update, apply_updates --trace--> Graph --conditionals as selections--> Graph of pieces

A conditional that returns a tree (``optax.apply_if_finite``) would tie all parameters together. Both its branches are
computed, and each result is selected by itself: what a parameter's update depends on is then that parameter's alone.

    new parameters, state that belongs to none ──what they are made of──▶ state ──what that is made of──▶ gradients

The parameters that an optimizer trains are those whose gradients some part of its update reads. A gradient that is not
among them (``optax.set_to_zero``, a mask, a group of ``multi_transform``) is not computed. State that would only have
counted it, such as the moments of a parameter that is set back behind Adam, stays as it was.
"""

import contextlib
import re
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree, Shaped, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.gradients.master_weights import MasterWeightsState
from jaxpipe.gradients.per_stage import known_stages
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, dependents, live, trace
from jaxpipe.graph.primitives import ADDITIONS, KEEPS_ZERO
from jaxpipe.graph.split_scan import MixedRowsError, WholeStackError, split_rows
from jaxpipe.graph.stacked_layers import Stacks
from jaxpipe.models.bound_model import BoundModel


T = TypeVar("T")

#: The number of no parameter, in trees with a number at each leaf.
_NO_PARAMETER = -1


@dataclass(frozen=True, eq=False)
class TracedUpdate:
    """``optimizer.update`` and ``apply_updates`` on the whole tree.

    Attributes:
      graph: ``(parameters, gradients, optimizer state) -> (new parameters, new optimizer state)``, flat. The gradient
        of a parameter that has a float32 master weight is float32, any other of its parameter's type. What becomes its
        gradient (``BoundModel.overwritten``) the optimizer does not see.
      owner: the parameter of the model's own that each leaf of the state belongs to, None if to none.
      state_shape, state_stacks: the state as optax has it, and how its leaves are cut.
      trained: by parameter, whether its gradient is among the inputs (``without_frozen``).
      per_stage: whether some of it looks at each stage apart (``jaxpipe.gradients.per_stage``).
    """

    graph: Graph
    owner: tuple[int | None, ...]
    state_avals: tuple[jax.ShapeDtypeStruct, ...]
    state_shape: optax.OptState
    state_stacks: Stacks
    trained: tuple[bool, ...]
    per_stage: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """A name for each leaf of the state."""
        flat, _ = jax.tree_util.tree_flatten_with_path(self.state_shape)
        return tuple(jax.tree_util.keystr(flat[k][0]) for k in self.state_stacks.leaf_of)


def trace_update(
    optimizer: optax.GradientTransformation, model: BoundModel, stage_of: Sequence[int] | None = None
) -> TracedUpdate:
    """Trace an optimizer.

    Args:
      stage_of: the stage of each parameter; left out: all are in one.

    Raises:
      PartitionError: if the optimizer needs more than gradients, parameters and its state.
    """
    whole, stacks = model.original, model.stacks[0]
    avals = [v.aval for v in whole.parameters]
    tree = without_captures(whole.parameter_tree(avals))
    state_shape = _named(optimizer, lambda: jax.eval_shape(optimizer.init, tree))
    state_avals, state_tree = jax.tree.flatten(state_shape)
    owner = _owners(optimizer, state_shape, whole)
    # A leaf is cut as its parameter, if it has as many rows.
    cuts = [None if k is None else stacks.bounds[k] for k in owner]
    bounds = (c if c and a.shape[:1] == c[-1:] else None for c, a in zip(cuts, state_avals, strict=True))
    state_stacks = Stacks(tuple(bounds))
    count, mastered = len(avals), _with_masters(state_shape, owner)
    gradients = [jax.ShapeDtypeStruct(a.shape, jnp.float32) if k in mastered else a for k, a in enumerate(avals)]

    def update(*leaves: Array) -> list[Array]:
        overwritten = [leaves[count + k] for k in sorted(whole.overwritten)]  # behind all others
        parameters, gradients = (
            without_captures(whole.parameter_tree(part)) for part in (leaves[:count], leaves[count : 2 * count])
        )
        state = jax.tree.unflatten(state_tree, leaves[2 * count :])
        updates, state = optimizer.update(gradients, state, parameters)
        _check(optimizer, whole, parameters, updates, state_avals, jax.tree.leaves(state))
        new = optax.apply_updates(parameters, updates)
        return [*jax.tree.leaves(new), *overwritten, *jax.tree.leaves(state)]

    # Leaves of the tree may come in another order than the model's parameters.
    first = [pieces[0] for pieces in stacks.groups([0] * len(model.parameters) if stage_of is None else stage_of)]
    with known_stages(jax.tree.leaves(whole.parameter_tree(first))) as stages:
        graph = _named(optimizer, lambda: trace(update, *avals, *gradients, *state_avals))
    graph = _without_conditionals(graph, (*range(count), *range(count), *owner))
    if model.cuts is not None:
        if stages.asked:
            raise WholeStackError(
                "optimizer: gradients.per_stage puts each parameter into one stage, and unroll_scans puts stacked ones "
                "into several. Clip by value or by block, or leave out one of the two.",
                "gradients.per_stage puts each parameter into one stage",
            )
        graph = _cut(graph, whole, stacks, state_stacks)
    return TracedUpdate(
        graph=graph,
        owner=owner,
        state_avals=tuple(state_stacks.shapes(state_avals)),
        state_shape=state_shape,
        state_stacks=state_stacks,
        trained=(True,) * len(model.parameters),
        per_stage=stages.asked,
    )


def without_frozen(update: TracedUpdate, trained: Sequence[bool] | None = None) -> TracedUpdate:
    """Leave gradients out of an update that it does not need, or those of parameters that are not ``trained``."""
    graph, count = update.graph, len(update.trained)
    gradients, state = graph.inputs[count : 2 * count], graph.inputs[2 * count :]
    needed = _needed(update)
    if trained is None:
        trained = [t in needed for t in gradients]
    lost = [t for t, kept in zip(gradients, trained, strict=True) if not kept]
    assert needed.isdisjoint(lost), "the update needs a gradient that was thought not to be needed"
    changed, zeros = dependents(graph.operators, lost), _zeros(graph.operators)
    pairs = zip(graph.inputs[:count], graph.outputs[:count], strict=True)
    parameters = [old if _adds_zero(graph.producers.get(new), old, zeros) else new for old, new in pairs]
    new_state = [old if new in changed else new for old, new in zip(state, graph.outputs[count:], strict=True)]
    outputs = (*parameters, *new_state)
    inputs = tuple(t for t in graph.inputs if t not in lost)
    small = replace(graph, inputs=inputs, outputs=outputs, operators=live(graph.operators, outputs))
    return replace(update, graph=small, trained=tuple(trained))


def _needed(update: TracedUpdate) -> set[TensorNumber]:
    """The tensors behind all new parameters, behind state of no parameter, and behind state that these depend on."""
    graph, count = update.graph, len(update.trained)
    owner = [update.owner[k] for k in update.state_stacks.leaf_of]
    state = list(zip(graph.inputs[2 * count :], graph.outputs[count:], strict=True))
    wanted = {*graph.outputs[:count], *(new for (_, new), k in zip(state, owner, strict=True) if k is None)}
    while True:
        needed = wanted | {t for op in live(graph.operators, wanted) for t in op.inputs}
        more = {new for old, new in state if old in needed} - wanted
        if not more:
            return needed
        wanted |= more


def _zeros(operators: Sequence[Operator]) -> set[TensorNumber]:
    """The tensors that are zeros written into the program, and so are no matter what."""
    zeros: set[TensorNumber] = set()
    for op in operators:
        numbers = [np.all(np.asarray(x) == 0) for x in op.literals if not isinstance(x, str)]
        if op.name in KEEPS_ZERO and all(numbers) and all(t in zeros for t in op.inputs):
            zeros.update(op.outputs)
    return zeros


def _adds_zero(op: Operator | None, old: TensorNumber, zeros: Collection[TensorNumber]) -> bool:
    """True if an operator adds zero to a tensor."""
    if op is None or op.name not in ADDITIONS or old not in op.inputs:
        return False
    others = [t for t in op.inputs if t != old]
    added = [*(t in zeros for t in others), *(not np.any(x) for x in op.literals)]
    return added == [True]


def trace_initial_state(optimizer: optax.GradientTransformation, model: BoundModel) -> jex.ClosedJaxpr:
    """Trace ``optimizer.init`` for the parameters of a model in its own layout."""
    tree = without_captures(model.original.parameter_tree([v.aval for v in model.original.parameters]))
    return _named(optimizer, lambda: jax.make_jaxpr(optimizer.init)(tree))


def _check(
    optimizer: optax.GradientTransformation,
    model: BoundModel,
    parameters: optax.Params,
    updates: optax.Updates,
    before: Sequence[Shaped],
    after: Sequence[Array],
) -> None:
    """Raise ``PartitionError`` unless there is an update for each parameter, and a state as before."""
    who = ", ".join(dict.fromkeys(_parts(optimizer.update))) or "the transformation"
    leaves, tree = jax.tree.flatten(parameters)
    if jax.tree.structure(updates) != tree:
        raise PartitionError(
            f"optimizer: {who} returns something else than an update for each parameter. Use optax.snapshot to keep a "
            "measure of gradients in the state of an optimizer."
        )
    names = jax.tree.leaves(model.parameter_tree([v.name for v in model.parameters]))
    for name, x, update in zip(names, leaves, jax.tree.leaves(updates), strict=True):
        if jnp.shape(update) != x.shape:
            raise PartitionError(
                f"optimizer: {who} makes an update of shape {jnp.shape(update)} for {name}, which has shape {x.shape}. "
                "A pipeline hands over one gradient of each parameter for the whole batch; an optimizer that takes one "
                "for each example (optax.contrib.differentially_private_aggregate, dpsgd) needs others. Use one that "
                "works with the mean gradient."
            )
    types = [(a.dtype.name, b.dtype.name) for a, b in zip(before, map(jnp.asarray, after), strict=False)]
    changed = next((pair for pair in types if pair[0] != pair[1]), None)
    if changed:
        raise PartitionError(
            f"optimizer: the state of {who} has an array of type {changed[0]} that is {changed[1]} after an update. A "
            "compiled step needs a state that keeps its form. Gradients of parameters with master weights are float32: "
            "put what keeps a state of their size inside, gradients.master_weights(optax.chain(...))."
        )
    if [x.shape for x in before] != [jnp.shape(x) for x in after]:
        raise PartitionError(
            f"optimizer: the state of {who} has {len(after)} arrays after an update and {len(before)} before, or their "
            "shapes have changed. A compiled step needs a state that keeps its form; optax.snapshot keeps a measure so."
        )


def transformation_of(op: Operator) -> str | None:
    """The optax transformation that an operator is from, as far as can be told."""
    return None if op.equation is None else _transformation(_compat.functions_behind(op.equation))


def _transformation(functions: Iterable[str]) -> str | None:
    """The innermost of some functions' qualified names that is the update, or the init, of a transformation.

    Example:
      >>> _transformation(["fori_loop", "scale_by_lbfgs.<locals>.update_fn", "chain.<locals>.update_fn"])
      'scale_by_lbfgs'
    """
    matches = (re.fullmatch(r"(?:.*\.)?(\w+)\.<locals>\.(?:\w+_)?(?:update|init)(?:_fn)?", name) for name in functions)
    return next((match[1] for match in matches if match and match[1] != "with_extra_args_support"), None)


def _parts(function: object, depth: int = 8) -> Iterator[str]:
    """The transformations that an update is made of, by what it closes over."""
    if isinstance(function, Mapping):
        function = tuple(function.values())
    if isinstance(function, tuple | list):
        # Of a transformation, a pair of init and update, the latter.
        for part in function[1:] if hasattr(function, "update") else function:
            yield from _parts(part, depth)
    elif depth and callable(function):
        inner: list[str] = []
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                inner += _parts(cell.cell_contents, depth - 1)
        name = _transformation([getattr(function, "__qualname__", "")])
        yield from inner if name in (None, "chain", "named_chain") else [name, *inner]


def _named(optimizer: optax.GradientTransformation, run: Callable[[], T]) -> T:
    """Run a function; an exception of a transformation becomes a ``PartitionError`` with its name."""
    try:
        return run()
    except PartitionError as error:
        raise PartitionError(str(error)) from None  # without the notes that JAX adds
    except Exception as error:
        missing = re.match(r"(\S+)\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.*)", str(error))
        frames = [
            frame.f_code.co_qualname
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") != __name__
        ]
        name = _transformation([*([missing[1]] if missing else ()), *frames[::-1]])
        parts = list(dict.fromkeys(_parts(optimizer.update)))
        where = name or "a transformation"
        where += f" (of {', '.join(parts)})" if len(parts) > 1 else ""
        if isinstance(error, TypeError) and missing:
            raise PartitionError(
                f"optimizer: {where} needs {missing[2].replace(chr(39), '')} besides gradients and parameters (a loss "
                "value, or a function that computes the loss again). A pipeline's step hands its optimizer gradients, "
                "state and parameters only. Use an optimizer that needs nothing else, such as optax.adamw; for a "
                "learning rate that follows the loss, set one from your own loop with optax.inject_hyperparams."
            ) from error
        raise PartitionError(
            f"optimizer: {where} cannot be traced with the model's gradients, its own state and the parameters alone: "
            f"{type(error).__name__}: {error} Use an optimizer that needs nothing else; "
            "optimizer.update(gradients, optimizer.init(parameters), parameters) must run. Parameters have the model's "
            "own tree (dictionaries, an nnx.State, a Partial): give labels and masks as functions of it."
        ) from error


def _owners(
    optimizer: optax.GradientTransformation, shape: optax.OptState, model: BoundModel
) -> tuple[int | None, ...]:
    """The parameter that each leaf of the optimizer state belongs to; None for one that belongs to none.

    ``optax.tree_map_params`` finds the parts that are like the tree of parameters. It calls ``init`` with something
    else than such a tree, which functions that choose parameters (labels, masks) may not take. A leaf then belongs to
    the parameter whose path ends its own.
    """
    numbers = model.parameter_tree(list(range(len(model.parameters))))
    number_at = dict(jax.tree_util.tree_flatten_with_path(numbers)[0])

    def numbered(part: PyTree) -> PyTree:
        """A part like the tree of parameters, with a parameter's number for all that is in its place."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: next(number_at[path[:k]] for k in range(len(path) + 1) if path[:k] in number_at), part
        )

    def without_number(part: PyTree) -> PyTree:
        return jax.tree.map(lambda _: _NO_PARAMETER, part)

    try:
        marked = optax.tree_map_params(
            optimizer, numbered, shape, transform_non_params=without_number, is_leaf=lambda _: True
        )
        return tuple(None if k == _NO_PARAMETER else k for k in jax.tree.leaves(marked))
    except Exception:  # of such a function, or of a part with other paths than the parameters have
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(shape)[0]]
        ends = ([path[k:] for k in range(len(path))] for path in paths)
        return tuple(next((number_at[end] for end in of_leaf if end in number_at), None) for of_leaf in ends)


def _with_masters(state_shape: optax.OptState, owner: Sequence[int | None]) -> set[int | None]:
    """The parameters that have a master weight."""

    def mark(part: PyTree) -> PyTree:
        if isinstance(part, MasterWeightsState):
            return jax.tree.map(lambda _: True, part.masters), jax.tree.map(lambda _: False, part.inner)
        return False

    marks = jax.tree.map(mark, state_shape, is_leaf=lambda part: isinstance(part, MasterWeightsState))
    return {k for k, marked in zip(owner, jax.tree.leaves(marks), strict=True) if marked}


def _cut(graph: Graph, whole: BoundModel, parameters: Stacks, state: Stacks) -> Graph:
    """The update of whole parameters as one of their pieces: the same, up to the order in which sums are added."""
    both = parameters.bounds
    try:
        return split_rows(graph, Stacks((*both, *both, *state.bounds)), Stacks((*both, *state.bounds)))
    except MixedRowsError as error:
        names = [v.name for v in whole.parameters]
        mixed = sorted({names[k % len(names)] for k in error.sources if k < 2 * len(names)})
        reason = f"{error.where} combines layers of {', '.join(mixed) or 'a stacked parameter'}"
        raise WholeStackError(
            f"optimizer: {reason}, which unroll_scans puts into several stages. Use an optimizer that works element by "
            "element, or by norms and sums, or leave out unroll_scans.",
            f"the optimizer's {reason}",
        ) from None


def _without_conditionals(graph: Graph, owner: Sequence[int | None]) -> Graph:
    """Replace each conditional on several parameters by its branches and a selection of each result.

    Args:
      owner: the parameter that each input belongs to, if it does to one.
    """
    if not any(op.name == "cond" for op in graph.operators):
        return graph
    builder = GraphBuilder(graph.tensors, graph.constants)
    stand_in: dict[TensorNumber, TensorNumber] = {}
    belongs = {t: k for t, k in zip(graph.inputs, owner, strict=True) if k is not None}
    waiting = list(reversed(graph.operators))
    while waiting:
        op = waiting.pop()
        read = [stand_in.get(t, t) for t in op.inputs]
        owners = {belongs[t] for t in read if t in belongs}
        if op.name != "cond" or len(owners) < 2:
            if len(owners) == 1:
                belongs.update(dict.fromkeys(op.outputs, next(iter(owners))))
            builder.operators.append(replace(op, inputs=tuple(read)))
            continue
        # What it is made of may have conditionals of its own.
        before, builder.operators = builder.operators, []
        results = _selected(builder, op, read)
        waiting += [*reversed(builder.operators)]
        builder.operators = before
        stand_in.update(zip(op.outputs, results, strict=True))
    return builder.build(graph.inputs, [stand_in.get(t, t) for t in graph.outputs])


def _selected(builder: GraphBuilder, op: Operator, read: Sequence[TensorNumber]) -> list[TensorNumber]:
    """The results of a conditional, out of those of all its branches; adds these to ``builder``."""
    given = iter(read)
    atoms = [builder.constant(a.val) if _compat.is_literal(a) else next(given) for a in op.equation.invars]
    which, operands = atoms[0], atoms[1:]
    ways = [builder.read(program, operands, path=op.path) for program in op.params["branches"]]

    def select(which: Array, *cases: Array) -> Array:
        return jax.lax.select_n(jnp.clip(which.astype(jnp.int32), 0, len(cases) - 1), *cases)

    results = []
    for cases in zip(*ways, strict=True):
        closed = _compat.trace_without_scope(select, *(builder.tensors[t].aval for t in (which, *cases)))
        results += builder.read(closed, [which, *cases], path=op.path)
    return results


class _WeakFunction:
    """Equal to a function, without keeping it."""

    def __init__(self, function: types.FunctionType):
        self._function = weakref.ref(function)
        self._hash = hash(function)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        function = self._function()
        given = other._function() if isinstance(other, _WeakFunction) else other
        return self is other or (function is not None and function is given)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        function = self._function()
        assert function is not None, "the model is gone"
        return function(*args, **kwargs)


def without_captures(tree: PyTree) -> PyTree:
    """Return an equal tree whose ``Partial`` does not keep its function.

    optax compiles functions of whole trees, and JAX keeps the structure of what compiled functions get and return.

    Example:
      >>> model = jax.tree_util.Partial(lambda w, x: w * x, 2.0)
      >>> jax.tree.structure(without_captures(model)) == jax.tree.structure(model)
      True
    """
    if not isinstance(tree, jax.tree_util.Partial) or not isinstance(tree.func, types.FunctionType):
        return tree
    return jax.tree_util.Partial(_WeakFunction(tree.func), *tree.args, **tree.keywords)
