"""Bytes that a step needs on each device, from the sizes of its arrays and of its compiled programs.

The host follows a graph's instructions far ahead of the devices, and memory is reserved in their order: an array exists
from the instruction that writes it to the last that reads it, a program's temporaries during its call.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Device, Shaped
from jaxpipe.graph.graph import live, read_graph
from jaxpipe.graph.liveness import temporary_bytes
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.runtime.mpmd.compile_tasks import Needs
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Call, Join, Place, Send, Split, StepGraph, TaskAt, Value
from jaxpipe.sharding.mesh_axes import count_parts


#: Components of a device's memory in the order in which they are printed; ``"state"`` has keys, totals, counters too.
COMPONENTS = ("parameters", "gradients", "optimizer", "residual", "state", "batch", "stash", "messages", "peers")

#: The component of parts of other stages' stashes.
PEER_PURPOSE = "peers"

#: What is in the host's memory, which takes nothing of the device's.
HOST_PURPOSE = "host"


#: An array by number, and the component in which it is counted.
Life: TypeAlias = tuple[int, str]


@dataclass(frozen=True)
class Peak:
    """The most bytes of a device at once.

    Attributes:
      total: of arrays and temporaries.
      temporary: of these, the temporaries of the call in which that is.
      label: of the call.
      parts: of the rest, bytes by component (``COMPONENTS``).
      host: the most bytes at once in the host's memory, which are not the device's.
    """

    total: int
    temporary: int
    label: str
    parts: dict[str, int] = field(default_factory=dict)
    host: int = 0

    @property
    def components(self) -> dict[str, int]:
        """All bytes by component."""
        sizes = {name: self.parts.get(name, 0) for name in COMPONENTS}
        shown = {name: n for name, n in sizes.items() if n or name not in ("residual", "peers")}
        return shown | {"temporaries": self.temporary}


def device_peaks(dispatch: Dispatch, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device holds at once while it follows a compiled graph."""
    return _peaks(dispatch.graph, devices, dispatch.needs)


