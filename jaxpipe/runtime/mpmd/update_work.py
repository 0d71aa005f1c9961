"""The end of a step: results become loss and metrics, gradients an update of each stage's own parameters.

    totals of all stages ──one device──▶ loss, metrics, the total weight, and whether the step is stopped
    sums of gradients ──replicas──▶ mean ──▶ small values that other stages need (norms), round by round
    mean, parameters, optimizer state, values of others ──▶ new parameters, new optimizer state

Every stage runs its own part of the optimizer (``jaxpipe.runtime.optimizer_by_stage``). Where stages have replicas,
this work is one program over the devices of a stage, in which XLA adds the replicas' arrays up. Of arrays that each
replica has for itself it gets those of all, side by side along their first axis.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat
from jaxpipe.array_types import Array, DType, Shaped, TensorNumber
from jaxpipe.gradients.squared_norm import squared_norm
from jaxpipe.graph.graph import run
from jaxpipe.runtime.mpmd.stage_work import OVERFLOWS, STEP, Arrays, Avals, Context, Name, Role, Work, shape_of
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by, needed_operators, operators_of
from jaxpipe.runtime.overwrite_state import renewals
from jaxpipe.runtime.replica_exchange import StageExchange
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import DATA


#: The total weight of a batch, and whether its step changes nothing.
WEIGHT, STOPPED = Name(Role.WEIGHT), Name(Role.STOPPED)

#: A stage's share of the gradient's squared norm; of what its replicas had to send, and have not sent.
SQUARES, HAD, UNSENT = (Name(Role.SQUARES, k) for k in range(3))

#: How many steps have changed nothing.
SKIPPED = Name(Role.STEP, 1)

#: Whether a gradient of a stage is not finite.
NONFINITE = Name(Role.SQUARES, 3)

_COUNTS = (STEP, SKIPPED, NONFINITE, OVERFLOWS)
_DTYPES = {HAD: jnp.float32, UNSENT: jnp.float32, STOPPED: jnp.bool_} | dict.fromkeys(_COUNTS, jnp.int32)


def value_avals(context: Context, names: Iterable[Name]) -> Avals:
    """Return the shapes of totals, weights, norms and counts, of a stage or reported by one."""
    dtypes = _DTYPES | {WEIGHT: context.weight_dtype, SQUARES: context.norm_dtype}
    avals = {}
    for name in names:
        kind = name._replace(part=0)
        avals[name] = jax.ShapeDtypeStruct((), dtypes[kind]) if kind in dtypes else context.total_aval(name)
    return avals


def add_up(values: Arrays, names: Iterable[Name]) -> Array:
    """Return the sum of some values, in the order of their names."""
    return functools.reduce(operator.add, [values[name] for name in names])


@dataclass(frozen=True, eq=False)
class UpdateContext:
    """Data that the work at the end of a step needs in every stage."""

    pipeline: Context
    by_stage: PartitionedUpdate  # the optimizer
    replicas: int
    exchange: StageExchange | None = None
    guarded: bool = False  # a step that is not finite changes nothing
    skips: bool = False  # such a step counts as one

    @functools.cached_property
    def tensor_of(self) -> dict[TensorNumber, TensorNumber]:
        """By tensor number in the optimizer of a parameter or its gradient, that in the objective."""
        objective = self.pipeline.objective
        trained = [t for t in objective.parameters if t not in objective.frozen]
        pairs = zip(self.by_stage.parameters, objective.parameters, strict=True)
        return dict(pairs) | dict(zip(self.by_stage.gradients, trained, strict=True))

    @functools.cached_property
    def taken_dtype(self) -> dict[TensorNumber, DType]:
        """By trained parameter of the objective, the type in which the optimizer takes its gradient."""
        return {self.tensor_of[t]: self.by_stage.graph.tensors[t].dtype for t in self.by_stage.gradients}

    def is_alone(self, s: StageNumber) -> bool:
        """Return whether a stage has one device."""
        return self.pipeline.members[s] == 1

    def of_members(self, s: StageNumber, aval: Shaped) -> jax.ShapeDtypeStruct:
        """Return the shape of an array that each member of a stage has for itself, of all of them."""
        return shape_of(aval) if self.is_alone(s) else self.pipeline.together(s, aval)

    def returns_sum(self, s: StageNumber, k: StageNumber) -> bool:
        """Return whether stage ``k`` returns gradients to ``s`` as one sum, not from each member to another one."""
        return self.pipeline.members[s] != self.pipeline.members[k]

    def lenders(self, s: StageNumber, t: TensorNumber) -> list[StageNumber]:
        """The other stages that compute gradients of a parameter."""
        return [k for k in self.pipeline.stage_numbers if k != s and t in self.pipeline.trained(k)]

    def residual_avals(self, s: StageNumber) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what a replica has not sent of a stage's gradients."""
        avals = map(self.pipeline.aval, self.pipeline.held(s))
        lead = self.pipeline.lead(s)
        return [jax.ShapeDtypeStruct((*lead, *a.shape), jnp.promote_types(a.dtype, jnp.float32)) for a in avals]


