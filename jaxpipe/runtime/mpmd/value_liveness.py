"""Liveness of values: what nobody reads is left out, and what is read for the last time written over or dropped."""

from collections import defaultdict
from dataclasses import replace

from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Call, Instruction, Join, Send, Split, StepGraph, Task, Traces, trim_task


def remove_unread(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return a graph of tasks that write what is read.

    Calls of one task write the same results: those that are read after any of them.
    """
    while True:
        instructions, needed = _needed(graph)
        written: dict[int, set[int]] = defaultdict(set)
        for call in instructions:
            if isinstance(call, Call):
                written[call.task].update(k for k, number in enumerate(call.writes) if number in needed)
        trimmed = {
            task: _trimmed(graph.tasks[task], frozenset(kept), layout.planned.traces)
            for task, kept in written.items()
            if len(kept) < len(graph.tasks[task].writes)
        }
        if not trimmed:
            inputs = {port: k for port, k in graph.inputs.items() if k in needed}
            return replace(graph, instructions=tuple(instructions), inputs=inputs)
        for n, x in enumerate(instructions):
            if isinstance(x, Call) and x.task in trimmed:
                reads = tuple(x.reads[k] for k in trimmed[x.task][1])
                writes = tuple(x.writes[k] for k in sorted(written[x.task]))
                instructions[n] = replace(x, reads=reads, writes=writes)
        tasks = tuple(trimmed[k][0] if k in trimmed else task for k, task in enumerate(graph.tasks))
        graph = replace(graph, tasks=tasks, instructions=tuple(instructions))


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


def infer_donation(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return the graph with ``donated``: what every call of a task may write over.

    Parts of an array share its memory, and nobody may write over them. What exists before the step is written over by
    tasks that consume it alone, and with its own new value: XLA pairs operands and results by shape.
    """
    last: dict[int, int] = {}
    shared: set[int] = set()
    for k, x in enumerate(graph.instructions):
        last.update(dict.fromkeys(x.reads, k))
        if isinstance(x, Split) or (isinstance(x, Join) and not shared.isdisjoint(x.reads)):
            shared.update(x.writes)
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


def drop_values(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return the graph with ``drops``: the values that an instruction is the last one to read or to write."""
    last: dict[int, int] = {}
    for k, instruction in enumerate(graph.instructions):
        last.update(dict.fromkeys((*instruction.reads, *instruction.writes), k))
    drops: list[list[int]] = [[] for _ in graph.instructions]
    for number in last.keys() - set(graph.outputs.values()):
        drops[last[number]].append(number)
    return replace(graph, drops=tuple(map(tuple, drops)))
