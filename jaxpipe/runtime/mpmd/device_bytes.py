"""Bytes that a step needs on each device, from the sizes of its arrays and of its compiled programs.

The host follows a graph's instructions far ahead of the devices, and memory is reserved in their order: an array exists
from the instruction that writes it to the last that reads it, a program's temporaries during its call.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Device, Shaped
from jaxpipe.graph.graph import live, read_graph
from jaxpipe.graph.liveness import temporary_bytes
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.runtime.mpmd.compile_tasks import Needs
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.step_graph import Call, Join, Place, Send, StepGraph, TaskAt
from jaxpipe.sharding.mesh_axes import count_parts


#: Components of a device's memory in the order in which they are printed; ``"state"`` has keys, totals, counters too.
COMPONENTS = ("parameters", "gradients", "optimizer", "residual", "state", "batch", "stash", "messages", "peers")

#: The component of parts of other stages' stashes.
PEER_PURPOSE = "peers"

#: What is in the host's memory, which takes nothing of the device's.
HOST_PURPOSE = "host"


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
        return {name: n for name, n in sizes.items() if n or name not in ("residual", "peers")} | {
            "temporaries": self.temporary
        }


def device_peaks(dispatch: Dispatch, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device holds at once while it follows a compiled graph."""
    return _walk(dispatch.graph, devices, dispatch.needs)


def predicted_bytes(graph: StepGraph, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device is predicted to hold at once while a graph is followed.

    It is the same walk, with estimated temporaries, before anything is compiled.
    """
    needs: dict[TaskAt, Needs] = {}
    for call in graph.instructions:
        if isinstance(call, Call) and (call.task, call.place) not in needs:
            specs, shape = [graph.specs[number] for number in call.reads], devices.mesh(call.place).shape
            reused = _reusable_bytes(graph, call.task, [count_parts(spec, shape) for spec in specs])
            temporary = _working_bytes(graph, call.task, specs, shape)
            needs[call.task, call.place] = Needs(graph.tasks[call.task].label, temporary, reused)
    return _walk(graph, devices, needs)


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


def _walk(graph: StepGraph, devices: StageDevices, needs: Mapping[TaskAt, Needs]) -> dict[Device, Peak]:
    """Return the most bytes that each device holds at once.

    Args:
      needs: of each task at each place.
    """
    memory = _Memory(graph, devices)
    seen: set[tuple[Device, str, Hashable]] = set()
    for port, number in graph.inputs.items():
        # What every stage has is there once on a device with several stages.
        array = devices.at(port.place), port.field, port.number
        if array not in seen:
            seen.add(array)
            memory.add(number, port.place)
    for instruction, left in zip(graph.instructions, graph.drops, strict=True):
        if isinstance(instruction, Join):
            memory.join(instruction)
        elif isinstance(instruction, Send):
            memory.send(instruction)
        elif isinstance(instruction, Call):
            memory.call(instruction, needs[instruction.task, instruction.place])
        for number in left:
            memory.drop(number)
    return {d: replace(peak, host=memory.hosted[d]) for d, peak in memory.peaks.items()}


class _Memory:
    """The arrays on each device while a graph is followed, and the most bytes so far."""

    def __init__(self, graph: StepGraph, devices: StageDevices):
        self.peaks: dict[Device, Peak] = {d: Peak(0, 0, "") for d in devices.every}
        self.hosted: dict[Device, int] = defaultdict(int)  # the most bytes in the host's memory
        self._graph, self._devices = graph, devices
        self._held: dict[Device, dict[str, int]] = {d: defaultdict(int) for d in devices.every}  # by component
        self._components = _components(graph)
        self._alive: dict[int, dict[Device, int]] = {}
        self._waiting: set[int] = set()

    def _size(self, register: int, place: Place) -> int:
        """Return the bytes of an array on each device of a place."""
        groups = len(self._devices.firsts(place))
        shards = self._devices.submesh.shards(self._graph.specs[register], groups)
        return -(-array_bytes(self._graph.avals[register]) // shards)

    def add(self, register: int, place: Place) -> None:
        """Reserve an array."""
        self._alive[register] = dict.fromkeys(self._devices.of(place), self._size(register, place))
        self._count(register)

    def drop(self, register: int) -> None:
        """Free an array."""
        self._count(register, -1)
        self._alive.pop(register, None)

    def _count(self, register: int, sign: int = 1) -> None:
        """Count an array in its component, or not any more."""
        component = "messages" if register in self._waiting else self._components[register]
        for device, size in self._alive.get(register, {}).items():
            held = self._held[device]
            held[component] += sign * size
            self.hosted[device] = max(self.hosted[device], held[HOST_PURPOSE])

    def send(self, send: Send) -> None:
        """Receive a message. One that is kept for the backward pass is a message until its stage reads it."""
        for register, place in zip(send.writes, send.targets, strict=True):
            if self._components[register] == "stash":
                self._waiting.add(register)
            self.add(register, place)
        for place in () if send.to_host else set(send.targets):
            self._note(place, Needs("a message"), {})

    def call(self, call: Call, needed: Needs) -> None:
        """Run a program, which needs some bytes besides its operands and results."""
        for register in self._waiting.intersection(call.reads):
            self._count(register, -1)
            self._waiting.remove(register)
            self._count(register)
        for register in call.writes:
            self.add(register, call.place)
        written = [(self._size(register, call.place), self._components[register]) for register in call.writes]
        self._note(call.place, needed, _reused(self._graph, call, needed, written))

    def join(self, instruction: Join) -> None:
        """Give arrays that are put together a new register; they stay where they are, as do those that are split."""
        together: Counter[Device] = Counter()
        for register in instruction.reads:
            together.update(self._alive.pop(register, {}))
        self._alive[instruction.writes[0]] = together

    def _note(self, place: Place, needed: Needs, reused: dict[str, int]) -> None:
        for device in self._devices.of(place):
            held = self._held[device]
            total = sum(held.values()) - held[HOST_PURPOSE] + needed.temporary_bytes - needed.alias_bytes
            if total > self.peaks[device].total:
                here = {name: n - reused.get(name, 0) for name, n in held.items() if name != HOST_PURPOSE}
                self.peaks[device] = Peak(total, needed.temporary_bytes, needed.label, here)


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
