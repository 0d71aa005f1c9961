"""Any optax optimizer, run stage by stage with the result it would have on the whole tree.

    TracedUpdate of the whole tree (jaxpipe.models.traced_update) --partition--> one program for each stage

An operator whose operands belong to one stage runs in that stage's branch. Where values of several stages meet
(the sum of squared norms behind a global-norm clipping), they are exchanged and the operator runs everywhere; only
small values may meet. Exchanges come in rounds; after the last, every stage has its new parameters and state.

New parameters and optimizer state are written over the old ones, each before the next is computed:

    gradient, old state ─▶ new state ─▶ written ─▶ read there ─▶ new parameter ─▶ written     and the next parameter

So nothing as large as the parameters of a stage is made besides. XLA copies a buffer that is written to unless all that
reads what was there before is known to come first; barriers between the steps say so.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import Graph, Operator, ordered, run
from jaxpipe.graph.reverse_walk import closure, needed
from jaxpipe.graph.stacked_layers import Stacks
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.traced_update import TracedUpdate, transformation_of
from jaxpipe.runtime.stages import Program


#: The end of a learning rate's path in a state of ``optax.inject_hyperparams``.
_LEARNING_RATE = ".hyperparams['learning_rate']"

#: Elements of the largest value that may be exchanged between stages.
EXCHANGE_LIMIT = 4096


@dataclass(frozen=True, eq=False)
class PartitionedUpdate(TracedUpdate):
    """``optimizer.update`` and ``apply_updates`` on the whole tree, each operator with its stage."""

    stage_of: dict[TensorNumber, int]  # by tensor number; absent where every stage has it
    round: dict[TensorNumber, int]  # by tensor number, after how many exchanges it can be known
    exchanged: tuple[tuple[TensorNumber, ...], ...]  # by round, the tensors sent to all stages after it
    parameters: tuple[TensorNumber, ...]  # tensor numbers, as those that follow
    gradients: tuple[TensorNumber, ...]
    state: tuple[TensorNumber, ...]
    new_state: tuple[TensorNumber, ...]
    state_stage: tuple[int | None, ...]  # by leaf; None if every stage has it

    @functools.cached_property
    def learning_rate(self) -> int | None:
        """Return which piece of the state is the (first) learning rate that ``optax.inject_hyperparams`` keeps."""
        return next((k for k in self.leaves_of(None) if self.state_names[k].endswith(_LEARNING_RATE)), None)

    @functools.cached_property
    def new_of(self) -> dict[TensorNumber, TensorNumber]:
        """By tensor number of a parameter or a leaf of the state, that of its new value."""
        return dict(zip((*self.parameters, *self.state), self.graph.outputs, strict=True))

    def leaves_of(self, stage: int | None) -> list[int]:
        """Return the positions of the state's leaves in a stage; None: of those that every stage has."""
        return [k for k, owner in enumerate(self.state_stage) if owner == stage]


def partition_update(update: TracedUpdate, model: BoundModel, stage_of: Sequence[int]) -> PartitionedUpdate:
    """Give each operator of an optimizer, traced for these stages if it looks at them, a stage."""
    graph, state_stacks = update.graph, update.state_stacks
    state_stage = _stage_of_state(update.owner, model.stacks[0].groups(stage_of), state_stacks)
    inputs, outputs = graph.inputs, graph.outputs
    gradient_stage = [s for s, trained in zip(stage_of, update.trained, strict=True) if trained]
    first, behind = len(model.parameters), len(model.parameters) + len(gradient_stage)
    given = zip(inputs, (*stage_of, *gradient_stage, *state_stage), strict=True)
    tensor_stage = {t: stage for t, stage in given if stage is not None}
    wanted = (*stage_of, *state_stage)
    free = [t for t, s in zip(outputs, wanted, strict=True) if s is None]
    exchanged, rounds = _assign_stages(graph, tensor_stage, free)
    names = [*(v.name for v in model.parameters), *update.state_names]
    for t, stage, name in zip(outputs, wanted, names, strict=True):
        if stage is not None and tensor_stage.get(t, stage) != stage:
            raise PartitionError(
                f"optimizer: the new value of {name}, in stage {stage}, is made in stage {tensor_stage[t]}; the "
                "optimizer moves whole arrays between parameters, which a pipeline does not do."
            )
    return PartitionedUpdate(
        **vars(update),
        stage_of=tensor_stage,
        round=rounds,
        exchanged=exchanged,
        parameters=inputs[:first],
        gradients=inputs[first:behind],
        state=inputs[behind:],
        new_state=outputs[first:],
        state_stage=state_stage,
    )


