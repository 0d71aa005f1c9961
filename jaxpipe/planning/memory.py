"""Bytes that each device will reserve, from shapes alone."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe.graph import itemsize
from jaxpipe.pipeline.layout import Layout
from jaxpipe.pipeline.program import PAGE, Program, backward_branch, forward_branch
from jaxpipe.planning.liveness import peak_bytes


def predict(program: Program, optimizer: Layout, shared: Sequence[Any], batch: Sequence[Any]) -> dict[str, int]:
    """Bytes on each device, by component.

    One program runs everywhere, so every component is the largest over the stages. ``working`` is what is needed
    besides while a stage computes, or while the optimizer writes new parameters and state, at a time when the arena
    is free again.

    Args:
      program: the training program.
      optimizer: where the optimizer state lives.
      shared: optimizer state that every device has.
      batch: one replica's part of the batch.
    """
    parameters = program.parameters.bytes
    held = {
        "parameters": parameters,
        "optimizer": optimizer.bytes + sum(map(_bytes, shared)),
        "state": program.state.bytes,
        "batch": sum(map(_bytes, batch)),
        "gradients": parameters,
    }
    arena = program.arena_pages * PAGE * 4
    # What arrives, and what is being sent.
    transport = 2 * 4 * sum(program.message_words) if len(program.sections) > 1 else 0
    computing = max(working_bytes(program, s) for s in range(len(program.sections)))
    # A conditional does not write into what it reads, so new values stand beside the old until the step ends.
    updating = parameters + optimizer.bytes if len(program.sections) > 1 else parameters
    return {
        **held,
        "arena": arena,
        "transport": transport,
        "working": max(computing, updating - arena - transport),
    }


def stage_bytes(program: Program, optimizer: Layout, shared: Sequence[Any], batch: Sequence[Any]) -> list[int]:
    """Bytes that each stage would need by itself, without the others' shapes to make room for."""
    found = []
    for s, section in enumerate(program.sections):
        own = sum(map(_bytes, program.parameters.avals[s]))
        state = sum(map(_bytes, program.state.avals[s])) + sum(map(_bytes, optimizer.avals[s]))
        stash = sum(map(_bytes, program.stash_avals(section)))
        sent = sum(map(_bytes, program.avals((*section.leaving, *section.returning))))
        everywhere = sum(map(_bytes, (*shared, *batch)))
        slots = program.schedule.in_flight(s)
        found.append(2 * own + state + slots * stash + sent + everywhere + working_bytes(program, s))
    return found


def working_bytes(program: Program, s: int) -> int:
    """What a stage needs besides while it computes: the larger of its forward and its backward pass.

    The forward pass returns its stash packed, the backward pass gets a copy out of the arena. Either has a copy
    of its micro-batch.
    """
    m = program.schedule.num_microbatches
    parameters, state = (
        [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
        for layout in (program.parameters, program.state)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    rows = program.avals(program.objective.batch)
    forward, backward = (jax.ShapeDtypeStruct((n,), np.uint32) for n in program.message_words)
    copies = 2 * sum(map(_bytes, rows)) if m > 1 else 0
    if program.alone:
        stash: Any = program.stash_avals(program.sections[0])
        copy = sum(map(_bytes, stash))
    else:
        stash = jax.ShapeDtypeStruct((max(program.stash_pages), PAGE), np.uint32)
        copy = _bytes(stash)
    computing = peak_bytes(forward_branch(program, s), parameters, state, key, rows, forward)
    returning = peak_bytes(backward_branch(program, s), parameters, key, rows, stash, backward)
    return copies + max(computing, returning + copy)


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize(aval.dtype)