def returned_gradient(s: StageNumber, t: TensorNumber) -> Name:
    """The sum of a parameter's gradients from stage ``s``, which borrows the parameter."""
    return Name(Role.GRADIENT, t, 1 + s)


def returned_sum(s: StageNumber, t: TensorNumber) -> Name:
    """The sum of a parameter's gradients over all members of stage ``s``, which borrows the parameter."""
    return Name(Role.MEAN, t, 1 + s)


def reported(name: Name, source: int) -> Name:
    """Return the name of a value where the values of all stages, or replicas of stages, come together."""
    return name._replace(part=1 + source)


def _work(
    context: UpdateContext, s: StageNumber, what: str, writes: Sequence[Name], function: Callable[[Arrays], list[Array]]
) -> Work:
    """Return work of a stage at the end of a step, which may read any array that the stage has then."""
    return Work(f"stage {s}: {what}", _operands(context, s), writes, function)


def _operands(context: UpdateContext, s: StageNumber) -> Avals:
    """Return what a stage has at the end of a step."""
    pipeline, tensors, held = context.pipeline, context.by_stage.graph.tensors, context.pipeline.held(s)
    sums = pipeline.sums(s, pipeline.trained(s))
    operands = {name: context.of_members(s, aval) for name, aval in sums.items()}
    for t in held:
        total = pipeline.sum_aval(s, t)
        for k in context.lenders(s, t):
            if context.returns_sum(s, k):
                operands[returned_sum(k, t)] = jax.ShapeDtypeStruct(pipeline.aval(t).shape, total.dtype)
            else:
                operands[returned_gradient(k, t)] = context.of_members(s, total)
    operands |= value_avals(pipeline, [WEIGHT, SQUARES])
    if context.exchange is not None:
        residuals = zip(held, context.residual_avals(s), strict=True)
        operands |= {Name(Role.RESIDUAL, t): context.of_members(s, aval) for t, aval in residuals}
        operands |= {Name(Role.EXCHANGED, t, 1): pipeline.aval(t) for t in held} | _messages(context, s)
    renewed = {
        name: pipeline.aval(name.tensor) if name.role is Role.PARAMETER else shape_of(tensors[k])
        for k, name in renewed_names(context, s).items()
    }
    state = {Name(Role.STATE, t): pipeline.aval(t) for t in _state_at_end(context, s)}
    operands |= renewed | {name: context.of_members(s, aval) for name, aval in state.items()}
    operands |= {Name(Role.EXCHANGED, t): shape_of(tensors[t]) for ts in context.by_stage.exchanged for t in ts}
    operands |= value_avals(pipeline, [STEP, SKIPPED, *([STOPPED] if context.guarded else [])])
    return operands | ({older(name): aval for name, aval in (renewed | state).items()} if context.guarded else {})


