"""Bytes that a list needs on each device, from the sizes of its arrays and of its compiled programs.

The host follows a list far ahead of the devices, and memory is reserved in its order: an array exists from the
instruction that writes it to the last that reads it, a program's temporaries during its call.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Device, Shaped
from jaxpipe.graph.graph import itemsize, live, read_graph
from jaxpipe.graph.liveness import temporary_bytes
from jaxpipe.graph.sharding_propagation import of_one_device, propagate
from jaxpipe.runtime.mpmd.call_list import CallList, Program
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.instructions import Call, Exchange, Join, Place, Send, Split
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_work import Name, Role
from jaxpipe.sharding.submesh import count_parts


#: Components of a device's memory in the order in which they are printed, with the roles of arrays in each.
COMPONENTS = {
    "parameters": (Role.PARAMETER,),
    "gradients": (Role.GRADIENT, Role.MEAN),
    "optimizer": (Role.OPTIMIZER, Role.SHARED),
    "residual": (Role.RESIDUAL,),
    "state": (),  # with keys, totals and counters
    "batch": (Role.BATCH,),
    "stash": (Role.STASH, Role.SAVED, Role.PIECE),
    "messages": (Role.ACTIVATION, Role.COTANGENT, Role.RESULT, Role.EXCHANGED),
    "peers": (),  # parts of other stages' stashes
}

#: The component of what is in the host's memory, which takes nothing of the device's.
_HOST = "host"

_COMPONENT: dict[Role | None, str] = {role: name for name, roles in COMPONENTS.items() for role in roles}


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


@dataclass(frozen=True)
class Needs:
    """Bytes that a program needs besides its operands and its results.

    Attributes:
      label: of its work.
      temporary: besides both.
      reused: of results that are written over donated operands.
    """

    label: str
    temporary: int = 0
    reused: int = 0


NOTHING = Needs("")


def peak_bytes(dispatch: Dispatch, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device of this process holds at once while it follows a list."""
    needs = {key: Needs(run.label, run.temporary_bytes, run.alias_bytes) for key, run in dispatch.executables.items()}
    return walk(dispatch.calls, devices, needs)


def predicted_bytes(calls: CallList, devices: StageDevices) -> dict[Device, Peak]:
    """Return the most bytes that each device is predicted to hold at once while a list is followed.

    It is the same walk, with estimated temporaries, before anything is compiled.
    """
    needs: dict[tuple[int, Place], Needs] = {}
    for call in calls.instructions:
        if isinstance(call, Call) and (call.program, call.place) not in needs:
            specs, shape = [calls.specs[register] for register in call.reads], devices.mesh_shape(call.place)
            program = calls.programs[call.program]
            reused = _reusable_bytes(program, [count_parts(spec, shape) for spec in specs])
            temporary = _working_bytes(program, specs, shape)
            needs[call.program, call.place] = Needs(program.traced.work.label, temporary, reused)
    return walk(calls, devices, needs)


def _working_bytes(program: Program, specs: Sequence[P], shape: Mapping[str, int]) -> int:
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


def _reusable_bytes(program: Program, parts: Sequence[int]) -> int:
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


def walk(calls: CallList, devices: StageDevices, needs: Mapping[tuple[int, Place], Needs]) -> dict[Device, Peak]:
    """Return the most bytes that each device holds at once.

    Args:
      needs: of each program at each place; those that are left out need nothing besides their arrays.
    """
    memory = _Memory(calls, devices)
    seen: set[tuple[Device, Name, int]] = set()
    for key, register in calls.inputs.items():
        # What every stage has is there once on a device with several stages.
        array = devices.at(key.place), key.name, key.microbatch
        if array not in seen:
            seen.add(array)
            memory.add(register, key.place)
    for instruction, left in zip(calls.instructions, calls.dropped, strict=True):
        if isinstance(instruction, (Split, Join)):
            memory.share(instruction)
        elif isinstance(instruction, Exchange):
            memory.send(instruction.forth)
            memory.send(instruction.back)
        elif isinstance(instruction, Send):
            memory.send(instruction)
        elif isinstance(instruction, Call):
            memory.call(instruction, needs.get((instruction.program, instruction.place), NOTHING))
        for register in left:
            memory.drop(register)
    return {d: replace(peak, host=memory.host_peaks.get(d, 0)) for d, peak in memory.peaks.items()}


