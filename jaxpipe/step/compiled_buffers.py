"""XLA's own record of a compiled program: its instructions, its allocations, and the buffers in them.

XLA writes it as protocol buffers when it is told to dump a program (``xla/service/hlo.proto`` of openxla/xla); read
here are the few fields that are needed. ``memory_analysis()`` has the record of allocations too, but it is empty where
a program was compiled for a GPU that is absent.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

#: The values of each field of a message, by the number of the field.
Fields = defaultdict[int, list[Any]]


@dataclass(frozen=True, eq=False)
class Buffer:
    """A value in memory.

    Attributes:
      name: of the instruction that makes it; may be empty.
      path: JAX's name of what that computes, such as ``jit(step)/transpose(jvp(Net))/Dense_0/dot_general``.
      shape: dimensions; none where they are not known.
    """

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

    buffer: Buffer
    begins: bool
    place_of: Buffer


@dataclass(frozen=True)
class Allocation:
    """A block of memory that the program has from its begin to its end, and the buffers that take turns in it.

    Attributes:
      parameter: the number of the argument that it holds; None if it holds none.
      is_result: whether it holds a result of the program.
      events: when its buffers begin and end, where XLA has told.
    """

    bytes: int
    parameter: int | None
    is_result: bool
    buffers: tuple[Buffer, ...]
    events: tuple[Event, ...]


def compile_with_buffers(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, tuple[Allocation, ...] | None]:
    """Compile a program; returns its allocations too, or None if XLA has no record of them.

    What JAX has kept on disk was compiled earlier, without a record: it is compiled anew, under a key of its own.
    """
    compiled, record = _compiled_and_dumped(lowered)
    config: Any = jax.config
    if not record[_ASSIGNMENT] and config.jax_compilation_cache_dir:
        compiled, record = _compiled_and_dumped(lowered, {_NO_EFFECT: str(time.time_ns() % 2**31)})
    sizes = compiled.memory_analysis()
    assignment = _value(record, _ASSIGNMENT) or (sizes.serialized_buffer_assignment_proto if sizes else b"")
    return compiled, read_allocations(_value(record, 1), assignment) if record[1] and assignment else None


def _compiled_and_dumped(
    lowered: jax.stages.Lowered, options: Mapping[str, str] = MappingProxyType({})
) -> tuple[jax.stages.Compiled, Fields]:
    """Compile a program; returns the fields of what XLA writes meanwhile, too."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **_DUMP, **options})
        records = [_fields(file.read_bytes()) for file in Path(folder).glob("*after_optimizations.hlo.pb")]
    return compiled, max(records, key=len, default=_fields(b""))  # one with allocations


def read_allocations(module: bytes, assignment: bytes) -> tuple[Allocation, ...]:
    """Return the allocations of a program but those of threads and of constants.

    Args:
      module: its ``HloModuleProto``.
      assignment: its ``BufferAssignmentProto``.
    """
    instructions, record = _instructions(module), _fields(assignment)
    buffers = {_value(x, 1): _buffer(x, instructions) for x in map(_fields, record[1])}
    # The number of the allocation that is beside a trace is not always that which it has in the end.
    traces = [tuple(_event(_fields(x), buffers) for x in _fields(trace)[1]) for trace in record[4]]
    by_first = {trace[0].buffer: trace for trace in traces if trace}
    # Fields 3 and 12 are of allocations of threads and of constants.
    allocations = (x for x in map(_fields, record[3]) if not _value(x, 3) and not _value(x, 12))
    return tuple(_allocation(x, buffers, by_first) for x in allocations)


def _allocation(record: Fields, every: Mapping[int, Buffer], traces: Mapping[Buffer, tuple[Event, ...]]) -> Allocation:
    buffers = tuple(every[_value(_fields(x), 1)] for x in record[9])
    return Allocation(
        bytes=_value(record, 2),
        parameter=_value(record, 6) if _value(record, 5) else None,
        is_result=bool(_value(record, 7)),
        buffers=buffers,
        events=next((traces[buffer] for buffer in buffers if buffer in traces), ()),
    )


def _event(record: Fields, buffers: Mapping[int, Buffer]) -> Event:
    buffer, kind = _value(record, 2), _value(record, 1)
    place_of = _value(record, 5) if kind == 2 else buffer
    return Event(buffers[buffer], begins=kind != 1, place_of=buffers[place_of])


def _buffer(record: Fields, instructions: Mapping[int, tuple[str, str, list[tuple[int, ...]]]]) -> Buffer:
    place = _fields(_value(record, 3, b""))
    name, path, shapes = instructions.get(_value(place, 4), ("", "", []))
    part = next(iter(_numbers(place[3])), 0)
    return Buffer(_value(record, 2), name, path, shapes[part] if part < len(shapes) else ())


def _instructions(module: bytes) -> dict[int, tuple[str, str, list[tuple[int, ...]]]]:
    """Return, by the number of an instruction, its name, JAX's name, and the shapes of its result or of its parts."""
    computations = [_fields(x) for x in _fields(module)[3]]
    roots = {_value(x, 5): _value(x, 6) for x in computations}
    records = {_value(x, 35): x for computation in computations for x in map(_fields, computation[2])}

    def path(number: int, depth: int = 3) -> str:
        """Return JAX's name; where XLA has dropped it, that of what is fused, or of what it is computed from."""
        record = records.get(number, _fields(b""))
        name = _value(_fields(_value(record, 7, b"")), 2, b"").decode()
        if name or not depth:
            return name
        sources = [*(roots.get(c, 0) for c in _numbers(record[38])), *_numbers(record[36])]
        return next(filter(None, (path(source, depth - 1) for source in sources)), "")

    return {
        number: (_value(record, 1).decode(), path(number), _shapes(_fields(_value(record, 3, b""))))
        for number, record in records.items()
    }


def _shapes(shape: Fields) -> list[tuple[int, ...]]:
    """Return the dimensions of an array, or those of the parts of a tuple."""
    parts = map(_fields, shape[4])
    return [next(iter(_shapes(part)), ()) for part in parts] if shape[4] else [tuple(_numbers(shape[3]))]


def _numbers(values: Sequence[bytes]) -> list[int]:
    """Return the numbers of a repeated field, which are packed."""
    numbers = list[int]()
    for value in values:
        place = 0
        while place < len(value):
            number, place = _number(value, place)
            numbers.append(number)
    return numbers


def _value(fields: Fields, number: int, default: Any = 0) -> Any:
    """Return the value of a field of which there is one; none is written for zero and for what is empty."""
    return fields[number][-1] if fields[number] else default


def _fields(message: bytes) -> Fields:
    """Return the values of each field of a message of protocol buffers.

    They are numbers, and messages, texts or packed numbers as bytes.
    """
    fields, place = defaultdict[int, list[Any]](list), 0
    while place < len(message):
        key, place = _number(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _number(message, place)
        else:
            length, place = _number(message, place) if kind == 2 else ({1: 8, 5: 4}[kind], place)
            value, place = message[place : place + length], place + length
        fields[key >> 3].append(value)
    return fields


def _number(message: bytes, place: int) -> tuple[int, int]:
    """Return a number in base 128, the lowest digits first, and where it ends."""
    number = shift = 0
    while True:
        digit = message[place]
        number |= (digit & 127) << shift
        place, shift = place + 1, shift + 7
        if digit < 128:
            return number, place