def _stopped(context: UpdateContext, values: Arrays) -> Array | None:
    """Return whether a step changes nothing; None if no step is stopped."""
    return values[STOPPED] if context.guarded else None


def _sum_names(context: UpdateContext, s: StageNumber, t: TensorNumber) -> list[Name]:
    """The arrays that a parameter's gradient is made of."""
    pipeline = context.pipeline
    returned = [(returned_sum if context.returns_sum(s, k) else returned_gradient)(k, t) for k in context.lenders(s, t)]
    return [*(pipeline.sums(s, [t]) if t in pipeline.trained(s) else ()), *returned]


def _own_sums(context: UpdateContext, s: StageNumber, values: Arrays) -> dict[TensorNumber, Array]:
    """Sums of each member, with what members of stages that borrow a parameter have returned."""
    return {t: _own_sum(context, s, values, t) for t in context.pipeline.held(s)}


def _own_sum(context: UpdateContext, s: StageNumber, values: Arrays, t: TensorNumber) -> Array:
    pipeline = context.pipeline
    pack = pipeline.packs[s].get(t)
    total = values.get(Name(Role.GRADIENT, t)) if pack is None else pack.part(values[pack.name], t)
    returned = [returned_gradient(k, t) for k in context.lenders(s, t) if not context.returns_sum(s, k)]
    aval = context.of_members(s, pipeline.sum_aval(s, t))
    total = jnp.zeros(aval.shape, aval.dtype) if total is None else total
    return (total + add_up(values, returned) if returned else total).reshape(aval.shape)


def _mean(context: UpdateContext, s: StageNumber, values: Arrays) -> dict[TensorNumber, Array]:
    """The gradients of a stage's parameters, by tensor number, in the types of their sums."""
    return {t: _mean_of(context, s, values, t) for t in context.pipeline.held(s)}


def _mean_of(context: UpdateContext, s: StageNumber, values: Arrays, t: TensorNumber) -> Array:
    if t in context.pipeline.objective.overwritten:
        largest = _own_sum(context, s, values, t)
        largest = largest if context.is_alone(s) else jnp.max(largest, 0)
        return jnp.where(largest == -jnp.inf, 0, largest)  # where no micro-batch has a gradient
    total = _over_members(context, s, _own_sum(context, s, values, t))
    returned = [values[returned_sum(k, t)] for k in context.lenders(s, t) if context.returns_sum(s, k)]
    total = functools.reduce(operator.add, returned, total)
    return total / values[WEIGHT].astype(total.dtype)


def _over_members(context: UpdateContext, s: StageNumber, value: Array) -> Array:
    """The sum over the members of a stage, of their values side by side."""
    return value if context.is_alone(s) else jnp.sum(value, 0, dtype=value.dtype)


def returned_sum_work(context: UpdateContext, s: StageNumber, t: TensorNumber) -> Work:
    """Return the sum over the members of stage ``s``, which borrows a parameter, of its gradients."""

    def function(values: Arrays) -> list[Array]:
        return [_over_members(context, s, values[Name(Role.GRADIENT, t)])]

    return _work(context, s, "sum of gradients", [returned_sum(s, t)], function)


def fold_work(context: Context, s: StageNumber) -> Work:
    """Return the state of a stage after all micro-batches, of what each of them adds, in their order."""
    fold, m = context.stages[s].fold, context.num_microbatches
    assert fold is not None
    state = [Name(Role.STATE, t) for t in fold.state]
    operands = {name: context.aval(name.tensor) for name in state}
    operands |= {Name(Role.STATISTIC, t, j): context.aval(t) for t in fold.statistics for j in range(m)}

    def function(values: Arrays) -> list[Array]:
        statistics = [jnp.stack([values[Name(Role.STATISTIC, t, j)] for j in range(m)]) for t in fold.statistics]

        def step(now: list[Array], row: list[Array]) -> tuple[list[Array], None]:
            return fold.graph.evaluate([*now, *row]), None

        return lax.scan(step, [values[name] for name in state], statistics, m)[0]

    return Work(f"stage {s}: state", operands, state, function)


