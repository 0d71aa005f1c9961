"""Leaves out what nobody reads: results of tasks, and with them what these read; copies, tasks, inputs."""

from collections import defaultdict
from dataclasses import replace

from jaxpipe.runtime.mpmd.instructions import Call, Instruction, Send
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import StepGraph, Task
from jaxpipe.runtime.mpmd.trace_task import Traces, trim_task


def remove_unread(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return a graph of tasks that write what is read.

    Calls of one task write the same results: those that are read after any of them.
    """
    tasks = list(graph.tasks)
    while True:
        instructions, needed = _needed(graph)
        written: dict[int, set[int]] = defaultdict(set)
        for call in instructions:
            if isinstance(call, Call):
                written[call.task].update(k for k, number in enumerate(call.writes) if number in needed)
        reads: dict[int, tuple[int, ...]] = {}
        for task, kept in written.items():
            if len(kept) < len(tasks[task].writes):
                tasks[task], reads[task] = _trimmed(tasks[task], frozenset(kept), layout.planned.traces)
        graph = replace(
            graph,
            tasks=tuple(tasks),
            instructions=tuple(
                replace(
                    x,
                    reads=tuple(x.reads[k] for k in reads[x.task]),
                    writes=tuple(x.writes[k] for k in sorted(written[x.task])),
                )
                if isinstance(x, Call) and x.task in reads
                else x
                for x in instructions
            ),
        )
        if not reads:
            return replace(graph, inputs={port: k for port, k in graph.inputs.items() if k in needed})


def _needed(graph: StepGraph) -> tuple[list[Instruction], set[int]]:
    """Return the instructions that write what is needed, copies without the rest; and all values that are needed."""
    needed, kept = set(graph.outputs.values()), []
    for instruction in reversed(graph.instructions):
        if isinstance(instruction, Send):
            pairs = [pair for pair in zip(instruction.reads, instruction.writes, strict=True) if pair[1] in needed]
            if not pairs:
                continue
            reads, writes = zip(*pairs, strict=True)
            instruction = replace(instruction, reads=reads, writes=writes)
        elif needed.isdisjoint(instruction.writes):
            continue
        kept.append(instruction)
        needed.update(instruction.reads)
    return kept[::-1], needed


def _trimmed(task: Task, writes: frozenset[int], traces: Traces) -> tuple[Task, tuple[int, ...]]:
    key = "trimmed", task, writes
    if key not in traces:
        traces[key] = trim_task(task, writes)
    return traces[key]