def _stage_of_state(
    owner: Sequence[int | None], stages: Sequence[Sequence[int]], stacks: Stacks
) -> tuple[int | None, ...]:
    """Return the stage of each piece of the optimizer state: that of its parameter's piece; None: every stage has it.

    So it is of a norm of layers that are in several stages, as ``optax.novograd`` keeps one of each parameter.
    """
    state_stages: list[int | None] = []
    for k, cuts in zip(owner, stacks.bounds, strict=True):
        if k is None or (cuts is None and len(set(stages[k])) > 1):
            state_stages.append(None)
        else:
            state_stages += stages[k] if cuts is not None else stages[k][:1]
    return tuple(state_stages)


def _assign_stages(
    graph: Graph, tensor_stage: dict[TensorNumber, int], shared: Sequence[TensorNumber]
) -> tuple[tuple[tuple[TensorNumber, ...], ...], dict]:
    """Extend ``tensor_stage`` to all tensors; return the exchanged tensors and the round of each tensor."""
    rounds = dict.fromkeys((*graph.inputs, *graph.constants), 0)
    exchanged: list[list[TensorNumber]] = []
    known_from: dict[TensorNumber, int] = {}  # an exchanged tensor: the round in which every stage knows it

    def is_large(t: TensorNumber) -> bool:
        return graph.tensors[t].size > EXCHANGE_LIMIT

    def exchange(t: TensorNumber) -> int:
        if t not in known_from:
            while len(exchanged) <= rounds[t]:
                exchanged.append([])
            exchanged[rounds[t]].append(t)
            known_from[t] = rounds[t] + 1
        return known_from[t]

    for op in graph.operators:
        owners = {tensor_stage[t] for t in op.inputs if t in tensor_stage}
        if len(owners) > 1:
            # Small values travel to the stage of the large ones; without a large one, to every stage.
            large = [t for t in op.inputs if t in tensor_stage and is_large(t)]
            owners = {tensor_stage[t] for t in large}
            if len(owners) > 1:
                shapes = ", ".join(f"{graph.tensors[t].shape} of stage {tensor_stage[t]}" for t in large)
                source = transformation_of(op)
                what = op.label if source is None else f"{op.label} of {source}"
                raise PartitionError(
                    f"optimizer: {what} combines large values of several stages ({shapes}). Stages exchange at "
                    f"most {EXCHANGE_LIMIT} numbers at once (norms, counts), so this optimizer cannot be split over a "
                    "pipeline. Use one that works parameter by parameter."
                )
        when = [exchange(t) if t in tensor_stage and tensor_stage[t] not in owners else rounds[t] for t in op.inputs]
        for t in op.outputs:
            rounds[t] = max(when, default=0)
            if owners:
                tensor_stage[t] = next(iter(owners))
    for t in shared:
        if t in tensor_stage:
            if is_large(t):
                raise PartitionError(
                    f"optimizer: a state of shape {graph.tensors[t].shape} belongs to no parameter, but is made of "
                    f"values of stage {tensor_stage[t]}. A pipeline keeps a copy of such a state in every stage, of at "
                    f"most {EXCHANGE_LIMIT} numbers."
                )
            exchange(t)
    return tuple(tuple(ts) for ts in exchanged), rounds


def held_by(update: PartitionedUpdate, stage: int) -> tuple[list[TensorNumber], list[TensorNumber], list[TensorNumber]]:
    """Tensor numbers of a stage's parameters, gradients and optimizer state."""
    return (
        [t for t in update.parameters if update.stage_of[t] == stage],
        [t for t in update.gradients if update.stage_of[t] == stage],
        [update.state[k] for k in update.leaves_of(stage)],
    )