def exchange_work(context: UpdateContext, s: StageNumber) -> Work:
    """Return the block-sparse exchange of a stage: residuals and gradients become messages and new residuals."""
    plan, pipeline = context.exchange, context.pipeline
    assert plan is not None
    held, messages = pipeline.held(s), _messages(context, s)
    residuals = [Name(Role.RESIDUAL, t) for t in held]

    def of_member(shares: list[Array], before: list[Array], step: Array, stopped: Array | bool) -> list[Array]:
        avals = [pipeline.aval(t) for t in held]
        own_shares, left = ([x.reshape(a.shape) for x, a in zip(xs, avals, strict=True)] for xs in (shares, before))

        gradients = [g.astype(x.dtype) + x for g, x in zip(own_shares, left, strict=True)]
        arrived, (rest, squares, unsent) = plan.send(s, step, gradients)
        new = [x.reshape(old.shape) for x, old in zip(rest, before, strict=True)]
        new = [jnp.where(stopped, old, x) for old, x in zip(before, new, strict=True)] if context.guarded else new
        return [*jax.tree.leaves(arrived), *new, *_in_order([squares, unsent])]

    def function(values: Arrays) -> list[Array]:
        share = values[WEIGHT] / pipeline.members[s]
        shares = [g / share.astype(g.dtype) for g in _own_sums(context, s, values).values()]
        mapped = jax.shard_map(
            of_member,
            mesh=pipeline.specs.submesh.abstract(pipeline.members[s]),
            in_specs=(P(DATA), P(DATA), P(), P()),
            out_specs=[*(P() for _ in messages), *(P(DATA) for _ in held), P(), P()],
            check_vma=False,
        )
        return mapped(shares, [values[name] for name in residuals], values[STEP], values.get(STOPPED, False))

    return _work(context, s, "exchange", [*messages, *residuals, HAD, UNSENT], function)


def average_work(context: UpdateContext, s: StageNumber) -> Work:
    """Return the averages of a stage's gradients, of the messages of their exchange.

    They are made by another program than the messages, so that they take the memory of the gradients.
    """
    plan = context.exchange
    assert plan is not None
    messages, tree = _messages(context, s), jax.tree.structure(plan.messages(s))

    def function(values: Arrays) -> list[Array]:
        return plan.averages(s, values[STEP], jax.tree.unflatten(tree, [values[name] for name in messages]))

    names = [Name(Role.EXCHANGED, t, 1) for t in context.pipeline.held(s)]
    return _work(context, s, "averages", names, function)


def _messages(context: UpdateContext, s: StageNumber) -> Avals:
    """Return the arrays that arrive in a stage's exchange."""
    assert context.exchange is not None
    return {Name(Role.EXCHANGED, k, 2): x for k, x in enumerate(jax.tree.leaves(context.exchange.messages(s)))}


def _in_order(values: Sequence[Array]) -> list[Array]:
    rows = [lax.all_gather(x, DATA) for x in values]
    return [functools.reduce(operator.add, [row[r] for r in range(row.shape[0])]) for row in rows]


def look_work(context: UpdateContext, s: StageNumber) -> Work:
    """Return the search of a stage's gradients for what is not finite."""

    def function(values: Arrays) -> list[Array]:
        if context.exchange is None:
            gradients = _gradients(context, s, values).values()
        else:
            gradients = [g / values[WEIGHT].astype(g.dtype) for g in _own_sums(context, s, values).values()]
        here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0))
        return [(here > 0).astype(jnp.int32)]

    return _work(context, s, "look for what is not finite", [NONFINITE], function)


def nonfinite_work(context: UpdateContext, s: StageNumber) -> Work:
    """Return whether any gradient of a stage was not finite: the sum of their squares is not, either."""

    def function(values: Arrays) -> list[Array]:
        return [(~jnp.isfinite(values[SQUARES])).astype(jnp.int32)]

    return _work(context, s, "look for what is not finite", [NONFINITE], function)


