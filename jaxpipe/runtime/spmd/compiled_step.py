"""The compiled functions of a pipeline: training step, gradients, evaluation, prediction.

Parameters that stages on several devices use (tied embeddings) live on one, the others borrow them:

    before the ticks:  the owner's value ──all-reduce of its bits──▶ every device
    after the ticks:   the borrowers' gradients ──all-reduce──▶ added to the owner's

Once a step, not once a micro-batch. JAX adds the cotangents of all uses for each micro-batch and then those of the
micro-batches; here each use is added up over the micro-batches first, which rounds otherwise. Every device reads and
writes the owner's place in its own buffers, which hold something else there, and leaves what is not the owner's.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from jaxpipe.array_types import Array, PyTree
from jaxpipe.gradients.block_exchange import Averaged, exchange, sent_share
from jaxpipe.gradients.blocks import Blocks
from jaxpipe.gradients.squared_norm import norm_dtype, squared_norm
from jaxpipe.models.combine_metrics import combine
from jaxpipe.runtime.executable_plan import Batching, Update
from jaxpipe.runtime.optimizer_by_stage import held_by
from jaxpipe.runtime.replica_exchange import StageExchange
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.spmd.tick_loop import Carry, run_ticks
from jaxpipe.runtime.spmd.update_in_place import run_update
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.runtime.uint32_words import from_words, pack_words, to_words, unpack_words, word_count
from jaxpipe.sharding.mesh_axes import DATA, STAGE


T = TypeVar("T")

#: Buffers with averages and with new residuals; sums of squares of what a device had, and of what is left.
Exchanged: TypeAlias = tuple[list[Array], list[Array], Array, Array]


class Totals(NamedTuple):
    """Results of all devices, and what this one has summed up."""

    loss: Array
    metrics: list[Array]
    weight: Array
    overflows: Array  # sparse tensors that did not fit and were computed again
    state: Sequence[Array]  # folded over the micro-batches
    sums: Sequence[Array]  # of gradients; empty without a backward pass


def training_step(
    mesh: Mesh, program: LockstepProgram, batching: Batching, state: TrainState, *, update: Update
) -> Wrapped:
    """``(state, batch leaves) -> (state, loss, counters, metrics)``, compiled when first called.

    Counters are the gradient's norm and the overflows; and, of a sparse exchange, the share of the gradients' squared
    norm that was sent, and the norm of the residuals.
    """
    by_stage, sparse = update.by_stage, update.exchange
    taken = itertools.chain(*(held_by(by_stage, s)[1] for s in program.device_numbers))
    avals = itertools.chain(*program.gradients.avals)
    takes_sums = any(by_stage.graph.tensors[t].dtype != a.dtype for t, a in zip(taken, avals, strict=True))
    layout = program.sums if takes_sums and sparse is None else program.gradients

    def device_step(
        state: TrainState, batch: Sequence[Array]
    ) -> tuple[TrainState, Array, dict[str, Array], list[Array]]:
        totals = _train(program, batching, state, batch)
        residual, counters = (), {"overflows": totals.overflows}
        if sparse is None:
            gradients = sums = _mean(program, totals, layout)
        else:
            share = totals.weight / lax.axis_size(DATA)
            sums = [x / share.astype(x.dtype) for x in totals.sums]
            gradients, residual, squares, left = _exchanged(program, sparse, state.step, sums, state.residual)
            squares, left = _in_order([squares, left], (STAGE, DATA))
            counters |= {"sent_share": sent_share(squares, left), "residual_norm": jnp.sqrt(left)}
        stopped = None
        if update.on_nonfinite is not None:
            counters["nonfinite_stages"] = _nonfinite(program, sums)
            stopped = counters["stopped"] = jnp.any(counters["nonfinite_stages"]) | ~jnp.isfinite(totals.loss)
        parameters, optimizer, shared = run_update(
            by_stage,
            (program.parameters, layout, program.optimizer(update)),
            (state.parameters, gradients, state.optimizer),
            state.shared,
            unless=stopped,
        )
        new = replace(
            state,
            parameters=tuple(parameters),
            variables=tuple(_replicas_agree(program, totals.state)),
            optimizer=tuple(optimizer),
            residual=tuple(residual),
            shared=tuple(shared),
            step=state.step + 1,
        )
        squares = squared_norm(gradients, norm_dtype(g.dtype for g in gradients))
        counters["gradient_norm"] = jnp.sqrt(_in_order([squares], STAGE)[0])
        if by_stage.learning_rate is not None:
            counters["learning_rate"] = new.shared[by_stage.state_stage[: by_stage.learning_rate].count(None)]
        if stopped is not None:
            new = _guarded(state, new, stopped, update.on_nonfinite == "skip")
            counters |= {"skipped": new.skipped} if update.on_nonfinite == "skip" else {}
        return new, totals.loss, counters, totals.metrics

    specs = state_specs(state)
    return _compile(mesh, device_step, (specs, batching.specs()), (specs, P(), P(), P()), donate=True)


def _nonfinite(program: LockstepProgram, gradients: Sequence[Array]) -> Array:
    """Return, by stage, whether a gradient is not finite."""
    here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0)) > 0
    row = jnp.zeros((program.num_devices,), jnp.int32).at[lax.axis_index(STAGE)].set(here.astype(jnp.int32))
    return lax.psum(row, (STAGE, DATA) if program.replicated else STAGE) > 0


def _guarded(old: TrainState, new: TrainState, stopped: Array, skip: bool) -> TrainState:
    """Return the new state, or the old one's bits if something is not finite.

    A step that is skipped is a step: the next one draws other random numbers. One that raises has not been made.
    ``run_update`` has left what the optimizer writes as it was.
    """
    either = functools.partial(jax.tree.map, lambda before, after: jnp.where(stopped, before, after))
    return replace(
        new,
        variables=either(old.variables, new.variables),
        residual=either(old.residual, new.residual),
        step=new.step if skip else either(old.step, new.step),
        skipped=old.skipped + (stopped.astype(jnp.int32) if skip else 0),
    )


def gradient_step(mesh: Mesh, program: LockstepProgram, batching: Batching, state: TrainState) -> Wrapped:
    """``(state, batch leaves) -> (loss, metrics, gradient buffers)``; none of the latter if all work is forward."""

    def device_step(state: TrainState, batch: Sequence[Array]) -> tuple[Array, list[Array], list[Array]]:
        totals = _train(program, batching, state, batch)
        return totals.loss, totals.metrics, _mean(program, totals, program.gradients) if totals.sums else []

    return _compile(mesh, device_step, (state_specs(state), batching.specs()), (P(), P(), P(STAGE)))


def prediction_step(mesh: Mesh, program: LockstepProgram, batching: Batching, state: TrainState) -> Wrapped:
    """``(state, batch leaves) -> prediction leaves``, rows in the order of the batch."""

    def device_step(state: TrainState, batch: Sequence[Array]) -> list[Array]:
        *leaves, _ = _run(program, batching, state, batch)[1]
        return [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in leaves]

    rows = P() if batching.replicas == 1 else P(DATA)
    return _compile(mesh, device_step, (state_specs(state), batching.specs()), rows)


def _exchanged(
    program: LockstepProgram, plan: StageExchange, step: Array, gradients: Sequence[Array], residuals: Sequence[Array]
) -> Exchanged:
    """Run an exchange, inside ``shard_map``, of this replica's share of the gradient times the number of replicas."""

    def by_stage(function: Callable[[int], T]) -> T:
        return lax.switch(lax.axis_index(STAGE), [functools.partial(function, s) for s in program.device_numbers])

    def read(s: int) -> list[Array]:
        pairs = zip(program.sums.read(s, gradients), program.residuals.read(s, residuals), strict=True)
        return [g.astype(r.dtype) + r for g, r in pairs]

    def write(s: int, averaged: Averaged) -> Exchanged:
        new = program.gradients.write(s, averaged.gradients), program.residuals.write(s, averaged.residuals)
        return *new, averaged.squares, averaged.unsent

    def phase(plans: Sequence[Sequence[Blocks]]) -> Exchanged:
        return exchange(plans, plan.settings.rule, DATA, by_stage, read, write)

    return lax.switch(plan.settings.phase(step), [functools.partial(phase, plans) for plans in plan.plans])


