"""The functions of a pipeline that are compiled, as they run on every device: training step, gradients, prediction.

In an outer loop a step ends with the exchange of a fragment, from which replicas go on.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.gradients.block_exchange import Averaged, exchange, sent_share
from jaxpipe.gradients.squared_norm import norm_dtype, squared_norm
from jaxpipe.models.combine_metrics import combine
from jaxpipe.runtime.replica_exchange import StageExchange, StageOuterLoop, sums_in_order
from jaxpipe.runtime.spmd.buffer_layout import BufferLayout
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.spmd.tick_loop import run_ticks
from jaxpipe.runtime.spmd.update_in_place import run_update
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA, STAGE


def training_step(
    program: LockstepProgram, state: TrainState, batch: Sequence[Array]
) -> tuple[TrainState, Array, dict[str, Array], list[Array]]:
    """Return the new state, the loss, counters, and metrics.

    Counters are the gradient's norm and the overflows; and, of a sparse exchange, the share of the gradients' squared
    norm that was sent, and the norm of the residuals. In an outer loop all are those of the replicas of a site.
    """
    assert program.update is not None
    update, loop = program.update, program.update.outer
    loss, metrics, weight, overflows, variables, sums = _train(program, state, batch, apart=loop is not None)
    residual, counters = list(state.residual), {"overflows": overflows}
    if update.exchange is None:
        axes = program.replica_axes if loop is None else ()
        gradients = checked = _mean(program.taken, sums, weight, axes)
    else:
        checked = _mean(program.sums, sums, weight / lax.axis_size(DATA), ())
        gradients, residual, *squares = _exchanged(program, update.exchange, state.step, checked, state.residual)
        whole, left = sums_in_order(squares, (STAGE, DATA))
        counters |= {"sent_share": sent_share(whole, left), "residual_norm": jnp.sqrt(left)}
    stopped = None
    if update.on_nonfinite is not None:
        counters["nonfinite_stages"] = _nonfinite(program, checked)
        stopped = counters["stopped"] = jnp.any(counters["nonfinite_stages"]) | ~jnp.isfinite(loss)
    if loop is None and program.replicated:
        variables = means(variables)
    new = run_update(program, state, gradients, stopped)
    new = replace(new, variables=tuple(variables), residual=tuple(residual), step=state.step + 1)
    if stopped is not None:
        # A step that is skipped is a step: the next one draws other random numbers. One that raises has not been made.
        skips, fields = update.on_nonfinite == "skip", ("variables", "residual", "shared", "step", "skipped")
        before = replace(state, step=new.step, skipped=state.skipped + 1) if skips else state
        either = partial(jax.tree.map, partial(jnp.where, stopped))
        new = replace(new, **{field: either(getattr(before, field), getattr(new, field)) for field in fields})
        counters |= {"skipped": new.skipped} if skips else {}
    (squares,) = sums_in_order([squared_norm(gradients, norm_dtype(g.dtype for g in gradients))], STAGE)
    if loop is not None:
        new = advance(program, loop, new)
        squares = lax.pmean(squares, DATA, axis_index_groups=program.sites)
    counters["gradient_norm"] = jnp.sqrt(squares)
    if (rate := update.by_stage.learning_rate) is not None:
        counters["learning_rate"] = new.shared[update.by_stage.state_stage[:rate].count(None)]
    return new, loss, counters, metrics


def gradient_step(
    program: LockstepProgram, state: TrainState, batch: Sequence[Array]
) -> tuple[Array, list[Array], list[Array]]:
    """Return the loss, metrics, and gradient buffers."""
    loss, metrics, weight, *_, sums = _train(program, state, batch)
    return loss, metrics, _mean(program.gradients, sums, weight, program.replica_axes)


def evaluation_step(program: LockstepProgram, state: TrainState, batch: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return the loss and metrics of a program without a backward pass."""
    return _train(program, state, batch)[:2]


def prediction_step(program: LockstepProgram, state: TrainState, batch: Sequence[Array]) -> list[Array]:
    """Return the leaves of predictions, rows in the order of the batch."""
    *leaves, _ = run_ticks(program, at_outer(program, state), batch)[2]
    return [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in leaves]


def _train(
    program: LockstepProgram, state: TrainState, batch: Sequence[Array], apart: bool = False
) -> tuple[Array, list[Array], Array, Array, Sequence[Array], list[Array]]:
    """Run all micro-batches, and add up their results and those of the replicas.

    Returns loss, metrics, weight, and the count of sparse tensors that did not fit and were computed again; then this
    device's variables, and its sums of gradients, if there is a backward pass. ``apart``: the weight is that of this
    replica, and all else that of the replicas of its site.
    """
    variables, sums, rows = run_ticks(program, state if apart else at_outer(program, state), batch)
    zeros = [jnp.zeros(x.shape[1:], x.dtype) for x in rows]
    totals = lax.scan(lambda totals, row: (list(map(operator.add, totals, row)), None), zeros, rows)[0]
    whole = sums_in_order(totals, DATA, program.sites if apart else None) if program.replicated else totals
    loss, weight, *metrics, overflows = whole
    metrics = combine(metrics, weight, program.objective.summed)
    loss = loss / weight.astype(loss.dtype)
    return loss, metrics, totals[1] if apart else weight, overflows, variables, sums


