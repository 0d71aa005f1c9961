"""Messages between devices of different processes, put together where the list allows it.

Each message between processes is a program that both owners start and wait in. Messages that are next to each other
become one: those of one direction side by side, those that cross there and back.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.array_types import Device
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Call, Instruction, Send, StepGraph


def combine_sends(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return a graph with as few messages between processes as the order of its instructions allows."""
    return replace(graph, instructions=tuple(join_messages(graph.instructions, layout.devices)))


def join_messages(instructions: Sequence[Instruction], devices: StageDevices) -> list[Instruction]:
    """Return a list whose messages between two devices of different processes are as few as its order allows.

    A message may wait for a later one between the same devices as long as nobody reads it before that. Of messages in
    one direction it waits only if neither device calls a program in between, as it would come late.
    """
    results: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Send) and devices.cross(*instruction.ends):
            waiting = _waiting(results, instruction, devices)
            if waiting is not None:
                before = results.pop(waiting)
                assert isinstance(before, Send)
                instruction = _joined(before, instruction, devices)
        results.append(instruction)
    return results


def _waiting(results: Sequence[Instruction], send: Send, devices: StageDevices) -> int | None:
    """Return the position of the last message between a send's devices, if it may wait for the send."""
    source, target = _first_devices(send, devices)
    read, called = set(send.reads), False
    for k in range(len(results) - 1, -1, -1):
        before = results[k]
        if isinstance(before, Send) and set(_first_devices(before, devices)) == {source, target}:
            same = before.returning > 0 or _first_devices(before, devices) == (source, target)
            return k if read.isdisjoint(before.writes) and not (same and called) else None
        read.update(before.reads)
        called = called or (isinstance(before, Call) and not {source, target}.isdisjoint(devices.of(before.place)))
    return None


def _first_devices(message: Send, devices: StageDevices) -> tuple[Device, ...]:
    return tuple(map(devices.at, message.ends))


def _joined(before: Send, send: Send, devices: StageDevices) -> Send:
    """Return a message with the arrays of a later one: before those that return, or as some of these."""
    goes_back = _first_devices(before, devices) != _first_devices(send, devices)
    k = len(before.reads) if goes_back else len(before.reads) - before.returning
    return replace(
        before,
        reads=(*before.reads[:k], *send.reads, *before.reads[k:]),
        writes=(*before.writes[:k], *send.writes, *before.writes[k:]),
        returning=before.returning + (len(send.reads) if goes_back else 0),
    )
