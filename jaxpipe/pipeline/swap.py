"""Slices of stashes on their way to peers or the host and back, between the ticks of ``jaxpipe.pipeline.ticks``.

What is in the host's memory is a second arena, ``[host pages, words]``. XLA keeps it there as long as nothing is
computed with it: it is only written by ``dynamic_update_slice`` and read by ``dynamic_slice``, with a transfer right
before or behind.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.schedules.swaps import HOST
from jaxpipe.schedules.transport import Transport


if TYPE_CHECKING:
    from jaxpipe.pipeline.program import Program

#: A slice is sent in at most so many portions: what arrives needs room of its own before it is written.
PORTIONS = 8


def landing_pages(program: "Program") -> int:
    """Pages that a device exchanges with its peers and its host at a time."""
    return 0 if program.transport is None else sum(-(-one.pages // PORTIONS) for one in program.transport.rounds)


def exchange_seconds(program: "Program") -> float:
    """What swaps add to a step: the exchange after each tick, whether anything moves in it or not."""
    return 0.0 if program.transport is None else len(program.schedule.ticks) * program.transport.seconds


def swap_columns(found: Transport, num_stages: int, num_ticks: int, stage: Any) -> list[Any]:
    """By tick and round, of this device: the first page of what it sends, that for what arrives, and its pages.

    Behind these, of the host's memory: the first page for what is sent, and that of what arrives.
    """
    table = np.zeros((5, num_stages, num_ticks, len(found.rounds)), np.int32)
    if found.host:
        # Where nothing has to move, something goes to the spare slot.
        table[3] = found.host - found.rounds[-1].pages
    for row in found.rows:
        when = row.tick, row.round
        if row.source == HOST:
            table[4, row.target][when] = row.source_page
        else:
            table[0, row.source][when] = row.source_page
        if row.target == HOST:
            table[3, row.source][when] = row.target_page
        else:
            table[1:3, row.target, *when] = row.target_page, row.pages
    return list(jnp.asarray(table)[:, stage])


def swap(
    found: Transport, arena: Any, host: Any, axis: str, columns: Sequence[Any], never: Any, after: Any
) -> tuple[Any, Any]:
    """Both arenas after each device has handed slices to its peers and its host, and taken in what came from them.

    Args:
      found: what moves.
      arena: ``[pages, words]``.
      host: ``[pages, words]``, in the host's memory; None if nothing goes there.
      axis: of the mesh.
      columns: this tick's entries of ``swap_columns``.
      never: false, which XLA does not know.
      after: a number that is known when the arena has been read.
    """
    sent, landed, sizes, there, back = columns
    words = arena.shape[1]

    def zero(numbers: Sequence[Any]) -> Any:
        """A zero that is known when some numbers are."""
        return jnp.where(never, sum(lax.convert_element_type(x, jnp.int32) for x in numbers), 0)

    for portion in range(PORTIONS):
        arrived = []
        for k, one in enumerate(found.rounds):
            step = -(-one.pages // PORTIONS)
            first, pages = portion * step, min(step, one.pages - portion * step)
            if pages > 0:
                leaving = lax.dynamic_slice(arena, (sent[k] + first, jnp.int32(0)), (pages, words))
                if one.pairs:
                    message = lax.ppermute(leaving, axis, one.pairs)
                else:
                    # Written first and read from what that gives: so both are done in the same buffer, and the arena is
                    # read before what arrives is written over it.
                    leaving = jax.device_put(leaving, jax.memory.Space.Host)
                    host = lax.dynamic_update_slice(host, leaving, (there[k] + first, jnp.int32(0)))
                    message = lax.dynamic_slice(host, (back[k] + first, jnp.int32(0)), (pages, words))
                    message = jax.device_put(message, jax.memory.Space.Device)
                arrived.append((k, first, message))
        # XLA copies the arena unless it sees that all is read before anything is written over it.
        read = zero([after, *(message[0, 0] for _, _, message in arrived)])
        for k, first, message in arrived:
            start = (landed[k] + read + first, jnp.int32(0))
            old = lax.dynamic_slice(arena, start, message.shape)
            written = jnp.arange(first, first + len(message), dtype=jnp.int32)[:, None] < sizes[k]
            arena = lax.dynamic_update_slice(arena, jnp.where(written, message, old), start)
    return arena, host
