"""Bytes that each device will reserve, from shapes alone."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpipe.array_types import PyTree, Shaped
from jaxpipe.graph.graph import itemsize
from jaxpipe.graph.liveness import peak_bytes
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.sparse_exchange import exchanging_bytes
from jaxpipe.runtime.spmd.stage_branches import Kept, Rows, stage_branch
from jaxpipe.schedules.table import Kind, StageNumber


def predict(planned: Program, update: Update, batch: Sequence[Shaped]) -> dict[str, int]:
    """Bytes on each device, by component.

    One program runs everywhere, so every component is the largest over the stages. ``messages`` is where messages
    wait. ``temporaries`` is what is needed besides while a stage computes or devices send, or while replicas exchange
    gradients or the optimizer writes new parameters and state, at a time when the arena is free again.
    """
    program, by_stage = LockstepProgram.of(planned), update.by_stage
    slots = program.slots(update)
    shared = [a for a, owner in zip(by_stage.state_avals, by_stage.state_stage, strict=True) if owner is None]
    held = {
        "parameters": program.parameters.bytes,
        "optimizer": slots.bytes + sum(map(_bytes, shared)),
        "state": program.state.bytes,
        "batch": sum(map(_bytes, batch)),
        "gradients": program.sums.bytes,
    }
    if program.shared:
        # Values, gradients, and the words of both while they are exchanged.
        sums = program.sum_avals[len(program.gradients.buffers) :]
        held["shared"] = 2 * (sum(map(_bytes, program.avals(program.shared))) + sum(map(_bytes, sums)))
    exchanging = 0
    if update.exchange is not None:
        held["residual"] = program.residuals.bytes
        exchanging = exchanging_bytes(program, update.exchange)
    arena = program.table.arena_pages * PAGE * 4
    words = program.message_words
    waiting = 4 * sum(count * n for count, n in zip(program.table.inbox_slots, words, strict=True))
    computing = max(working_bytes(program, s) for s in program.stage_numbers)
    # A new value is made of a gradient and of state, and written over the old one before the next is made.
    written = (aval for layout in (program.sums, slots) for stage in layout.avals for aval in stage)
    updating = 2 * max(map(_bytes, written), default=0)
    return {
        **held,
        "stash": arena,
        "messages": waiting,
        "temporaries": max(computing, 2 * 4 * sum(words), max(exchanging, updating) - arena - waiting),
    }


def working_bytes(program: LockstepProgram, s: StageNumber) -> int:
    """Return what a stage needs besides while it computes: the larger of its forward and its backward pass.

    The forward pass returns its stash packed, the backward pass reads it out of the arena. Messages that have been made
    wait until all work of a tick is done.
    """
    parameters, state = (
        [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
        for layout in (program.parameters, program.state)
    )
    number, lead = jax.ShapeDtypeStruct((), jnp.int32), program.num_microbatches
    batch = [jax.ShapeDtypeStruct((lead, *a.shape), a.dtype) for a in program.avals(program.objective.batch)]
    common = (parameters + program.avals(program.shared), jax.eval_shape(lambda: jax.random.key(0)))
    common = *common, Rows._make((batch, number))
    ahead, back = (jax.ShapeDtypeStruct((n,), jnp.uint32) for n in program.message_words)
    pages = max(*program.stash_pages, *program.saved_pages)
    kept = Kept._make((jax.ShapeDtypeStruct((pages, PAGE), jnp.uint32), number))
    kind = program.schedule.backward_kind
    needed = peak_bytes(stage_branch(program, Kind.FORWARD, s), state, *common, ahead)
    work: list[tuple[Kind, int, tuple[PyTree, Kept]]] = [(kind, _bytes(ahead), (back, kept))]
    if program.schedule.splits_backward:
        work.append((Kind.BACKWARD_WEIGHT, _bytes(ahead) + _bytes(back), (kept, kept)))
    for kind, messages, operands in work:
        needed = max(needed, messages + peak_bytes(stage_branch(program, kind, s), [], *common, *operands))
    return needed


def _bytes(aval: Shaped) -> int:
    return math.prod(aval.shape) * itemsize(aval.dtype)
