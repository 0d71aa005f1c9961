"""The tick loop that every device runs: a scan over the rows of a schedule.

    tick:  forward of one micro-batch ─▶ stash to the arena
           stash from the arena ─▶ backward of one micro-batch ─▶ add to gradients
           (stash and cotangents from the arena ─▶ weight part of the backward ─▶ add to gradients)
           send to the next stage and to the one before

Which stage a device works for is a number at run time: work of each kind is a ``switch`` over the stages, in which
those that do the same are one. Everything that all stages do alike stays outside it: collectives, arena writes, sums.
What is not there to be read (an idle tick, a slot that nobody has written) has every bit set, which is a NaN in each
floating type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, Shaped
from jaxpipe.runtime.gradient_precision import add_gradient
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.stage_branches import Kept, Rows, work_by_stage
from jaxpipe.runtime.spmd.tick_table import Row, Work
from jaxpipe.runtime.uint32_words import POISON, zeros
from jaxpipe.schedules import Kind
from jaxpipe.sharding.mesh_axes import DATA, STAGE


@dataclass(frozen=True)
class Totals:
    """The arrays of a device after the last tick."""

    gradients: Sequence[Array]  # sums over its micro-batches; empty without a backward pass
    state: Sequence[Array]  # folded over the micro-batches
    results: Sequence[Array]  # sums, or predictions by micro-batch, where this stage makes them; zeros elsewhere
    overflows: Array  # sparse tensors that did not fit and were computed again


class Carry(NamedTuple):
    """The arrays that a device carries from tick to tick."""

    arena: Array
    inboxes: list[Array]  # of messages forward and back, ``[slots, words]``
    state: list[Array]
    gradients: list[Array]
    results: list[Array]


def run_ticks(
    program: LockstepProgram,
    parameters: Sequence[Array],
    state: Sequence[Array],
    key: Array,
    batch: Sequence[Array],
    collect: bool = False,
) -> Totals:
    """Run all micro-batches of one device through its stages, inside ``shard_map``.

    Buffers of shared parameters are behind the device's own; leaves of the batch are ``[num_microbatches, ...]``.
    ``collect`` keeps the results of each micro-batch apart, instead of adding them up.
    """
    schedule, replica = program.schedule, lax.axis_index(DATA) if program.replicated else 0
    kinds = Kind.FORWARD, schedule.backward_kind, Kind.BACKWARD_WEIGHT
    forward, backward, weight = (work_by_stage(program, kind) for kind in kinds)

    def microbatch(work: Work) -> tuple[Array, Rows]:
        number = jnp.maximum(work.microbatch, 0)
        return jax.random.fold_in(key, replica * program.num_microbatches + number), Rows(batch, number)

    def tick(carry: Carry, row: Row) -> tuple[Carry, None]:
        arena, inboxes, state, gradients, results = carry

        work = row.forward
        state, (message, stash, values) = forward(
            work, state, parameters, *microbatch(work), _at(inboxes[0], work.message)
        )
        messages = [message]
        results = [_add(old, new, work.microbatch, collect) for old, new in zip(results, values, strict=True)]
        arena = _write(arena, stash, work.stash, work.branch, program.stash_pages)

        if schedule.has_backward:
            work = row.backward
            _, (cotangents, saved, steps) = backward(
                work, [], parameters, *microbatch(work), _at(inboxes[1], work.message), Kept(arena, work.stash)
            )
            messages.append(cotangents)
            gradients = _sum(gradients, steps, work)
            arena = _write(arena, saved, work.saved, work.branch, program.saved_pages)

        if schedule.splits_backward:
            work = row.weight
            kept = Kept(arena, work.stash), Kept(arena, work.saved)
            gradients = _sum(gradients, weight(work, [], parameters, *microbatch(work), *kept)[1], work)

        # All work of a tick is done before neighbors wait for each other.
        for back, message in enumerate(lax.optimization_barrier(messages)):
            arrived = _from_neighbor(program, message, bool(back))
            inboxes = [*inboxes[:back], _landed(inboxes[back], arrived, row.landed[back]), *inboxes[back + 1 :]]
        return Carry(arena, inboxes, state, gradients, results), None

    last, _ = lax.scan(tick, _initial(program, state, collect), _rows(program))
    return Totals(last.gradients, last.state, last.results[:-1], last.results[-1])


def _initial(program: LockstepProgram, state: Sequence[Array], collect: bool) -> Carry:
    lead = (program.num_microbatches,) if collect else ()
    sums = program.sum_avals if program.schedule.has_backward else []
    boxes = zip(program.table.inbox_slots, program.message_words, strict=True)
    return Carry(
        jnp.full((program.table.arena_pages, PAGE), POISON),
        [jnp.full(box, POISON) for box in boxes],
        state=list(state),
        gradients=[jnp.zeros(a.shape, a.dtype) for a in sums],
        results=[zeros((*lead, *a.shape), a.dtype) for a in _made(program)],
    )


def _made(program: LockstepProgram) -> list[Shaped]:
    """Return what forward work hands out of each micro-batch: the results, and how many tensors overflowed."""
    return [*program.avals(program.objective.results), jax.ShapeDtypeStruct((), jnp.int32)]


def _rows(program: LockstepProgram) -> Row:
    """This device's rows of the table, by tick."""
    leaves, treedef = jax.tree.flatten(program.table.rows)
    columns = jnp.asarray(np.stack(leaves, axis=1))[lax.axis_index(STAGE)]
    return jax.tree.unflatten(treedef, list(columns))


