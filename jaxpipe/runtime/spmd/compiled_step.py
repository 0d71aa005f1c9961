"""The compiled functions of a pipeline: training step, gradients, evaluation, prediction."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Wrapped

from jaxpipe.array_types import Array, PyTree
from jaxpipe.gradients.block_exchange import sent_share
from jaxpipe.gradients.squared_norm import norm_dtype, squared_norm
from jaxpipe.models.combine_metrics import combine
from jaxpipe.runtime.executable_plan import Batching, Update
from jaxpipe.runtime.gradient_precision import round_to
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate, held_by
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.spmd.shared_parameters import borrow, give_back
from jaxpipe.runtime.spmd.sparse_exchange import run_exchange
from jaxpipe.runtime.spmd.tick_loop import Totals, run_ticks
from jaxpipe.runtime.spmd.update_in_place import run_update
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.runtime.uint32_words import from_words, pack_words, to_words, unpack_words, word_count
from jaxpipe.sharding.mesh_axes import DATA, STAGE


def state_specs(state: TrainState) -> TrainState:
    """Return the partition spec of each array of a state of shapes."""
    return jax.tree.map(lambda x: x.sharding.spec, state)


def training_step(
    mesh: Mesh, program: LockstepProgram, update: Update, batching: Batching, state: TrainState
) -> Wrapped:
    """``(state, batch leaves) -> (state, loss, counters, metrics)``, compiled when first called.

    Counters are the gradient's norm and the overflows; and, of a sparse exchange, the share of the gradients' squared
    norm that was sent, and the norm of the residuals.
    """
    specs, by_stage = state_specs(state), update.by_stage
    rate = None if by_stage.learning_rate is None else by_stage.state_stage[: by_stage.learning_rate].count(None)
    rounded = update.exchange is not None or not takes_sums(program, by_stage)

    def device_step(
        state: TrainState, batch: Sequence[Array]
    ) -> tuple[TrainState, Array, dict[str, Array], list[Array]]:
        parameters, variables, optimizer = map(_own, (state.parameters, state.variables, state.optimizer))
        totals = _train(program, batching, parameters, variables, state, batch)
        residual, counters = (), {}
        if update.exchange is None:
            loss, gradients, metrics = _mean(program, totals, rounded=rounded)
            sums = gradients
        else:
            loss, sums, metrics = _mean(program, totals, summed=False)
            left = [x.reshape(x.shape[2:]) for x in state.residual]
            gradients, residual, squares, left = run_exchange(program, update.exchange, state.step, sums, left)
            squares, left = _in_order([squares, left], (STAGE, DATA))
            counters = {"sent_share": sent_share(squares, left), "residual_norm": jnp.sqrt(left)}

        nonfinite = None if update.on_nonfinite is None else _nonfinite(program, loss, sums)
        parameters, optimizer, shared = run_update(
            by_stage,
            (program.parameters, program.gradients if rounded else program.sums, program.slots(update)),
            (parameters, optimizer),
            gradients,
            state.shared,
            unless=None if nonfinite is None else nonfinite[1],
        )
        new = TrainState(
            _rows(parameters),
            _rows(_replicas_agree(program, totals.state)),
            _rows(optimizer),
            tuple(x.reshape(1, 1, *x.shape) for x in residual),
            tuple(shared),
            state.key,
            state.step + 1,
            state.skipped,
            state.plan,
        )
        counters |= {"gradient_norm": _norm(gradients), "overflows": totals.overflows}
        if rate is not None:
            counters["learning_rate"] = new.shared[rate]
        if nonfinite is not None:
            stages, stopped = nonfinite
            new = _guarded(state, new, stopped, update.on_nonfinite == "skip")
            counters |= {"nonfinite_stages": stages, "stopped": stopped}
            counters |= {"skipped": new.skipped} if update.on_nonfinite == "skip" else {}
        return new, loss, counters, metrics

    return _compile(mesh, device_step, (specs, batching.specs()), (specs, P(), P(), P()), donate=True)


def _nonfinite(program: LockstepProgram, loss: Array, gradients: Sequence[Array]) -> tuple[Array, Array]:
    """Return, by stage, whether a gradient is not finite, and whether any is, or the loss."""
    here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0)) > 0
    row = jnp.zeros((program.num_devices,), jnp.int32).at[lax.axis_index(STAGE)].set(here.astype(jnp.int32))
    stages = lax.psum(row, (STAGE, DATA) if program.replicated else (STAGE,)) > 0
    return stages, jnp.any(stages) | ~jnp.isfinite(loss)


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


def takes_sums(program: LockstepProgram, by_stage: PartitionedUpdate) -> bool:
    """Return whether an optimizer takes some gradients in the types of their sums, not of their parameters."""
    held = [held_by(by_stage, s)[1] for s in range(len(program.gradients.avals))]
    pairs = zip(itertools.chain(*held), itertools.chain(*program.gradients.avals), strict=True)
    return any(by_stage.graph.tensors[t].dtype != aval.dtype for t, aval in pairs)


def gradient_step(mesh: Mesh, program: LockstepProgram, batching: Batching, state: TrainState) -> Wrapped:
    """``(state, batch leaves) -> (loss, metrics, gradient buffers)``; none of the latter if all work is forward."""

    def device_step(state: TrainState, batch: Sequence[Array]) -> tuple[Array, list[Array], tuple[Array, ...]]:
        parameters, variables = _own(state.parameters), _own(state.variables)
        totals = _train(program, batching, parameters, variables, state, batch)
        loss, gradients, metrics = _mean(program, totals)
        return loss, metrics, _rows(gradients)

    return _compile(mesh, device_step, (state_specs(state), batching.specs()), (P(), P(), P(STAGE)))


def prediction_step(mesh: Mesh, program: LockstepProgram, batching: Batching, state: TrainState) -> Wrapped:
    """``(state, batch leaves) -> prediction leaves``, rows in the order of the batch."""

    def device_step(state: TrainState, batch: Sequence[Array]) -> list[Array]:
        parameters, variables = _own(state.parameters), _own(state.variables)
        totals = _train(program, batching, parameters, variables, state, batch, collect=True)
        return [_from_maker(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])) for x in totals.results]

    rows = P() if batching.replicas == 1 else P(DATA)
    return _compile(mesh, device_step, (state_specs(state), batching.specs()), rows)


def _compile(
    mesh: Mesh, function: Callable[..., PyTree], inputs: PyTree, outputs: PyTree, donate: bool = False
) -> Wrapped:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), inputs, is_leaf=lambda x: isinstance(x, P))
    return jax.jit(mapped, in_shardings=shardings, donate_argnums=(0,) if donate else ())


def _own(buffers: Sequence[Array]) -> list[Array]:
    """This device's row of each buffer."""
    return [x.reshape(x.shape[1:]) for x in buffers]