def _mean(layout: BufferLayout, sums: Sequence[Array], weight: Array, axes: tuple[str, ...]) -> list[Array]:
    """The mean gradient over the micro-batches of the replicas along some axes, in the types of a layout."""
    pairs = zip(lax.psum(list(sums), axes), layout.buffers, strict=True)
    return [(x / weight.astype(x.dtype)).astype(buffer.dtype) for x, buffer in pairs]


def _nonfinite(program: LockstepProgram, gradients: Sequence[Array]) -> Array:
    """Return, by stage, whether a gradient is not finite."""
    here = sum((jnp.sum(~jnp.isfinite(g), dtype=jnp.int32) for g in gradients), start=jnp.int32(0)) > 0
    return lax.psum(lax.all_gather(here.astype(jnp.int32), STAGE), program.replica_axes) > 0


def _exchanged(
    program: LockstepProgram, plan: StageExchange, step: Array, gradients: Sequence[Array], residuals: Sequence[Array]
) -> tuple[list[Array], list[Array], Array, Array]:
    """Exchange this replica's share of the gradient, times the number of replicas.

    Returns buffers with averages and with new residuals; sums of squares of what this device had, and of what is left.
    """
    layouts = program.gradients, program.state["residual"]

    def read(s: int) -> list[Array]:
        left = layouts[1].read(s, residuals)
        return [g.astype(left[t].dtype) + left[t] for t, g in program.sums.read(s, gradients).items()]

    def write(s: int, averaged: Averaged) -> tuple[list[Array], list[Array], Array, Array]:
        pairs = zip(layouts, (averaged.gradients, averaged.residuals), strict=True)
        new = (layout.write(s, dict(zip(layout.places[s], values, strict=True))) for layout, values in pairs)
        return next(new), next(new), averaged.squares, averaged.unsent

    phases = [partial(exchange, plans, plan.rule, DATA, program.by_device, read, write) for plans in plan.plans]
    return lax.switch(plan.settings.phase(step), phases)


def at_outer(program: LockstepProgram, state: TrainState) -> TrainState:
    """Return a state whose replicas all have the outer parameters, if there are any, and the means of variables."""
    if program.update is None or program.update.outer is None:
        return state

    def parameters(device: int) -> list[Array]:
        outer = program.state["outer"].read(device, state.outer)
        return program.parameters.write(device, program.outer_parameters(outer))

    return replace(state, parameters=tuple(program.by_device(parameters)), variables=tuple(means(state.variables)))


def advance(program: LockstepProgram, loop: StageOuterLoop, state: TrainState) -> TrainState:
    """Return the state after the exchange and the restart that are due when an inner step has been made."""
    settings, fields = loop.settings, ("parameters", "outer", "residual")
    layouts = parameters, outer, pending = [program.state[field] for field in fields]

    def turn(fragment: int, device: int) -> list[TensorNumber]:
        return [program.objective.parameters[k] for k in loop.parameters[fragment][device]]

    def exchanged(fragment: int, *held: list[Array]) -> list[list[Array]]:
        def read(d: int) -> list[Array]:
            now, before = parameters.read(d, held[0]), outer.read(d, held[1])
            return [settings.difference(before[t, 0], now[t]) for t in turn(fragment, d)]

        def write(d: int, averaged: Averaged) -> list[list[Array]]:
            now, before = parameters.read(d, held[0]), outer.read(d, held[1])
            renewed, restarts = {}, {}
            for t, average, rest in zip(turn(fragment, d), averaged.gradients, averaged.residuals, strict=True):
                names = [name for name in before if name[0] == t]
                renewed |= zip(names, loop.advance(average, [before[name] for name in names]), strict=True)
                restarts[t] = settings.restart(renewed[t, 0], rest, now[t])
            changed = ({}, renewed, restarts) if settings.delay else (restarts, renewed, {})
            return [x.put(d, buffers, new) for x, buffers, new in zip(layouts, held, changed, strict=True)]

        return exchange(loop.plans[fragment], loop.rule, DATA, program.by_device, read, write)

    def moved(fragment: int, now: list[Array], ways: list[Array]) -> list[Array]:
        def write(d: int) -> list[Array]:
            before, way = parameters.read(d, now), pending.read(d, ways)
            return parameters.put(d, now, {t: settings.move(before[t], way[t]) for t in turn(fragment, d)})

        return program.by_device(write)

    held = [list(getattr(state, field)) for field in fields]
    variables = lax.cond(state.step % settings.inner_steps == 0, means, list, state.variables)
    groups = zip(fields, settings.after(state.step, held, exchanged, moved), strict=True)
    return replace(state, variables=tuple(variables), **{field: tuple(buffers) for field, buffers in groups})


def means(values: Sequence[Array]) -> list[Array]:
    """Return the means of state variables over the replicas; of what has none, such as a count, the first one's."""
    return [lax.pmean(x, DATA) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.all_gather(x, DATA)[0] for x in values]
