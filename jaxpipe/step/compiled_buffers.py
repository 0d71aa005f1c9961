"""XLA's own record of a compiled program: its instructions, its allocations, and the buffers in them.

XLA writes it as protocol buffers when it is told to dump a program (``xla/service/hlo.proto`` of openxla/xla); read
here are the few fields that are needed. ``memory_analysis()`` has the record of allocations too, but it is empty where
a program was compiled for a GPU that is absent.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax


#: Compiler options under which XLA writes its record.
_DUMP = {"xla_dump_hlo_as_proto": True}

#: A compiler option that JAX's key of a program on disk has in it, and no program depends on.
_NO_EFFECT = "xla_debug_buffer_assignment_show_max"

#: The field of an ``HloProto`` that has the ``BufferAssignmentProto``.
_ASSIGNMENT = 3


@dataclass(frozen=True)
class Buffer:
    """A value in memory.

    Attributes:
      name: of the instruction that makes it; may be empty.
      path: JAX's name of what that computes, such as ``jit(step)/transpose(jvp(Net))/Dense_0/dot_general``.
      shape: dimensions; none where they are not known.
    """

    number: int
    bytes: int
    name: str = ""
    path: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Event:
    """A buffer that begins or ends, in the order in which the program runs.

    Attributes:
      place_of: the buffer in whose memory it begins, itself or another.
    """

    buffer: int
    begins: bool
    place_of: int


@dataclass(frozen=True)
class Allocation:
    """A block of memory that the program has from its begin to its end, and the buffers that take turns in it.

    Attributes:
      parameter: the number of the argument that it holds; None if it holds none.
      is_result: whether it holds a result of the program.
      buffers: their numbers.
      events: when they begin and end, where XLA has told.
    """

    bytes: int
    parameter: int | None
    is_result: bool
    buffers: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class CompiledBuffers:
    """All allocations of a program but those of threads and of constants, and the buffers by number."""

    allocations: tuple[Allocation, ...]
    buffers: dict[int, Buffer]


def compile_with_buffers(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, CompiledBuffers | None]:
    """Compile a program; returns XLA's record too, or None if there is no such record.

    What JAX has kept on disk was compiled earlier, without a record: it is compiled anew, under a key of its own.
    """
    compiled, record = _compiled_and_dumped(lowered)
    config: Any = jax.config
    if _ASSIGNMENT not in record and config.jax_compilation_cache_dir:
        compiled, record = _compiled_and_dumped(lowered, {_NO_EFFECT: str(time.time_ns() % 2**31)})
    sizes = compiled.memory_analysis()
    assignment = record.get(_ASSIGNMENT) or (sizes.serialized_buffer_assignment_proto if sizes else b"")
    return compiled, read_buffers(record[1], assignment) if 1 in record and assignment else None


def _compiled_and_dumped(
    lowered: jax.stages.Lowered, options: Mapping[str, str] = MappingProxyType({})
) -> tuple[jax.stages.Compiled, dict[int, Any]]:
    """Compile a program; returns the fields of what XLA writes meanwhile, too."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **_DUMP, **options})
        records = [dict(_fields(file.read_bytes())) for file in Path(folder).glob("*after_optimizations.hlo.pb")]
    return compiled, max(records, key=len, default={})  # one with allocations


def read_buffers(module: bytes, assignment: bytes) -> CompiledBuffers:
    """Return the buffers of an ``HloModuleProto`` and its ``BufferAssignmentProto``."""
    instructions = _instructions(module)
    buffers, allocations, events = dict[int, Buffer](), [], dict[int, tuple[Event, ...]]()  # by their first buffer
    for field, value in _fields(assignment):
        if field == 1:
            buffer = _buffer(value, instructions)
            buffers[buffer.number] = buffer
        elif field == 3:
            allocations.append(value)
        elif field == 4:
            # The number of the allocation that is beside them is not always that which it has in the end.
            trace = tuple(_event(x) for f, x in _fields(value) if f == 1)
            if trace:
                events[trace[0].buffer] = trace
    read = (_allocation(value, events) for value in allocations)
    return CompiledBuffers(tuple(allocation for allocation in read if allocation is not None), buffers)


