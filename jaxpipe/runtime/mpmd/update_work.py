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
from jaxpipe.array_types import Array, DType, TensorNumber
from jaxpipe.gradients.squared_norm import squared_norm
from jaxpipe.graph.graph import operator_ends, run
from jaxpipe.graph.reverse_walk import needed
from jaxpipe.runtime.mpmd.stage_work import OVERFLOWS, STEP, Arrays, Avals, Context, Name, Role, Work, shape_of
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by
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

    def returns_sum(self, s: StageNumber, k: StageNumber) -> bool:
        """Return whether stage ``k`` returns gradients to ``s`` as one sum, not from each member to another one."""
        return self.pipeline.members[s] != self.pipeline.members[k]

    def lenders(self, s: StageNumber, t: TensorNumber) -> list[StageNumber]:
        """The other stages that compute gradients of a parameter."""
        return [k for k in self.pipeline.stage_numbers if k != s and t in self.pipeline.trained(k)]

    def returned(self, s: StageNumber, k: StageNumber, t: TensorNumber) -> Name:
        """The sum of a parameter's gradients that stage ``k``, which borrows it, returns: of each member, or of all."""
        return Name(Role.MEAN if self.returns_sum(s, k) else Role.GRADIENT, t, 1 + k)

    def state_names(self, s: StageNumber) -> dict[TensorNumber, Name]:
        """By tensor number in the optimizer, the state of a stage and that which every stage has."""
        roles = {s: Role.OPTIMIZER, None: Role.SHARED}
        owned = enumerate(zip(self.by_stage.state, self.by_stage.state_stage, strict=True))
        return {t: Name(roles[owner], k) for k, (t, owner) in owned if owner in roles}


def older(name: Name) -> Name:
    """Return the name of an array as it was before the step."""
    return name._replace(part=1)


def reported(name: Name, source: int) -> Name:
    """Return the name of a value where the values of all stages, or replicas of stages, come together."""
    return name._replace(part=1 + source)


def fold_work(context: Context, s: StageNumber) -> Work:
    """Return the state of a stage after all micro-batches, of what each of them adds, in their order."""
    fold, m = context.stages[s].fold, context.num_microbatches
    assert fold is not None
    state = [Name(Role.STATE, t) for t in fold.state]
    operands = {name: context.aval(name.tensor) for name in state}
    operands |= {Name(Role.STATISTIC, t, j): context.aval(t) for t in fold.statistics for j in range(m)}

    def function(values: Arrays) -> Arrays:
        statistics = [jnp.stack([values[Name(Role.STATISTIC, t, j)] for j in range(m)]) for t in fold.statistics]

        def step(now: list[Array], row: list[Array]) -> tuple[list[Array], None]:
            return fold.graph.evaluate([*now, *row]), None

        folded = lax.scan(step, [values[name] for name in state], statistics, m)[0]
        return dict(zip(state, folded, strict=True))

    return Work(f"stage {s}: state", operands, function)


def zeros_work(label: str, avals: Avals, overwritten: Collection[TensorNumber] = ()) -> Work:
    """Return the work that makes zeros, and what is below all gradients of parameters that become their gradient."""

    def function(_: Arrays) -> Arrays:
        low = {name for name in avals if name.role is Role.GRADIENT and name.tensor in overwritten}
        return {name: jnp.full(a.shape, -jnp.inf if name in low else 0, a.dtype) for name, a in avals.items()}

    return Work(label, {}, function)


