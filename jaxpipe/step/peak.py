"""The memory of a compiled step at its peak, by cause and module path."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.step.compiled_buffers import Allocation, Buffer, Event
from jaxpipe.step.traced_step import Argument, Role, TracedStep


#: Causes besides those of arguments, which are their roles.
COPIES = "new state beside the old, as it is not donated"
RESULTS = "results"
GRADIENTS = "gradients"
STORED = "stored for the backward pass"
LOGITS = "logits and their gradient"
PARAMETER_COPIES = "converted or padded arguments"
FORWARD = "at work in the forward pass"
BACKWARD = "at work in the backward pass"
UPDATE = "at work outside both passes"
UNUSED = "unused between buffers"
UNKNOWN = "not attributed"

#: Columns to which products of GPUs and TPUs are padded.
_TILE = 128


@dataclass(frozen=True)
class PeakPart:
    """Some memory at the peak.

    Attributes:
      cause: why it is needed, such as ``"parameters"`` or ``"stored for the backward pass"``.
      name: the argument, or the module path and operator that made it; may be empty.
      bytes: of one device.
      shape: of the array, if it is one.
    """

    cause: str
    name: str
    bytes: int
    shape: tuple[int, ...] = ()


def peak_parts(
    allocations: Sequence[Allocation] | None, compiled: jax.stages.Compiled, step: TracedStep
) -> tuple[PeakPart, ...]:
    """Return parts that add up to XLA's arguments + results + temporaries - aliases.

    Args:
      allocations: by XLA's record; without one, arguments, results and temporaries are told apart and no more.
      compiled: the compiled step.
      step: what it was compiled from.
    """
    total = reserved_bytes(compiled)
    if allocations is None:
        sizes = compiled.memory_analysis()
        assert sizes is not None
        parts = [
            PeakPart("arguments", "", sizes.argument_size_in_bytes),
            PeakPart(RESULTS, "", sizes.output_size_in_bytes - sizes.alias_size_in_bytes),
        ]
    else:
        used = _compat.kept_arguments(compiled, len(step.arguments))  # JAX drops those that it does not use
        parts = list(_parts(allocations, [step.arguments[k] for k in used], step))
    missing = total - sum(part.bytes for part in parts)
    return (*(part for part in parts if part.bytes), *([PeakPart(UNKNOWN, "", missing)] if missing else []))


def _parts(allocations: Sequence[Allocation], arguments: Sequence[Argument], step: TracedStep) -> Iterator[PeakPart]:
    sort = _Sort.of(step)
    updated = Counter(a.bytes for a in arguments if a.updated and not a.donated)
    for allocation in allocations:
        if allocation.parameter is not None:
            argument = arguments[allocation.parameter] if allocation.parameter < len(arguments) else None
            cause, name, shape = (argument.role.value, argument.name, argument.shard) if argument else (UNKNOWN, "", ())
            yield PeakPart(cause, name, allocation.bytes, shape)
        elif allocation.is_result:
            updated[allocation.bytes] -= 1
            result = max(allocation.buffers, key=lambda buffer: buffer.bytes)
            cause = COPIES if updated[allocation.bytes] >= 0 else RESULTS
            yield PeakPart(cause, _module_path(result), allocation.bytes, result.shape)
        else:
            yield from _temporaries(allocation, sort)


def _temporaries(allocation: Allocation, sort: "_Sort") -> Iterator[PeakPart]:
    """Yield the buffers of an allocation when most of it is used, and what is unused then."""
    if not allocation.events:  # XLA has not told which of several is there when
        buffer, *others = allocation.buffers
        cause, name = (UNKNOWN, "") if others else (sort.cause(buffer, False), _module_path(buffer))
        yield PeakPart(cause, name, allocation.bytes)
        return
    live = _fullest(allocation.events)
    for buffer, is_kept in live:
        yield PeakPart(sort.cause(buffer, is_kept), _module_path(buffer), buffer.bytes, buffer.shape)
    yield PeakPart(UNUSED, "", allocation.bytes - sum(buffer.bytes for buffer, _ in live))


def _fullest(events: Sequence[Event]) -> list[tuple[Buffer, bool]]:
    """Return the buffers that are live when most of an allocation is used, and whether each waits for a backward pass.

    That one begins while they live: zeros of a gradient are made at the very beginning, and micro-batches take turns.
    """
    begins = {event.buffer: moment for moment, event in enumerate(events) if event.begins}
    ends = {event.buffer: moment for moment, event in enumerate(events) if not event.begins}
    # A place is the buffer that was in it first: by place, the buffers that are in it; by buffer, its place.
    places, places_of = dict[Buffer, dict[Buffer, None]](), dict[Buffer, Buffer]()
    size, most, fullest = 0, -1, list[Buffer]()
    for event in events:
        if event.begins:
            place = places_of[event.buffer] = places_of.get(event.place_of, event.place_of)
            size += 0 if places.get(place) else place.bytes
            places.setdefault(place, {})[event.buffer] = None
            if size > most:
                most, fullest = size, [next(reversed(inside)) for inside in places.values() if inside]
        else:
            place = places_of[event.buffer]
            del places[place][event.buffer]
            size -= 0 if places[place] else place.bytes
    backward = [moment for buffer, moment in begins.items() if _is_backward(buffer)]
    lives = [(buffer, begins[buffer], ends.get(buffer, len(events))) for buffer in fullest]
    return [(buffer, any(begin < moment <= end for moment in backward)) for buffer, begin, end in lives]


def _is_backward(buffer: Buffer) -> bool:
    return "transpose(" in buffer.path


def _module_path(buffer: Buffer) -> str:
    """Return a path without JAX's transformations: ``Net/Dense_0/dot_general``.

    Example:
      >>> _module_path(Buffer(4, "dot.1", "jit(step)/transpose(jvp(Net))/checkpoint/Dense_0/dot_general"))
      'Net/Dense_0/dot_general'
    """
    before, path = "", re.sub(r"^jit\([^()]*\)/|\b(checkpoint|rematted_computation)/", "", buffer.path)
    while before != path:
        before, path = path, re.sub(r"\b(?:jit|jvp|transpose|vmap|remat|checkpoint)\(([^()]*)\)", r"\1", path)
    return re.sub(r"/{2,}", "/", path).strip("/") or buffer.name


@dataclass(frozen=True)
class _Sort:
    """Shapes that tell the causes of temporaries apart: of parameters, without axes of length 1, and of logits."""

    parameters: frozenset[tuple[int, ...]]
    logits: tuple[int, int] | None

    @staticmethod
    def of(step: TracedStep) -> "_Sort":
        shapes = {_long_axes(a.shard) for a in step.arguments if a.role is Role.PARAMETERS}
        return _Sort(frozenset(shape for shape in shapes if shape), _logits(step.program))

    def cause(self, buffer: Buffer, is_kept: bool) -> str:
        path, shape = buffer.path, buffer.shape
        if self._are_logits(shape):
            return LOGITS
        if path and "/" not in path:  # named as an argument
            return PARAMETER_COPIES
        if _is_backward(buffer):
            return GRADIENTS if _long_axes(shape) in self.parameters else BACKWARD
        return UPDATE if "jvp(" not in path else STORED if is_kept else FORWARD

    def _are_logits(self, shape: tuple[int, ...]) -> bool:
        """Return whether an array is of logits; some are without the last position, or padded to whole tiles."""
        if self.logits is None or not shape:
            return False
        size, classes = self.logits
        if classes < _TILE:
            return (math.prod(shape), shape[-1]) == self.logits
        padded = -(-classes // _TILE) * _TILE
        return any(classes <= length <= padded for length in shape) and 0.9 < math.prod(shape) / size < 1.15


def _long_axes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(length for length in shape if length > 1))


def _logits(program: AnyJaxpr) -> tuple[int, int] | None:
    """Return the size and last axis of the result of the forward pass's last product, if no other result has them."""
    kinds = Counter((math.prod(shape), shape[-1]) for shape in _forward_products(program, "") if shape)
    last = next(reversed(kinds), None)
    return last if last and kinds[last] == 1 and last[0] == max(size for size, _ in kinds) else None


def _forward_products(program: AnyJaxpr, outer: str) -> Iterator[tuple[int, ...]]:
    for equation in _compat.open_jaxpr(program)[0].eqns:
        names = f"{outer}/{equation.source_info.name_stack}"
        if equation.primitive.name == "dot_general" and "jvp(" in names and "transpose(" not in names:
            yield tuple(equation.outvars[0].aval.shape)
        for inner in _compat.inner_programs(equation):
            yield from _forward_products(inner, names)
