"""The step that is explained: traced and compiled for its device, and compiled again with other batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpipe.array_types import PyTree
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.step.compiled_buffers import compile_with_buffers
from jaxpipe.step.peak import PeakPart, peak_parts
from jaxpipe.step.step_arguments import jitter
from jaxpipe.step.target_device import TargetDevice, placed
from jaxpipe.step.traced_step import Argument, Role, TracedStep, trace_step
from jaxpipe.step.wrapped_modules import CalledModules, observed_modules


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
    sizes = {a.shape[0] for a in arguments if a.role is Role.BATCH and a.shape}
    return sizes.pop() if len(sizes) == 1 else None


def bytes_with_batch(explained: Explained, size: int) -> int | None:
    """Return the step's bytes with a batch of another size; None if there is no batch, or the step does not take it.

    Each size is compiled once.
    """
    known, arguments, places = explained.bytes_by_batch, explained.step.arguments, explained.step.places
    leaves, treedef = jax.tree.flatten(explained.args)
    if size < 1 or batch_size(arguments) is None or places is None:
        return None
    if size not in known:
        for k, argument in zip(places, arguments, strict=True):
            if argument.role is Role.BATCH and argument.shape:
                x = leaves[k]
                leaves[k] = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=getattr(x, "sharding", None))
        step = trace_step(explained.jitted, jax.tree.unflatten(treedef, leaves))
        known[size] = reserved_bytes(step.traced.lower().compile())
    return known[size]
