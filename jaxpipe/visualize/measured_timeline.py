"""Seconds of the stages of a pipeline, by real runs of their own programs."""

import numpy as np
from jax.sharding import Mesh

from jaxpipe.costs.timing import Program, time_programs
from jaxpipe.runtime import program as runtime_program
from jaxpipe.runtime.spmd.stage_branches import stage_programs
from jaxpipe.schedules import Kind, Timeline, simulate
from jaxpipe.sharding.mesh_axes import stage_devices


def measure_timeline(program: runtime_program.Program, mesh: Mesh) -> Timeline:
    """The timeline of a step from measured work: what each stage does with a micro-batch, run by itself.

    The programs are those that the executor runs in a tick, messages and stash packed as it does; each runs on the
    stage's device while all others wait, with random operands, and counts with the median of repeated runs, less what
    it takes to start any program. Not measured: sending, arena reads and writes, the sum of gradients, the optimizer,
    and what devices that work at the same time take from each other.
    """
    schedule = program.schedule
    places, programs = [], []
    for s in program.stage_numbers:
        device = program.device(s)
        for kind, work in stage_programs(program, s).items():
            places.append((kind, program.stage_replicas.per_device(device)))
            programs.append((Program(*work), stage_devices(mesh, program.stage_replicas, device)[0]))
    seconds: dict[Kind, list[float]] = {}
    for (kind, count), median in zip(places, np.median(time_programs(programs), axis=0).tolist(), strict=True):
        seconds.setdefault(kind, []).append(count * median)
    if not schedule.splits_backward:
        return simulate(schedule, forward=seconds[Kind.FORWARD], backward=seconds[Kind.BACKWARD])
    parts = seconds[Kind.BACKWARD_INPUT], seconds[Kind.BACKWARD_WEIGHT]
    return simulate(schedule, forward=seconds[Kind.FORWARD], backward_input=parts[0], backward_weight=parts[1])
