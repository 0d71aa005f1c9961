"""The tick loop that every device runs: a scan over the rows of a schedule.

    tick:  message ─▶ forward of one micro-batch ─▶ stash to the arena
           message, stash from the arena ─▶ backward of one micro-batch ─▶ add to gradients
           (stash and cotangents from the arena ─▶ weight part of the backward ─▶ add to gradients)
           send to the next stage and to the one before ─▶ what arrives to the mail

Which stage a device works for is a number at run time: work of each kind is a ``switch`` over the stages, in which
those that do the same are one. Their branches take and return arrays of the same shapes:

    state variables; parameters, batch, message, arena ──▶ state variables; message, pages to keep, what is added

Forward work adds the bits of its results to the micro-batch's, backward work its gradients to the sums; only forward
work is given state variables. The idle branch beside the stages keeps these, and all else that it returns is zero.
Work reads its micro-batch, and what was kept for it in the arena, array by array: XLA copies what a branch changes, but
not what it only reads, if that changes before and not after it in a tick. So messages are apart, and work is given its
own. Everything that all stages do alike stays outside: collectives, arena writes, sums.

Parameters that stages on several devices use (tied embeddings) live on one, the others borrow them:

    before the ticks:  the owner's value ──all-reduce of its bits──▶ every device
    after the ticks:   the borrowers' gradients ──all-reduce──▶ added to the owner's

Once a step, not once a micro-batch. JAX adds the cotangents of all uses for each micro-batch and then those of the
micro-batches; here each use is added up over the micro-batches first, which rounds otherwise. Every device reads and
writes the owner's place in its own buffers, which hold something else there, and leaves what is not the owner's.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, PyTree, TensorNumber
from jaxpipe.runtime.gradient_precision import add_gradient
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.stage_switch import switch
from jaxpipe.runtime.spmd.tick_table import ARRIVED, RETURNED, SAVED, STASH
from jaxpipe.runtime.stage_passes import stage_backward, stage_forward
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.runtime.uint32_words import from_words, pack_words, read_words, to_words, unpack_words, word_count
from jaxpipe.schedules.table import Kind, StageNumber
from jaxpipe.sharding.mesh_axes import DATA, STAGE


class Given(NamedTuple):
    """The arrays that work reads."""

    parameters: Sequence[Array]  # buffers
    borrowed: Mapping[TensorNumber, Array]  # parameters of others
    state: Sequence[Array]  # variables, for forward work
    batch: Sequence[Array]  # leaves ``[num_microbatches, ...]``
    message: Array  # ``[pages, words]``, of the stage before or of the next one; none for the weight part
    arena: Array  # the same; none for forward work
    key: Array
    row: Array  # of the tick table


class Made(NamedTuple):
    """The arrays that work makes."""

    state: Sequence[Array]
    message: Array  # pages, for a neighbor
    kept: Array  # pages, for later work on the micro-batch
    added: PyTree  # words of results; or gradients, as ``LockstepProgram.added``


def run_ticks(
    program: LockstepProgram, given: TrainState, batch: Sequence[Array]
) -> tuple[Sequence[Array], list[Array], list[Array]]:
    """Run all micro-batches of one device through its stages, inside ``shard_map``.

    Returns the state variables, folded over the micro-batches; sums of gradients, none if all work is forward; and
    the results of all micro-batches, of all devices.
    """
    borrowed, key = _borrow(program, given.parameters), jax.random.fold_in(given.key, given.step)
    replica = lax.axis_index(DATA) if program.replicated else 0
    pages = jnp.asarray([[0] * 4, *program.pages], jnp.int32)
    table, windows, count = program.table, program.windows, program.num_devices
    # From the last device to the first, if they have several stages.
    onward = [(d, (d + 1) % count) for d in range(count if program.schedule.num_chunks > 1 else count - 1)]
    ways = onward, [(b, a) for a, b in onward]

    def tick(carry: tuple, rows: tuple[Array, Array]) -> tuple[tuple, None]:
        mail, arena, state, sums, results = carry
        (work, landed), messages = rows, []
        for k, kind in enumerate(program.schedule.kinds):
            row = work[k]
            message = lax.dynamic_slice(mail, (row[2 + k], jnp.int32(0)), (windows[k], PAGE)) if k < STASH else mail[:0]
            number = jax.random.fold_in(key, replica * program.num_microbatches + row[0])
            before, kept = (state, arena[:0]) if kind is Kind.FORWARD else ([], arena)
            output = _work(program, kind, Given(given.parameters, borrowed, before, batch, message, kept, number, row))
            if kind is Kind.FORWARD:
                whole = lax.dynamic_index_in_dim(results, row[0], keepdims=False) + output.added
                results = lax.dynamic_update_index_in_dim(results, whole, row[0], 0)
                state = output.state
            else:
                sums = jax.tree.map(add_gradient, sums, output.added)
            if k < STASH:  # the weight part sends and keeps nothing
                arena = _write(arena, output.kept, row[2 + STASH + k], pages[row[1], STASH + k])
                messages.append(output.message)
        # All work of a tick is done before neighbors wait for each other.
        for what, message in enumerate(lax.optimization_barrier(messages)):
            if message.size:
                mail = _write(mail, lax.ppermute(message, STAGE, ways[what]), *landed[what])
        return (mail, arena, state, sums, results), None

    mail, arena = (jnp.zeros((n, PAGE), jnp.uint32) for n in table.pages)
    sums = jax.tree.map(jnp.zeros_like, program.added(program.sums)) if program.schedule.has_backward else None
    results = jnp.zeros((program.num_microbatches, word_count(program.result_avals)), jnp.uint32)
    rows = jnp.asarray(table.work)[lax.axis_index(STAGE)], jnp.asarray(table.landed)[lax.axis_index(STAGE)]
    carry = mail, arena, list(given.variables), sums, results
    *_, variables, sums, results = lax.scan(tick, carry, rows)[0]
    # One stage has made what all others have as zeros.
    results = jax.vmap(partial(unpack_words, avals=program.result_avals))(lax.psum(results, STAGE))
    return variables, [] if sums is None else _give_back(program, *sums), results


def _borrow(program: LockstepProgram, buffers: Sequence[Array]) -> dict[TensorNumber, Array]:
    """The value of every parameter that others borrow, from the device that has it; inside ``shard_map``."""
    owned = {t: program.parameters.places[d][t].get(buffers) for t, d in program.lent.items()}
    words = [jnp.where(lax.axis_index(STAGE) == program.lent[t], to_words(x), jnp.uint32(0)) for t, x in owned.items()]
    return dict(zip(owned, map(from_words, lax.psum(words, STAGE), owned.values()), strict=True))


def _give_back(program: LockstepProgram, buffers: list[Array], borrowed: Mapping[TensorNumber, Array]) -> list[Array]:
    """This device's gradient buffers, with what others have computed for its parameters."""
    for t, gradient in lax.psum(borrowed, STAGE).items():
        place = program.sums.places[program.lent[t]][t]
        value = place.get(buffers)
        buffers = place.put(buffers, jnp.where(lax.axis_index(STAGE) == program.lent[t], value + gradient, value))
    return buffers