def predicted_bytes(graph: StepGraph, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device is predicted to hold at once while a graph is followed.

    It is the same count, with estimated temporaries, before anything is compiled.
    """
    needs: dict[TaskAt, Needs] = {}
    for call in graph.instructions:
        if isinstance(call, Call) and (call.task, call.place) not in needs:
            specs, shape = [graph.specs[number] for number in call.reads], devices.mesh(call.place).shape
            reused = _reusable_bytes(graph, call.task, [count_parts(spec, shape) for spec in specs])
            temporary = _working_bytes(graph, call.task, specs, shape)
            needs[call.task, call.place] = Needs(graph.tasks[call.task].label, temporary, reused)
    return _peaks(graph, devices, needs)


def _working_bytes(graph: StepGraph, number: int, specs: Sequence[P], shape: Mapping[str, int]) -> int:
    """Return the estimated bytes of a task's temporaries on each device: what it needs besides operands and results.

    Args:
      specs: by operand that it reads, how it is split.
      shape: the mesh axes of its devices, and their sizes.
    """
    task, donated = graph.tasks[number], graph.donated[number]
    several = any(size > 1 for size in shape.values())
    key = "bytes", tuple(specs) if several else (), donated
    if key not in task.estimate:
        program = read_graph(task.program.closed, inline_shards=True)
        program = replace(program, operators=live(program.operators, program.outputs))
        if several:
            given = dict(zip(program.inputs, specs, strict=True))
            program = of_one_device(program, propagate(program, given, shape).specs, shape)
        task.estimate[key] = temporary_bytes(program, [program.inputs[k] for k in sorted(donated)])
    return task.estimate[key]


def _reusable_bytes(graph: StepGraph, number: int, parts: Sequence[int]) -> int:
    """Return the bytes of donated operands that results are written over: those of their shape and type.

    Args:
      parts: by operand, in how many parts its devices have it.
    """
    task, donated = graph.tasks[number], sorted(graph.donated[number])
    forms = [((task.read_avals[k].shape, task.read_avals[k].dtype), parts[k]) for k in donated]
    given = Counter(form for form, _ in forms)
    split = dict(forms)
    sizes = {(aval.shape, aval.dtype): array_bytes(aval) for aval in task.written_avals}
    written = Counter((aval.shape, aval.dtype) for aval in task.written_avals)
    return sum(count * sizes[form] // split[form] for form, count in (given & written).items())


def _peaks(graph: StepGraph, devices: StageDevices, needs: Mapping[TaskAt, Needs]) -> dict[Device, Peak]:
    """Return the most bytes that each device holds at once.

    Args:
      needs: of each task at each place.
    """
    components, sizes = _components(graph), [_size(value, devices) for value in graph.values]
    begins, ends = defaultdict[int, list[Life]](list), defaultdict[int, list[Life]](list)
    for life, begin, end in _lives(graph, devices, components):
        begins[begin].append(life)
        ends[end].append(life)
    peaks = {d: Peak(0, 0, "") for d in devices.every}
    held = {d: Counter[str]() for d in devices.every}

    def count(lives: Sequence[Life], sign: int) -> None:
        for number, component in lives:
            for device in devices.of(graph.values[number].place):
                held[device][component] += sign * sizes[number]

    for k, x in enumerate(graph.instructions):
        count(begins[k], 1)
        if isinstance(x, Call):
            needed, written = needs[x.task, x.place], [(sizes[number], components[number]) for number in x.writes]
            reused = _reused(graph, x, needed, written)
            for device in devices.of(x.place):
                peaks[device] = _higher(peaks[device], held[device], needed, reused)
        elif isinstance(x, Send):
            for device in {d for place in x.targets for d in devices.of(place)}:
                peaks[device] = _higher(peaks[device], held[device], Needs("a message"), {})
        count(ends[k], -1)
    return peaks


def _higher(peak: Peak, held: Counter[str], needed: Needs, reused: Mapping[str, int]) -> Peak:
    """Return the peak of a device after an instruction during which it holds some bytes, by component."""
    host = max(peak.host, held[HOST_PURPOSE])
    total = held.total() - held[HOST_PURPOSE] + needed.temporary_bytes - needed.alias_bytes
    if total <= peak.total:
        return replace(peak, host=host)
    parts = {name: held[name] - reused.get(name, 0) for name in COMPONENTS}
    return Peak(total, needed.temporary_bytes, needed.label, parts, host)


def _lives(graph: StepGraph, devices: StageDevices, components: Sequence[str]) -> Iterator[tuple[Life, int, int]]:
    """Give the arrays, with the first and the last instruction during which each exists.

    What is kept for the backward pass and comes in a message is a message until its stage reads it. Arrays that are put
    together, or are parts of another one, share its memory.
    """
    # What every stage has is there once on a device with several stages.
    given = {(devices.at(p.place), p.field, p.number): number for p, number in reversed(graph.inputs.items())}
    begins, read, sent = dict.fromkeys(given.values(), 0), dict[int, int](), set[int]()
    for k, x in enumerate(graph.instructions):
        if isinstance(x, Call | Send):
            begins |= dict.fromkeys(x.writes, k)
        if isinstance(x, Send):
            sent.update(x.writes)
        elif isinstance(x, Call):
            for number in x.reads:
                read.setdefault(number, k)
    ends = dict.fromkeys(range(len(graph.values)), len(graph.instructions))
    ends |= {number: k for k, dropped in enumerate(graph.drops) for number in dropped}
    for x in reversed(graph.instructions):
        if isinstance(x, Join | Split):
            ends |= {number: max(ends[other] for other in (number, *x.writes)) for number in x.reads}
    for number, begin in begins.items():
        component, end = components[number], ends[number]
        if component == "stash" and number in sent:
            first = read.get(number, end + 1)
            yield (number, "messages"), begin, first - 1
            begin = first
        if begin <= end:
            yield (number, component), begin, end


def _size(value: Value, devices: StageDevices) -> int:
    """Return the bytes of an array on each device of its place."""
    shards = devices.submesh.shards(value.form.spec, len(devices.firsts(value.place)))
    return -(-array_bytes(value.aval) // shards)


def _reused(graph: StepGraph, call: Call, needed: Needs, written: Sequence[tuple[int, str]]) -> dict[str, int]:
    """By component, bytes of a call's results that are written over donated operands: those of an operand's shape."""
    left, reused = needed.alias_bytes, defaultdict[str, int](int)
    avals, free = graph.avals, graph.donated[call.task]
    donated = {(avals[r].shape, avals[r].dtype) for k, r in enumerate(call.reads) if k in free}
    shaped = [(avals[r].shape, avals[r].dtype) in donated for r in call.writes]
    for _, (size, component) in sorted(zip(shaped, written, strict=True), key=lambda entry: not entry[0]):
        reused[component] += min(size, left)
        left -= min(size, left)
    return reused


def _components(graph: StepGraph) -> list[str]:
    """The component of each value.

    An activation or a cotangent that several calls of one stage make or read is kept there, as a part of the stash.
    """
    touched: dict[int, list[Place]] = defaultdict(list)
    for call in graph.instructions:
        if isinstance(call, Call):
            for number in (*call.reads, *call.writes):
                touched[number].append(call.place)
    components = [value.form.purpose for value in graph.values]
    for number, places in touched.items():
        is_message = components[number] == "messages" and graph.values[number].form.tensor is not None
        if is_message and len(places) > len(set(places)):
            components[number] = "stash"
    return components


def array_bytes(aval: Shaped) -> int:
    """Return the bytes of an array of some shape and type."""
    return math.prod(aval.shape) * aval.dtype.itemsize