def _allocation(record: bytes, events: dict[int, tuple[Event, ...]]) -> Allocation | None:
    fields = list(_fields(record))
    single = dict(fields)
    if single.get(3) or single.get(12):  # of a thread, or a constant
        return None
    buffers = tuple(dict(_fields(value)).get(1, 0) for field, value in fields if field == 9)
    return Allocation(
        bytes=single.get(2, 0),
        parameter=single.get(6, 0) if single.get(5) else None,
        is_result=bool(single.get(7)),
        buffers=buffers,
        events=next((events[n] for n in buffers if n in events), ()),
    )


def _event(record: bytes) -> Event:
    fields = dict(_fields(record))
    buffer, kind = fields.get(2, 0), fields.get(1, 0)
    return Event(buffer, begins=kind != 1, place_of=fields.get(5, 0) if kind == 2 else buffer)


def _buffer(record: bytes, instructions: dict[int, tuple[str, str, list[tuple[int, ...]]]]) -> Buffer:
    fields = dict(_fields(record))
    place = list(_fields(fields.get(3, b"")))
    name, path, shapes = instructions.get(dict(place).get(4, 0), ("", "", []))
    part = next((k for field, value in place if field == 3 for k in _numbers(value)), 0)
    return Buffer(fields.get(1, 0), fields.get(2, 0), name, path, shapes[part] if part < len(shapes) else ())


def _instructions(module: bytes) -> dict[int, tuple[str, str, list[tuple[int, ...]]]]:
    """Return, by the number of an instruction, its name, JAX's name, and the shapes of its result or of its parts."""
    records = dict[int, dict[int, Any]]()
    roots = dict[int, int]()
    for computation in (value for field, value in _fields(module) if field == 3):
        fields = list(_fields(computation))
        roots[dict(fields).get(5, 0)] = dict(fields).get(6, 0)
        for inner, value in fields:
            if inner == 2:
                record = dict(_fields(value))
                records[record.get(35, 0)] = record

    def path(number: int, depth: int = 3) -> str:
        """Return JAX's name; where XLA has dropped it, that of what is fused, or of what it is computed from."""
        record = records.get(number, {})
        name = dict(_fields(record.get(7, b""))).get(2, b"").decode()
        if name or not depth:
            return name
        sources = [roots.get(c, 0) for c in _numbers(record.get(38, b""))] + _numbers(record.get(36, b""))
        return next(filter(None, (path(source, depth - 1) for source in sources)), "")

    return {
        number: (record[1].decode(), path(number), list(_shapes(record.get(3, b""))))
        for number, record in records.items()
    }


def _shapes(shape: bytes) -> Iterator[tuple[int, ...]]:
    """Yield the dimensions of an array, or those of the parts of a tuple."""
    fields = list(_fields(shape))
    parts = [value for field, value in fields if field == 4]
    for part in parts:
        yield next(_shapes(part), ())
    if not parts:
        yield tuple(k for field, value in fields if field == 3 for k in _numbers(value))


def _numbers(value: bytes) -> list[int]:
    """Return the numbers of a repeated field, which are packed."""
    numbers, place = [], 0
    while place < len(value):
        number, place = _number(value, place)
        numbers.append(number)
    return numbers


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protocol buffers: numbers, and messages, texts or packed numbers as bytes."""
    place = 0
    while place < len(message):
        key, place = _number(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _number(message, place)
        else:
            length, place = _number(message, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
            value, place = message[place : place + length], place + length
        yield key >> 3, value


def _number(message: bytes, place: int) -> tuple[int, int]:
    """Return a number in base 128, the lowest digits first, and where it ends."""
    number = shift = 0
    while True:
        digit = message[place]
        number |= (digit & 127) << shift
        place, shift = place + 1, shift + 7
        if digit < 128:
            return number, place