def _at(inbox: Array, slot: ArrayLike) -> Array:
    return inbox[0] if inbox.shape[0] == 1 else lax.dynamic_index_in_dim(inbox, slot, keepdims=False)


def _from_neighbor(program: LockstepProgram, message: Array, back: bool) -> Array:
    """Return the message of the stage before, or of the next one; every device sends one."""
    count = program.num_devices
    # From the last to the first, if they have several stages.
    pairs = [(s, (s + 1) % count) for s in range(count if program.schedule.num_chunks > 1 else count - 1)]
    if not pairs or not message.size:
        return message
    return lax.ppermute(message, STAGE, [(b, a) for a, b in pairs] if back else pairs)


def _landed(inbox: Array, message: Array, slot: ArrayLike) -> Array:
    """Return an inbox with a message in a slot; as it was if nothing is needed (-1)."""
    place = jnp.maximum(slot, 0)
    new = jnp.where(slot >= 0, message, _at(inbox, place))
    return lax.dynamic_update_index_in_dim(inbox, new, place, 0)


def _write(arena: Array, pages: Array, first: ArrayLike, branch: ArrayLike, counts: Sequence[int]) -> Array:
    """The arena with as many pages as the stage of a branch has in their place."""
    if not len(arena) or not max(counts):
        return arena
    start = (first, jnp.int32(0))
    mine = jnp.arange(len(pages), dtype=jnp.int32)[:, None] < jnp.asarray((0, *counts), jnp.int32)[branch]
    old = lax.dynamic_slice(arena, start, pages.shape)
    return lax.dynamic_update_slice(arena, jnp.where(mine, pages, old), start)


def _sum(gradients: Sequence[Array], steps: Sequence[Array], work: Work) -> list[Array]:
    """Gradients with what a micro-batch adds to them."""
    pairs = zip(gradients, steps, strict=True)
    return [jnp.where(work.microbatch >= 0, add_gradient(total, step), total) for total, step in pairs]


def _add(total: Array, new: Array, microbatch: ArrayLike, collect: bool) -> Array:
    """The sum with what a micro-batch adds, or with that in its row."""
    if not collect:
        return jnp.where(microbatch >= 0, total + new, total)
    place = jnp.maximum(microbatch, 0)
    return total.at[place].set(jnp.where(microbatch >= 0, new, total[place]))
