"""Outputs of a decorated function that all examples of a ``jax.vmap`` share.

    vmap(grad(function)):  one call of vmap, in which forward and backward rule run
    grad(vmap(function)):  forward rule, mapped ──▶ outputs, residuals ──▶ backward rule, mapped again

In the second an output may be one value for all examples: what depends on parameters alone, or a mean over a named
axis. It has one cotangent then. The backward rule runs for each example, and JAX adds up what it gives for inputs that
all examples share: jax 0.10 counts that cotangent once for each of them, 0.12 refuses. Here it is the first example's.
Inside of ``jit``, ``scan``, ``cond`` or a checkpoint that is itself mapped, no trace tells, and JAX does as it does.
"""

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array


@dataclass(frozen=True, eq=False)
class Mapped:
    """A call of ``jax.vmap`` around a forward rule: what its two halves share, its own, the inputs that it maps."""

    tag: object
    trace: weakref.ref[Any]
    inputs: tuple[bool, ...]


def vmaps_of(values: Sequence[object]) -> tuple[Mapped, ...]:
    """Return the calls of ``jax.vmap`` around a forward rule of some inputs, the innermost first."""
    return tuple(Mapped(t.tag, weakref.ref(t), tuple(_is_mapped(x, t) for x in values)) for t in _vmap_traces())


def of_first_example(
    vmaps: Sequence[Mapped], kept: Sequence[object], cotangents: Sequence[Array | None]
) -> list[Array | None]:
    """Return the cotangents of a backward rule, of which those that all examples share are the first one's alone.

    Where inputs, what is ``kept`` and all cotangents are one value for all examples, so are the gradients.
    """
    cotangents = list(cotangents)
    for trace, mapped in _apart(vmaps):
        if not any(mapped.inputs) and not any(_is_mapped(x, trace) for x in (*kept, *cotangents)):
            continue
        first = _compat.BatchTracer(trace, jnp.arange(trace.axis_data.size) == 0, 0)
        for k, ct in enumerate(cotangents):
            if ct is not None and not _is_mapped(ct, trace):
                cotangents[k] = jnp.where(first, ct, jnp.zeros_like(ct))
    return cotangents


def added_up(vmaps: Sequence[Mapped], gradients: Sequence[Array | None]) -> list[Array | None]:
    """Return the gradients of a backward rule, those of inputs that all examples share added up over them."""
    gradients = list(gradients)
    for trace, mapped in _apart(vmaps):
        for k, x in enumerate(gradients):
            if x is not None and not mapped.inputs[k] and _is_mapped(x, trace):
                gradients[k] = _sum(x, trace)
    return gradients


def _apart(vmaps: Sequence[Mapped]) -> list[tuple[Any, Mapped]]:
    """The calls of ``jax.vmap`` around a backward rule that are another half of those around its forward rule."""
    return [(t, m) for t in _vmap_traces() for m in vmaps if m.tag is t.tag and m.trace() is not t]


def _vmap_traces() -> Iterator[Any]:
    """The traces of the calls of ``jax.vmap`` around what is traced here, the innermost first."""
    trace = _compat.current_trace()
    while isinstance(trace, _compat.BatchTrace):
        yield trace
        trace = trace.parent_trace


def _is_mapped(x: Any, trace: object) -> bool:
    while _compat.is_batched(x):
        if _compat.is_within(x, trace):
            return True
        x = x.val
    return False


def _sum(x: Any, trace: object) -> Array:
    """The sum over the examples of a call of ``jax.vmap``, which may be around others that map ``x``, too."""
    if _compat.is_within(x, trace):
        return x.val.sum(x.batch_dim)
    inner = next(t for t in _vmap_traces() if _compat.is_within(x, t))
    return _compat.BatchTracer(inner, _sum(x.val, trace), x.batch_dim)
