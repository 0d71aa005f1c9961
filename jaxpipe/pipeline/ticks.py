"""The tick loop that every device runs: a scan over the rows of a schedule.

    tick:  forward of one micro-batch ─▶ stash to the arena
           stash from the arena ─▶ backward of one micro-batch ─▶ add to gradients
           (stash and cotangents from the arena ─▶ weight part of the backward ─▶ add to gradients)
           send to the next stage and to the one before

Which stage a device works for is a number at run time: work of each kind is a ``switch`` over the stages, in which
those that do the same are one. Everything that all stages do alike stays outside it: collectives, arena reads and
writes, sums. What is not there to be read (an idle tick, a slot that nobody has written) has every bit set, which is a
NaN in each floating type. Only the host's memory is not filled with that; nothing but stashes is taken out of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe._compat import host_buffer
from jaxpipe.pipeline.branches import (
    Kept,
    Rows,
    backward_branch,
    forward_branch,
    idle_backward,
    idle_forward,
    idle_weight,
    made_avals,
    saved_shape,
    stash_shape,
    touched,
    weight_branch,
)
from jaxpipe.pipeline.columns import Work
from jaxpipe.pipeline.live import Live, WeightRow, Weights, version
from jaxpipe.pipeline.precision import add_gradient
from jaxpipe.pipeline.program import DATA, PAGE, STAGE, Program
from jaxpipe.pipeline.swap import swap, swap_columns
from jaxpipe.pipeline.switch import switch
from jaxpipe.pipeline.turns import hand_on, run_work
from jaxpipe.pipeline.words import POISON
from jaxpipe.schedules import Kind


@dataclass(frozen=True)
class Totals:
    """What a device has after the last tick.

    Attributes:
      gradients: sums over its micro-batches, in the buffers of the parameters; empty without a backward pass.
      state: the state buffers, folded over the micro-batches.
      results: sums of the results, or predictions by micro-batch, where this stage makes them; zeros elsewhere.
      overflows: sparse tensors of this stage that did not fit their room and were computed again.
      statistics: by micro-batch, what those of this device add to its state where that is folded at the end
        (``jaxpipe.pipeline.folding``), zeros for the others; None if there is none.
      weights: what updates on the way have left; None without any.
    """

    gradients: Sequence[Any]
    state: Sequence[Any]
    results: Sequence[Any]
    overflows: Any
    statistics: Any = None
    weights: Weights | None = None


class Row(NamedTuple):
    """What a device does in a tick: work of each kind, slots for messages (-1 for none), and what is moved."""

    forward: Work
    backward: Work
    weight: Work
    forward_landed: Any
    backward_landed: Any
    swaps: list[Any]
    weights: WeightRow | None


class Carry(NamedTuple):
    """What a device takes from tick to tick."""

    arena: Any
    host: Any
    forward_inbox: Any
    backward_inbox: Any
    state: list[Any]
    gradients: list[Any]
    results: list[Any]
    weights: Weights | None


def run_ticks(
    program: Program,
    parameters: Sequence[Any],
    state: Sequence[Any],
    key: Any,
    batch: Sequence[Any],
    collect: bool = False,
    live: Live | None = None,
) -> Totals:
    """All micro-batches of one device through its stages, inside ``shard_map``.

    Args:
      program: what to run.
      parameters, state: this device's buffers; behind those of the parameters, the shared ones.
      key: random key of the step.
      batch: the micro-batches of this replica: leaves ``[num_microbatches, ...]``.
      collect: keep the results of each micro-batch apart, instead of adding them up.
      live: updates parameters on the way, by the versions of the schedule.
    """
    schedule, m, kind = program.schedule, program.num_microbatches, program.schedule.backward_kind
    stage = program.own
    replica = lax.axis_index(DATA) if program.replicated else 0
    forward = _by_stage(program, forward_branch, idle_forward)
    backward = _by_stage(program, backward_branch, idle_backward)
    weight = _by_stage(program, weight_branch, idle_weight)
    window, kept = stash_shape(program)[0], saved_shape(program)[0]
    words, overflows = program.message_words, len(program.objective.results)
    there, back = program.columns.forward_inbox, program.columns.backward_inbox
    stored = not program.alone and (window > 0 or program.takes_turns)
    early = program.sends_early

    def microbatch(j: Any) -> tuple[Any, Rows]:
        own = jnp.maximum(j, 0)
        return jax.random.fold_in(key, replica * m + own), Rows(batch, own)

    def pages(branch: Any, sizes: Sequence[int]) -> Any:
        """How many pages the stage of a branch has."""
        return jnp.asarray((0, *sizes), jnp.int32)[branch]

    def tick(carry: Carry, row: Row) -> tuple[Carry, None]:
        arena, host, inbox, back_inbox, state, gradients, results, weights = carry
        own = parameters if weights is None or row.weights is None else version(weights, row.weights.forward)

        def ahead(work: Work, held: Any) -> Any:
            arena, state, results = held
            operands = own, state, *microbatch(work.microbatch), _message(inbox, work)
            message, stash, state, made = forward(work.branch, *operands)
            results = [
                _add(old, new, work.microbatch, work.microbatch >= 0, collect or k > overflows)
                for k, (old, new) in enumerate(zip(results, made, strict=True))
            ]
            if stored and schedule.has_backward:
                arena = _write(arena, stash, work.stash, pages(work.branch, program.stash_pages))
            return (arena, state, results), message, stash

        held, message, stash = run_work(program, row.forward, ahead, (arena, state, results), words[0])
        arena, state, results = held
        if early or not schedule.has_backward:
            inbox = hand_on(program, message, inbox, row.forward_landed, direct=there.direct, back=False)
        if not schedule.has_backward:
            return Carry(arena, host, inbox, back_inbox, state, gradients, results, weights), None
        if weights is not None and row.weights is not None:
            own = version(weights, row.weights.backward)

        def behind(work: Work, held: Any) -> Any:
            arena, gradients = held
            found = stash if program.alone else Kept(arena, work.stash)
            operands = own, *microbatch(work.microbatch), found, _message(back_inbox, work)
            cotangents, saved, steps = backward(work.branch, *operands)
            gradients = _sum(program, kind, gradients, steps, work.microbatch >= 0)
            if kept:
                arena = _write(arena, saved, work.saved, pages(work.branch, program.saved_pages))
            return (arena, gradients), cotangents, None

        def later(work: Work, gradients: Any) -> Any:
            places = Kept(arena, work.stash), Kept(arena, work.saved)
            operands = own, *microbatch(work.microbatch), *places
            steps = weight(work.branch, *operands)
            gradients = _sum(program, Kind.BACKWARD_WEIGHT, gradients, steps, work.microbatch >= 0)
            return gradients, jnp.zeros((0,), jnp.uint32), None

        (arena, gradients), cotangents, _ = run_work(program, row.backward, behind, (arena, gradients), words[1])
        if schedule.splits_backward:
            gradients, _, _ = run_work(program, row.weight, later, gradients, 0)
        if live is not None and weights is not None and row.weights is not None:
            weights, gradients = live.update(weights, gradients, row.weights, stage)
        if not early:
            message, cotangents = lax.optimization_barrier((message, cotangents))
            inbox = hand_on(program, message, inbox, row.forward_landed, direct=there.direct, back=False)
        back_inbox = hand_on(program, cotangents, back_inbox, row.backward_landed, direct=back.direct, back=True)
        if program.transport is not None and window:
            never, after = row.backward.microbatch < -1, cotangents[:1].sum()
            arena, host = swap(program.transport, arena, host, STAGE, row.swaps, never, after)
        return Carry(arena, host, inbox, back_inbox, state, gradients, results, weights), None

    rows = program.teams.most_turns
    initial = Carry(
        arena=jnp.full((program.arena_pages, PAGE), POISON),
        host=host_buffer((program.host_pages, PAGE), np.uint32) if program.host_pages else None,
        forward_inbox=jnp.full((there.slots * rows, words[0]), POISON),
        backward_inbox=jnp.full((back.slots * rows, words[1]), POISON),
        state=list(state),
        gradients=[jnp.zeros(a.shape, a.dtype) for a in program.sum_avals] if schedule.has_backward else [],
        results=[
            jnp.zeros((*((m,) if collect or k > overflows else ()), *a.shape), a.dtype)
            for k, a in enumerate(made_avals(program))
        ],
        weights=None if live is None else live.begin(parameters),
    )
    last, _ = lax.scan(tick, initial, _rows(program, stage, None if live is None else live.rows()))
    made = last.results
    statistics = made[overflows + 1] if program.statistics_words else None
    return Totals(last.gradients, last.state, made[:overflows], made[overflows], statistics, last.weights)


def _by_stage(program: Program, branch: Callable[..., Any], idle: Callable[..., Any]) -> Callable[..., Any]:
    """Work of one kind: ``(0 or one more than the stage, operands)``."""
    branches = [branch(program, s) for s in range(len(program.sections))]
    if program.alone:
        return lambda _, *operands: branches[0](*operands)
    return lambda number, *operands: switch(number, [idle(program), *branches], *operands)


def _rows(program: Program, stage: Any, weights: WeightRow | None) -> Row:
    """This device's rows of the table, by tick."""
    table = program.columns
    there, back = (np.asarray(box.landed, np.int32) for box in (table.forward_inbox, table.backward_inbox))
    rows = Row(table.forward, table.backward, table.weight, there, back, [], weights)
    leaves, treedef = jax.tree.flatten(rows)
    own = jnp.asarray(np.stack(leaves, axis=1))[stage]
    rows = jax.tree.unflatten(treedef, [own[k] for k in range(len(leaves))])
    found = program.transport
    if found is None:
        return rows
    return rows._replace(swaps=swap_columns(found, program.num_devices, len(program.schedule.ticks), stage))


