"""Stashes on their way between peers, inside the tick loop (see ``jaxpipe.schedules.swaps``)."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline.program import PAGE, Program, send
from jaxpipe.schedules.swaps import peer


#: A stash goes to a peer in at most about as many pieces.
SWAP_PIECES = 8


def moved_pages(program: Program) -> tuple[int, ...]:
    """Pages of the stashes that each device and its peer exchange."""
    if program.swaps is None:
        return (0,) * len(program.sections)
    moved = [program.swaps.moved(s) for s in range(len(program.sections))]
    return tuple(0 if s is None else program.stash_pages[s] for s in moved)


def landing_pages(program: Program) -> int:
    """Pages that peers exchange at a time: what arrives needs room of its own before it is written."""
    return -(-max(moved_pages(program)) // SWAP_PIECES)


def swap(program: Program, arena: Any, stage: Any, sent: Any, landed: Any) -> Any:
    """The arena after each device has handed a stash to its peer, and taken in what came from there."""
    count = len(program.sections)
    pairs = [(s, peer(s, count)) for s in range(count) if peer(s, count) != s]
    moved, step = moved_pages(program), landing_pages(program)
    mine = jnp.asarray(moved, jnp.int32)[stage]
    for first in range(0, max(moved), step):
        pages = min(step, max(moved) - first)
        leaving = lax.dynamic_slice(arena, (jnp.maximum(sent, 0) + first, jnp.int32(0)), (pages, PAGE))
        arrived = send(leaving, pairs)
        start = (jnp.maximum(landed, 0) + first, jnp.int32(0))
        old = lax.dynamic_slice(arena, start, (pages, PAGE))
        written = (jnp.arange(first, first + pages, dtype=jnp.int32)[:, None] < mine) & (landed >= 0)
        arena = lax.dynamic_update_slice(arena, jnp.where(written, arrived, old), start)
    return arena