def state_specs(state: TrainState) -> TrainState:
    """Return the partition spec of each array of a state of shapes."""
    return jax.tree.map(lambda x: x.sharding.spec, state)


def _compile(
    mesh: Mesh, function: Callable[..., PyTree], inputs: PyTree, outputs: PyTree, donate: bool = False
) -> Wrapped:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())


def _run(
    program: LockstepProgram, batching: Batching, state: TrainState, batch: Sequence[Array]
) -> tuple[Carry, list[Array]]:
    """Run all micro-batches; returns also the results of each, and its overflows."""
    parameters, key = _borrow(program, state.parameters), jax.random.fold_in(state.key, state.step)
    last = run_ticks(program, parameters, state.variables, key, batching.rows(batch))
    # One stage has made what all others have as zeros.
    words = lax.psum(last.results, STAGE)
    return last, jax.vmap(functools.partial(unpack_words, avals=program.result_avals))(words)


def _train(program: LockstepProgram, batching: Batching, state: TrainState, batch: Sequence[Array]) -> Totals:
    """Run all micro-batches, and add up their results and those of the replicas."""
    last, rows = _run(program, batching, state, batch)
    zeros = [jnp.zeros(x.shape[1:], x.dtype) for x in rows]
    sums = lax.scan(lambda totals, row: (list(map(operator.add, totals, row)), None), zeros, rows)[0]
    loss, weight, *metrics, overflows = _in_order(sums, DATA) if program.replicated else sums
    return Totals(
        loss / weight.astype(loss.dtype),
        combine(metrics, weight, program.objective.summed),
        weight,
        overflows,
        last.state,
        _give_back(program, last.gradients) if last.gradients else [],
    )