class _Memory:
    """The arrays on each device while a list is followed, and the most bytes so far."""

    def __init__(self, calls: CallList, devices: StageDevices):
        self.peaks: dict[Device, Peak] = {d: Peak(0, 0, "") for d in devices.every}
        self._calls, self._devices = calls, devices
        self._held: dict[Device, int] = defaultdict(int)
        self._parts: dict[Device, dict[str, int]] = {d: defaultdict(int) for d in devices.every}
        self._components = _components(calls)
        self._alive: dict[int, dict[Device, int]] = {}
        self._waiting: set[int] = set()
        self.host_peaks: dict[Device, int] = defaultdict(int)

    def _size(self, register: int, place: Place) -> int:
        """Return the bytes of an array on each device of a place."""
        groups = len(self._devices.firsts(place))
        shards = self._devices.submesh.shards(self._calls.specs[register], groups)
        return -(-array_bytes(self._calls.avals[register]) // shards)

    def add(self, register: int, place: Place) -> None:
        """Reserve an array."""
        self._alive[register] = dict.fromkeys(self._devices.of(place), self._size(register, place))
        for device, size in self._alive[register].items():
            self._change(device, self._components[register], size)

    def drop(self, register: int) -> None:
        """Free an array."""
        for device, size in self._alive.pop(register, {}).items():
            self._change(device, self._components[register], -size)

    def _change(self, device: Device, component: str, size: int) -> None:
        self._parts[device][component] += size
        if component == _HOST:
            self.host_peaks[device] = max(self.host_peaks[device], self._parts[device][_HOST])
        else:
            self._held[device] += size

    def send(self, send: Send) -> None:
        """Receive a message. One that is kept for the backward pass is a message until its stage reads it."""
        for register in send.writes:
            if self._components[register] == "stash":
                self._waiting.add(register)
                self._components[register] = "messages"
            self.add(register, send.target)
        if send.to_host:
            return
        for device in self._devices.of(send.target):
            self._note(device, Needs("a message"), {})

    def call(self, call: Call, needed: Needs) -> None:
        """Run a program, which needs some bytes besides its operands and results."""
        for register in self._waiting.intersection(call.reads):
            self._waiting.remove(register)
            for device, size in self._alive[register].items():
                self._change(device, "messages", -size)
                self._change(device, "stash", size)
            self._components[register] = "stash"
        for register in call.writes:
            self.add(register, call.place)
        written = [(self._size(register, call.place), self._components[register]) for register in call.writes]
        reused = _reused(self._calls, call, needed, written)
        for device in self._devices.of(call.place):
            self._note(device, needed, reused)

    def share(self, instruction: Split | Join) -> None:
        """Give arrays that are taken apart or put together new registers; they stay where they are."""
        if isinstance(instruction, Split):
            self._alive |= {register: {} for register in instruction.writes}
            return
        together: dict[Device, int] = {}
        for register in instruction.reads:
            for device, size in self._alive.pop(register, {}).items():
                together[device] = together.get(device, 0) + size
        self._alive[instruction.writes[0]] = together

    def _note(self, device: Device, needed: Needs, reused: dict[str, int]) -> None:
        total = self._held[device] + needed.temporary - needed.reused
        if total > self.peaks[device].total:
            parts = self._parts[device].items()
            here = {name: n - reused.get(name, 0) for name, n in parts if name != _HOST}
            self.peaks[device] = Peak(total, needed.temporary, needed.label, here)


def _reused(calls: CallList, call: Call, needed: Needs, written: Sequence[tuple[int, str]]) -> dict[str, int]:
    """By component, bytes of a call's results that are written over donated operands: those of an operand's shape."""
    left, reused = needed.reused, defaultdict[str, int](int)
    program = calls.programs[call.program]
    donated = {(calls.avals[r].shape, calls.avals[r].dtype) for k, r in enumerate(call.reads) if k in program.donated}
    shaped = [(calls.avals[r].shape, calls.avals[r].dtype) in donated for r in call.writes]
    for _, (size, component) in sorted(zip(shaped, written, strict=True), key=lambda entry: not entry[0]):
        reused[component] += min(size, left)
        left -= min(size, left)
    return reused


def _components(calls: CallList) -> dict[int, str]:
    """The component of each register, by the name that its maker or its first reader has for it.

    An activation or a cotangent that several calls of one stage make or read is kept there, as a part of the stash;
    what a stage's replicas exchange is a message.
    """
    names: dict[int, Name] = {register: key.name for key, register in calls.inputs.items()}
    touched: dict[int, list[Place]] = defaultdict(list)
    for instruction in calls.instructions:
        if isinstance(instruction, Call):
            traced = calls.programs[instruction.program].traced
            reads, writes = (instruction.reads, traced.read_names), (instruction.writes, traced.written_names)
            for registers, known in (reads, writes):
                for register, name in zip(registers, known, strict=True):
                    names.setdefault(register, name)
                    touched[register].append(instruction.place)
        elif isinstance(instruction, (Split, Join)):
            source = names.get(instruction.reads[0])
            names |= {register: source for register in instruction.writes if source is not None}
    components_of: dict[int, str] = {}
    for register in range(len(calls.avals)):
        role = names[register].role if register in names else None
        component = _COMPONENT.get(role, "state")
        if register in calls.away or register in calls.hosted:
            components_of[register] = "peers" if register in calls.away else _HOST
            continue
        places = touched[register]
        kept = component == "messages" and role is not Role.EXCHANGED and len(places) > len(set(places))
        components_of[register] = "stash" if kept else component
    return components_of


def array_bytes(aval: Shaped) -> int:
    """Return the bytes of an array of some shape and type."""
    return math.prod(aval.shape) * itemsize(aval.dtype)
