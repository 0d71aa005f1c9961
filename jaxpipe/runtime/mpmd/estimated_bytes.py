"""Bytes that a list needs on each device, before anything is compiled: the same walk, with estimated temporaries."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Device
from jaxpipe.graph.graph import live, read_graph
from jaxpipe.graph.liveness import temporary_bytes
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.runtime.mpmd.call_list import CallList, Program
from jaxpipe.runtime.mpmd.device_bytes import Needs, Peak, array_bytes, walk
from jaxpipe.runtime.mpmd.instructions import Call, Place
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.sharding.submesh import count_parts


def predicted_bytes(calls: CallList, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device is predicted to hold at once while a list is followed."""
    calls_of: dict[tuple[int, Place], Call] = {}
    for call in calls.instructions:
        if isinstance(call, Call):
            calls_of.setdefault((call.program, call.place), call)
    estimates: dict[tuple[int, tuple[int, ...]], Needs] = {}
    for (number, place), call in calls_of.items():
        shape = devices.mesh_shape(place)
        key = number, tuple(shape.values())
        if key not in estimates:
            specs = [calls.specs[register] for register in call.reads]
            estimates[key] = _estimate(calls.programs[number], specs, shape)
    needs = {at: estimates[at[0], tuple(devices.mesh_shape(at[1]).values())] for at in calls_of}
    return walk(calls, devices, needs)


def _estimate(program: Program, specs: Sequence[P], shape: Mapping[str, int]) -> Needs:
    parts = [count_parts(spec, shape) for spec in specs]
    return Needs(program.traced.work.label, working_bytes(program, specs, shape), reused_bytes(program, parts))


def working_bytes(program: Program, specs: Sequence[P], shape: Mapping[str, int]) -> int:
    """Return the estimated bytes of a program's temporaries on each device: what it needs besides operands and results.

    Args:
      specs: by operand that it reads, how it is split.
      shape: the mesh axes of its devices, and their sizes.
    """
    traced = program.traced
    several = any(size > 1 for size in shape.values())
    key = "bytes", tuple(specs) if several else (), program.donated
    if key not in traced.estimate:
        graph = read_graph(traced.program.closed, inline_shards=True)
        graph = replace(graph, operators=live(graph.operators, graph.outputs))
        if several:
            given = dict(zip(graph.inputs, specs, strict=True))
            graph = of_one_device(graph, propagate(graph, given, shape).specs, shape)
        donated = [graph.inputs[k] for k in sorted(program.donated)]
        traced.estimate[key] = temporary_bytes(graph, donated)
    return traced.estimate[key]


def reused_bytes(program: Program, parts: Sequence[int]) -> int:
    """Return the bytes of donated operands that results are written over: those of their shape and type.

    Args:
      parts: by operand, in how many parts its devices have it.
    """
    traced = program.traced
    donated = [((traced.read_avals[k].shape, traced.read_avals[k].dtype), parts[k]) for k in sorted(program.donated)]
    given = Counter(form for form, _ in donated)
    split = dict(donated)
    sizes = {(aval.shape, aval.dtype): array_bytes(aval) for aval in traced.written_avals}
    written = Counter((aval.shape, aval.dtype) for aval in traced.written_avals)
    return sum(count * sizes[form] // split[form] for form, count in (given & written).items())
