"""Predictions for a plan: the seconds of a step, and the bytes that each device will reserve, from shapes alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxpipe.array_types import Shaped
from jaxpipe.graph.liveness import peak_bytes
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.tick_loop import Given, Made, stage_work
from jaxpipe.runtime.spmd.tick_table import ARRIVED, KEPT, RETURNED, SAVED, STASH
from jaxpipe.runtime.stages import Program
from jaxpipe.schedules.simulate import Timeline
from jaxpipe.schedules.table import Kind, StageNumber


def lockstep_timeline(
    program: Program, work: Sequence[Sequence[float]], send: Callable[[int], float], bytes_per_second: float
) -> Timeline:
    """Return the timeline of a step, with the cost of every tick besides its work.

    A stash and what waits with it go into the arena where something was, and are copied out of it, whether a device has
    work or not. Each part of a split backward pass adds to all sums of gradients; work is charged for one of them.

    Args:
      program: the stages and their schedule.
      work: by stage, seconds forward, backward for inputs and for weights.
      send: seconds of a message of some bytes over the slowest link between neighbors.
      bytes_per_second: of a device's memory.
    """
    lockstep, splits = LockstepProgram.of(program), program.schedule.splits_backward
    window = [4 * PAGE * pages for pages in lockstep.windows]
    moved = (7 if splits else 5) * window[STASH] + 5 * window[SAVED] + (3 * lockstep.sums.bytes if splits else 0)
    communication = send(window[ARRIVED]) + send(window[RETURNED]) + moved / bytes_per_second
    forward, first, second = work
    return program.schedule.simulate(
        forward=forward, backward_input=first, backward_weight=second, communication=communication, lockstep=True
    )


def predict(planned: Program, update: Update, batch: Sequence[Shaped]) -> dict[str, int]:
    """Bytes on each device, by component.

    One program runs everywhere, so every component is the largest over the stages. ``messages`` is where messages
    wait. ``temporaries`` is what is needed besides while a stage computes or devices send, or while replicas exchange
    gradients or the optimizer writes new parameters and state, at a time when the arena is free again.
    """
    program, by_stage = LockstepProgram.of(planned, update=update), update.by_stage
    sizes, sums = {field: layout.bytes for field, layout in program.state.items()}, program.sums
    owned = list(zip(by_stage.state_avals, by_stage.state_stage, strict=True))
    held = {
        "parameters": sizes["parameters"],
        "optimizer": sizes["optimizer"] + _bytes(a for a, owner in owned if owner is None),
        "state": sizes["variables"],
        "batch": _bytes(batch),
        "gradients": sums.bytes,
    }
    if program.lent:
        # Values, gradients, and the words of both while they are exchanged.
        held["shared"] = 2 * sum(_bytes(program.added(x)[1].values()) for x in (program.parameters, sums))
    # A new value is made of a gradient and of state, and written over the old one before the next is made.
    written = [program.sum_bytes([t]) for d in program.device_numbers for t in program.trained(d)]
    at_the_end = 2 * max([*written, *(_bytes([a]) for a, owner in owned if owner is not None)], default=0)
    if (exchange := update.exchange or update.outer) is not None:
        # Messages both ways, and new values beside the old ones: a conditional does not write over what it reads.
        messages = max((1 + exchange.replicas) * gathered + 2 * reduced for gathered, reduced in exchange.traffic)
        if update.outer is not None:
            held["outer"] = sizes["outer"]
            new = sizes["outer"] + sizes["residual"] + sizes["parameters"] - sums.bytes  # where gradients were
        else:
            # The replica's own gradients, averages, new residuals.
            new = sums.bytes + program.gradients.bytes + sizes["residual"] * (program.num_devices > 1)
        held["residual"] = sizes["residual"]
        at_the_end = max(at_the_end, messages + new)
    mail, stash = (4 * PAGE * pages for pages in program.table.pages)
    sent = 4 * PAGE * (program.windows[ARRIVED] + program.windows[RETURNED])
    computing = max(working_bytes(program, s) for s in program.stage_numbers)
    temporaries = max(computing, 2 * sent, at_the_end - stash - mail)
    return {**held, "stash": stash, "messages": mail, "temporaries": temporaries}


def working_bytes(program: LockstepProgram, s: StageNumber) -> int:
    """Return the bytes that a stage needs besides while it computes: those of the largest of its passes.

    The forward pass returns its stash packed, the backward pass reads it out of the arena. Messages that have been made
    wait until all work of a tick is done.
    """
    waiting, needed = 0, 0
    for (function, given), sent in zip(stage_programs(program, s), (ARRIVED, RETURNED, RETURNED), strict=False):
        needed = max(needed, waiting + peak_bytes(function, given))
        waiting += 4 * PAGE * program.windows[sent]
    return needed


def stage_programs(program: LockstepProgram, s: StageNumber) -> Iterator[tuple[Callable[[Given], Made], Given]]:
    """Yield the work of a stage of each kind, and the shapes that it is given; of the arena, what it reads at once."""
    leaves, count = program.avals(program.objective.batch), program.num_microbatches
    batch = [jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in leaves]
    pages = [jax.ShapeDtypeStruct((window, PAGE), jnp.uint32) for window in program.windows]
    row = jax.ShapeDtypeStruct((2 + len(KEPT),), jnp.int32)
    arena, key = max(pages[STASH:], key=lambda x: x.size), jax.eval_shape(lambda: jax.random.key(0))
    for kind in program.schedule.kinds if program.trains(s) else (Kind.FORWARD,):
        state, what = (program.variables.buffers, ARRIVED) if kind is Kind.FORWARD else ((), RETURNED)
        given = *program.added(program.parameters), state, batch, pages[what], arena, key, row
        yield partial(stage_work, program, kind, s), Given._make(given)


def _bytes(avals: Iterable[Shaped]) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
