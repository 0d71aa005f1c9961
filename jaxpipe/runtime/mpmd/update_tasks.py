"""The end of a step: gradients become an update of each stage's own parameters.

    sums of gradients ──replicas──▶ mean ──▶ small values that other stages need (norms), round by round
    mean, parameters, optimizer state, values of others ──▶ new parameters, new optimizer state

Every stage runs its own part of the optimizer (``jaxpipe.runtime.optimizer_by_stage``). Where stages have replicas,
this work is one program over the devices of a stage, in which XLA adds the replicas' arrays up. Of arrays that each
replica has for itself it gets those of all, side by side along their first axis. All work of a stage gets the same
arrays, by group; tracing shows which of them it reads.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Mapping

import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.gradients.squared_norm import squared_norm
from jaxpipe.graph.graph import run
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Arrays, Path
from jaxpipe.runtime.optimizer_by_stage import compute, held_by, renewals
from jaxpipe.schedules.table import StageNumber


def folded_state(layout: StageLayout, s: StageNumber, arrays: Arrays) -> Arrays:
    """Return the state of a stage after all micro-batches, of what each of them adds, in their order."""
    fold = layout.stage(s).fold
    assert fold is not None
    statistics = [jnp.stack([row[t] for row in arrays["statistics"]]) for t in fold.statistics]

    def step(now: list[Array], row: list[Array]) -> tuple[list[Array], None]:
        return fold.graph.evaluate([*now, *row]), None

    folded = lax.scan(step, [arrays["state"][t] for t in fold.state], statistics, layout.num_microbatches)[0]
    return {"state": dict(zip(fold.state, folded, strict=True))}


class StageUpdate:
    """The work of a stage at the end of a step, each a function of the arrays that the stage has then."""

    def __init__(self, layout: StageLayout, s: StageNumber):
        """Note what the stage has."""
        self._layout, self._s, self._by_stage = layout, s, layout.update.by_stage
        self._held, self._members = layout.held(s), layout.members(s)
        self._is_alone = self._members == 1
        # Members that share micro-batches have the same state already.
        alike = self._is_alone or layout.stage(s).fold is not None
        self.state = layout.renewed_state(s) if layout.is_guarded or not alike else []
        parameters, gradients, _ = held_by(self._by_stage, s)
        pairs = zip(parameters, layout.stage(s).parameters, strict=True)
        #: By tensor number in the optimizer, the parameters and the optimizer state that the stage writes.
        self.renewed: dict[TensorNumber, Path] = {t: ("parameters", parameter) for t, parameter in pairs}
        self.renewed |= layout.state_paths(s)
        #: By tensor number in the optimizer of each gradient that it takes, the parameter.
        self._taken = dict(zip(gradients, self._held, strict=True))

    def returned_sum(self, arrays: Arrays) -> Arrays:
        """Return the sum over the members of the stage of gradients of parameters that it borrows."""
        return {"mean": {t: self._over_members(x) for t, x in arrays["sums"].items()}}

    def look(self, arrays: Arrays) -> Arrays:
        """Search the gradients for what is not finite."""
        if self._layout.update.exchange is None:
            gradients = self._gradients(arrays, self._taken).values()
        else:
            gradients = [g / arrays["weight"].astype(g.dtype) for g in self.own_sums(arrays)]
        here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0))
        return {"nonfinite": (here > 0).astype(jnp.int32)}

    def share(self, number: int, arrays: Arrays) -> Arrays:
        """Return what the stage tells the others before a round of the optimizer."""
        told = [t for t in self._by_stage.exchanged[number] if self._by_stage.stage_of[t] == self._s]
        env = self._environment(number, arrays, self._gradients(arrays, self._taken))
        compute(self._by_stage, self._s, told, env)
        return {"exchanged": {t: env[t] for t in told}}

    def update(self, arrays: Arrays) -> Arrays:
        """Run the last round of the optimizer; if the stage counts, with what every device has."""
        results, squares = self.new_values(arrays, arrays.get("stopped"), "skipped" in arrays)
        return results | self.state_after(arrays) | {"squares": squares}

    def mean_gradient(self, arrays: Arrays) -> Arrays:
        """Return the mean gradients, in the types of the parameters."""
        return {"mean": {t: self._mean_of(arrays, t).astype(self._layout.aval(t).dtype) for t in self._held}}

    def own_sums(self, arrays: Arrays) -> list[Array]:
        """Sums of each member, with what members of stages that borrow a parameter have returned."""
        return [self._own_sum(arrays, t) for t in self._held]

    def _own_sum(self, arrays: Arrays, t: TensorNumber) -> Array:
        aval, entry = self._layout.sum_aval(self._s, t), self._layout.sums[self._s].get(t)
        # A leading axis over the members stands in the place of the axis of length 1 that each has.
        shape = aval.shape if self._is_alone else (self._members, *aval.shape[1:])
        if entry is not None and entry.tensors[0] in arrays["sums"]:
            total = entry.part(arrays["sums"][entry.tensors[0]], t)
        else:
            total = jnp.zeros(shape, aval.dtype)
        returned = self._returned(arrays, t, sums=False)
        return (total + functools.reduce(operator.add, returned) if returned else total).reshape(shape)

    def _returned(self, arrays: Arrays, t: TensorNumber, sums: bool) -> list[Array]:
        """Gradients of a parameter that other stages have returned: those of each member, or ``sums`` of all.

        Members of a stage with as many members return theirs to one each.
        """
        layout = self._layout
        lenders = [k for k in layout.lenders(t) if (layout.members(k) != self._members) == sums]
        return [arrays["returned"][k][t] for k in lenders]

    def _mean_of(self, arrays: Arrays, t: TensorNumber) -> Array:
        """The gradient of a parameter, in the type of its sum."""
        if t in self._layout.objective.overwritten:
            largest = self._own_sum(arrays, t)
            largest = largest if self._is_alone else jnp.max(largest, 0)
            return jnp.where(largest == -jnp.inf, 0, largest)  # where no micro-batch has a gradient
        total = self._over_members(self._own_sum(arrays, t))
        total = functools.reduce(operator.add, self._returned(arrays, t, sums=True), total)
        return total / arrays["weight"].astype(total.dtype)

    def _over_members(self, value: Array) -> Array:
        """The sum over the members of a stage, of their values side by side."""
        return value if self._is_alone else jnp.sum(value, 0, dtype=value.dtype)

    def _gradients(self, arrays: Arrays, tensors: Iterable[TensorNumber]) -> dict[TensorNumber, Array]:
        """Gradients of the stage's parameters as the optimizer takes them, by tensor number in it."""
        taken = {t: self._taken[t] for t in tensors}
        averages = arrays.get("averages") or {t: self._mean_of(arrays, t) for t in taken.values()}
        dtypes = self._by_stage.graph.tensors
        return {t: averages[parameter].astype(dtypes[t].dtype) for t, parameter in taken.items()}

    def state_after(self, arrays: Arrays) -> Arrays:
        """Return the new values of a stage besides the optimizer's: its state, the numbers of steps if it counts."""
        stopped, state, layout = arrays.get("stopped"), {}, self._layout
        for t in self.state:
            aval, after = layout.aval(t), arrays["state"][t]
            if not self._is_alone:
                each = after.reshape(self._members, *aval.shape)
                mean = jnp.issubdtype(aval.dtype, jnp.inexact) and layout.devices.replicas > 1
                axis = dict(zip(layout.objective.state, layout.objective.model.examples, strict=True))[t]
                if axis is not None:  # of each replica the rows of its own micro-batches
                    rows = [jnp.split(x, len(each), axis)[r] for r, x in enumerate(each)]
                    after = jnp.concatenate(rows, axis)
                else:
                    after = self._over_members(each) / len(each) if mean else each[0]
            state[t] = after if stopped is None else jnp.where(stopped, arrays["old"]["state"][t], after)
        results: Arrays = {"state": state} if state else {}
        if "skipped" not in arrays:
            return results
        step, skipped = arrays["step"], arrays["skipped"]
        if stopped is not None and layout.update.on_nonfinite == "skip":
            return results | {"step": step + 1, "skipped": skipped + stopped.astype(jnp.int32)}
        return results | {"step": chosen(stopped, step, step + 1), "skipped": skipped}

    def new_values(self, arrays: Arrays, stopped: Array | None, counts: bool) -> tuple[Arrays, Array]:
        """Run the optimizer: parameters and state, shared if it counts, and the squared norm of the gradient.

        New values are written one after the other, each over the old one (``optimizer_by_stage.renewals``).
        """
        by_stage, taken, dtype = self._by_stage, self._taken, self._layout.norm_dtype
        gradients = self._gradients(arrays, taken)
        env = self._environment(len(by_stage.exchanged), arrays, gradients)
        common = [t for op in by_stage.graph.operators for t in op.outputs if t not in by_stage.stage_of]
        compute(by_stage, self._s, common, env)
        steps = renewals(by_stage, self._s, [t for t in env if t not in taken])
        written = {step.old for step in steps}
        results = {
            path: chosen(stopped, env[t], env[by_stage.new_of[t]])
            for t, path in self.renewed.items()
            if t not in written and (counts or path[0] != "shared")
        }
        # Gradients that are made one by one, just before each is read; members make theirs together.
        waiting = set(taken) if "averages" not in arrays and self._is_alone else set()
        squares = {t: squared_norm([g], dtype) for t, g in gradients.items()}
        before: list[Array] = []
        for step in steps:
            fresh = [t for t in step.reads if t in waiting]
            waiting.difference_update(fresh)
            sums = self._sums_of(arrays, [taken[t] for t in fresh])
            read = {t: env[t] for t in (step.old, *step.reads) if t not in fresh and t not in waiting}
            _, sums, read = _compat.barrier((before, sums, read))
            env |= read | self._gradients(arrays | sums, fresh)
            squares |= {t: squared_norm([env[t]], dtype) for t in fresh}
            run(step.operators, env)
            env[step.new] = results[self.renewed[step.old]] = chosen(stopped, env[step.old], env[step.new])
            before = [env[step.new], *(squares[t] for t in fresh)]
        counted = [t for t in gradients if taken[t] not in self._layout.objective.overwritten]
        return in_groups(results), sum((squares[t] for t in counted), start=jnp.zeros((), dtype))

    def _sums_of(self, arrays: Arrays, tensors: Collection[TensorNumber]) -> Arrays:
        """The arrays that the gradients of some parameters are made of."""
        entries = self._layout.sums[self._s]
        wanted = {entries[t].tensors[0] for t in tensors if t in entries}
        returned = {k: {t: x for t, x in row.items() if t in tensors} for k, row in arrays["returned"].items()}
        return {"sums": {t: x for t, x in arrays["sums"].items() if t in wanted}, "returned": returned}

    def _environment(
        self, rounds: int, arrays: Arrays, gradients: Mapping[TensorNumber, Array]
    ) -> dict[TensorNumber, Array]:
        """Values by tensor number in the optimizer that the stage begins a round with."""
        env: dict[TensorNumber, Array] = dict(self._by_stage.graph.constants)
        env |= {t: value_at(arrays, path) for t, path in self.renewed.items()}
        env |= gradients
        return env | {t: arrays["exchanged"][t] for ts in self._by_stage.exchanged[:rounds] for t in ts}


def value_at(arrays: Arrays, path: Path) -> Array:
    """Return the array of a group and a key."""
    group, key = path
    return arrays[group][key]


def in_groups(values: Mapping[Path, Array]) -> Arrays:
    """Return arrays by group, of those by group and key."""
    groups: Arrays = {}
    for (group, key), x in values.items():
        groups.setdefault(group, {})[key] = x
    return groups


def chosen(stopped: Array | None, before: Array, after: Array) -> Array:
    """Return the value to write: the old one where the step is stopped."""
    return after if stopped is None else jnp.where(stopped, before, after)
