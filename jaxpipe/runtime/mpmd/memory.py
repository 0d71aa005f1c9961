"""Bytes that a list needs on each device, from the sizes of its arrays and of its compiled programs.

The host follows a list far ahead of the devices, and memory is reserved in its order: an array exists from the
instruction that writes it to the last that reads it, a program's temporaries during its call.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpipe.graph import itemsize
from jaxpipe.runtime.mpmd.calls import CallList
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.instructions import Call, Exchange, Join, Place, Send, Split
from jaxpipe.runtime.mpmd.stage_work import Name, Role


#: Components of a device's memory in the order in which they are printed, with the roles of arrays in each.
COMPONENTS = {
    "parameters": (Role.PARAMETER,),
    "gradients": (Role.GRADIENT, Role.MEAN),
    "optimizer": (Role.OPTIMIZER, Role.SHARED, Role.EXCHANGED),
    "residual": (Role.RESIDUAL,),
    "state": (),  # with keys, totals and counters
    "batch": (Role.BATCH,),
    "stash": (Role.STASH, Role.SAVED),
    "messages": (Role.ACTIVATION, Role.COTANGENT, Role.RESULT),
}
_COMPONENT = {role: name for name, roles in COMPONENTS.items() for role in roles}


@dataclass(frozen=True)
class Peak:
    """The most bytes of a device at once.

    Attributes:
      total: of arrays and temporaries.
      temporary: of these, the temporaries of the call in which that is.
      label: of the call.
      parts: of the rest, bytes by component (``COMPONENTS``).
    """

    total: int
    temporary: int
    label: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def components(self) -> dict[str, int]:
        """All bytes by component."""
        found = {name: self.parts.get(name, 0) for name in COMPONENTS}
        return {name: n for name, n in found.items() if n or name != "residual"} | {"temporaries": self.temporary}


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


def peak_bytes(dispatch: Dispatch, devices: np.ndarray) -> dict[Any, Peak]:
    """Return the most bytes that each device of this process holds at once while it follows a list."""
    needs = {key: Needs(run.label, run.temporary_bytes, run.alias_bytes) for key, run in dispatch.executables.items()}
    return walk(dispatch.calls, devices, needs)


def walk(calls: CallList, devices: np.ndarray, needs: Mapping[tuple[int, Place], Needs]) -> dict[Any, Peak]:
    """Return the most bytes that each device holds at once.

    Args:
      calls: the list.
      devices: by stage and replica.
      needs: of each program at each place; those that are left out need nothing besides their arrays.
    """
    held: dict[Any, int] = defaultdict(int)
    parts: dict[Any, dict[str, int]] = {d: defaultdict(int) for d in devices.flat}
    components = _components(calls)
    peaks: dict[Any, Peak] = {d: Peak(0, 0, "") for d in devices.flat}
    sizes = [array_bytes(aval) for aval in calls.avals]
    alive: dict[int, dict[Any, int]] = {}

    def add(register: int, place: Place) -> None:
        size = sizes[register] // (devices.shape[1] if register in calls.sharded else 1)
        shares = _shares(size, place, devices)
        alive[register] = shares
        for device, size in shares.items():
            held[device] += size
            parts[device][components[register]] += size

    def drop(register: int) -> None:
        for device, size in alive.pop(register, {}).items():
            held[device] -= size
            parts[device][components[register]] -= size

    def note(device: Any, needed: Needs, reused: dict[str, int]) -> None:
        total = held[device] + needed.temporary - needed.reused
        if total > peaks[device].total:
            here = {name: n - reused.get(name, 0) for name, n in parts[device].items()}
            peaks[device] = Peak(total, needed.temporary, needed.label, here)

    waiting: dict[int, str] = {}
    seen: set[Any] = set()
    for key, register in calls.inputs.items():
        # What every stage has is there once on a device with several stages.
        device = devices[key.place.stage, max(key.place.replica, 0)]
        if (device, key.name, key.microbatch) not in seen:
            seen.add((device, key.name, key.microbatch))
            add(register, key.place)
    for instruction, left in zip(calls.instructions, calls.dropped, strict=True):
        if isinstance(instruction, (Split, Join)):
            _share(instruction, alive, devices)
        elif isinstance(instruction, (Send, Exchange)):
            sends = [instruction.forth, instruction.back] if isinstance(instruction, Exchange) else [instruction]
            for send in sends:
                for register in send.writes:
                    if components[register] == "stash":
                        waiting[register] = "stash"
                        components[register] = "messages"
                    add(register, send.target)
                note(devices[send.target.stage, max(send.target.replica, 0)], Needs("a message"), {})
        elif isinstance(instruction, Call):
            key = instruction.program, instruction.place
            for register in waiting.keys() & set(instruction.reads):  # from now on it is kept for the backward pass
                for device, size in alive[register].items():
                    parts[device][components[register]] -= size
                    parts[device][waiting[register]] += size
                components[register] = waiting.pop(register)
            for register in instruction.writes:
                add(register, instruction.place)
            row = devices[instruction.place.stage]
            own = row if instruction.place.is_whole else row[instruction.place.replica :][:1]
            needed = needs.get(key, NOTHING)
            written = [(sizes[register], components[register]) for register in instruction.writes]
            reused = _reused(calls, instruction, needed, written)
            for device in own:
                note(device, needed, reused)
        for register in left:
            drop(register)
    return peaks


def _share(instruction: Split | Join, alive: dict[int, dict[Any, int]], devices: np.ndarray) -> None:
    """Arrays that are taken apart or put together stay where they are."""
    if isinstance(instruction, Join):
        together: dict[Any, int] = {}
        for register in instruction.reads:
            for device, size in alive.pop(register, {}).items():
                together[device] = together.get(device, 0) + size
        alive[instruction.writes[0]] = together
    else:
        for register in instruction.writes:
            alive[register] = {}


def _shares(size: int, place: Place, devices: np.ndarray) -> dict[Any, int]:
    if not place.is_whole:
        return {devices[place.stage, place.replica]: size}
    return dict.fromkeys(devices[place.stage], size)


def _reused(calls: CallList, call: Call, needed: Needs, written: Sequence[tuple[int, str]]) -> dict[str, int]:
    """By component, bytes of a call's results that are written over donated operands: those of an operand's shape."""
    left, found = needed.reused, defaultdict[str, int](int)
    program = calls.programs[call.program]
    donated = {(calls.avals[r].shape, calls.avals[r].dtype) for k, r in enumerate(call.reads) if k in program.donated}
    shaped = [(calls.avals[r].shape, calls.avals[r].dtype) in donated for r in call.writes]
    for _, (size, component) in sorted(zip(shaped, written, strict=True), key=lambda entry: not entry[0]):
        found[component] += min(size, left)
        left -= min(size, left)
    return found


def _components(calls: CallList) -> dict[int, str]:
    """The component of each register, by the name that its maker or its first reader has for it.

    An activation or a cotangent that several calls of one stage make or read is kept there, as a part of the stash.
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
    found: dict[int, str] = {}
    for register in range(len(calls.avals)):
        component = _COMPONENT.get(names[register].role, "state") if register in names else "state"
        places = touched[register]
        kept = component == "messages" and len(places) > len(set(places))
        found[register] = "stash" if kept else component
    return found


def array_bytes(aval: Any) -> int:
    """Return the bytes of an array of some shape and type."""
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize(aval.dtype)
