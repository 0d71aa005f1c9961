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
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, Shaped, TensorNumber
from jaxpipe.runtime import stage_passes
from jaxpipe.runtime.gradient_precision import add_gradient
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.stage_switch import switch
from jaxpipe.runtime.spmd.tick_table import ARRIVED, RETURNED, SAVED, STASH
from jaxpipe.runtime.uint32_words import from_words, pack_words, to_words, word_count
from jaxpipe.schedules.table import Kind, StageNumber
from jaxpipe.sharding.mesh_axes import DATA, STAGE


class Carry(NamedTuple):
    """The arrays that a device carries from tick to tick."""

    mail: Array
    arena: Array
    state: Sequence[Array]  # folded over the micro-batches
    gradients: Sequence[Array]  # sums over its micro-batches; empty without a backward pass
    results: Array  # ``[num_microbatches, words]``, zero for what other devices make


def run_ticks(
    program: LockstepProgram, parameters: Sequence[Array], state: Sequence[Array], key: Array, batch: Sequence[Array]
) -> Carry:
    """Run all micro-batches of one device through its stages, inside ``shard_map``; arguments as ``Given``."""
    replica = lax.axis_index(DATA) if program.replicated else 0
    work = {kind: work_by_stage(program, kind) for kind in program.kinds}
    pages = jnp.asarray([[0] * 4, *program.pages], jnp.int32)

    def tick(carry: Carry, rows: tuple[Array, Array]) -> tuple[Carry, None]:
        mail, arena, state, gradients, results = carry
        messages = []
        for kind, row in zip(program.kinds, rows[0], strict=False):
            number = jax.random.fold_in(key, replica * program.num_microbatches + row[0])
            given = Given(parameters, batch, *_received(program, kind, mail, arena, row), number, row)
            if kind is Kind.FORWARD:
                state, message, kept, added = work[kind](state, given)
                whole = lax.dynamic_index_in_dim(results, row[0], keepdims=False) + added[0]
                results = lax.dynamic_update_index_in_dim(results, whole, row[0], 0)
                arena = _write(arena, kept, row[2 + STASH], pages[row[1], STASH])
            else:
                _, message, kept, added = work[kind]([], given)
                gradients = list(map(add_gradient, gradients, added))
                arena = _write(arena, kept, row[2 + SAVED], pages[row[1], SAVED])
            messages.append(message)
        # All work of a tick is done before neighbors wait for each other.
        messages = lax.optimization_barrier(messages)
        for what, message in zip((ARRIVED, RETURNED), messages, strict=False):
            first, count = rows[1][what]
            mail = _write(mail, _from_neighbor(program, message, what == RETURNED), first, count)
        return Carry(mail, arena, state, gradients, results), None

    sums = program.sum_avals if program.schedule.has_backward else []
    gradients = [jnp.zeros(a.shape, a.dtype) for a in sums]
    results = jnp.zeros((program.num_microbatches, sum(map(word_count, program.result_avals))), jnp.uint32)
    mail, arena = (jnp.zeros((table.pages, PAGE), jnp.uint32) for table in (program.mail, program.arena))
    work_here, landed_here = (
        jnp.asarray(x)[:, lax.axis_index(STAGE)].swapaxes(0, 1) for x in (program.work, program.mail.landed)
    )
    return lax.scan(tick, Carry(mail, arena, list(state), gradients, results), (work_here, landed_here))[0]


def _received(
    program: LockstepProgram, kind: Kind, mail: Array, arena: Array, row: Array
) -> tuple[Array | None, Array | None]:
    """Return the message that work of a kind reads, and the arena, each if it reads any."""
    if kind is Kind.BACKWARD_WEIGHT:
        return None, arena
    what = ARRIVED if kind is Kind.FORWARD else RETURNED
    message = lax.dynamic_slice(mail, (row[2 + what], jnp.int32(0)), (program.windows[what], PAGE))
    return message, None if kind is Kind.FORWARD else arena


def _from_neighbor(program: LockstepProgram, message: Array, back: bool) -> Array:
    """Return the message of the stage before, or of the next one; every device sends one."""
    count = program.num_devices
    # From the last to the first, if they have several stages.
    pairs = [(s, (s + 1) % count) for s in range(count if program.schedule.num_chunks > 1 else count - 1)]
    if not pairs or not message.size:
        return message
    return lax.ppermute(message, STAGE, [(b, a) for a, b in pairs] if back else pairs)


def _write(arena: Array, pages: Array, first: ArrayLike, count: ArrayLike) -> Array:
    """The mail or the arena with the first so many of some pages from a place on."""
    if not len(pages):
        return arena
    start = (first, jnp.int32(0))
    is_new = jnp.arange(len(pages), dtype=jnp.int32)[:, None] < count
    before = lax.dynamic_slice(arena, start, pages.shape)
    return lax.dynamic_update_slice(arena, jnp.where(is_new, pages, before), start)


class Given(NamedTuple):
    """The arrays that work reads."""

    parameters: Sequence[Array]  # buffers, then the value of every shared parameter
    batch: Sequence[Array]  # leaves ``[num_microbatches, ...]``
    message: Array | None  # ``[pages, words]``, of the stage before or of the next one
    arena: Array | None  # the same
    key: Array
    row: Array  # of the tick table


class Made(NamedTuple):
    """The arrays that work makes."""

    state: Sequence[Array]
    message: Array  # pages, for a neighbor
    kept: Array  # pages, for later work on the micro-batch
    added: Sequence[Array]


