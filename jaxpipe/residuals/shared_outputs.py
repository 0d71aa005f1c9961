"""Outputs of a decorated function that all examples of a ``jax.vmap`` share.

    vmap(grad(function)):  one call of vmap, in which forward and backward rule run
    grad(vmap(function)):  forward rule, mapped ──▶ outputs, residuals ──▶ backward rule, mapped again

In the second an output may be one value for all examples: what depends on parameters alone, or a mean over a named
axis. It has one cotangent then. The backward rule runs for each example, and JAX adds up what it gives for inputs that
all examples share: jax 0.10 counts that cotangent once for each of them, 0.12 refuses. Here it is the first example's.

Inside of ``jit``, ``scan``, ``cond`` or a checkpoint that is itself mapped, JAX traces the forward rule first and maps
what was traced. What goes from one rule to the other tells then what is mapped: *marks*, arrays without elements that
are mapped as inputs and outputs are.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["inputs", "outputs"], meta_fields=["vmaps", "is_traced"]
)
@dataclass(frozen=True, eq=False)
class ForwardRule:
    """Surroundings of a forward rule: marks, the calls of ``jax.vmap``, and whether others may map what it traced.

    Each call of ``jax.vmap`` is what its halves share, and whether it is inside of ``jax.grad``. One around it
    has several halves, too, where it maps a ``jax.shard_map``.
    """

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    vmaps: tuple[tuple[object, bool], ...]
    is_traced: bool


def vmaps_here() -> tuple[object, ...]:
    """Return what the halves of each call of ``jax.vmap`` share that maps a function which is called here."""
    return tuple(trace.tag for trace in _vmap_traces())


def forward_rule(inputs: Sequence[Array], outputs: Sequence[Array], inside: Sequence[object]) -> ForwardRule:
    """Describe where the forward rule that is traced now runs, with the inputs that are differentiated.

    Args:
      inside: of the vmaps where the function was called.
    """
    around = list(_vmap_traces())
    end = around[-1].parent_trace if around else _compat.current_trace()
    vmaps = tuple((trace.tag, any(tag is trace.tag for tag in inside)) for trace in around)
    return ForwardRule(
        list(map(_mark, inputs)), list(map(_mark, outputs)), vmaps, isinstance(end, _compat.DynamicJaxprTrace)
    )


def counted_once(
    rule: ForwardRule, backward: Callable[..., Sequence[Array | None]], kept: PyTree, cotangents: Sequence[Array | None]
) -> list[Array | None]:
    """Return the gradients of a backward rule, with what all examples share counted once.

    Of their cotangents, those that they share are the first example's alone; the gradients of inputs that they share
    are added up. Where inputs, what is ``kept`` and all cotangents are one value for all, so are the gradients.
    """
    apart = [trace for trace in _vmap_traces() if _is_apart(trace, rule, kept, cotangents)]
    seeds = list(cotangents)
    for trace in apart:
        first = _compat.BatchTracer(trace, jnp.arange(trace.axis_data.size) == 0, 0)
        seeds = [x if x is None or _is_mapped(x, trace) else jnp.where(first, x, jnp.zeros_like(x)) for x in seeds]
    gradients = list(backward(kept, seeds))
    for trace in apart:
        for k, (x, mark) in enumerate(zip(gradients, rule.inputs, strict=True)):
            if x is not None and _is_mapped(x, trace) and not _is_mapped(mark, trace):
                gradients[k] = _sum(x, trace)
    return gradients


def _is_apart(trace: Any, rule: ForwardRule, kept: PyTree, cotangents: Sequence[Array | None]) -> bool:
    """Return whether a call of ``jax.vmap`` around a backward rule is another half of one around its forward rule.

    It has the tag of one that ran inside of ``jax.grad``, or maps what was traced: then cotangents are mapped as
    outputs are. They need not be where a pullback is mapped by itself, which differentiates each example on its own.
    Where no cotangent is shared, JAX knows which of the two it is. (Where one is, a pullback that ``jit`` returns is
    taken for the first by mistake if the same ``vmap`` calls it with cotangents that are mapped as the outputs are.)
    """
    if all(ct is None or _is_mapped(ct, trace) for ct in cotangents):
        return False
    if not any(_is_mapped(x, trace) for x in (*rule.inputs, *rule.outputs, *jax.tree.leaves(kept))):
        return False
    if inside := [inside for tag, inside in rule.vmaps if tag is trace.tag]:
        return inside[0]
    return rule.is_traced and all(
        ct is None or _is_mapped(ct, trace) == _is_mapped(mark, trace)
        for ct, mark in zip(cotangents, rule.outputs, strict=True)
    )


def _mark(x: Array) -> Array:
    return jax.lax.broadcast(x, (0,))


def _vmap_traces() -> Iterator[Any]:
    """The traces of the calls of ``jax.vmap`` around what is traced here, the innermost first."""
    trace = _compat.current_trace()
    while isinstance(trace, _compat.BatchTrace):
        yield trace
        trace = trace.parent_trace


def _is_mapped(x: Any, trace: object) -> bool:
    while isinstance(x, _compat.BatchTracer):
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
