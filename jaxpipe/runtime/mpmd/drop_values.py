"""Finds after which instruction a value can be dropped."""

from dataclasses import replace

from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import StepGraph


def drop_values(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return the graph with ``drops``: the values that an instruction is the last one to read or to write."""
    last: dict[int, int] = {}
    for k, instruction in enumerate(graph.instructions):
        last.update(dict.fromkeys((*instruction.reads, *instruction.writes), k))
    drops: list[list[int]] = [[] for _ in graph.instructions]
    for number in last.keys() - set(graph.outputs.values()):
        drops[last[number]].append(number)
    return replace(graph, drops=tuple(map(tuple, drops)))
