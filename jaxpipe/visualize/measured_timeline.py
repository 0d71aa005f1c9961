"""Seconds of the stages of a pipeline, by real runs of their own programs."""

import numpy as np
from jax.sharding import Mesh

from jaxpipe.array_types import PyTree
from jaxpipe.costs.timing import TimedProgram, time_programs
from jaxpipe.runtime.stage_passes import Stash, Values, stage_backward, stage_forward
from jaxpipe.runtime.stages import Program
from jaxpipe.schedules import Kind, Timeline
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import stage_devices


def measure_timeline(program: Program, mesh: Mesh, lockstep: bool) -> Timeline:
    """The timeline of a step from measured work: what each stage does with a micro-batch, run by itself.

    Each pass runs on the stage's device while all others wait, with random operands, and counts with the median of
    repeated runs, less what it takes to start any program. Not measured: sending, the sum of gradients, the optimizer,
    what devices that work at the same time take from each other, and in one program for all devices what moves a stash.
    """
    schedule, kinds = program.schedule, program.schedule.kinds
    seconds: dict[Kind, list[float]] = {kind: [0.0] * len(program.stages) for kind in kinds}
    work = [(s, kind) for s in program.stage_numbers for kind in kinds if kind is Kind.FORWARD or s >= schedule.frozen]
    programs = []
    for s, kind in work:
        programs.append((_pass(program, s, kind), stage_devices(mesh, program.stage_replicas, program.device(s))[0]))
    for (s, kind), median in zip(work, np.median(time_programs(programs), axis=0).tolist(), strict=True):
        seconds[kind][s] = program.stage_replicas.per_device(program.device(s)) * median
    return schedule.simulate(
        forward=seconds[Kind.FORWARD],
        backward_input=seconds[schedule.backward_kind],
        backward_weight=seconds.get(Kind.BACKWARD_WEIGHT, 0.0),
        lockstep=lockstep,
    )


def _pass(program: Program, s: StageNumber, kind: Kind) -> TimedProgram:
    """Return a pass of a stage over a micro-batch, with the shapes of its operands."""
    stage, graph = program.stages[s], program.stages[s].graph
    inputs = dict(zip(graph.inputs, program.avals(graph.inputs), strict=True))
    if kind is Kind.FORWARD:

        def forward(values: Values) -> PyTree:
            return stage_forward(stage, values, program.schedule.has_backward)

        return TimedProgram(forward, (inputs,))
    known = {t: inputs[t] for t in (*stage.programs.parameters, *stage.used)}
    received = program.tangents(program.received(s, kind))

    def backward(known: Values, stash: Stash, received: Values) -> PyTree:
        return stage_backward(program.objective, stage, kind, known, stash, received)

    return TimedProgram(backward, (known, stage.stashed, received))
