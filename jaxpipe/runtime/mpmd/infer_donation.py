"""Finds the operands whose memory a task may write over: those that nobody reads afterwards."""

from dataclasses import replace

from jaxpipe.runtime.mpmd.instructions import Call, Join, Split
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import StepGraph


def infer_donation(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return the graph with ``donated``: what every call of a task may write over.

    Parts of an array share its memory, and nobody may write over them. What exists before the step is written over by
    tasks that consume it alone, and with its own new value: XLA pairs operands and results by shape.
    """
    last: dict[int, int] = {}
    shared: set[int] = set()
    for k, instruction in enumerate(graph.instructions):
        last.update(dict.fromkeys(instruction.reads, k))
        if isinstance(instruction, Split) or (
            isinstance(instruction, Join) and not shared.isdisjoint(instruction.reads)
        ):
            shared.update(instruction.writes)
    for instruction in reversed(graph.instructions):
        if isinstance(instruction, Split):
            (whole,) = instruction.reads
            last[whole] = max(last[whole], *(last.get(part, -1) for part in instruction.writes))
    lasting, given = set(graph.outputs.values()), set(graph.inputs.values())
    donated: dict[int, frozenset[int]] = {}
    for k, call in enumerate(graph.instructions):
        if not isinstance(call, Call):
            continue
        task = graph.tasks[call.task]
        free = frozenset(
            position
            for position, number in enumerate(call.reads)
            if last[number] == k
            and number not in lasting
            and call.reads.count(number) == 1
            and number not in shared
            and (task.reads[position] in task.writes if task.consumes else number not in given)
        )
        donated[call.task] = donated.get(call.task, free) & free
    return replace(graph, donated=tuple(donated.get(k, frozenset()) for k in range(len(graph.tasks))))
