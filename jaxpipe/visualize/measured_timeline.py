"""Seconds of the stages of a pipeline, by real runs of their own programs."""

from jax.sharding import Mesh

from jaxpipe.costs.measured_seconds import Stopwatch
from jaxpipe.costs.operator_groups import Program as Timed
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.stage_branches import stage_programs
from jaxpipe.schedules import Kind, Timeline, simulate
from jaxpipe.sharding.mesh_axes import stage_devices


def measure_timeline(program: Program, mesh: Mesh) -> Timeline:
    """The timeline of a step from measured work: what each stage does with a micro-batch, run by itself.

    The programs are those that the executor runs in a tick, messages and stash packed as it does; each runs on the
    stage's device while all others wait, with random operands, and counts with the median of repeated runs, less what
    it takes to start any program. Not measured: sending, arena reads and writes, the sum of gradients, the optimizer,
    and what devices that work at the same time take from each other.
    """
    schedule = program.schedule
    watches = [Stopwatch(stage_devices(mesh, program.stage_replicas, d)[0]) for d in range(program.num_devices)]
    seconds: dict[Kind, list[float]] = {}
    for s in program.stage_numbers:
        for kind, work in stage_programs(program, s).items():
            device = program.device(s)
            median = watches[device].time(Timed(*work)).median
            seconds.setdefault(kind, []).append(program.stage_replicas.per_device(device) * median)
    if not schedule.splits_backward:
        return simulate(schedule, forward=seconds[Kind.FORWARD], backward=seconds[Kind.BACKWARD])
    parts = seconds[Kind.BACKWARD_INPUT], seconds[Kind.BACKWARD_WEIGHT]
    return simulate(schedule, forward=seconds[Kind.FORWARD], backward_input=parts[0], backward_weight=parts[1])
