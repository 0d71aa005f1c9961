"""Bytes that a list needs on each device, before anything is compiled: the same walk, with estimated temporaries."""

from collections import Counter
from dataclasses import replace
from typing import Any

from jaxpipe.graph import live, read_graph
from jaxpipe.planning.liveness import temporary_bytes
from jaxpipe.runtime.mpmd.calls import CallList, Program
from jaxpipe.runtime.mpmd.compile import TracedWork
from jaxpipe.runtime.mpmd.instructions import Call
from jaxpipe.runtime.mpmd.memory import Needs, Peak, array_bytes, walk
from jaxpipe.runtime.mpmd.stage_devices import StageDevices


def predicted_bytes(calls: CallList, devices: StageDevices) -> dict[Any, Peak]:
    """Return the most bytes that each device is predicted to hold at once while a list is followed.

    Args:
      calls: the list.
      devices: of the stages.
    """
    used = {(call.program, call.place) for call in calls.instructions if isinstance(call, Call)}
    estimates = {number: _estimate(calls.programs[number]) for number, _ in used}
    return walk(calls, devices, {(number, place): estimates[number] for number, place in used})


def _estimate(program: Program) -> Needs:
    return Needs(program.traced.work.label, working_bytes(program.traced), reused_bytes(program))


def working_bytes(traced: TracedWork) -> int:
    """Return the estimated bytes of some work's temporaries: what it needs besides its operands and its results."""
    if "bytes" not in traced.estimate:
        graph = read_graph(traced.program.closed)
        outputs = tuple(graph.outputs[k] for k in traced.writes)
        graph = replace(graph, operators=live(graph.operators, outputs), outputs=outputs)
        traced.estimate["bytes"] = temporary_bytes(graph)
    return traced.estimate["bytes"]


def reused_bytes(program: Program) -> int:
    """Return the bytes of donated operands that results are written over: those of their shape and type."""
    traced = program.traced
    given = Counter((traced.read_avals[k].shape, traced.read_avals[k].dtype) for k in program.donated)
    sizes = {(aval.shape, aval.dtype): array_bytes(aval) for aval in traced.written_avals}
    written = Counter((aval.shape, aval.dtype) for aval in traced.written_avals)
    return sum(count * sizes[form] for form, count in (given & written).items())
