"""The tick loop that every device runs: a scan over the rows of a schedule.

    tick:  forward of one micro-batch ─▶ stash to the arena
           stash from the arena ─▶ backward of one micro-batch ─▶ add to gradients
           (stash and cotangents from the arena ─▶ weight part of the backward ─▶ add to gradients)
           send to the next stage and to the one before

Which stage a device works for is a number at run time: work of each kind is a ``switch`` over the stages, in which
those that do the same are one. Everything that all stages do alike stays outside it: collectives, arena reads and
writes, sums. What is not there to be read (an idle tick, a slot that nobody has written) has every bit set, which is a
NaN in each floating type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.runtime.gradient_precision import add_gradient
from jaxpipe.runtime.program import PAGE, Program
from jaxpipe.runtime.spmd.stage_branches import (
    Kept,
    Rows,
    backward_branch,
    forward_branch,
    idle_backward,
    idle_forward,
    idle_weight,
    made_avals,
    touched,
    weight_branch,
)
from jaxpipe.runtime.spmd.tick_table import Work
from jaxpipe.runtime.stage_switch import switch
from jaxpipe.runtime.uint32_words import POISON
from jaxpipe.schedules import Kind
from jaxpipe.sharding.mesh_axes import DATA, STAGE


@dataclass(frozen=True)
class Totals:
    """The arrays of a device after the last tick.

    Attributes:
      gradients: sums over its micro-batches, in the buffers of the parameters; empty without a backward pass.
      state: the state buffers, folded over the micro-batches.
      results: sums of the results, or predictions by micro-batch, where this stage makes them; zeros elsewhere.
      overflows: sparse tensors of this stage that did not fit their room and were computed again.
    """

    gradients: Sequence[Any]
    state: Sequence[Any]
    results: Sequence[Any]
    overflows: Any


class Row(NamedTuple):
    """The work of a device in a tick: actions of each kind, and slots for messages (-1 for none)."""

    forward: Work
    backward: Work
    weight: Work
    forward_landed: Any
    backward_landed: Any


class Carry(NamedTuple):
    """The arrays that a device carries from tick to tick."""

    arena: Any
    forward_inbox: Any
    backward_inbox: Any
    state: list[Any]
    gradients: list[Any]
    results: list[Any]


def run_ticks(
    program: Program,
    parameters: Sequence[Any],
    state: Sequence[Any],
    key: Any,
    batch: Sequence[Any],
    collect: bool = False,
) -> Totals:
    """All micro-batches of one device through its stages, inside ``shard_map``.

    Args:
      parameters, state: this device's buffers; behind those of the parameters, the shared ones.
      batch: the micro-batches of this replica: leaves ``[num_microbatches, ...]``.
      collect: keep the results of each micro-batch apart, instead of adding them up.
    """
    schedule, m, kind = program.schedule, program.num_microbatches, program.schedule.backward_kind
    replica = lax.axis_index(DATA) if program.replicated else 0
    forward = _by_stage(program, forward_branch, idle_forward)
    backward = _by_stage(program, backward_branch, idle_backward)
    weight = _by_stage(program, weight_branch, idle_weight)
    stashes, keeps = max(program.stash_pages) > 0 and not program.alone, max(program.saved_pages) > 0
    words = program.message_words
    next_inbox, previous_inbox = program.columns.forward_inbox, program.columns.backward_inbox

    def microbatch(work: Work) -> tuple[Any, Rows]:
        number = jnp.maximum(work.microbatch, 0)
        return jax.random.fold_in(key, replica * m + number), Rows(batch, number)

    def tick(carry: Carry, row: Row) -> tuple[Carry, None]:
        arena, inbox, back_inbox, state, gradients, results = carry

        work = row.forward
        operands = parameters, state, *microbatch(work), _message(inbox, work)
        message, stash, state, values = forward(work.branch, *operands)
        results = [_add(old, new, work.microbatch, collect) for old, new in zip(results, values, strict=True)]
        if stashes:
            arena = _write(arena, stash, work.stash, work.branch, program.stash_pages)
        if program.sends_early:
            inbox = _exchange(program, message, inbox, row.forward_landed, next_inbox.direct)
        if not schedule.has_backward:
            return Carry(arena, inbox, back_inbox, state, gradients, results), None

        work = row.backward
        operands = parameters, *microbatch(work), stash if program.alone else Kept(arena, work.stash)
        cotangents, saved, steps = backward(work.branch, *operands, _message(back_inbox, work))
        gradients = _sum(program, kind, gradients, steps, work)
        if keeps:
            arena = _write(arena, saved, work.saved, work.branch, program.saved_pages)

        if schedule.splits_backward:
            work = row.weight
            operands = parameters, *microbatch(work), Kept(arena, work.stash), Kept(arena, work.saved)
            gradients = _sum(program, Kind.BACKWARD_WEIGHT, gradients, weight(work.branch, *operands), work)

        if not program.sends_early:
            message, cotangents = lax.optimization_barrier((message, cotangents))
            inbox = _exchange(program, message, inbox, row.forward_landed, next_inbox.direct)
        back_inbox = _exchange(program, cotangents, back_inbox, row.backward_landed, previous_inbox.direct, back=True)
        return Carry(arena, inbox, back_inbox, state, gradients, results), None

    initial = Carry(
        arena=jnp.full((program.arena_pages, PAGE), POISON),
        forward_inbox=jnp.full((next_inbox.slots, words[0]), POISON),
        backward_inbox=jnp.full((previous_inbox.slots, words[1]), POISON),
        state=list(state),
        gradients=[jnp.zeros(a.shape, a.dtype) for a in program.sum_avals] if schedule.has_backward else [],
        results=[jnp.zeros((*((m,) if collect else ()), *a.shape), a.dtype) for a in made_avals(program)],
    )
    last, _ = lax.scan(tick, initial, _rows(program))
    return Totals(last.gradients, last.state, last.results[:-1], last.results[-1])


def _by_stage(program: Program, branch: Callable[..., Any], idle: Callable[..., Any]) -> Callable[..., Any]:
    """Work of one kind: ``(0 or one more than the stage, operands)``."""
    branches = [branch(program, s) for s in range(len(program.stages))]
    if program.alone:
        return lambda _, *operands: branches[0](*operands)
    return lambda number, *operands: switch(number, [idle(program), *branches], *operands)


def _rows(program: Program) -> Row:
    """This device's rows of the table, by tick."""
    table, stage = program.columns, lax.axis_index(STAGE)
    forward_landed, backward_landed = (
        np.asarray(box.landed, np.int32) for box in (table.forward_inbox, table.backward_inbox)
    )
    leaves, treedef = jax.tree.flatten(
        Row(table.forward, table.backward, table.weight, forward_landed, backward_landed)
    )
    columns = jnp.asarray(np.stack(leaves, axis=1))[stage]
    return jax.tree.unflatten(treedef, [columns[k] for k in range(len(leaves))])


