"""Messages between devices of different processes, put together where the list allows it.

Each message between processes is a program that both owners start and wait in. Messages that are next to each other
become one: those of one direction side by side, those that cross there and back.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.array_types import Device
from jaxpipe.runtime.mpmd.instructions import Call, Exchange, Instruction, Send, ends
from jaxpipe.runtime.mpmd.stage_devices import StageDevices
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import StepGraph


def combine_sends(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return a graph with as few messages between processes as the order of its instructions allows."""
    return replace(graph, instructions=tuple(join_messages(graph.instructions, layout.devices)))


def join_messages(instructions: Sequence[Instruction], devices: StageDevices) -> list[Instruction]:
    """Return a list whose messages between two devices of different processes are as few as its order allows.

    A message may wait for a later one between the same devices as long as nobody reads it before that. Of messages in
    one direction it waits only if neither device calls a program in between, as it would come late.
    """
    results: list[Instruction | None] = []
    for instruction in instructions:
        if isinstance(instruction, Send) and devices.cross(*ends(instruction)):
            waiting = _waiting(results, instruction, devices)
            if waiting is not None:
                before = results[waiting]
                assert isinstance(before, (Send, Exchange))
                results[waiting] = None
                instruction = _joined(before, instruction, devices)
        results.append(instruction)
    return [instruction for instruction in results if instruction is not None]


def _waiting(results: Sequence[Instruction | None], send: Send, devices: StageDevices) -> int | None:
    """Return the position of the last message between a send's devices, if it may wait for the send."""
    source, target = _first_devices(send, devices)
    read, called = set(send.reads), False
    for k in range(len(results) - 1, -1, -1):
        before = results[k]
        if before is None:
            continue
        if isinstance(before, (Send, Exchange)) and set(_first_devices(before, devices)) == {source, target}:
            same = isinstance(before, Exchange) or _first_devices(before, devices) == (source, target)
            return k if read.isdisjoint(before.writes) and not (same and called) else None
        read.update(before.reads)
        called = called or (isinstance(before, Call) and not {source, target}.isdisjoint(devices.of(before.place)))
    return None


def _first_devices(message: Send | Exchange, devices: StageDevices) -> tuple[Device, ...]:
    return tuple(map(devices.at, ends(message)))


def _joined(before: Send | Exchange, send: Send, devices: StageDevices) -> Send | Exchange:
    if isinstance(before, Exchange):
        if _first_devices(before.forth, devices) == _first_devices(send, devices):
            return replace(before, forth=_side_by_side(before.forth, send))
        return replace(before, back=_side_by_side(before.back, send))
    if _first_devices(before, devices) == _first_devices(send, devices):
        return _side_by_side(before, send)
    return Exchange(before, send)


def _side_by_side(first: Send, second: Send) -> Send:
    return replace(first, reads=first.reads + second.reads, writes=first.writes + second.writes)