def compute(
    update: PartitionedUpdate, s: int | None, wanted: Sequence[TensorNumber], known: dict[TensorNumber, Array]
) -> None:
    """Run what some tensors follow from: operators of a stage, if there is one, and those that every stage runs."""
    allowed = [op for op in update.graph.operators if {update.stage_of.get(t) for t in op.outputs} & {s, None}]
    run(needed(allowed, wanted, Operator.ends, known=known)[0], known)


@dataclass(frozen=True, eq=False)
class Renewal:
    """A parameter or a part of the optimizer state that gets a new value."""

    old: TensorNumber
    new: TensorNumber
    operators: tuple[Operator, ...]  # that make the new value, of what is known after the renewals before

    @property
    def reads(self) -> list[TensorNumber]:
        """The tensors that the operators read and do not write; with no operators, the new value."""
        written = {t for op in self.operators for t in op.outputs}
        return ordered(t for t in (*(t for op in self.operators for t in op.inputs), self.new) if t not in written)


def renewals(update: PartitionedUpdate, s: int, everywhere: Collection[TensorNumber]) -> list[Renewal]:
    """Return the writes of a stage in order: the state that a new parameter is computed from, then that parameter."""
    parameters, _, state = held_by(update, s)
    graph, new, known = update.graph, update.new_of, set(everywhere)
    left, renewed = dict.fromkeys(state), list[Renewal]()
    #: By tensor that the stage makes, and that is not known yet, its operator.
    maker = {t: op for op in graph.operators for t in op.outputs if update.stage_of.get(t) == s and t not in known}

    def renewal(t: TensorNumber) -> Renewal:
        behind = closure([new[t]], lambda u: maker[u].inputs if u in maker else ())
        operators = {maker[u] for u in behind if u in maker}
        return Renewal(t, new[t], tuple(sorted(operators, key=graph.places.__getitem__)))

    def renew(t: TensorNumber) -> None:
        renewed.append(renewal(t))
        for op in renewed[-1].operators:
            for u in op.outputs:
                maker.pop(u, None)

    for t in parameters:
        for u in renewal(t).reads:
            if u in left:
                left.pop(u)
                renew(u)
        renew(t)
    for t in left:
        renew(t)
    return [x for x in renewed if x.new != x.old]


def check_asynchronous(program: Program, by_stage: PartitionedUpdate, exchanged: bool, zero: int = 0) -> None:
    """Raise ``PartitionError`` if a schedule updates weights during a step, and the update cannot be made then."""
    schedule, objective = program.schedule, program.objective
    if schedule.versions is None:
        return
    name = f"schedule={schedule.name}: weights change while micro-batches are in flight"
    if by_stage.exchanged:
        sizes = sorted({str(by_stage.graph.tensors[t].shape) for ts in by_stage.exchanged for t in ts})
        raise PartitionError(
            f"{name}, a late stage before the gradient of an early one exists, but the optimizer combines values of "
            f"several stages (of shape {', '.join(sizes)}), as clipping by the global norm does. Clip each "
            "stage by its own norm, jaxpipe.gradients.per_stage(optax.clip_by_global_norm(...)), or use a schedule "
            "that updates at the end of a step."
        )
    if objective.weighted:
        raise PartitionError(
            f"{name}, so the total weight of a batch is not known when the first gradient of it is applied. Return "
            "a mean, (mean, metrics), instead of (sum, weight, metrics)."
        )
    if program.lent:
        raise PartitionError(
            f"{name}, but {len(program.lent)} parameter(s), the largest of "
            f"{max(a.size for a in program.avals([*program.lent]))} numbers, are used in several stages, each of which "
            "would update them at another time. Untie them, or use a schedule that updates at the end of a step."
        )
    if zero:
        raise PartitionError(
            f"PlanOptions(zero={zero}) with {name}; replicas that split the optimizer state add up gradients and "
            "gather parameters once, at the end of a step. Leave out zero, or use a schedule that updates then, as "
            "'1f1b' does."
        )
    if exchanged:
        raise PartitionError(f"{name}; gradient_exchange=block_sparse(...) exchanges once a step. Use 'dense'.")