def _borrow(program: LockstepProgram, buffers: Sequence[Array]) -> list[Array]:
    """This device's buffers, and behind them the value of every shared parameter; inside ``shard_map``."""
    places = [(d, n, t) for d in program.device_numbers for n, t in enumerate(program.held(d)[0])]
    owned = {t: (d, program.parameters.get(d, n, buffers)) for d, n, t in places if t in program.shared}
    values = [owned[t] for t in program.shared]
    words = [jnp.where(lax.axis_index(STAGE) == d, to_words(x), jnp.uint32(0)) for d, x in values]
    return [*buffers, *(from_words(w, x) for w, (_, x) in zip(lax.psum(words, STAGE), values, strict=True))]


def _give_back(program: LockstepProgram, sums: Sequence[Array]) -> list[Array]:
    """This device's gradient buffers, with what others have computed for its parameters."""
    count = len(program.sums.buffers)
    buffers, borrowed = list(sums[:count]), lax.psum(list(sums[count:]), STAGE)
    gradient_of = dict(zip(program.shared_trained, borrowed, strict=False))
    for d in program.device_numbers:
        for n, t in enumerate(program.trained(d)):
            if t in gradient_of:
                own = program.sums.get(d, n, buffers)
                whole = jnp.where(lax.axis_index(STAGE) == d, own + gradient_of[t].reshape(own.shape), own)
                buffers = program.sums.put(d, n, buffers, whole)
    return buffers


def _mean(program: LockstepProgram, totals: Totals, layout: Layout) -> list[Array]:
    """The mean gradient over the micro-batches of all replicas, in the types of a layout."""
    sums = lax.psum(totals.sums, DATA) if program.replicated else totals.sums
    means = [x / totals.weight.astype(x.dtype) for x in sums]
    return [x.astype(buffer.dtype) for x, buffer in zip(means, layout.buffers, strict=True)]


def _in_order(values: Sequence[Array], axes: str | tuple[str, ...]) -> list[Array]:
    """The sums of small values over devices, with the same bits whatever connects them: ``psum`` has no fixed order.

    They cross the network in one message, of which the time is latency.
    """
    rows = lax.all_gather(pack_words(values, sum(map(word_count, values))), axes)
    parts = [unpack_words(row, values) for row in rows]
    return [functools.reduce(operator.add, column) for column in zip(*parts, strict=True)]


def _replicas_agree(program: LockstepProgram, state: Sequence[Array]) -> list[Array]:
    """State averaged over replicas; integers (counts) are the same on all."""
    if not program.replicated:
        return list(state)
    return [lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in state]
