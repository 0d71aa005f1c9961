"""Any optax optimizer, run stage by stage with the result it would have on the whole tree.

    optimizer.update on the abstract whole tree --trace--> Graph --colour--> one program for each stage

An operator whose operands belong to one stage runs in that stage's branch. Where values of several stages meet
(the sum of squared norms behind a global-norm clipping), they are exchanged and the operator runs everywhere; only
small values may meet. Exchanges come in rounds; after the last, every stage has its new parameters and state.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe.errors import PartitionError
from jaxpipe.gradients.per_stage import known_stages
from jaxpipe.graph import Graph, Operator, run, trace
from jaxpipe.model import BoundModel
from jaxpipe.pipeline.captures import without_captures
from jaxpipe.pipeline.switch import switch
from jaxpipe.pipeline.words import from_words, to_words, word_count
from jaxpipe.rows import MixedRowsError, split_rows
from jaxpipe.stacks import Stacks


#: Elements of the largest value that may be exchanged between stages.
EXCHANGE_LIMIT = 4096


@dataclass(frozen=True, eq=False)
class ColouredUpdate:
    """``optimizer.update`` and ``apply_updates`` on the whole tree, each operator with its stage.

    Attributes:
      graph: ``(parameters, gradients, optimizer state) -> (new parameters, new optimizer state)``, flat.
      colour: by tensor number, the stage that has it; absent where every stage has it.
      round: by tensor number, after how many exchanges it can be known.
      exchanged: by round, the tensors sent to all stages after it.
      parameters, gradients, state: tensor numbers of the inputs.
      new_parameters, new_state: tensor numbers of the outputs.
      state_stage: the stage of each leaf of the optimizer state, None if every stage has it.
      state_avals: its leaves, those that belong to a cut parameter cut as that is.
      state_shape, state_stacks: it as optax has it, and how its leaves are cut.
      per_stage: whether some of it looks at each stage apart (``jaxpipe.gradients.per_stage``).
    """

    graph: Graph
    colour: dict[int, int]
    round: dict[int, int]
    exchanged: tuple[tuple[int, ...], ...]
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    state: tuple[int, ...]
    new_parameters: tuple[int, ...]
    new_state: tuple[int, ...]
    state_stage: tuple[int | None, ...]
    state_avals: tuple[Any, ...]
    state_shape: Any
    state_stacks: Stacks
    per_stage: bool = False


def colour_update(
    optimizer: optax.GradientTransformation, model: BoundModel, stage_of: Sequence[int]
) -> ColouredUpdate:
    """Trace an optimizer and give each of its operators a stage.

    Args:
      optimizer: any optax transformation.
      model: the whole model.
      stage_of: the stage of each parameter.

    Raises:
      PartitionError: if values of several stages meet that are too large to be exchanged.
    """
    own, stacks = model.own, model.stacks[0]
    avals = [v.aval for v in own.parameters]
    state_shape = jax.eval_shape(optimizer.init, without_captures(own.parameter_tree(avals)))
    state_avals, state_tree = jax.tree.flatten(state_shape)
    owner = _parameter_of_state(optimizer, state_shape, own)
    state_stacks = Stacks(tuple(map(functools.partial(_cut_as, stacks), owner, state_avals)))
    state_stage = _stage_of_state(owner, stacks.groups(stage_of), state_stacks)
    count = len(avals)

    def update(*leaves: Any) -> list[Any]:
        parameters, gradients = (
            without_captures(own.parameter_tree(part)) for part in (leaves[:count], leaves[count : 2 * count])
        )
        state = jax.tree.unflatten(state_tree, leaves[2 * count :])
        updates, state = optimizer.update(gradients, state, parameters)
        new = optax.apply_updates(parameters, updates)
        return [*jax.tree.leaves(new), *jax.tree.leaves(state)]

    # Leaves of the tree may come in another order than the model's parameters.
    first = [pieces[0] for pieces in stacks.groups(stage_of)]
    with known_stages(jax.tree.leaves(own.parameter_tree(first))) as stages:
        graph = trace(update, *avals, *avals, *state_avals)
    if model.cut is not None:
        if stages.asked:
            raise PartitionError(
                "optimizer: gradients.per_stage puts each parameter into one stage, and unroll_scans puts stacked ones "
                "into several. Clip by value or by block, or leave out one of the two."
            )
        graph = _cut(graph, own, stacks, state_stacks)
    inputs, outputs = graph.inputs, graph.outputs
    count, state_avals = len(model.parameters), state_stacks.shapes(state_avals)
    colour: dict[int, int] = {}
    for t, stage in zip(inputs, (*stage_of, *stage_of, *state_stage), strict=True):
        if stage is not None:
            colour[t] = stage
    wanted = (*stage_of, *state_stage)
    exchanged, rounds = _colour(graph, colour, [t for t, s in zip(outputs, wanted, strict=True) if s is None])
    for t, stage, name in zip(
        outputs, wanted, [*(v.name for v in model.parameters), *_names(state_shape, state_stacks)], strict=True
    ):
        if stage is not None and colour.get(t, stage) != stage:
            raise PartitionError(
                f"optimizer: the new value of {name}, in stage {stage}, is made in stage {colour[t]}. The optimizer "
                "moves whole arrays between parameters, which a pipeline does not do."
            )
    return ColouredUpdate(
        graph=graph,
        colour=colour,
        round=rounds,
        exchanged=exchanged,
        parameters=inputs[:count],
        gradients=inputs[count : 2 * count],
        state=inputs[2 * count :],
        new_parameters=outputs[:count],
        new_state=outputs[count:],
        state_stage=state_stage,
        state_avals=tuple(state_avals),
        state_shape=state_shape,
        state_stacks=state_stacks,
        per_stage=stages.asked,
    )


def _cut(graph: Graph, own: BoundModel, parameters: Stacks, state: Stacks) -> Graph:
    """The update of whole parameters as one of their pieces: the same, up to the order in which sums are added."""
    both = parameters.bounds
    try:
        return split_rows(graph, Stacks((*both, *both, *state.bounds)), Stacks((*both, *state.bounds)))
    except MixedRowsError as error:
        names = [v.name for v in own.parameters]
        mixed = sorted({names[k % len(names)] for k in error.sources if k < 2 * len(names)})
        raise PartitionError(
            f"optimizer: {error.where} combines layers of {', '.join(mixed) or 'a stacked parameter'}, which "
            "unroll_scans puts into several stages. Use an optimizer that works element by element, or by norms and "
            "sums, or leave out unroll_scans."
        ) from None


def _names(tree: Any, stacks: Stacks) -> list[str]:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [paths[k] for k in stacks.leaf_of]


def _parameter_of_state(
    optimizer: optax.GradientTransformation, shape: Any, model: BoundModel
) -> tuple[int | None, ...]:
    """The parameter that each leaf of the optimizer state belongs to, as optax tells; None for one that has none."""
    numbers = model.parameter_tree([_Number(k) for k in range(len(model.parameters))])
    marked = optax.tree_map_params(
        optimizer, lambda _, number: number, shape, numbers, transform_non_params=lambda _: _Number(None)
    )
    found = jax.tree.leaves(marked, is_leaf=lambda x: isinstance(x, _Number))
    return tuple(x.value for x in found)


class _Number:
    """A leaf that carries a number."""

    def __init__(self, value: int | None):
        self.value = value


def _cut_as(stacks: Stacks, owner: int | None, aval: Any) -> tuple[int, ...] | None:
    """Where a leaf of the optimizer state is cut: as its parameter, if it has as many rows."""
    cuts = None if owner is None else stacks.bounds[owner]
    return cuts if cuts is not None and aval.shape[:1] == cuts[-1:] else None


def _stage_of_state(
    owner: Sequence[int | None], stages: Sequence[Sequence[int]], stacks: Stacks
) -> tuple[int | None, ...]:
    """The stage of each piece of the optimizer state: that of the piece of the parameter that it belongs to.

    Args:
      owner: by leaf, its parameter.
      stages: by parameter, the stages of its pieces.
      stacks: how the state is cut.
    """
    found: list[int | None] = []
    for k, cuts in zip(owner, stacks.bounds, strict=True):
        if k is None:
            found.append(None)
        else:
            found += stages[k] if cuts is not None else stages[k][:1]
    return tuple(found)


def _colour(graph: Graph, colour: dict[int, int], shared: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], dict]:
    """Extend ``colour`` to all tensors; returns what is exchanged after each round, and the round of each tensor."""
    rounds = dict.fromkeys((*graph.inputs, *graph.constants), 0)
    exchanged: list[list[int]] = []
    known_from: dict[int, int] = {}  # an exchanged tensor: the round in which every stage knows it

    def is_large(t: int) -> bool:
        return graph.tensors[t].size > EXCHANGE_LIMIT

    def exchange(t: int) -> int:
        if t not in known_from:
            while len(exchanged) <= rounds[t]:
                exchanged.append([])
            exchanged[rounds[t]].append(t)
            known_from[t] = rounds[t] + 1
        return known_from[t]

    for op in graph.operators:
        owners = {colour[t] for t in op.inputs if t in colour}
        if len(owners) > 1:
            # Small values travel to where the large ones are; if there are none, everywhere.
            large = [t for t in op.inputs if t in colour and is_large(t)]
            owners = {colour[t] for t in large}
            if len(owners) > 1:
                shapes = ", ".join(f"{graph.tensors[t].shape} of stage {colour[t]}" for t in large)
                raise PartitionError(
                    f"optimizer: {op.label} combines large values of several stages ({shapes}). Stages exchange at "
                    f"most {EXCHANGE_LIMIT} numbers at once (norms, counts), so this optimizer cannot be split over a "
                    "pipeline. Use one that works parameter by parameter."
                )
        when = [exchange(t) if t in colour and colour[t] not in owners else rounds[t] for t in op.inputs]
        for t in op.outputs:
            rounds[t] = max(when, default=0)
            if owners:
                colour[t] = next(iter(owners))
    for t in shared:
        if t in colour:
            if is_large(t):
                raise PartitionError(
                    f"optimizer: a state of shape {graph.tensors[t].shape} belongs to no parameter, but is made of "
                    f"values of stage {colour[t]}. A pipeline keeps one copy of such a state in every stage, at most "
                    f"{EXCHANGE_LIMIT} numbers."
                )
            exchange(t)
    return tuple(tuple(ts) for ts in exchanged), rounds


def exchanged_values(
    update: ColouredUpdate,
    stage: Any,
    together: Callable[[Any], Any],
    read: Callable[[int], tuple[Sequence[Any], Sequence[Any], Sequence[Any]]],
    shared_state: Sequence[Any],
    num_stages: int,
) -> dict[int, Any]:
    """What all stages know before each of them computes its new parameters, by tensor number; inside ``shard_map``.

    Args:
      update: the coloured program.
      stage: this device's stage, a tracer.
      together: the sum over the stages.
      read: for a stage, its parameters, gradients and state out of this device's buffers.
      shared_state: the state of which every stage has a copy.
      num_stages: number of stages.
    """
    graph = update.graph
    everywhere: dict[int, Any] = dict(graph.constants)
    shared = [t for t, s in zip(update.state, update.state_stage, strict=True) if s is None]
    everywhere.update(zip(shared, shared_state, strict=True))
    common = [op for op in graph.operators if not any(t in update.colour for t in op.outputs)]

    def advance(limit: int) -> None:
        run([op for op in common if update.round[op.outputs[0]] == limit], everywhere)

    advance(0)
    for number, tensors in enumerate(update.exchanged):
        length = sum(word_count(graph.tensors[t].aval) for t in tensors)

        def send(s: int, tensors: Sequence[int] = tensors) -> jax.Array:
            env = _environment(update, s, everywhere, read(s))
            mine = [t for t in tensors if update.colour[t] == s]
            run(_needed(operators_of(update, s), mine, env), env)
            return jnp.concatenate(
                [
                    to_words(env[t])
                    if t in env and t in mine
                    else jnp.zeros(word_count(graph.tensors[t].aval), jnp.uint32)
                    for t in tensors
                ]
            )

        words = together(switch(stage, [lambda s=s: send(s) for s in range(num_stages)]))
        assert words.shape == (length,)
        start = 0
        for t in tensors:
            aval = graph.tensors[t].aval
            count = word_count(aval)
            everywhere[t] = from_words(words[start : start + count], aval)
            start += count
        advance(number + 1)
    return everywhere


def _environment(
    update: ColouredUpdate, s: int, everywhere: dict[int, Any], own: tuple[Sequence[Any], ...]
) -> dict[int, Any]:
    """Values by tensor number that a stage begins with."""
    env = dict(everywhere)
    for numbers, values in zip(held_by(update, s), own, strict=True):
        env.update(zip(numbers, values, strict=True))
    return env


def operators_of(update: ColouredUpdate, s: int) -> list[Operator]:
    """The operators that run in a stage."""
    return [op for op in update.graph.operators if _belongs(op, update.colour, s)]


def _belongs(op: Operator, colour: dict[int, int], stage: int) -> bool:
    return any(colour.get(t) == stage for t in op.outputs)


def held_by(update: ColouredUpdate, stage: int) -> tuple[list[int], list[int], list[int]]:
    """Tensor numbers of a stage's parameters, gradients and optimizer state."""
    return (
        [t for t in update.parameters if update.colour[t] == stage],
        [t for t in update.gradients if update.colour[t] == stage],
        [t for t, owner in zip(update.state, update.state_stage, strict=True) if owner == stage],
    )


def _needed(operators: Sequence[Operator], wanted: Sequence[int], known: dict[int, Any]) -> list[Operator]:
    """The operators that make ``wanted`` from what is known."""
    needed = {t for t in wanted if t not in known}
    kept = []
    for op in reversed(operators):
        if not needed.isdisjoint(op.outputs):
            kept.append(op)
            needed.update(t for t in op.inputs if t not in known)
    return kept[::-1]