def _write(arena: Array, pages: Array, first: Array, count: Array) -> Array:
    """The mail or the arena with the first so many of some pages from a place on."""
    if not len(pages):
        return arena
    start = (first, jnp.int32(0))
    is_new = jnp.arange(len(pages), dtype=jnp.int32)[:, None] < count
    before = lax.dynamic_slice(arena, start, pages.shape)
    return lax.dynamic_update_slice(arena, jnp.where(is_new, pages, before), start)


def _work(program: LockstepProgram, kind: Kind, given: Given) -> Made:
    """Do work of one kind, for the stage of a row or none."""
    branches = [partial(stage_work, program, kind, s) for s in program.stage_numbers]
    output = jax.eval_shape(branches[-1], given)

    def idle(given: Given) -> Made:
        return jax.tree.map(jnp.zeros_like, output)._replace(state=list(given.state))

    frozen = 0 if kind is Kind.FORWARD else program.schedule.frozen
    return switch(given.row[1], [idle, *[idle] * frozen, *branches[frozen:]], given)


def stage_work(program: LockstepProgram, kind: Kind, s: StageNumber, given: Given) -> Made:
    """Do a stage's work of a kind."""
    objective, parameters = program.objective, program.parameters.read(program.device(s), given.parameters)
    rows = [lax.dynamic_index_in_dim(x, given.row[0], keepdims=False) for x in given.batch]
    known = dict(zip((*objective.batch, objective.key), (*rows, given.key), strict=True))
    known |= {**given.borrowed, **parameters}
    return _forward(program, s, known, given) if kind is Kind.FORWARD else _backward(program, kind, s, known, given)


def _forward(program: LockstepProgram, s: StageNumber, known: dict[TensorNumber, Array], given: Given) -> Made:
    stage, device = program.stages[s], program.device(s)
    state = program.variables.read(device, given.state)
    known |= state | _kept(program, s, ARRIVED, given)
    values, stash, overflows = stage_forward(stage, known, program.trains(s))
    state |= {t: values[new] for t, new in zip(stage.state, stage.new_state, strict=True)}
    results = [*program.result_avals[:-1], overflows]
    for k in stage.results:
        results[k] = values[program.objective.results[k]]
    return Made(
        program.variables.write(device, state),
        _pages({t: values[t] for t in stage.leaving}, program.windows[ARRIVED]),
        _pages(stash, program.windows[STASH]),
        pack_words(results),
    )


def _backward(
    program: LockstepProgram, kind: Kind, s: StageNumber, known: dict[TensorNumber, Array], given: Given
) -> Made:
    stage, device, is_weight = program.stages[s], program.device(s), kind is Kind.BACKWARD_WEIGHT
    received, stash = _kept(program, s, SAVED if is_weight else RETURNED, given), _kept(program, s, STASH, given)
    gradients, saved = stage_backward(program.objective, stage, kind, known, stash, received)
    borrowed = jax.tree.map(jnp.zeros_like, program.added(program.gradients)[1])
    borrowed |= {t: x for t, x in gradients.items() if program.lent.get(t, device) != device}
    added = program.gradients.write(device, gradients), borrowed
    if is_weight:
        return Made([], _pages({}, 0), _pages({}, 0), added)
    message = _pages({t: gradients[t] for t in stage.returning}, program.windows[RETURNED])
    waiting = {t: saved[t] for t in stage.saved} if kind is Kind.BACKWARD_INPUT else {}
    return Made([], message, _pages(waiting, program.windows[SAVED]), added)


def _pages(values: PyTree, count: int) -> Array:
    """Arrays as so many pages."""
    return pack_words(values, count * PAGE).reshape(count, PAGE)


def _kept(program: LockstepProgram, s: StageNumber, what: int, given: Given) -> PyTree:
    """Read what was kept for a stage: its message, or a part of the arena."""
    room, first = (given.message, jnp.int32(0)) if what < STASH else (given.arena, given.row[2 + what])

    def read(start: int, count: int) -> Array:
        page, offset = divmod(start, PAGE)
        shape = -(-(offset + count) // PAGE), PAGE
        words = lax.dynamic_slice(room, (first + page, jnp.int32(0)), shape).reshape(-1)
        return lax.slice(words, (offset,), (offset + count,))

    return read_words(program.kept(s)[what], read)