def share_work(context: UpdateContext, s: StageNumber, number: int) -> Work | None:
    """Return the work for what a stage tells the others before a round of the optimizer; None if that is nothing."""
    by_stage = context.by_stage
    told = [t for t in by_stage.exchanged[number] if by_stage.stage_of[t] == s]
    if not told:
        return None

    def function(values: Arrays) -> list[Array]:
        env = _environment(context, s, number, values, _gradients(context, s, values))
        _compute(context, s, told, env)
        return [env[t] for t in told]

    names = [Name(Role.EXCHANGED, t) for t in told]
    return _work(context, s, f"optimizer, round {number}", names, function)


def update_work(context: UpdateContext, s: StageNumber, counts: bool) -> Work:
    """Return the last round of the optimizer in a stage; if it counts, with what every device has."""
    names = {t: name for t, name in renewed_names(context, s).items() if counts or name.role is not Role.SHARED}

    def function(values: Arrays) -> list[Array]:
        results, squares = _renewed(context, s, values, names, _stopped(context, values))
        return [*results, *_ends(context, s, counts, values), squares]

    writes = [*names.values(), *_end_names(context, s, counts), SQUARES]
    return _work(context, s, "update", writes, function)


def early_update_work(context: UpdateContext, s: StageNumber, group: int) -> Work:
    """Return the update of a stage by the mean gradient of a group of micro-batches; adds up its squared norm.

    A stage of an asynchronous schedule renews its weights as soon as it has that gradient. Schedules say which version
    of the weights a micro-batch uses (``jaxpipe.schedules.asynchronous``); the list holds a reference to each version
    until the last backward pass that reads it.
    """
    names = renewed_names(context, s)

    def function(values: Arrays) -> list[Array]:
        values = values | {WEIGHT: jnp.float32(group * context.replicas)}
        results, squares = _renewed(context, s, values, names, None)
        return [*results, values[SQUARES] + squares]

    return _work(context, s, "early update", [*names.values(), SQUARES], function)


def end_work(context: UpdateContext, s: StageNumber, counts: bool) -> Work:
    """Return the end of a stage's step after its updates: state of all replicas, numbers of steps if it counts.

    Under a guard it also writes parameters and optimizer state, those from before the step if it is stopped.
    """
    renewed = [*renewed_names(context, s).values()] if context.guarded else []

    def function(values: Arrays) -> list[Array]:
        stopped = _stopped(context, values)
        results = [_chosen(stopped, values[older(name)], values[name]) for name in renewed]
        return [*results, *_ends(context, s, counts, values)]

    return _work(context, s, "end of the step", [*renewed, *_end_names(context, s, counts)], function)


def renewed_names(context: UpdateContext, s: StageNumber) -> dict[TensorNumber, Name]:
    """By tensor number in the optimizer, the parameters and the optimizer state that a stage writes."""
    names = {t: Name(Role.PARAMETER, context.tensor_of[t]) for t in held_by(context.by_stage, s)[0]}
    return names | _state_places(context, s)


def older(name: Name) -> Name:
    """Return the name of an array as it was before the step."""
    return name._replace(part=1)


def _chosen(stopped: Array | None, before: Array, after: Array) -> Array:
    """Return the value to write: the old one where the step is stopped."""
    return after if stopped is None else jnp.where(stopped, before, after)


def _state_at_end(context: UpdateContext, s: StageNumber) -> list[TensorNumber]:
    # Members that share micro-batches have the same state already.
    alike = context.is_alone(s) or context.pipeline.stages[s].fold is not None
    return context.pipeline.renewed_state(s) if context.guarded or not alike else []


def _end_names(context: UpdateContext, s: StageNumber, counts: bool) -> list[Name]:
    """Return what a stage writes at the end of a step besides the optimizer: its state, the numbers of steps."""
    return [*(Name(Role.STATE, t) for t in _state_at_end(context, s)), *([STEP, SKIPPED] if counts else [])]