def _message(inbox: Any, work: Work) -> Any:
    """The message that some work needs."""
    return inbox[0] if inbox.shape[0] == 1 else lax.dynamic_index_in_dim(inbox, work.message, keepdims=False)


def _write(arena: Any, pages: Any, first: Any, count: Any) -> Any:
    """The arena with the first ``count`` pages of some in their place."""
    start = (first, jnp.int32(0))
    mine = jnp.arange(len(pages), dtype=jnp.int32)[:, None] < count
    old = lax.dynamic_slice(arena, start, pages.shape)
    return lax.dynamic_update_slice(arena, jnp.where(mine, pages, old), start)


def _sum(program: Program, kind: Kind, gradients: Sequence[Any], steps: Sequence[Any], active: Any) -> list[Any]:
    """Gradients with what work of a kind adds to some of them."""
    total = list(gradients)
    for k, step in zip(touched(program, kind), steps, strict=True):
        new = add_gradient(total[k], step)
        total[k] = new if program.alone else jnp.where(active, new, total[k])
    return total


def _add(total: Any, new: Any, j: Any, active: Any, collect: bool) -> Any:
    if not collect:
        return jnp.where(active, total + new, total)
    place = jnp.maximum(j, 0)
    return total.at[place].set(jnp.where(active, new, total[place]))
