"""A stage's work on a micro-batch, as branches of one conditional: all take and return arrays of the same shapes.

    forward:  state; parameters, key, micro-batch, message                -> state; message, stash, results
    backward: ; parameters, key, micro-batch, message, stash              -> ; message, saved, gradients
    weight:   ; parameters, key, micro-batch, stash, saved                -> ; gradients   (backward work is split)

The idle branch beside them keeps the state; all bits of its other results are set. Backward work reads what it needs
out of the arena (``Kept``), array by array, and all work its micro-batch out of the batch (``Rows``): XLA copies what a
branch changes, but not what it only reads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.array_types import Array, ArrayLike, PyTree, Shaped, TensorNumber
from jaxpipe.runtime import stage_passes
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.tick_table import Work
from jaxpipe.runtime.stage_switch import switch
from jaxpipe.runtime.stages import Stage
from jaxpipe.runtime.uint32_words import POISON, from_words, pack_words, unpack_words, word_count, zeros
from jaxpipe.schedules.table import Kind, StageNumber


class Rows(NamedTuple):
    """The micro-batch that a branch works on."""

    batch: Sequence[Array]  # leaves ``[num_microbatches, ...]``
    number: ArrayLike  # of the micro-batch

    def read(self) -> list[Array]:
        """Its leaves."""
        return [lax.dynamic_index_in_dim(x, self.number, keepdims=False) for x in self.batch]


class Kept(NamedTuple):
    """The places in the arena of what was kept for a branch."""

    arena: Array  # ``[pages, words]``
    first: ArrayLike  # its first page

    def read(self, avals: Sequence[Shaped]) -> list[Array]:
        """The arrays that were packed there."""
        arrays, start = [], 0
        for aval in avals:
            page, offset = divmod(start, PAGE)
            count = word_count(aval)
            shape = (-(-(offset + count) // PAGE), PAGE)
            words = lax.dynamic_slice(self.arena, (self.first + page, jnp.int32(0)), shape).reshape(-1)
            arrays.append(from_words(lax.slice(words, (offset,), (offset + count,)), aval))
            start += count
        return arrays


#: The work of a kind of a stage: what is kept from tick to tick, and operands, to the former and results.
Branch: TypeAlias = Callable[..., tuple[list[Array], PyTree]]


def work_by_stage(program: LockstepProgram, kind: Kind) -> Callable[..., tuple[list[Array], PyTree]]:
    """Return work of one kind, ``(work, kept, operands)``, for the stage of its branch or none."""
    branches = [stage_branch(program, kind, s) for s in program.stage_numbers]

    def run(work: Work, kept: Sequence[Array], *operands: PyTree) -> tuple[list[Array], PyTree]:
        shapes = jax.eval_shape(branches[-1], kept, *operands)[1]

        def idle(kept: Sequence[Array], *_: PyTree) -> tuple[list[Array], PyTree]:
            return list(kept), jax.tree.map(_poisoned, shapes)

        idle_first = kind is not Kind.FORWARD
        every = [idle if idle_first and s < program.schedule.frozen else f for s, f in enumerate(branches)]
        return switch(work.branch, [idle, *every], kept, *operands)

    return run


def _poisoned(aval: Shaped) -> Array:
    """An array that nothing may read: every bit is set, which is a NaN in each floating type."""
    return from_words(jnp.full(word_count(aval), POISON), aval)


def stage_branch(program: LockstepProgram, kind: Kind, s: StageNumber) -> Branch:
    """Return a stage's work of a kind."""
    branches = {Kind.FORWARD: _forward, Kind.BACKWARD_WEIGHT: _weight}
    return branches.get(kind, _backward)(program, s)


def _forward(program: LockstepProgram, s: StageNumber) -> Branch:
    stage, device, wanted = program.stages[s], program.device(s), program.objective.results

    def forward(
        state: Sequence[Array], parameters: Sequence[Array], key: Array, rows: Rows, message: Array
    ) -> tuple[list[Array], PyTree]:
        known = _available(program, s, parameters, key, rows)
        variables = program.held(device)[1]
        known.update(zip(variables, program.state.read(device, state), strict=True))
        known.update(zip(stage.arriving, unpack_words(message, program.avals(stage.arriving)), strict=True))
        value_of, kept, overflows = stage_passes.forward(stage, known, program.schedule.has_backward)
        results = [
            value_of[t] if k in stage.results else zeros(a.shape, a.dtype)
            for k, (t, a) in enumerate(zip(wanted, program.avals(wanted), strict=True))
        ]
        new = dict(zip(stage.state, stage.new_state, strict=True))
        return program.state.write(device, [value_of[new[t]] if t in new else known[t] for t in variables]), (
            pack_words([value_of[t] for t in stage.leaving], program.message_words[0]),
            _pages([x for parts in kept.values() for x in parts], program.stash_pages),
            [*results, overflows],
        )

    return forward


