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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat
from jaxpipe.gradients.block_exchange import Averaged, exchange
from jaxpipe.gradients.block_sparse import Settings
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.graph.graph import run
from jaxpipe.runtime.mpmd.stage_work import STEP, Context, Name, Role, Work
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by, needed_operators, operators_of
from jaxpipe.runtime.overwrite_state import renewals
from jaxpipe.sharding.mesh_axes import DATA


#: The total weight of a batch, and whether its step changes nothing.
WEIGHT, STOPPED = Name(Role.WEIGHT), Name(Role.STOPPED)

#: A stage's share of the gradient's squared norm; of what its replicas had to send, and have not sent.
SQUARES, HAD, UNSENT = (Name(Role.SQUARES, k) for k in range(3))

#: How many steps have changed nothing.
SKIPPED = Name(Role.STEP, 1)

#: Whether a gradient of a stage is not finite, ``int32[]``.
NONFINITE = Name(Role.SQUARES, 3)


@dataclass(frozen=True, eq=False)
class Exchange:
    """A block-sparse exchange between replicas.

    Attributes:
      settings: of ``block_sparse``.
      plans: by stage and phase of the warm-up, the blocks of each gradient.
    """

    settings: Settings
    plans: tuple[tuple[tuple[Blocks, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class UpdateContext:
    """Data that the work at the end of a step needs in every stage.

    Attributes:
      pipeline: the work of all stages on micro-batches.
      by_stage: the optimizer, each of its operators with its stage.
      replicas: of the pipeline.
      exchange: how replicas exchange gradients; None if whole.
      guarded: whether a step that is not finite changes nothing.
      skips: whether such a step counts as one.
    """

    pipeline: Context
    by_stage: PartitionedUpdate
    replicas: int
    exchange: Exchange | None = None
    guarded: bool = False
    skips: bool = False

    @functools.cached_property
    def tensor_of(self) -> dict[int, int]:
        """By tensor number in the optimizer of a parameter or its gradient, that in the objective."""
        objective = self.pipeline.objective
        trained = [t for t in objective.parameters if t not in objective.frozen]
        pairs = zip(self.by_stage.parameters, objective.parameters, strict=True)
        return dict(pairs) | dict(zip(self.by_stage.gradients, trained, strict=True))

    @functools.cached_property
    def taken_dtype(self) -> dict[int, np.dtype[Any]]:
        """By trained parameter of the objective, the type in which the optimizer takes its gradient."""
        return {self.tensor_of[t]: self.by_stage.graph.tensors[t].dtype for t in self.by_stage.gradients}

    def is_alone(self, s: int) -> bool:
        """Return whether a stage has one device."""
        return self.pipeline.members[s] == 1

    def of_members(self, s: int, aval: Any) -> Any:
        """Return the shape of an array that each member of a stage has for itself, of all of them."""
        return aval if self.is_alone(s) else self.pipeline.together(s, aval)

    def returns_sum(self, s: int, k: int) -> bool:
        """Return whether stage ``k`` returns gradients to ``s`` as one sum, not from each member to another one."""
        return self.pipeline.members[s] != self.pipeline.members[k]

    def lenders(self, s: int, t: int) -> list[int]:
        """The other stages that compute gradients of a parameter."""
        return [k for k in range(len(self.pipeline.stages)) if k != s and t in self.pipeline.trained(k)]

    def residual_avals(self, s: int) -> list[Any]:
        """Shapes of what a replica has not sent of a stage's gradients."""
        avals = map(self.pipeline.aval, self.pipeline.held(s))
        lead = self.pipeline.lead(s)
        return [jax.ShapeDtypeStruct((*lead, *a.shape), jnp.promote_types(a.dtype, jnp.float32)) for a in avals]


def returned_gradient(s: int, t: int) -> Name:
    """The sum of a parameter's gradients from stage ``s``, which borrows the parameter."""
    return Name(Role.GRADIENT, t, 1 + s)


def returned_sum(s: int, t: int) -> Name:
    """The sum of a parameter's gradients over all members of stage ``s``, which borrows the parameter."""
    return Name(Role.MEAN, t, 1 + s)


def reported(name: Name, source: int) -> Name:
    """Return the name of a value where the values of all stages, or replicas of stages, come together."""
    return name._replace(part=1 + source)


class Operands(dict[Name, Any]):
    """Operands of some work: name and shape."""

    def add(self, name: Name, shape: Sequence[int], dtype: Any) -> None:
        """Another operand."""
        self[name] = jax.ShapeDtypeStruct(tuple(shape), dtype)


def _gradient_operands(context: UpdateContext, s: int) -> Operands:
    pipeline, operands = context.pipeline, Operands()
    for t in pipeline.held(s):
        if t in pipeline.trained(s):
            operands |= {name: context.of_members(s, aval) for name, aval in pipeline.sums(s, [t]).items()}
        for k in context.lenders(s, t):
            if context.returns_sum(s, k):
                operands.add(returned_sum(k, t), pipeline.aval(t).shape, pipeline.sum_aval(s, t).dtype)
            else:
                operands[returned_gradient(k, t)] = context.of_members(s, pipeline.sum_aval(s, t))
    operands.add(WEIGHT, (), jnp.float32)
    return operands


def _mean(context: UpdateContext, s: int, values: dict[Name, Any]) -> dict[int, Any]:
    """The gradients of a stage's parameters, by tensor number, in the types of their sums."""
    sums = {t: _over_members(context, s, g) for t, g in _own_sums(context, s, values).items()}
    sums = {t: _with_returned(context, s, values, t, g) for t, g in sums.items()}
    return {t: g / values[WEIGHT].astype(g.dtype) for t, g in sums.items()}


def _mean_of(context: UpdateContext, s: int, values: dict[Name, Any], t: int) -> Any:
    """The gradient of one parameter in a stage with one device, as the optimizer takes it."""
    total = _with_returned(context, s, values, t, _own_sum(context, s, values, t))
    return (total / values[WEIGHT].astype(total.dtype)).astype(context.taken_dtype[t])


def _own_sums(context: UpdateContext, s: int, values: dict[Name, Any]) -> dict[int, Any]:
    """Sums of each member, with what members of stages that borrow a parameter have returned."""
    return {t: _own_sum(context, s, values, t) for t in context.pipeline.held(s)}


def _own_sum(context: UpdateContext, s: int, values: dict[Name, Any], t: int) -> Any:
    pipeline = context.pipeline
    pack = pipeline.packs[s].get(t)
    sums_here = values.get(Name(Role.GRADIENT, t)) if pack is None else pack.part(values[pack.name], t)
    lenders = context.lenders(s, t)
    returned = [values[returned_gradient(k, t)] for k in lenders if not context.returns_sum(s, k)]
    aval = context.of_members(s, pipeline.sum_aval(s, t))
    total = jnp.zeros(aval.shape, aval.dtype) if sums_here is None else sums_here
    if returned:
        total = total + functools.reduce(operator.add, returned)
    return total.reshape(aval.shape)


def _with_returned(context: UpdateContext, s: int, values: dict[Name, Any], t: int, total: Any) -> Any:
    """The sum of a parameter's gradients, with the sums of stages that have another number of members."""
    returned = [values[returned_sum(k, t)] for k in context.lenders(s, t) if context.returns_sum(s, k)]
    return functools.reduce(operator.add, returned, total)


def _sum_names(context: UpdateContext, s: int, t: int) -> list[Name]:
    """The operands that a parameter's gradient is made of."""
    here = context.pipeline.sums(s, [t]) if t in context.pipeline.trained(s) else ()
    lenders = context.lenders(s, t)
    return [*here, *((returned_sum if context.returns_sum(s, k) else returned_gradient)(k, t) for k in lenders)]


def _over_members(context: UpdateContext, s: int, value: Any) -> Any:
    """The sum over the members of a stage, of their values side by side."""
    return value if context.is_alone(s) else jnp.sum(value, 0, dtype=value.dtype)


def returned_sum_work(context: UpdateContext, s: int, t: int) -> Work:
    """Return the sum over the members of stage ``s``, which borrows a parameter, of its gradients."""
    operands = Operands()
    operands[Name(Role.GRADIENT, t)] = context.of_members(s, context.pipeline.sum_aval(s, t))

    def function(values: dict[Name, Any]) -> list[Any]:
        return [_over_members(context, s, values[Name(Role.GRADIENT, t)])]

    return named_work(f"stage {s}: sum of gradients", operands, [returned_sum(s, t)], function)


def fold_work(context: Context, s: int) -> Work:
    """Return the state of a stage after all micro-batches, of what each of them adds, in their order."""
    fold, operands, m = context.stages[s].fold, Operands(), context.num_microbatches
    assert fold is not None
    state = [Name(Role.STATE, t) for t in fold.state]
    operands |= {name: context.aval(name.number) for name in state}
    for t in fold.statistics:
        operands |= {Name(Role.STATISTIC, t, j): context.aval(t) for j in range(m)}

    def function(values: dict[Name, Any]) -> list[Any]:
        statistics = [jnp.stack([values[Name(Role.STATISTIC, t, j)] for j in range(m)]) for t in fold.statistics]

        def step(now: list[Any], row: list[Any]) -> tuple[list[Any], None]:
            return fold.graph.evaluate([*now, *row]), None

        return lax.scan(step, [values[name] for name in state], statistics, m)[0]

    return named_work(f"stage {s}: state", operands, state, function)


def exchange_work(context: UpdateContext, s: int) -> Work:
    """Return the block-sparse exchange of a stage: residuals and gradients become averages and new residuals."""
    assert context.exchange is not None
    pipeline, settings, plans = context.pipeline, context.exchange.settings, context.exchange.plans[s]
    held = pipeline.held(s)
    operands = _gradient_operands(context, s)
    operands.add(STEP, (), jnp.int32)
    residuals = [Name(Role.RESIDUAL, t) for t in held]
    operands |= zip(residuals, (context.of_members(s, aval) for aval in context.residual_avals(s)), strict=True)
    averages = [Name(Role.EXCHANGED, t, 1) for t in held]
    if context.guarded:
        operands.add(STOPPED, (), jnp.bool_)

    def of_member(shares: list[Any], before: list[Any], step: Any, stopped: Any) -> list[Any]:
        own_share = {t: g.reshape(pipeline.aval(t).shape) for t, g in zip(held, shares, strict=True)}
        left = {t: x.reshape(pipeline.aval(t).shape) for t, x in zip(held, before, strict=True)}

        def read(_: int) -> list[Any]:
            return [own_share[t].astype(left[t].dtype) + left[t] for t in held]

        def phase(blocks: Sequence[Blocks]) -> Any:
            return exchange([blocks], settings.rule, DATA, lambda f: f(0), read, lambda _, x: _averaged(x))

        branches = [functools.partial(phase, blocks) for blocks in plans]
        means, rest, squares, unsent = lax.switch(settings.phase(step), branches)
        new = [x.reshape(old.shape) for x, old in zip(rest, before, strict=True)]
        new = [jnp.where(stopped, old, x) for old, x in zip(before, new, strict=True)] if context.guarded else new
        return [*means, *new, *_in_order([squares, unsent])]

    def function(values: dict[Name, Any]) -> list[Any]:
        share = values[WEIGHT] / pipeline.members[s]
        shares = [g / share.astype(g.dtype) for g in _own_sums(context, s, values).values()]
        mapped = jax.shard_map(
            of_member,
            mesh=pipeline.specs.submesh.abstract(pipeline.members[s]),
            in_specs=(P(DATA), P(DATA), P(), P()),
            out_specs=[*(P() for _ in held), *(P(DATA) for _ in held), P(), P()],
            check_vma=False,
        )
        return mapped(shares, [values[name] for name in residuals], values[STEP], values.get(STOPPED, False))

    return named_work(f"stage {s}: exchange", operands, [*averages, *residuals, HAD, UNSENT], function)


def _averaged(result: Averaged) -> tuple[list[Any], list[Any], Any, Any]:
    return result.gradients, result.residuals, result.squares, result.unsent


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Sums over the replicas, in their order."""
    rows = [lax.all_gather(x, DATA) for x in values]
    return [functools.reduce(operator.add, [row[r] for r in range(row.shape[0])]) for row in rows]


def look_work(context: UpdateContext, s: int) -> Work:
    """Return the search of a stage's gradients for what is not finite."""
    operands = _gradient_operands(context, s)

    def function(values: dict[Name, Any]) -> list[Any]:
        if context.exchange is None:
            gradients = _gradients(context, s, values).values()
        else:
            share = values[WEIGHT]
            gradients = [g / share.astype(g.dtype) for g in _own_sums(context, s, values).values()]
        here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0))
        return [(here > 0).astype(jnp.int32)]

    return named_work(f"stage {s}: look for what is not finite", operands, [NONFINITE], function)


def share_work(context: UpdateContext, s: int, number: int) -> Work | None:
    """Return the work for what a stage tells the others before a round of the optimizer; None if that is nothing."""
    by_stage = context.by_stage
    told = [t for t in by_stage.exchanged[number] if by_stage.stage_of[t] == s]
    if not told:
        return None
    operands = optimizer_operands(context, s, number)

    def function(values: dict[Name, Any]) -> list[Any]:
        env = _environment(context, s, number, values, _gradients(context, s, values))
        _compute(context, s, told, env)
        return [env[t] for t in told]

    return named_work(
        f"stage {s}: optimizer, round {number}", operands, [Name(Role.EXCHANGED, t) for t in told], function
    )


def update_work(context: UpdateContext, s: int, counts: bool) -> Work:
    """Return the last round of the optimizer in a stage: new parameters and new optimizer state.

    Args:
      counts: whether it also writes what every device has: shared optimizer state and the numbers of steps.
    """
    operands = optimizer_operands(context, s, len(context.by_stage.exchanged))
    names = {t: name for t, name in renewed_names(context, s).items() if counts or name.role is not Role.SHARED}
    ends, results_at_end = end_operands(context, s, counts)
    if context.guarded:
        operands.add(STOPPED, (), jnp.bool_)

    def function(values: dict[Name, Any]) -> list[Any]:
        def choose_value(before: Any, after: Any) -> Any:
            return jnp.where(values[STOPPED], before, after) if context.guarded else after

        results, squares = renew(context, s, values, names, choose_value)
        return [*results, *results_at_end(values, choose_value), squares]

    writes = [*names.values(), *(name for name in ends if name.part == 0), SQUARES]
    return named_work(f"stage {s}: update", operands | ends, writes, function)


def renewed_names(context: UpdateContext, s: int) -> dict[int, Name]:
    """By tensor number in the optimizer, the parameters and the optimizer state that a stage writes."""
    names = {t: Name(Role.PARAMETER, context.tensor_of[t]) for t in held_by(context.by_stage, s)[0]}
    return names | _state_places(context, s)


def end_operands(context: UpdateContext, s: int, counts: bool) -> tuple[Operands, Callable[..., list[Any]]]:
    """Return what a stage reads and writes at the end of a step besides the optimizer.

    Args:
      counts: whether it writes the numbers of steps.

    Returns:
      The operands, of which those without an older value are written, and the function that does it.
    """
    pipeline, operands = context.pipeline, Operands()
    # Members that share micro-batches have the same state already.
    alike = context.is_alone(s) or pipeline.stages[s].fold is not None
    state = pipeline.renewed_state(s) if context.guarded or not alike else []
    for t in state:
        operands[Name(Role.STATE, t)] = context.of_members(s, pipeline.aval(t))
    if counts:
        operands.add(STEP, (), jnp.int32)
        operands.add(SKIPPED, (), jnp.int32)
    if context.guarded:
        for t in state:
            operands.add(Name(Role.STATE, t, 1), pipeline.aval(t).shape, pipeline.aval(t).dtype)

    def function(values: dict[Name, Any], choose_value: Callable[[Any, Any], Any]) -> list[Any]:
        results = []
        for t in state:
            after, aval = values[Name(Role.STATE, t)], pipeline.aval(t)
            if not context.is_alone(s):
                each = after.reshape(pipeline.members[s], *aval.shape)
                mean = jnp.issubdtype(aval.dtype, jnp.inexact) and context.replicas > 1
                after = _over_members(context, s, each) / len(each) if mean else each[0]
            results.append(choose_value(values.get(Name(Role.STATE, t, 1)), after))
        return [*results, *(_counted(context, values) if counts else [])]

    return operands, function


def renew(
    context: UpdateContext,
    s: int,
    values: dict[Name, Any],
    names: dict[int, Name],
    choose_value: Callable[[Any, Any], Any],
) -> tuple[list[Any], Any]:
    """Run the optimizer of a stage.

    Args:
      names: by tensor number in the optimizer, what is written.
      choose_value: ``(old, new) -> value`` to write.

    Returns:
      The new values, and the squared norm of the gradient.
    """
    by_stage = context.by_stage
    new = dict(
        zip((*by_stage.parameters, *by_stage.state), (*by_stage.new_parameters, *by_stage.new_state), strict=True)
    )
    gradients = _gradients(context, s, values)
    written, squares = _renew(context, s, values, gradients, choose_value)
    env = _environment(context, s, len(by_stage.exchanged), values, gradients)
    _compute(context, s, [new[t] for t in names if t not in written], env)
    results = [written[t] if t in written else choose_value(values[name], env[new[t]]) for t, name in names.items()]
    return results, sum((squares[t] for t in gradients), start=jnp.float32(0))


def _renew(
    context: UpdateContext,
    s: int,
    values: dict[Name, Any],
    gradients: dict[int, Any],
    choose_value: Callable[[Any, Any], Any],
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Write a stage's parameters and state one after the other, each over the old one (``overwriting.renewals``).

    Args:
      gradients: of its parameters, by tensor number.
      choose_value: ``(old, new) -> value`` to write.

    Returns:
      The new values, by tensor number of the old one in the optimizer, and the squared norm of each gradient.
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
    before: list[Any] = []
    written: dict[int, Any] = {}
    squares = {} if lazy else {t: _square(g) for t, g in gradients.items()}
    for step in steps:
        fresh = [t for t in step.reads if t in waiting]
        waiting.difference_update(fresh)
        sums = {name: values[name] for t in fresh for name in _sum_names(context, s, taken[t])}
        others = {t: env[t] for t in (step.old, *step.reads) if t not in fresh and t not in waiting}
        _, sums, others = _compat.fence((before, sums, others))
        env |= others
        env |= {t: _mean_of(context, s, values | sums, taken[t]) for t in fresh}
        squares |= {taken[t]: _square(env[t]) for t in fresh}
        run(step.operators, env)
        env[step.new] = written[step.old] = choose_value(env[step.old], env[step.new])
        before = [env[step.new], *(squares[taken[t]] for t in fresh)]
    return written, {t: squares[t] if t in squares else _square(g) for t, g in gradients.items()}


def _square(gradient: Any) -> Any:
    return jnp.sum(jnp.square(gradient.astype(jnp.float32)))


def _counted(context: UpdateContext, values: dict[Name, Any]) -> list[Any]:
    """The numbers of steps that were made, and that changed nothing, after this one."""
    step, skipped = values[STEP], values[SKIPPED]
    if not context.guarded:
        return [step + 1, skipped]
    if context.skips:
        return [step + 1, skipped + values[STOPPED].astype(jnp.int32)]
    return [jnp.where(values[STOPPED], step, step + 1), skipped]


def gradient_work(context: UpdateContext, s: int) -> Work:
    """Return the work for a stage's mean gradients."""
    held = context.pipeline.held(s)
    operands = _gradient_operands(context, s)

    def function(values: dict[Name, Any]) -> list[Any]:
        mean = _mean(context, s, values)
        return [mean[t].astype(context.pipeline.aval(t).dtype) for t in held]

    return named_work(f"stage {s}: gradient", operands, [Name(Role.MEAN, t) for t in held], function)


def _gradients(context: UpdateContext, s: int, values: dict[Name, Any]) -> dict[int, Any]:
    """The gradients of a stage's parameters, by tensor number, as the optimizer takes them."""
    if context.exchange is None:
        gradients = _mean(context, s, values)
    else:
        gradients = {t: values[Name(Role.EXCHANGED, t, 1)] for t in context.pipeline.held(s)}
    return {t: g.astype(context.taken_dtype[t]) for t, g in gradients.items()}


def _state_places(context: UpdateContext, s: int) -> dict[int, Name]:
    """By tensor number in the optimizer, the state of a stage and that which every stage has."""
    update = context.by_stage
    roles = {s: Role.OPTIMIZER, None: Role.SHARED}
    owned = enumerate(zip(update.state, update.state_stage, strict=True))
    return {t: Name(roles[owner], k) for k, (t, owner) in owned if owner in roles}


def optimizer_operands(context: UpdateContext, s: int, rounds: int) -> Operands:
    """Operands of the optimizer after some rounds of exchange."""
    by_stage, pipeline = context.by_stage, context.pipeline
    if context.exchange is None:
        operands = _gradient_operands(context, s)
    else:
        operands = Operands()
        for t in pipeline.held(s):
            operands[Name(Role.EXCHANGED, t, 1)] = pipeline.aval(t)
    operands |= {
        Name(Role.PARAMETER, context.tensor_of[t]): pipeline.aval(context.tensor_of[t]) for t in held_by(by_stage, s)[0]
    }
    for t, name in _state_places(context, s).items():
        operands.add(name, by_stage.graph.tensors[t].shape, by_stage.graph.tensors[t].dtype)
    for t in (t for ts in by_stage.exchanged[:rounds] for t in ts):
        operands.add(Name(Role.EXCHANGED, t), by_stage.graph.tensors[t].shape, by_stage.graph.tensors[t].dtype)
    return operands


def _environment(
    context: UpdateContext, s: int, rounds: int, values: dict[Name, Any], gradients: dict[int, Any]
) -> dict[int, Any]:
    """Values by tensor number in the optimizer that a stage begins a round with."""
    by_stage = context.by_stage
    parameters, taken, _ = held_by(by_stage, s)
    env: dict[int, Any] = dict(by_stage.graph.constants)
    env |= {t: values[Name(Role.PARAMETER, context.tensor_of[t])] for t in parameters}
    env |= {t: gradients[context.tensor_of[t]] for t in taken}
    env |= {t: values[name] for t, name in _state_places(context, s).items()}
    return env | {t: values[Name(Role.EXCHANGED, t)] for ts in by_stage.exchanged[:rounds] for t in ts}


def _compute(context: UpdateContext, s: int, wanted: Sequence[int], env: dict[int, Any]) -> None:
    """Run what some tensors follow from: operators of the stage, and those that every stage runs."""
    by_stage = context.by_stage
    common = [op for op in by_stage.graph.operators if not any(t in by_stage.stage_of for t in op.outputs)]
    allowed = {op.outputs for op in (*common, *operators_of(by_stage, s))}
    run(needed_operators([op for op in by_stage.graph.operators if op.outputs in allowed], wanted, env), env)


def zeros_work(label: str, avals: dict[Name, Any]) -> Work:
    """Return the work that makes zeros."""
    return named_work(label, Operands(), list(avals), lambda _: [jnp.zeros(a.shape, a.dtype) for a in avals.values()])


def named_work(
    label: str, operands: dict[Name, Any], writes: Sequence[Name], function: Callable[[dict[Name, Any]], list[Any]]
) -> Work:
    """Return work whose function takes its operands by name."""
    names = tuple(operands)
    return Work(
        label,
        names,
        tuple(operands.values()),
        tuple(writes),
        lambda given: function(dict(zip(names, given, strict=True))),
    )
