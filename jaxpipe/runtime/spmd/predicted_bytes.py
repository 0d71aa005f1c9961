"""Bytes that each device will reserve, from shapes alone."""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree, Shaped, TensorNumber
from jaxpipe.graph.graph import Graph, itemsize, run
from jaxpipe.graph.liveness import peak_bytes
from jaxpipe.runtime.executable_plan import Update
from jaxpipe.runtime.gradient_precision import add_gradient
from jaxpipe.runtime.overwrite_state import Renewal, renewals
from jaxpipe.runtime.program import Program
from jaxpipe.runtime.spmd.lockstep_program import PAGE, LockstepProgram
from jaxpipe.runtime.spmd.sparse_exchange import exchanging_bytes
from jaxpipe.runtime.spmd.stage_branches import stage_programs, touched
from jaxpipe.schedules.table import Kind, StageNumber


def predict(program: Program, update: Update, batch: Sequence[Shaped]) -> dict[str, int]:
    """Bytes on each device, by component.

    One program runs everywhere, so every component is the largest over the stages. ``transport`` is where messages
    wait. ``working`` is what is needed besides while a stage computes or devices send, or while replicas
    exchange gradients or the optimizer writes new parameters and state, at a time when the arena is free again.
    Gradients of a single micro-batch are not added up, and count as working memory.
    """
    program, by_stage = LockstepProgram.of(program), update.by_stage
    shared = [a for a, owner in zip(by_stage.state_avals, by_stage.state_stage, strict=True) if owner is None]
    held = {
        "parameters": program.parameters.bytes,
        "optimizer": program.slots(update).bytes + sum(map(_bytes, shared)),
        "state": program.state.bytes,
        "batch": sum(map(_bytes, batch)),
        "gradients": program.sums.bytes if _adds_up(program) else 0,
    }
    if program.shared:
        # Values, gradients, and the words of both while they are exchanged.
        sums = program.sum_avals[len(program.gradients.buffers) :]
        held["shared"] = 2 * (sum(map(_bytes, program.avals(program.shared))) + sum(map(_bytes, sums)))
    exchanging = 0
    if update.exchange is not None:
        held["residual"] = program.residuals.bytes
        exchanging = exchanging_bytes(program, update.exchange)
    arena = program.arena_pages * PAGE * 4
    transport = 4 * program.inbox_words if len(program.stages) > 1 else 0
    computing = max(working_bytes(program, s) for s in program.stage_numbers)
    sending = 2 * 4 * sum(program.message_words)
    updating = max(updating_bytes(update, s) for s in range(program.num_devices))
    if not _adds_up(program):
        updating, exchanging = updating + program.gradients.bytes, exchanging + program.gradients.bytes
    return {
        **held,
        "stash": arena,
        "messages": transport,
        "temporaries": max(computing, sending, exchanging - arena - transport, updating - arena - transport),
    }


def working_bytes(program: LockstepProgram, s: StageNumber) -> int:
    """Return what a stage needs besides while it computes: the larger of its forward and its backward pass.

    The forward pass returns its stash packed, the backward pass reads it out of the arena; a stage that is alone goes
    through both at once. A message that has been made and not yet been sent waits besides.
    """
    work = stage_programs(program, s)
    (forward, ahead), (backward, behind) = work[Kind.FORWARD], work[program.schedule.backward_kind]
    if program.alone:

        def both(ahead: PyTree, message: Array, sums: Sequence[Array] | None = None) -> PyTree:
            sent, stash, state, results = forward(*ahead)
            parameters, _, key, rows, _ = ahead
            back, _, steps = backward(parameters, key, rows, stash, message)
            if sums is not None:
                added = zip(touched(program, Kind.BACKWARD), steps, strict=True)
                steps = [add_gradient(sums[k], step) for k, step in added]
            return sent, state, results, back, steps

        return peak_bytes(both, ahead, behind[-1], donated=program.sum_avals if _adds_up(program) else ())
    sizes = [4 * n for n in program.message_words]
    waiting = 0 if program.sends_early else sizes[0]
    needed = max(peak_bytes(forward, *ahead), waiting + peak_bytes(backward, *behind))
    if program.schedule.splits_backward:
        late, operands = work[Kind.BACKWARD_WEIGHT]
        needed = max(needed, waiting + sizes[1] + peak_bytes(late, *operands))
    return needed


def _adds_up(program: LockstepProgram) -> bool:
    """Return whether gradients of several micro-batches are added up; XLA takes a loop apart that runs once."""
    return not program.alone or program.num_microbatches > 1


def updating_bytes(update: Update, s: int) -> int:
    """Return the optimizer's working bytes in a stage, while it writes each new value over the old one."""
    by_stage = update.by_stage
    graph = by_stage.graph
    common = [t for op in graph.operators for t in op.outputs if t not in by_stage.stage_of]
    shared = [t for t, owner in zip(by_stage.state, by_stage.state_stage, strict=True) if owner is None]
    everywhere = {*graph.constants, *common, *shared, *(t for ts in by_stage.exchanged for t in ts)}
    peaks: dict[Hashable, int] = {}
    beside, copied = 0, set()
    for step in renewals(by_stage, s, everywhere):
        others = [t for t in step.reads if t != step.old]
        avals = [graph.tensors[t].aval for t in (*others, step.old)]
        alike = tuple((a.shape, a.dtype) for a in avals), tuple(op.name for op in step.operators)
        if alike not in peaks:

            def renew(
                values: Sequence[Array], old: Array, step: Renewal = step, others: Sequence[TensorNumber] = others
            ) -> Array:
                env = {**dict(zip(others, values, strict=True)), step.old: old}
                run(step.operators, env)
                return env[step.new]

            peaks[alike] = peak_bytes(renew, avals[:-1], donated=avals[-1])
        if not _compat.barriers_hold() and (not _reads_once(step, graph) or not copied.isdisjoint(step.reads)):
            beside += _bytes(avals[-1])
            copied.update(t for op in step.operators for t in op.outputs if t != step.new)
    return beside + max(peaks.values(), default=0)


def _reads_once(step: Renewal, graph: Graph) -> bool:
    """Return whether operators read each array once; if not, early XLA computes with other shapes, and copies."""
    counts = Counter(t for op in step.operators for t in op.inputs)
    return all(n == 1 or len(graph.tensors[t].shape) < 2 for t, n in counts.items() if t in step.reads)


def _bytes(aval: Shaped) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize(aval.dtype)
