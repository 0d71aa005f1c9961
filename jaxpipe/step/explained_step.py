"""The step that is explained: traced and compiled for its device, and compiled again with other batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpipe.array_types import PyTree
from jaxpipe.costs.device_memory import pool_fraction
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.step.compiled_buffers import compile_with_buffers
from jaxpipe.step.peak import PeakPart, peak_parts
from jaxpipe.step.step_arguments import changed, jitter
from jaxpipe.step.target_device import TargetDevice, placed
from jaxpipe.step.traced_step import Argument, Role, TracedStep, trace_step
from jaxpipe.step.wrapped_modules import CalledModules, observed_modules


#: Batches that are compiled to find the largest that fits.
_MOST_BATCHES = 3


@dataclass(frozen=True, eq=False)
class Explained:
    """A step that measures are compared with.

    Attributes:
      jitted: as ``jax.jit`` or ``nnx.jit`` makes it.
      args: its arguments, as shapes on the device.
      step: traced from them.
      called: the modules that it calls.
      target: the device.
      parts: what is in memory at its peak.
      bytes: that it needs.
      bytes_by_batch: that it needs with batches of other sizes, as far as they were compiled.
    """

    jitted: Any
    args: PyTree
    step: TracedStep
    called: CalledModules
    target: TargetDevice
    parts: tuple[PeakPart, ...]
    bytes: int
    bytes_by_batch: dict[int, int] = field(default_factory=dict)

    @property
    def jit(self) -> str:
        """The name of the transformation that compiles it."""
        return "jax.jit" if jitter(self.args) is jax.jit else "nnx.jit"


def compile_step(jitted: Any, args: PyTree, target: TargetDevice) -> Explained:
    """Trace a step and compile it for a device."""
    shapes = placed(args, target)
    with observed_modules(shapes) as (called, named):
        traced = trace_step(jitted, named)
        compiled, buffers = compile_with_buffers(traced.traced.lower())
    parts = peak_parts(buffers, compiled, traced)
    return Explained(jitted, shapes, traced, called, target, parts, reserved_bytes(compiled))


def batch_size(arguments: Sequence[Argument]) -> int | None:
    """Return the length of the first axis of the batch, if all of its arrays have the same."""
    sizes = {a.array.shape[0] for a in arguments if a.role is Role.BATCH and a.array.shape}
    return sizes.pop() if len(sizes) == 1 else None


def bytes_with_batch(explained: Explained, size: int) -> int | None:
    """Return the step's bytes with a batch of another size; None if there is no batch, or the step does not take it.

    Each size is compiled once.
    """
    known, arguments, places = explained.bytes_by_batch, explained.step.arguments, explained.step.places
    if size < 1 or batch_size(arguments) is None or places is None:
        return None
    if size not in known:
        batch = {
            id(x): jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=getattr(x, "sharding", None))
            for x, argument in zip(map(jax.tree.leaves(explained.args).__getitem__, places), arguments, strict=True)
            if argument.role is Role.BATCH and argument.array.shape
        }
        step = trace_step(explained.jitted, changed(explained.args, lambda x: batch.get(id(x), x)))
        known[size] = reserved_bytes(step.traced.lower().compile())
    return known[size]


def largest_batch(explained: Explained) -> int | None:
    """Return the most examples whose step is within the pool; None where the memory or the batch is not known.

    Bytes are a straight line but for padding: between two sizes that were compiled the next is interpolated, and the
    answer is one that was compiled and fits. After few programs it may be smaller than the very largest.
    """
    size = batch_size(explained.step.arguments)
    if explained.target.memory is None or size is None:
        return None
    room = int(explained.target.memory * pool_fraction(explained.target.target))
    known = {size: explained.bytes}
    guess = max(1, size // 2)
    for _ in range(_MOST_BATCHES):
        try:
            needed = None if guess in known else bytes_with_batch(explained, guess)
        except Exception:  # a size that the user's step does not take, or too large for the compiler
            needed = None
        if needed is None:
            break
        known[guess] = needed
        guess = _next(known, room)
    return max((batch for batch, needed in known.items() if needed <= room), default=None)


def _next(known: dict[int, int], room: int) -> int:
    """Return the batch at which the line through the two sizes that are nearest to the limit meets it."""
    low, high = sorted(sorted(known, key=lambda batch: abs(known[batch] - room))[:2])
    slope = (known[high] - known[low]) / max(high - low, 1)
    if slope <= 0:
        return high
    return max(1, int(low + (room - known[low]) / slope))
