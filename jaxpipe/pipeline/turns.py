"""A tick's work on one micro-batch or on several, one after the other; and the messages that it hands on.

Where every device has a stage, or several, a tick has one micro-batch for each kind of work. Where stages have teams
of devices, it has a deal (``jaxpipe.schedules.teams``): a device takes its micro-batches in turns, and neighbors
exchange their messages when all have done so.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxpipe.pipeline.columns import Work
from jaxpipe.pipeline.program import STAGE, Program, send
from jaxpipe.pipeline.words import POISON


#: ``(work on one micro-batch, what is carried on) -> (what is carried on, message, stash)``.
Body = Callable[[Work, Any], tuple[Any, Any, Any]]


def run_work(program: Program, work: Work, body: Body, carry: Any, words: int) -> tuple[Any, Any, Any]:
    """Some kind of work in a tick.

    Args:
      program: what is run.
      work: this device's entries of the table; of a deal, where its first micro-batch is.
      body: does it for one micro-batch.
      carry: what it starts from.
      words: of a message.

    Returns:
      What is carried on; the message, or ``[turns, words]``; the stash, None if there may be several.
    """
    if not program.takes_turns:
        return body(_turn(program, work, None), carry)

    def turn(k: Any, held: Any) -> Any:
        carry, messages = held
        carry, message, _ = body(_turn(program, work, k), carry)
        return carry, lax.dynamic_update_index_in_dim(messages, message, k, 0)

    messages = jnp.full((program.teams.most_turns, words), POISON)
    return *lax.fori_loop(0, _turns(program, work), turn, (carry, messages)), None


def _turns(program: Program, work: Work) -> Any:
    """How many micro-batches of a deal this device has: fewer, if it is the last one and short."""
    teams = program.teams
    width = jnp.asarray(teams.widths, jnp.int32)[program.own]
    left = program.num_microbatches - work.microbatch * teams.deal - _replica(program)
    return jnp.where(work.microbatch >= 0, jnp.clip(-(-left // width), 0, teams.deal // width), 0)


def _turn(program: Program, work: Work, k: Any) -> Work:
    """The work on one micro-batch: its number, and where its stash, message and cotangents are."""
    teams = program.teams
    if teams.single:
        return work
    first = work.microbatch * teams.deal + _replica(program)
    if k is None:
        return work._replace(microbatch=jnp.where(work.microbatch >= 0, first, -1))
    stash, saved = (jnp.asarray(pages, jnp.int32)[program.own] for pages in (program.stash_pages, program.saved_pages))
    return work._replace(
        microbatch=first + k * jnp.asarray(teams.widths, jnp.int32)[program.own],
        stash=work.stash + k * stash,
        saved=work.saved + k * saved,
        message=work.message * teams.most_turns + k,
    )


def _replica(program: Program) -> Any:
    return jnp.asarray(program.teams.replica_of, jnp.int32)[lax.axis_index(STAGE)]


def hand_on(program: Program, message: Any, inbox: Any, slot: Any, *, direct: bool, back: bool) -> Any:
    """The inbox after neighbors have exchanged their messages.

    Args:
      program: what is run.
      message: what ``run_work`` gave.
      inbox: ``[slots, words]``; a slot is as many rows as a tick has messages for a device at most.
      slot: for what arrives; -1 if nothing does that is needed.
      direct: whether all that arrives is read in the next tick, so that nothing else is in the inbox.
      back: whether messages go to the stage before.
    """
    rounds = [one.back if back else one for one in program.teams.rounds]
    if not program.takes_turns:
        pairs = _ring(program, back) if program.teams.single else rounds[0].pairs if rounds else []
        return _put(inbox, send(message, pairs), slot, direct)
    if not rounds:
        return inbox
    device, most = lax.axis_index(STAGE), program.teams.most_turns
    sent = jnp.asarray([one.sent for one in rounds], jnp.int32)[:, device]
    landed = jnp.asarray([one.landed for one in rounds], jnp.int32)[:, device]
    if direct:
        inbox = jnp.full_like(inbox, POISON)
    arrived = [send(lax.dynamic_index_in_dim(message, sent[k], keepdims=False), r.pairs) for k, r in enumerate(rounds)]
    for k, one in enumerate(arrived):
        place = jnp.where((slot >= 0) & (landed[k] >= 0), slot * most + landed[k], -1)
        inbox = _put(inbox, one, place, False)
    return inbox


def _ring(program: Program, back: bool) -> list[tuple[int, int]]:
    """From each device to the next; from the last to the first, if they have several stages."""
    count = program.num_devices
    pairs = [(s, (s + 1) % count) for s in range(count if program.schedule.num_chunks > 1 else count - 1)]
    return [(b, a) for a, b in pairs] if back else pairs


def _put(inbox: Any, message: Any, slot: Any, direct: bool) -> Any:
    """The inbox with what has arrived."""
    if direct:
        return message[None]
    place = jnp.maximum(slot, 0)
    old = lax.dynamic_index_in_dim(inbox, place, keepdims=False)
    return lax.dynamic_update_index_in_dim(inbox, jnp.where(slot >= 0, message, old), place, 0)