def work_by_stage(program: LockstepProgram, kind: Kind) -> Callable[[Sequence[Array], Given], Made]:
    """Return work of one kind, for the stage of a row or none."""
    branches = [stage_branch(program, kind, s) for s in program.stage_numbers]

    def run(state: Sequence[Array], given: Given) -> Made:
        made = jax.eval_shape(branches[-1], state, given)

        def idle(state: Sequence[Array], _: Given) -> Made:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)._replace(state=list(state))

        frozen = 0 if kind is Kind.FORWARD else program.schedule.frozen
        return switch(given.row[1], [idle, *[idle] * frozen, *branches[frozen:]], state, given)

    return run


def stage_branch(program: LockstepProgram, kind: Kind, s: StageNumber) -> Callable[[Sequence[Array], Given], Made]:
    """Return a stage's work of a kind."""
    stage, device = program.stages[s], program.device(s)

    def kept(given: Given, what: int) -> list[Array]:
        shapes = program.kept(s)[what]
        if what in (ARRIVED, RETURNED):
            assert given.message is not None
            return _read(given.message, jnp.int32(0), shapes)
        assert given.arena is not None
        return _read(given.arena, given.row[2 + what], shapes)

    def available(given: Given) -> dict[TensorNumber, Array]:
        """Return the values that no stage sends: the micro-batch, its key, parameters here and borrowed."""
        rows = [lax.dynamic_index_in_dim(x, given.row[0], keepdims=False) for x in given.batch]
        known = dict(zip((*program.objective.batch, program.objective.key), (*rows, given.key), strict=True))
        known.update(zip(program.shared, given.parameters[len(program.parameters.buffers) :], strict=True))
        known.update(zip(program.held(device)[0], program.parameters.read(device, given.parameters), strict=True))
        return known

    def forward(state: Sequence[Array], given: Given) -> Made:
        known = available(given)
        variables = program.held(device)[1]
        known.update(zip(variables, program.variables.read(device, state), strict=True))
        known.update(zip(stage.arriving, kept(given, ARRIVED), strict=True))
        values, stash, overflows = stage_passes.forward(stage, known, program.trains(s))
        new = dict(zip(stage.state, stage.new_state, strict=True))
        made = [values[t] if k in stage.results else None for k, t in enumerate(program.objective.results)]
        words = [
            jnp.zeros(word_count(a), jnp.uint32) if x is None else to_words(x)
            for x, a in zip([*made, overflows], program.result_avals, strict=True)
        ]
        return Made(
            program.variables.write(device, [values[new[t]] if t in new else known[t] for t in variables]),
            _pages([values[t] for t in stage.leaving], program.windows[ARRIVED]),
            _pages([x for parts in stash.values() for x in parts], program.windows[STASH]),
            [jnp.concatenate(words)],
        )

    def backward(_: Sequence[Array], given: Given) -> Made:
        known, is_weight = available(given), kind is Kind.BACKWARD_WEIGHT
        names = stage.saved if is_weight else program.returned(s)
        received = dict(zip(names, kept(given, SAVED if is_weight else RETURNED), strict=True))
        assert stage.vjp is not None
        parts, stored = zip(stage.vjp.plan.stored, stage.vjp.stash_avals, strict=True), iter(kept(given, STASH))
        stash = {t: tuple(next(stored) for _ in avals) for t, avals in parts if t in stage.stashed}
        gradients, saved = stage_passes.backward(program.objective, stage, kind, known, stash, received)
        added = _gradient_buffers(program, s, gradients)
        if is_weight:
            return Made([], _pages([], 0), _pages([], 0), added)
        message = _pages([gradients[t] for t in stage.returning], program.windows[RETURNED])
        waiting = [saved[t] for t in stage.saved] if kind is Kind.BACKWARD_INPUT else []
        return Made([], message, _pages(waiting, program.windows[SAVED]), added)

    return forward if kind is Kind.FORWARD else backward


def _gradient_buffers(program: LockstepProgram, s: StageNumber, gradients: dict[TensorNumber, Array]) -> list[Array]:
    """The buffers of gradients with a stage's in them, and zeros elsewhere; those of shared parameters behind."""
    device = program.device(s)
    trained = program.trained(device)

    def value(t: TensorNumber, aval: Shaped, here: bool) -> Array:
        return gradients[t] if here and t in gradients else jnp.zeros(aval.shape, aval.dtype)

    own = [value(t, a, True) for t, a in zip(trained, program.avals(trained), strict=True)]
    shared = zip(program.shared_trained, program.avals(program.shared_trained), strict=True)
    return [*program.gradients.write(device, own), *(value(t, a, t not in trained).reshape(-1) for t, a in shared)]


def _pages(values: Sequence[Array], count: int) -> Array:
    """Arrays as so many pages."""
    return pack_words(values, count * PAGE).reshape(count, PAGE)


def _read(arena: Array, first: Array, avals: Sequence[Shaped]) -> list[Array]:
    """The arrays that were written from a page on."""
    arrays, start = [], 0
    for aval in avals:
        page, offset = divmod(start, PAGE)
        count = word_count(aval)
        shape = (-(-(offset + count) // PAGE), PAGE)
        words = lax.dynamic_slice(arena, (first + page, jnp.int32(0)), shape).reshape(-1)
        arrays.append(from_words(lax.slice(words, (offset,), (offset + count,)), aval))
        start += count
    return arrays
