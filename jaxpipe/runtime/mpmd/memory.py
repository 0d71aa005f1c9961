"""Bytes that a list needs on each device, from the sizes of its arrays and of its compiled programs.

The host follows a list far ahead of the devices, and memory is reserved in its order: an array exists from the
instruction that writes it to the last that reads it, a program's temporaries during its call.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpipe.graph import itemsize
from jaxpipe.runtime.mpmd.calls import CallList
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.instructions import Call, Exchange, Join, Place, Send, Split


@dataclass(frozen=True)
class Peak:
    """The most bytes of a device at once.

    Attributes:
      total: of arrays and temporaries.
      temporary: of these, the temporaries of the call in which that is.
      label: of the call.
    """

    total: int
    temporary: int
    label: str


def peak_bytes(dispatch: Dispatch, devices: np.ndarray) -> dict[Any, Peak]:
    """Return the most bytes that each device of this process holds at once while it follows a list."""
    temporaries = {key: program.temporary_bytes - program.alias_bytes for key, program in dispatch.executables.items()}
    labels = {key: program.label for key, program in dispatch.executables.items()}
    return walk(dispatch.calls, devices, temporaries, labels)


def walk(
    calls: CallList, devices: np.ndarray, temporaries: dict[tuple[int, Place], int], labels: dict[Any, str]
) -> dict[Any, Peak]:
    """Return the most bytes that each device holds at once.

    Args:
      calls: the list.
      devices: by stage and replica.
      temporaries: of each program at each place, bytes besides operands and results; of results in the place of
        operands, less.
      labels: of the same programs.
    """
    held: dict[Any, int] = defaultdict(int)
    peaks: dict[Any, Peak] = {d: Peak(0, 0, "") for d in devices.flat}
    sizes = [_bytes(aval) for aval in calls.avals]
    alive: dict[int, dict[Any, int]] = {}

    def add(register: int, place: Place) -> None:
        size = sizes[register] // (devices.shape[1] if register in calls.sharded else 1)
        shares = _shares(size, place, devices)
        alive[register] = shares
        for device, size in shares.items():
            held[device] += size

    def drop(register: int) -> None:
        for device, size in alive.pop(register, {}).items():
            held[device] -= size

    def note(device: Any, extra: int, label: str) -> None:
        if held[device] + extra > peaks[device].total:
            peaks[device] = Peak(held[device] + extra, extra, label)

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
            sends = [instruction.there, instruction.back] if isinstance(instruction, Exchange) else [instruction]
            for send in sends:
                for register in send.writes:
                    add(register, send.target)
                note(devices[send.target.stage, max(send.target.replica, 0)], 0, "a message")
        elif isinstance(instruction, Call):
            key = instruction.program, instruction.place
            for register in instruction.writes:
                add(register, instruction.place)
            row = devices[instruction.place.stage]
            own = row if instruction.place.is_whole else row[instruction.place.replica :][:1]
            for device in own:
                note(device, temporaries.get(key, 0), labels.get(key, ""))
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


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize(aval.dtype)