def _ends(context: UpdateContext, s: StageNumber, counts: bool, values: Arrays) -> list[Array]:
    """Return the arrays of ``_end_names``."""
    stopped = _stopped(context, values)
    results, pipeline = [], context.pipeline
    for t in _state_at_end(context, s):
        name, aval = Name(Role.STATE, t), pipeline.aval(t)
        after = values[name]
        if not context.is_alone(s):
            each = after.reshape(pipeline.members[s], *aval.shape)
            mean = jnp.issubdtype(aval.dtype, jnp.inexact) and context.replicas > 1
            axis = pipeline.objective.axis_of_examples(t)
            if axis is not None:  # of each replica the rows of its own micro-batches
                rows = [jnp.split(x, len(each), axis)[r] for r, x in enumerate(each)]
                after = jnp.concatenate(rows, axis)
            else:
                after = _over_members(context, s, each) / len(each) if mean else each[0]
        results.append(after if stopped is None else jnp.where(stopped, values[older(name)], after))
    if not counts:
        return results
    step, skipped = values[STEP], values[SKIPPED]
    if context.skips and stopped is not None:
        skipped = skipped + stopped.astype(jnp.int32)
        return [*results, step + 1, skipped]
    return [*results, _chosen(stopped, step, step + 1), skipped]


def _renewed(
    context: UpdateContext, s: StageNumber, values: Arrays, names: dict[TensorNumber, Name], stopped: Array | None
) -> tuple[list[Array], Array]:
    """Run the optimizer of a stage: the new values, and the squared norm of the gradient."""
    by_stage = context.by_stage
    olds, news = (*by_stage.parameters, *by_stage.state), (*by_stage.new_parameters, *by_stage.new_state)
    new = dict(zip(olds, news, strict=True))
    gradients = _gradients(context, s, values)
    written, squares = _renew(context, s, values, gradients, stopped)
    env = _environment(context, s, len(by_stage.exchanged), values, gradients)
    _compute(context, s, [new[t] for t in names if t not in written], env)
    results = [written[t] if t in written else _chosen(stopped, values[name], env[new[t]]) for t, name in names.items()]
    counted = [t for t in gradients if t not in context.pipeline.objective.overwritten]
    return results, sum((squares[t] for t in counted), start=jnp.zeros((), context.pipeline.norm_dtype))


def _renew(
    context: UpdateContext,
    s: StageNumber,
    values: Arrays,
    gradients: dict[TensorNumber, Array],
    stopped: Array | None,
) -> tuple[dict[TensorNumber, Array], dict[TensorNumber, Array]]:
    """Write a stage's parameters and state one after the other, each over the old one (``overwrite_state.renewals``).

    Returns new values by tensor number of the old one in the optimizer, and the squared norm of each gradient.
    """
    by_stage = context.by_stage
    taken = {t: context.tensor_of[t] for t in held_by(by_stage, s)[1]}
    # One by one, just before each is read, but where members make them together.
    lazy = context.exchange is None and context.is_alone(s)
    env = _environment(context, s, len(by_stage.exchanged), values, gradients)
    common = [t for op in by_stage.graph.operators for t in op.outputs if t not in by_stage.stage_of]
    _compute(context, s, common, env)
    steps = renewals(by_stage, s, [t for t in env if t not in taken])
    waiting = set(taken) if lazy else set()
    before: list[Array] = []
    written: dict[TensorNumber, Array] = {}
    dtype = context.pipeline.norm_dtype
    squares = {} if lazy else {t: squared_norm([g], dtype) for t, g in gradients.items()}
    for step in steps:
        fresh = [t for t in step.reads if t in waiting]
        waiting.difference_update(fresh)
        sums = {name: values[name] for t in fresh for name in _sum_names(context, s, taken[t])}
        others = {t: env[t] for t in (step.old, *step.reads) if t not in fresh and t not in waiting}
        # As lists: JAX sorts the keys of dictionaries, and names of sums by several replicas have no order.
        _, behind, others_behind = _compat.barrier((before, list(sums.values()), list(others.values())))
        sums = dict(zip(sums, behind, strict=True))
        env |= zip(others, others_behind, strict=True)
        means = {t: _mean_of(context, s, values | sums, taken[t]) for t in fresh}
        env |= {t: g.astype(context.taken_dtype[taken[t]]) for t, g in means.items()}
        squares |= {taken[t]: squared_norm([env[t]], dtype) for t in fresh}
        run(step.operators, env)
        env[step.new] = written[step.old] = _chosen(stopped, env[step.old], env[step.new])
        before = [env[step.new], *(squares[taken[t]] for t in fresh)]
    return written, {t: squares[t] if t in squares else squared_norm([g], dtype) for t, g in gradients.items()}


