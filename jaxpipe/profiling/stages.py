"""What the stages of a pipeline take, by real runs of their own programs."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.pipeline.axes import stage_devices
from jaxpipe.pipeline.branches import backward_branch, forward_branch, given_avals, weight_branch
from jaxpipe.pipeline.program import Program
from jaxpipe.profiling.groups import Program as Timed
from jaxpipe.profiling.measured import Stopwatch
from jaxpipe.schedules import Kind, Timeline, simulate


def measure_timeline(program: Program, mesh: Mesh) -> Timeline:
    """The timeline of a step from measured work: what each stage does with a micro-batch, run by itself.

    The programs are those that the executor runs in a tick, messages and stash packed as it does; each runs on the
    stage's device while all others wait, with random operands, and counts with the median of repeated runs, less what
    it takes to start any program. Not measured: sending, arena reads and writes, the sum of gradients, the optimizer,
    and what devices that work at the same time take from each other.

    Args:
      mesh: with an axis ``stage``; the first replica is measured.
    """
    schedule = program.schedule
    watches = [Stopwatch(stage_devices(mesh, program.teams, d)[0]) for d in range(program.num_devices)]
    seconds: dict[Kind, list[float]] = {}
    for s in range(len(program.sections)):
        for kind, timed in stage_work(program, s).items():
            device = program.device(s)
            median = watches[device].time(timed).median
            seconds.setdefault(kind, []).append(program.teams.turns(device) * median)
    if not schedule.splits_backward:
        return simulate(schedule, forward=seconds[Kind.FORWARD], backward=seconds[Kind.BACKWARD])
    parts = seconds[Kind.BACKWARD_INPUT], seconds[Kind.BACKWARD_WEIGHT]
    return simulate(schedule, forward=seconds[Kind.FORWARD], backward_input=parts[0], backward_weight=parts[1])


def stage_work(program: Program, s: int) -> dict[Kind, Timed]:
    """What a stage does with a micro-batch, by kind of work, as programs of their own."""
    section = program.sections[s]
    parameters, state = (
        [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in layout.buffers]
        for layout in (program.parameters, program.state)
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    forward, backward = (jax.ShapeDtypeStruct((n,), np.uint32) for n in program.message_words)
    rows, kept = given_avals(program)
    stash: Any = program.stash_avals(section) if program.alone else kept
    work = {Kind.FORWARD: Timed(forward_branch(program, s), (parameters, state, key, rows, forward))}
    work[program.schedule.backward_kind] = Timed(backward_branch(program, s), (parameters, key, rows, stash, backward))
    if program.schedule.splits_backward:
        work[Kind.BACKWARD_WEIGHT] = Timed(weight_branch(program, s), (parameters, key, rows, stash, kept))
    return work
