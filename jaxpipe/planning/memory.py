"""Bytes that each device will reserve, from shapes alone."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpipe.graph import Graph, Operator, itemsize
from jaxpipe.pipeline.layout import Layout
from jaxpipe.pipeline.program import PAGE, Program
from jaxpipe.pipeline.sections import Section
from jaxpipe.work import VIEWS, weight


def predict(program: Program, optimizer: Layout, shared: Sequence[Any], batch: Sequence[Any]) -> dict[str, int]:
    """Bytes on each device, by component.

    One program runs everywhere, so every component is the largest over the stages.

    Args:
      program: the training program.
      optimizer: where the optimizer state lives.
      shared: optimizer state that every device has.
      batch: one replica's part of the batch.
    """
    parameters = program.parameters.bytes
    stash = max(program.stash_pages) * PAGE * 4
    sent = 4 * sum(program.message_words)
    working = max(working_bytes(program, s) for s in range(len(program.sections)))
    return {
        "parameters": parameters,
        "optimizer": optimizer.bytes + sum(map(_bytes, shared)),
        "state": program.state.bytes,
        "batch": sum(map(_bytes, batch)),
        "gradients": parameters,
        "arena": program.arena_pages * PAGE * 4,
        "transport": 2 * sent,
        "working": working + stash,
    }


def stage_bytes(program: Program, optimizer: Layout, shared: Sequence[Any], batch: Sequence[Any]) -> list[int]:
    """Bytes that each stage would need by itself, without the others' shapes to make room for."""
    found = []
    for s, section in enumerate(program.sections):
        own = sum(map(_bytes, program.parameters.avals[s]))
        state = sum(map(_bytes, program.state.avals[s])) + sum(map(_bytes, optimizer.avals[s]))
        stash = sum(map(_bytes, program.stash_avals(section)))
        sent = sum(map(_bytes, program.avals((*section.leaving, *section.returning))))
        slots = program.schedule.in_flight(s)
        everywhere = sum(map(_bytes, (*shared, *batch)))
        found.append(2 * own + state + (slots + 1) * stash + 2 * sent + everywhere + working_bytes(program, s))
    return found


def working_bytes(program: Program, s: int) -> int:
    """What a stage needs besides while it computes: the larger of its forward and its backward pass."""
    section = program.sections[s]
    return max(_forward_bytes(section), _backward_bytes(section, program))


def _forward_bytes(section: Section) -> int:
    assert section.stage is not None
    graph = section.stage.graph
    kept = {*graph.outputs, *section.stashed}
    return peak_bytes(graph, graph.operators, kept)


def _backward_bytes(section: Section, program: Program) -> int:
    assert section.stage is not None
    return program.parameters.bytes


def peak_bytes(graph: Graph, operators: Sequence[Operator], kept: Iterable[int]) -> int:
    """The most bytes that are alive at once while operators run in order.

    Only what is written to memory counts: results of operators that XLA does not fuse, what those read, and ``kept``.
    """
    kept = set(kept)
    heavy = [op for op in operators if weight(op) is None]
    written = {t for op in heavy for t in (*op.inputs, *op.outputs)} | kept
    last = {t: k for k, op in enumerate(operators) for t in op.inputs}
    alive = peak = 0
    made = set()
    for k, op in enumerate(operators):
        for t in op.outputs:
            if t in written and op.name not in VIEWS:
                alive += _bytes(graph.tensors[t].aval)
                made.add(t)
        peak = max(peak, alive)
        for t in {t for t in op.inputs if last.get(t) == k and t in made and t not in kept}:
            alive -= _bytes(graph.tensors[t].aval)
    return peak


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize(aval.dtype)