class StageUpdate:
    """The work of a stage at the end of a step, each a function of the arrays that the stage has then."""

    def __init__(self, context: UpdateContext, s: StageNumber):
        """Note what the stage has."""
        self._context, self._s = context, s
        self._pipeline, self._by_stage = context.pipeline, context.by_stage
        self._held = self._pipeline.held(s)
        self._is_alone = self._pipeline.members[s] == 1
        # Members that share micro-batches have the same state already.
        alike = self._is_alone or self._pipeline.stages[s].fold is not None
        self._state = self._pipeline.renewed_state(s) if context.guarded or not alike else []
        #: By tensor number in the optimizer, the parameters and the optimizer state that the stage writes.
        names = {t: Name(Role.PARAMETER, context.tensor_of[t]) for t in held_by(context.by_stage, s)[0]}
        self.renewed = names | context.state_names(s)
        plan = context.exchange
        arriving = [] if plan is None else jax.tree.leaves(plan.messages(s))
        self._messages = {Name(Role.EXCHANGED, k, 2): x for k, x in enumerate(arriving)}
        self.residuals = {} if plan is None else {Name(Role.RESIDUAL, t): self._residual_aval(t) for t in self._held}
        self._operands = self._what_exists()

    def _residual_aval(self, t: TensorNumber) -> jax.ShapeDtypeStruct:
        """The shape of what all replicas have not sent of a parameter's gradients."""
        aval, lead = self._pipeline.aval(t), self._pipeline.lead(self._s)
        wide = jax.ShapeDtypeStruct((*lead, *aval.shape), jnp.promote_types(aval.dtype, jnp.float32))
        return self._pipeline.of_members(self._s, wide)

    def _what_exists(self) -> Avals:
        context, pipeline, s = self._context, self._pipeline, self._s
        tensors, together = self._by_stage.graph.tensors, functools.partial(pipeline.of_members, s)
        sums = pipeline.sums(s, pipeline.trained(s))
        operands = {name: together(aval) for name, aval in sums.items()}
        for t in self._held:
            total = pipeline.sum_aval(s, t)
            for k in context.lenders(s, t):
                sum_aval = jax.ShapeDtypeStruct(pipeline.aval(t).shape, total.dtype)
                operands[context.returned(s, k, t)] = sum_aval if context.returns_sum(s, k) else together(total)
        operands |= value_avals(pipeline, [WEIGHT, SQUARES]) | self.residuals | self._messages
        if context.exchange is not None:
            operands |= {Name(Role.EXCHANGED, t, 1): pipeline.aval(t) for t in self._held}
        renewed = {
            name: pipeline.aval(name.tensor) if name.role is Role.PARAMETER else shape_of(tensors[t])
            for t, name in self.renewed.items()
        }
        state = {Name(Role.STATE, t): pipeline.aval(t) for t in self._state}
        operands |= renewed | {name: together(aval) for name, aval in state.items()}
        operands |= {Name(Role.EXCHANGED, t): shape_of(tensors[t]) for ts in self._by_stage.exchanged for t in ts}
        counts = [STEP, *([SKIPPED] if pipeline.counts[s] else []), *([STOPPED] if context.guarded else [])]
        operands |= value_avals(pipeline, counts)
        return operands | ({older(name): aval for name, aval in (renewed | state).items()} if context.guarded else {})

    def _work(self, what: str, function: Callable[[Arrays], Arrays]) -> Work:
        return Work(f"stage {self._s}: {what}", self._operands, function)

    def returned_sum(self, home: StageNumber, t: TensorNumber) -> Work:
        """Return the sum over the members of this stage, which borrows a parameter of another one, of its gradients."""
        name = self._context.returned(home, self._s, t)
        return self._work("sum of gradients", lambda x: {name: self._over_members(x[Name(Role.GRADIENT, t)])})

    def exchange(self) -> Work:
        """Return the block-sparse exchange: residuals and gradients become messages and new residuals."""
        plan, pipeline, members = self._context.exchange, self._pipeline, self._pipeline.members[self._s]
        assert plan is not None
        avals = [pipeline.aval(t) for t in self._held]

        def of_member(shares: list[Array], before: list[Array], step: Array, stopped: Array | bool) -> list[Array]:
            own_shares, left = ([x.reshape(a.shape) for x, a in zip(xs, avals, strict=True)] for xs in (shares, before))
            gradients = [g.astype(x.dtype) + x for g, x in zip(own_shares, left, strict=True)]
            arrived, (rest, squares, unsent) = plan.send(self._s, step, gradients)
            new = [x.reshape(old.shape) for x, old in zip(rest, before, strict=True)]
            if self._context.guarded:
                new = [jnp.where(stopped, old, x) for old, x in zip(before, new, strict=True)]
            return [*jax.tree.leaves(arrived), *new, *_in_order([squares, unsent])]

        def function(values: Arrays) -> Arrays:
            share = values[WEIGHT] / members
            shares = [g / share.astype(g.dtype) for g in self._own_sums(values)]
            mapped = jax.shard_map(
                of_member,
                mesh=pipeline.specs.submesh.abstract(members),
                in_specs=(P(DATA), P(DATA), P(), P()),
                out_specs=[*(P() for _ in self._messages), *(P(DATA) for _ in avals), P(), P()],
                check_vma=False,
            )
            before = [values[name] for name in self.residuals]
            results = mapped(shares, before, values[STEP], values.get(STOPPED, False))
            return dict(zip([*self._messages, *self.residuals, HAD, UNSENT], results, strict=True))

        return self._work("exchange", function)

    def averages(self) -> Work:
        """Return the averages of the gradients, of the messages of their exchange.

        They are made by another program than the messages, so that they take the memory of the gradients.
        """
        plan = self._context.exchange
        assert plan is not None
        tree = jax.tree.structure(plan.messages(self._s))

        def function(values: Arrays) -> Arrays:
            messages = jax.tree.unflatten(tree, [values[name] for name in self._messages])
            averages = plan.averages(self._s, values[STEP], messages)
            return {Name(Role.EXCHANGED, t, 1): x for t, x in zip(self._held, averages, strict=True)}

        return self._work("averages", function)

    def look_at_norm(self) -> Work:
        """Return whether any gradient was not finite: the sum of their squares is not, either."""
        what = "look for a norm that is not finite"
        return self._work(what, lambda x: {NONFINITE: (~jnp.isfinite(x[SQUARES])).astype(jnp.int32)})

    def look(self) -> Work:
        """Return the search of the gradients for what is not finite."""

        def function(values: Arrays) -> Arrays:
            if self._context.exchange is None:
                gradients = self._gradients(values).values()
            else:
                gradients = [g / values[WEIGHT].astype(g.dtype) for g in self._own_sums(values)]
            here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0))
            return {NONFINITE: (here > 0).astype(jnp.int32)}

        return self._work("look for what is not finite", function)

    def share(self, number: int) -> Work:
        """Return the work for what the stage tells the others before a round of the optimizer."""
        told = [t for t in self._by_stage.exchanged[number] if self._by_stage.stage_of[t] == self._s]

        def function(values: Arrays) -> Arrays:
            env = self._environment(number, values, self._gradients(values))
            self._compute(told, env)
            return {Name(Role.EXCHANGED, t): env[t] for t in told}

        return self._work(f"optimizer, round {number}", function)

    def update(self) -> Work:
        """Return the last round of the optimizer; if the stage counts, with what every device has."""

        def function(values: Arrays) -> Arrays:
            results, squares = self._new_values(values, values.get(STOPPED), SKIPPED in values)
            return results | self._ends(values) | {SQUARES: squares}

        return self._work("update", function)

    def early_update(self, group: int) -> Work:
        """Return the update by the mean gradient of a group of micro-batches; adds up its squared norm.

        A stage of an asynchronous schedule renews its weights as soon as it has that gradient. Schedules say which
        version of the weights a micro-batch uses (``jaxpipe.schedules.asynchronous``); the list holds a reference to
        each version until the last backward pass that reads it.
        """

        def function(values: Arrays) -> Arrays:
            weight = jnp.float32(group * self._context.replicas)
            results, squares = self._new_values(values | {WEIGHT: weight}, None, True)
            return results | {SQUARES: values[SQUARES] + squares}

        return self._work("early update", function)

    def end(self) -> Work:
        """Return the end of a step after early updates: state of all replicas, numbers of steps if the stage counts.

        Under a guard it also writes parameters and optimizer state, those from before the step if it is stopped.
        """

        def function(values: Arrays) -> Arrays:
            renewed = self.renewed.values() if self._context.guarded else ()
            results = {name: _chosen(values.get(STOPPED), values[older(name)], values[name]) for name in renewed}
            return results | self._ends(values)

        return self._work("end of the step", function)

    def mean_gradient(self) -> Work:
        """Return the work for the mean gradients."""

        def function(values: Arrays) -> Arrays:
            mean = self._mean(values)
            return {Name(Role.MEAN, t): g.astype(self._pipeline.aval(t).dtype) for t, g in mean.items()}

        return self._work("gradient", function)

    def _sum_names(self, t: TensorNumber) -> list[Name]:
        """The arrays that a parameter's gradient is made of."""
        context, pipeline, s = self._context, self._pipeline, self._s
        sums = pipeline.sums(s, [t]) if t in pipeline.trained(s) else ()
        return [*sums, *(context.returned(s, k, t) for k in context.lenders(s, t))]

    def _own_sums(self, values: Arrays) -> list[Array]:
        """Sums of each member, with what members of stages that borrow a parameter have returned."""
        return [self._own_sum(values, t) for t in self._held]

    def _own_sum(self, values: Arrays, t: TensorNumber) -> Array:
        pipeline, aval = self._pipeline, self._pipeline.of_members(self._s, self._pipeline.sum_aval(self._s, t))
        pack = pipeline.packs[self._s].get(t)
        total = values.get(Name(Role.GRADIENT, t)) if pack is None else pack.part(values[pack.name], t)
        total = jnp.zeros(aval.shape, aval.dtype) if total is None else total
        returned = self._returned(t, Role.GRADIENT)
        return (total + add_up(values, returned) if returned else total).reshape(aval.shape)

    def _returned(self, t: TensorNumber, role: Role) -> list[Name]:
        """The sums that other stages have returned, of their members or of all of these."""
        names = (self._context.returned(self._s, k, t) for k in self._context.lenders(self._s, t))
        return [name for name in names if name.role is role]

    def _mean(self, values: Arrays) -> dict[TensorNumber, Array]:
        """The gradients of the stage's parameters, by tensor number, in the types of their sums."""
        return {t: self._mean_of(values, t) for t in self._held}

    def _mean_of(self, values: Arrays, t: TensorNumber) -> Array:
        if t in self._pipeline.objective.overwritten:
            largest = self._own_sum(values, t)
            largest = largest if self._is_alone else jnp.max(largest, 0)
            return jnp.where(largest == -jnp.inf, 0, largest)  # where no micro-batch has a gradient
        total = self._over_members(self._own_sum(values, t))
        returned = [values[name] for name in self._returned(t, Role.MEAN)]
        total = functools.reduce(operator.add, returned, total)
        return total / values[WEIGHT].astype(total.dtype)

    def _over_members(self, value: Array) -> Array:
        """The sum over the members of a stage, of their values side by side."""
        return value if self._is_alone else jnp.sum(value, 0, dtype=value.dtype)

    def _gradients(self, values: Arrays) -> dict[TensorNumber, Array]:
        """The gradients of the stage's parameters, by tensor number, as the optimizer takes them."""
        if self._context.exchange is None:
            gradients = self._mean(values)
        else:
            gradients = {t: values[Name(Role.EXCHANGED, t, 1)] for t in self._held}
        return {t: g.astype(self._context.taken_dtype[t]) for t, g in gradients.items()}

    def _ends(self, values: Arrays) -> Arrays:
        """Return what a stage writes besides the optimizer: its state, the numbers of steps if it counts."""
        stopped, results, pipeline = values.get(STOPPED), {}, self._pipeline
        for t in self._state:
            name, aval = Name(Role.STATE, t), pipeline.aval(t)
            after = values[name]
            if not self._is_alone:
                each = after.reshape(pipeline.members[self._s], *aval.shape)
                mean = jnp.issubdtype(aval.dtype, jnp.inexact) and self._context.replicas > 1
                axis = pipeline.objective.axis_of_examples(t)
                if axis is not None:  # of each replica the rows of its own micro-batches
                    rows = [jnp.split(x, len(each), axis)[r] for r, x in enumerate(each)]
                    after = jnp.concatenate(rows, axis)
                else:
                    after = self._over_members(each) / len(each) if mean else each[0]
            results[name] = after if stopped is None else jnp.where(stopped, values[older(name)], after)
        if SKIPPED not in values:
            return results
        step, skipped = values[STEP], values[SKIPPED]
        if stopped is not None and self._context.skips:
            skipped = skipped + stopped.astype(jnp.int32)
            return results | {STEP: step + 1, SKIPPED: skipped}
        return results | {STEP: _chosen(stopped, step, step + 1), SKIPPED: skipped}

    def _new_values(self, values: Arrays, stopped: Array | None, counts: bool) -> tuple[Arrays, Array]:
        """Run the optimizer: parameters and state, shared if it counts, and the squared norm of the gradient."""
        by_stage = self._by_stage
        names = {t: name for t, name in self.renewed.items() if counts or name.role is not Role.SHARED}
        olds, news = (*by_stage.parameters, *by_stage.state), (*by_stage.new_parameters, *by_stage.new_state)
        new = dict(zip(olds, news, strict=True))
        gradients = self._gradients(values)
        written, squares = self._overwrite(values, gradients, stopped)
        env = self._environment(len(by_stage.exchanged), values, gradients)
        self._compute([new[t] for t in names if t not in written], env)
        results = {
            name: written[t] if t in written else _chosen(stopped, values[name], env[new[t]])
            for t, name in names.items()
        }
        counted = [t for t in gradients if t not in self._pipeline.objective.overwritten]
        return results, sum((squares[t] for t in counted), start=jnp.zeros((), self._pipeline.norm_dtype))

    def _overwrite(
        self, values: Arrays, gradients: dict[TensorNumber, Array], stopped: Array | None
    ) -> tuple[dict[TensorNumber, Array], dict[TensorNumber, Array]]:
        """Write parameters and state one after the other, each over the old one (``overwrite_state.renewals``).

        Returns new values by tensor number of the old one in the optimizer, and the squared norm of each gradient.
        """
        by_stage, context = self._by_stage, self._context
        taken = {t: context.tensor_of[t] for t in held_by(by_stage, self._s)[1]}
        # One by one, just before each is read, but where members make them together.
        lazy = context.exchange is None and self._is_alone
        env = self._environment(len(by_stage.exchanged), values, gradients)
        common = [t for op in by_stage.graph.operators for t in op.outputs if t not in by_stage.stage_of]
        self._compute(common, env)
        steps = renewals(by_stage, self._s, [t for t in env if t not in taken])
        waiting = set(taken) if lazy else set()
        before: list[Array] = []
        written: dict[TensorNumber, Array] = {}
        dtype = self._pipeline.norm_dtype
        squares = {} if lazy else {t: squared_norm([g], dtype) for t, g in gradients.items()}
        for step in steps:
            fresh = [t for t in step.reads if t in waiting]
            waiting.difference_update(fresh)
            sums = {name: values[name] for t in fresh for name in self._sum_names(taken[t])}
            others = {t: env[t] for t in (step.old, *step.reads) if t not in fresh and t not in waiting}
            # As lists: JAX sorts the keys of dictionaries, and names of sums by several replicas have no order.
            _, behind, others_behind = _compat.barrier((before, list(sums.values()), list(others.values())))
            sums = dict(zip(sums, behind, strict=True))
            env |= zip(others, others_behind, strict=True)
            means = {t: self._mean_of(values | sums, taken[t]) for t in fresh}
            env |= {t: g.astype(context.taken_dtype[taken[t]]) for t, g in means.items()}
            squares |= {taken[t]: squared_norm([env[t]], dtype) for t in fresh}
            run(step.operators, env)
            env[step.new] = written[step.old] = _chosen(stopped, env[step.old], env[step.new])
            before = [env[step.new], *(squares[taken[t]] for t in fresh)]
        return written, {t: squares[t] if t in squares else squared_norm([g], dtype) for t, g in gradients.items()}

    def _environment(
        self, rounds: int, values: Arrays, gradients: dict[TensorNumber, Array]
    ) -> dict[TensorNumber, Array]:
        """Values by tensor number in the optimizer that the stage begins a round with."""
        taken = held_by(self._by_stage, self._s)[1]
        env: dict[TensorNumber, Array] = dict(self._by_stage.graph.constants)
        env |= {t: values[name] for t, name in self.renewed.items() if name.role is Role.PARAMETER}
        env |= {t: gradients[self._context.tensor_of[t]] for t in taken}
        env |= {t: values[name] for t, name in self.renewed.items() if name.role is not Role.PARAMETER}
        return env | {t: values[Name(Role.EXCHANGED, t)] for ts in self._by_stage.exchanged[:rounds] for t in ts}

    def _compute(self, wanted: Sequence[TensorNumber], env: dict[TensorNumber, Array]) -> None:
        """Run what some tensors follow from: operators of the stage, and those that every stage runs."""
        stage_of, operators = self._by_stage.stage_of, self._by_stage.graph.operators
        allowed = [op for op in operators if {stage_of.get(t) for t in op.outputs} & {self._s, None}]
        run(needed(allowed, wanted, operator_ends, known=env)[0], env)


def _chosen(stopped: Array | None, before: Array, after: Array) -> Array:
    """Return the value to write: the old one where the step is stopped."""
    return after if stopped is None else jnp.where(stopped, before, after)


def _in_order(values: Sequence[Array]) -> list[Array]:
    rows = [lax.all_gather(x, DATA) for x in values]
    return [functools.reduce(operator.add, [row[r] for r in range(row.shape[0])]) for row in rows]