def _backward(program: LockstepProgram, s: StageNumber) -> Branch:
    """The backward work of a stage, or its input part if the schedule splits it."""
    stage, kind = program.stages[s], program.schedule.backward_kind
    following = program.stages[s + 1].returning if s + 1 < len(program.stages) else ()

    def backward(
        nothing: Sequence[Array], parameters: Sequence[Array], key: Array, rows: Rows, message: Array, stash: Kept
    ) -> tuple[list[Array], PyTree]:
        known = _available(program, s, parameters, key, rows)
        cotangents = dict(zip(following, unpack_words(message, program.tangents(following)), strict=True))
        kept = _stashed(program, stage, stash)
        gradients, saved = stage_passes.backward(program.objective, stage, kind, known, kept, cotangents)
        waiting = [saved[t] for t in stage.saved] if kind is Kind.BACKWARD_INPUT else []
        return list(nothing), (
            pack_words([gradients[t] for t in stage.returning], program.message_words[1]),
            _pages(waiting, program.saved_pages),
            _gradient_buffers(program, s, gradients),
        )

    return backward


def _weight(program: LockstepProgram, s: StageNumber) -> Branch:
    stage, kind = program.stages[s], Kind.BACKWARD_WEIGHT

    def weight(
        nothing: Sequence[Array], parameters: Sequence[Array], key: Array, rows: Rows, stash: Kept, saved: Kept
    ) -> tuple[list[Array], PyTree]:
        known = _available(program, s, parameters, key, rows)
        received = dict(zip(stage.saved, saved.read(program.tangents(stage.saved)), strict=True))
        kept = _stashed(program, stage, stash)
        gradients, _ = stage_passes.backward(program.objective, stage, kind, known, kept, received)
        return list(nothing), _gradient_buffers(program, s, gradients)

    return weight


def _available(
    program: LockstepProgram, s: StageNumber, parameters: Sequence[Array], key: Array, rows: Rows
) -> dict[TensorNumber, Array]:
    """Return the inputs that no stage sends: the micro-batch, its key, parameters that the device has or borrows."""
    device = program.device(s)
    known = dict(zip((*program.objective.batch, program.objective.key), (*rows.read(), key), strict=True))
    borrowed = parameters[len(program.parameters.buffers) :]
    known.update(zip(program.shared, borrowed, strict=True))
    known.update(zip(program.held(device)[0], program.parameters.read(device, parameters), strict=True))
    return known


def _stashed(program: LockstepProgram, stage: Stage, stash: Kept) -> dict[TensorNumber, tuple[Array, ...]]:
    assert stage.vjp is not None
    stored = iter(stash.read(program.stash_avals(stage)))
    counts = dict(zip(stage.vjp.plan.stored, map(len, stage.vjp.stash_avals), strict=True))
    return {t: tuple(next(stored) for _ in range(counts[t])) for t in stage.stashed}


def _pages(values: Sequence[Array], pages: Sequence[int]) -> Array:
    """Arrays as pages of the arena, as many as the stage needs that needs most."""
    return pack_words(values, max(pages) * PAGE).reshape(max(pages), PAGE)


def _gradient_buffers(program: LockstepProgram, s: StageNumber, gradients: dict[TensorNumber, Array]) -> list[Array]:
    """The buffers of gradients with a stage's in them, and zeros elsewhere; those of shared parameters behind."""
    device = program.device(s)
    trained = program.trained(device)

    def value(t: TensorNumber, aval: Shaped, here: bool) -> Array:
        return gradients[t] if here and t in gradients else jnp.zeros(aval.shape, aval.dtype)

    own = [value(t, a, True) for t, a in zip(trained, program.avals(trained), strict=True)]
    shared = zip(program.shared_trained, program.avals(program.shared_trained), strict=True)
    return [*program.gradients.write(device, own), *(value(t, a, t not in trained).reshape(-1) for t, a in shared)]