def gradient_work(context: UpdateContext, s: StageNumber) -> Work:
    """Return the work for a stage's mean gradients."""
    held = context.pipeline.held(s)

    def function(values: Arrays) -> list[Array]:
        mean = _mean(context, s, values)
        return [mean[t].astype(context.pipeline.aval(t).dtype) for t in held]

    names = [Name(Role.MEAN, t) for t in held]
    return _work(context, s, "gradient", names, function)


def _gradients(context: UpdateContext, s: StageNumber, values: Arrays) -> dict[TensorNumber, Array]:
    """The gradients of a stage's parameters, by tensor number, as the optimizer takes them."""
    if context.exchange is None:
        gradients = _mean(context, s, values)
    else:
        gradients = {t: values[Name(Role.EXCHANGED, t, 1)] for t in context.pipeline.held(s)}
    return {t: g.astype(context.taken_dtype[t]) for t, g in gradients.items()}


def _state_places(context: UpdateContext, s: StageNumber) -> dict[TensorNumber, Name]:
    """By tensor number in the optimizer, the state of a stage and that which every stage has."""
    update = context.by_stage
    roles = {s: Role.OPTIMIZER, None: Role.SHARED}
    owned = enumerate(zip(update.state, update.state_stage, strict=True))
    return {t: Name(roles[owner], k) for k, (t, owner) in owned if owner in roles}


def _environment(
    context: UpdateContext, s: StageNumber, rounds: int, values: Arrays, gradients: dict[TensorNumber, Array]
) -> dict[TensorNumber, Array]:
    """Values by tensor number in the optimizer that a stage begins a round with."""
    by_stage = context.by_stage
    parameters, taken, _ = held_by(by_stage, s)
    env: dict[TensorNumber, Array] = dict(by_stage.graph.constants)
    env |= {t: values[Name(Role.PARAMETER, context.tensor_of[t])] for t in parameters}
    env |= {t: gradients[context.tensor_of[t]] for t in taken}
    env |= {t: values[name] for t, name in _state_places(context, s).items()}
    return env | {t: values[Name(Role.EXCHANGED, t)] for ts in by_stage.exchanged[:rounds] for t in ts}


def _compute(
    context: UpdateContext, s: StageNumber, wanted: Sequence[TensorNumber], env: dict[TensorNumber, Array]
) -> None:
    """Run what some tensors follow from: operators of the stage, and those that every stage runs."""
    by_stage = context.by_stage
    common = [op for op in by_stage.graph.operators if not any(t in by_stage.stage_of for t in op.outputs)]
    allowed = {op.outputs for op in (*common, *operators_of(by_stage, s))}
    run(needed_operators([op for op in by_stage.graph.operators if op.outputs in allowed], wanted, env), env)


def zeros_work(label: str, avals: Avals, overwritten: Collection[TensorNumber] = ()) -> Work:
    """Return the work that makes zeros, and what is below all gradients of parameters that become their gradient."""

    def function(_: Arrays) -> list[Array]:
        lowest = [name.role is Role.GRADIENT and name.tensor in overwritten for name in avals]
        return [
            jnp.full(a.shape, -jnp.inf if low else 0, a.dtype) for a, low in zip(avals.values(), lowest, strict=True)
        ]

    return Work(label, {}, list(avals), function)