def _rows(buffers: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(x.reshape(1, *x.shape) for x in buffers)


def _train(
    program: LockstepProgram,
    batching: Batching,
    parameters: Sequence[Array],
    variables: Sequence[Array],
    state: TrainState,
    batch: Sequence[Array],
    collect: bool = False,
) -> Totals:
    key = jax.random.fold_in(state.key, state.step)
    held = borrow(program, parameters)
    totals = run_ticks(program, held, variables, key, batching.rows(batch), collect)
    if not collect:
        # A stage that does not make a result has zeros for it.
        axes = (STAGE, DATA) if program.replicated else (STAGE,)
        *results, overflows = _in_order([*totals.results, totals.overflows], axes)
        totals = replace(totals, results=results, overflows=overflows)
    return replace(totals, gradients=give_back(program, totals.gradients) if totals.gradients else [])


def _mean(
    program: LockstepProgram, totals: Totals, summed: bool = True, rounded: bool = True
) -> tuple[Array, list[Array], list[Array]]:
    """Loss, gradients and metrics, from the results of all devices and the sums of gradients of this one.

    With ``summed=False``, gradients are this replica's own, of which the mean over the replicas is the gradient. Only
    with ``summed`` and ``rounded`` they are rounded to the types of their parameters.
    """
    loss, weight, *metrics = totals.results
    gradients = totals.gradients
    if program.replicated and summed:
        gradients = lax.psum(gradients, DATA)
    share = weight if summed else weight / lax.axis_size(DATA)
    gradients = [g / share.astype(g.dtype) for g in gradients]
    if summed and rounded and gradients:
        gradients = round_to(gradients, program.gradients.buffers)
    return loss / weight.astype(loss.dtype), gradients, combine(metrics, weight, program.objective.summed)


def _norm(gradients: Sequence[Array]) -> Array:
    squares = squared_norm(gradients, norm_dtype(g.dtype for g in gradients))
    return jnp.sqrt(_in_order([squares], (STAGE,))[0])


def _in_order(values: Sequence[Array], axes: tuple[str, ...]) -> list[Array]:
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


def _from_maker(x: Array) -> Array:
    """Return what one stage has made and all others have as zeros, on every stage, bit for bit."""
    words = lax.psum(to_words(x), STAGE)
    return from_words(words, jax.ShapeDtypeStruct(x.shape, x.dtype)) if math.prod(x.shape) else x
