"""Slices of stashes on their way to peers and back, between the ticks of ``jaxpipe.pipeline.ticks``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax


if TYPE_CHECKING:
    from jaxpipe.pipeline.program import Program

#: A slice goes to a peer in at most so many portions: what arrives needs room of its own before it is written.
PORTIONS = 8


def landing_pages(program: "Program") -> int:
    """Pages that a device exchanges with its peers at a time."""
    return 0 if program.transport is None else sum(-(-one.pages // PORTIONS) for one in program.transport.rounds)


def exchange_seconds(program: "Program") -> float:
    """What swaps add to a step: the exchange after each tick, whether anything moves in it or not."""
    return 0.0 if program.transport is None else len(program.schedule.ticks) * program.transport.seconds


def swap_columns(program: "Program", stage: Any) -> list[Any]:
    """By tick and round, of this device: the first page of what it sends, that for what arrives, and its pages."""
    found = program.transport
    if found is None:
        return []
    table = np.zeros((3, len(program.sections), len(program.schedule.ticks), len(found.rounds)), np.int32)
    for row in found.rows:
        table[0, row.source, row.tick, row.round] = row.source_page
        table[1:, row.target, row.tick, row.round] = row.target_page, row.pages
    return list(jnp.asarray(table)[:, stage])


def swap(program: "Program", arena: Any, axis: str, columns: Sequence[Any], after: Any) -> Any:
    """The arena after each device has handed slices to its peers, and taken in what came from them.

    Args:
      program: what is run.
      arena: ``[pages, words]``.
      axis: of the mesh.
      columns: this tick's entries of ``swap_columns``.
      after: a zero that is known when the arena has been read.
    """
    assert program.transport is not None
    sent, landed, sizes = columns
    words = arena.shape[1]
    for portion in range(PORTIONS):
        arrived = []
        for k, one in enumerate(program.transport.rounds):
            step = -(-one.pages // PORTIONS)
            first, pages = portion * step, min(step, one.pages - portion * step)
            if pages > 0:
                leaving = lax.dynamic_slice(arena, (sent[k] + first, jnp.int32(0)), (pages, words))
                arrived.append((k, first, lax.ppermute(leaving, axis, one.pairs)))
        for k, first, message in arrived:
            start = (landed[k] + after + first, jnp.int32(0))
            old = lax.dynamic_slice(arena, start, message.shape)
            written = jnp.arange(first, first + len(message), dtype=jnp.int32)[:, None] < sizes[k]
            arena = lax.dynamic_update_slice(arena, jnp.where(written, message, old), start)
    return arena
