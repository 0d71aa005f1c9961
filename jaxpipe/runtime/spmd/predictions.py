"""Predictions for a plan: the seconds of a step, and the bytes that each device will reserve, from shapes alone."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpipe.array_types import PyTree, Shaped
from jaxpipe.graph.graph import itemsize
from jaxpipe.graph.liveness import peak_bytes
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.sparse_exchange import exchanging_bytes
from jaxpipe.runtime.spmd.stage_branches import Branch, Kept, Rows, stage_branch
from jaxpipe.schedules.simulate import Timeline, simulate
from jaxpipe.schedules.table import Kind, StageNumber


def lockstep_timeline(
    program: Program, work: Sequence[Sequence[float]], send: Callable[[int], float], bytes_per_second: float
) -> Timeline:
    """Return the timeline of a step, with the cost of every tick besides its work.

    Args:
      program: the stages and their schedule.
      work: by stage, seconds forward, backward for inputs and for weights.
      send: seconds of a message of some bytes over the slowest link between neighbors.
      bytes_per_second: of a device's memory.
    """
    lockstep = LockstepProgram.of(program)
    each = sum(send(4 * n) for n in lockstep.message_words) + _moved_bytes(lockstep) / bytes_per_second
    forward, first, second = work
    return simulate(
        program.schedule,
        forward=forward,
        backward_input=first,
        backward_weight=second,
        communication=each,
        lockstep=True,
    )


def _moved_bytes(program: LockstepProgram) -> int:
    """Bytes that every device reads and writes in a tick, whether it has work or not.

    A stash and what waits with it go into the arena where something was, and are copied out of it. Each part of a split
    backward pass adds to all sums of gradients; work is charged for one of them.
    """
    splits = program.schedule.splits_backward
    pages = (7 if splits else 5) * max(program.stash_pages) + 5 * max(program.saved_pages)
    return 4 * PAGE * pages + (3 * program.sums.bytes if splits else 0)


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
    """Return what a stage needs besides while it computes: the largest of its passes.

    The forward pass returns its stash packed, the backward pass reads it out of the arena. Messages that have been made
    wait until all work of a tick is done.
    """
    written, needed = 0, 0
    for message, (branch, operands) in zip((*program.message_words, 0), stage_programs(program, s), strict=False):
        needed = max(needed, written + peak_bytes(branch, *operands))
        written += 4 * message
    return needed


def stage_programs(program: LockstepProgram, s: StageNumber) -> list[tuple[Branch, tuple[PyTree, ...]]]:
    """Return a stage's work, each kind with the shapes of its operands."""
    parameters, state = (
        [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
        for layout in (program.parameters, program.state)
    )
    number, lead = jax.ShapeDtypeStruct((), jnp.int32), program.num_microbatches
    batch = [jax.ShapeDtypeStruct((lead, *a.shape), a.dtype) for a in program.avals(program.objective.batch)]
    key = jax.eval_shape(lambda: jax.random.key(0))
    common = parameters + program.avals(program.shared), key, Rows._make((batch, number))
    ahead, back = (jax.ShapeDtypeStruct((n,), jnp.uint32) for n in program.message_words)
    pages = max(*program.stash_pages, *program.saved_pages)
    kept = Kept._make((jax.ShapeDtypeStruct((pages, PAGE), jnp.uint32), number))
    work: list[tuple[Branch, tuple[PyTree, ...]]] = [
        (stage_branch(program, Kind.FORWARD, s), (state, *common, ahead)),
        (stage_branch(program, program.schedule.backward_kind, s), ([], *common, back, kept)),
    ]
    if program.schedule.splits_backward:
        work.append((stage_branch(program, Kind.BACKWARD_WEIGHT, s), ([], *common, kept, kept)))
    return work


def _bytes(aval: Shaped) -> int:
    return math.prod(aval.shape) * itemsize(aval.dtype)
