"""Stashes on their way to a peer and back, between the ticks of ``jaxpipe.pipeline.program``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.schedules.swaps import peer


if TYPE_CHECKING:
    from jaxpipe.pipeline.program import Program

#: A stash goes to a peer in at most about as many pieces.
SWAP_PIECES = 8


def moved_pages(program: "Program") -> tuple[int, ...]:
    """Pages of the stashes that each device and its peer exchange."""
    if program.swaps is None:
        return (0,) * len(program.sections)
    moved = [program.swaps.moved(s) for s in range(len(program.sections))]
    return tuple(0 if s is None else program.stash_pages[s] for s in moved)


def landing_pages(program: "Program") -> int:
    """Pages that peers exchange at a time: what arrives needs room of its own before it is written."""
    return -(-max(moved_pages(program)) // SWAP_PIECES)


def swap_columns(program: "Program", stage: Any) -> list[Any]:
    """By tick, the first pages of what this device sends to its peer, and of what comes from there; -1 for none."""
    swaps, ticks = program.swaps, len(program.schedule.ticks)
    if swaps is None:
        return []
    table = [swaps.columns(s, ticks, program.stash_pages) for s in range(len(program.sections))]
    columns = jnp.asarray(np.asarray(table, np.int32))[stage]
    return [columns[0], columns[1]]


def swap(program: "Program", arena: Any, stage: Any, axis: str, columns: Sequence[Any], after: Any) -> Any:
    """The arena after each device has handed a stash to its peer, and taken in what came from there.

    Args:
      program: what is run.
      arena: ``[pages, words]``.
      stage: this device's number along ``axis``.
      axis: of the mesh.
      columns: this tick's entries of ``swap_columns``.
      after: a zero that is known when the arena has been read.
    """
    sent, landed = columns[0], columns[1] + after
    count, words = len(program.sections), arena.shape[1]
    pairs = [(s, peer(s, count)) for s in range(count) if peer(s, count) != s]
    moved, step = moved_pages(program), landing_pages(program)
    mine = jnp.asarray(moved, jnp.int32)[stage]
    for first in range(0, max(moved), step):
        pages = min(step, max(moved) - first)
        leaving = lax.dynamic_slice(arena, (jnp.maximum(sent, 0) + first, jnp.int32(0)), (pages, words))
        arrived = lax.ppermute(leaving, axis, pairs)
        start = (jnp.maximum(landed, 0) + first, jnp.int32(0))
        old = lax.dynamic_slice(arena, start, (pages, words))
        written = (jnp.arange(first, first + pages, dtype=jnp.int32)[:, None] < mine) & (landed >= 0)
        arena = lax.dynamic_update_slice(arena, jnp.where(written, arrived, old), start)
    return arena