def _message(inbox: Any, work: Work) -> Any:
    """The message that some work needs."""
    return inbox[0] if inbox.shape[0] == 1 else lax.dynamic_index_in_dim(inbox, work.message, keepdims=False)


def _exchange(program: Program, message: Any, inbox: Any, slot: Any, direct: bool, back: bool = False) -> Any:
    """The inbox after every device has sent a message to the next, or to the one before.

    Args:
      inbox: ``[slots, words]``.
      slot: for what arrives; -1 if nothing does that is needed.
      direct: whether all that arrives is read in the next tick, so that nothing else is in the inbox.
      back: whether messages go to the stage before.
    """
    count = program.num_devices
    # From the last to the first, if they have several stages.
    pairs = [(s, (s + 1) % count) for s in range(count if program.schedule.num_chunks > 1 else count - 1)]
    if pairs and message.size:
        message = lax.ppermute(message, STAGE, [(b, a) for a, b in pairs] if back else pairs)
    if direct:
        return message[None]
    place = jnp.maximum(slot, 0)
    old = lax.dynamic_index_in_dim(inbox, place, keepdims=False)
    return lax.dynamic_update_index_in_dim(inbox, jnp.where(slot >= 0, message, old), place, 0)


def _write(arena: Any, pages: Any, first: Any, branch: Any, counts: Sequence[int]) -> Any:
    """The arena with as many pages as the stage of a branch has in their place."""
    start = (first, jnp.int32(0))
    mine = jnp.arange(len(pages), dtype=jnp.int32)[:, None] < jnp.asarray((0, *counts), jnp.int32)[branch]
    old = lax.dynamic_slice(arena, start, pages.shape)
    return lax.dynamic_update_slice(arena, jnp.where(mine, pages, old), start)


def _sum(program: Program, kind: Kind, gradients: Sequence[Any], steps: Sequence[Any], work: Work) -> list[Any]:
    """Gradients with what work of a kind adds to some of them."""
    total = list(gradients)
    for k, step in zip(touched(program, kind), steps, strict=True):
        new = add_gradient(total[k], step)
        total[k] = new if program.alone else jnp.where(work.microbatch >= 0, new, total[k])
    return total


def _add(total: Any, new: Any, microbatch: Any, collect: bool) -> Any:
    """The sum with what a micro-batch adds, or with that in its row."""
    if not collect:
        return jnp.where(microbatch >= 0, total + new, total)
    place = jnp.maximum(microbatch, 0)
    return total.at[place].set(jnp.where(microbatch >= 0, new, total[place]))
