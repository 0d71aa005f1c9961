"""Max-pooling: the backward pass needs only where in its window each maximum was.

JAX keeps the whole input map and finds the maxima again (``select_and_scatter_add``). Here the forward pass keeps
the position: 2 bits for a 2x2 window, 4 for 3x3. Positions count the window's elements in row-major order, and the
scan that finds them is XLA's own (``selected >= candidate`` keeps), so that ties, NaN and padding go the same way.
The window may be dilated, which JAX itself cannot differentiate, and so may the map.

A ReLU before the pool needs no mask of its own: its cotangent is zero everywhere but at the maxima, so one bit for
each *output* element, "was the maximum positive", does the same.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import AbstractArray, Array
from jaxpipe.graph.graph import Operator, is_differentiable
from jaxpipe.graph.operator_vjp import Halves, from_rule
from jaxpipe.targets.building import current


@dataclass(frozen=True)
class Windows:
    """The windows of a pool, in the terms of ``lax.reduce_window``; everything by dimension.

    Attributes:
      shape: positions in a window.
      strides: elements from one window to the next.
      padding: elements before and after the map.
      dilation: elements from one position of a window to the next.
      base_dilation: the same for the map: its elements stand that far apart, with padding between them.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    base_dilation: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements from a window's first position to its last, both counted."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.shape, self.dilation, strict=True))


def applies(op: Operator) -> bool:
    """Return whether ``op`` is a max-pool of floats with at least one window."""
    return (
        op.name == "reduce_window_max"
        and not op.literals
        and is_differentiable(op.equation.invars[0].aval)
        and math.prod(op.equation.outvars[0].aval.shape) > 0
        and math.prod(op.params["window_dimensions"]) <= 2**16
    )


def position_bits(window: Sequence[int]) -> int:
    """Bits that name a position in a window: 1, 2, 4, 8 or 16, so that a byte holds a whole number of them."""
    return next(bits for bits in (1, 2, 4, 8, 16) if math.prod(window) <= 2**bits)


def derive(pool: Operator, relu: Operator | None, aval: AbstractArray) -> Halves:
    """The halves of the VJP of a max-pool, or of a ReLU and the max-pool that alone reads it."""
    names = ("window_dimensions", "window_strides", "padding", "window_dilation", "base_dilation")
    windows = Windows(*(tuple(pool.params[name]) for name in names))

    def forward(operand: Array) -> tuple[list[Array], list[Array]]:
        (values,) = (operand,) if relu is None else relu.evaluate(operand)
        result, position, selected = find_maxima(values, windows)
        return [result], [position] if relu is None else [position, selected > 0]

    def backward(residuals: Sequence[Array], cotangents: Sequence[Any]) -> list[Array]:
        position, *positive = residuals
        (cotangent,) = cotangents
        size = math.prod(windows.shape)
        position = position.astype(jnp.uint8 if size < 255 else jnp.int32)
        if positive:
            position = lax.select(positive[0], position, lax.full_like(position, size + 1))
        # Each position is read by every element of its window: decode it once.
        position = _compat.materialize(position, cotangent)
        # XLA would add a bias's cotangents up along the dimensions inside, and so in another order than JAX's.
        return [lax.optimization_barrier(scatter_to_maxima(cotangent, position, aval.shape, windows))]

    bits = [position_bits(windows.shape)] + ([] if relu is None else [1])
    return from_rule(forward, backward, [aval], bits=bits)


def find_maxima(values: Array, windows: Windows) -> tuple[Array, Array, Array]:
    """Each window's maximum, the row-major position that receives its cotangent, and the element there.

    The two differ only if the window holds a NaN: the maximum is NaN, the cotangent goes where XLA's scan stops.
    Plain elementwise operators on strided slices: they fuse, and may be recomputed like any other.
    """
    lowest = jnp.array(-jnp.inf, values.dtype)
    strides = windows.strides
    between = [b - 1 for b in windows.base_dilation]
    padded = lax.pad(values, lowest, [(low, high, m) for (low, high), m in zip(windows.padding, between, strict=True)])
    counts = [(n - k) // s + 1 for n, k, s in zip(padded.shape, windows.extent, strides, strict=True)]
    dtype = jnp.uint8 if position_bits(windows.shape) <= 8 else jnp.uint16
    candidates = []
    for offset in itertools.product(*(range(0, k, d) for k, d in zip(windows.extent, windows.dilation, strict=True))):
        limit = [o + (n - 1) * s + 1 for o, n, s in zip(offset, counts, strides, strict=True)]
        candidates.append(lax.slice(padded, offset, limit, strides))
    maximum = selected = candidates[0]
    position = lax.full_like(selected, 0, dtype)
    for code, candidate in enumerate(candidates[1:], start=1):
        keep = selected >= candidate
        position = lax.select(keep, position, lax.full_like(position, code))
        selected = lax.select(keep, selected, candidate)
        maximum = lax.max(maximum, candidate)
    return maximum, position, selected


def scatter_to_maxima(cotangent: Array, position: Array, shape: Sequence[int], windows: Windows) -> Array:
    """Send each cotangent to the position of its window's maximum; overlapping windows add up.

    A position of ``prod(windows.shape) + 1`` sends its cotangent nowhere. Element ``p = s q + r`` of a dimension with
    stride ``s`` lies in the windows ``q - t`` at offset ``r + s t``, if the window has a position at that offset.
    For each ``r`` the terms of all ``q`` are added up, as large as the pool's result; then the sums are put side by
    side. Larger ``t``, that is earlier windows, come first: XLA's order. Where XLA fuses few terms, few are added at a
    time.
    """
    strides = windows.strides
    reach = [-(-k // s) for k, s in zip(windows.extent, strides, strict=True)]
    dilated = [(n - 1) * b + 1 if n else 0 for n, b in zip(shape, windows.base_dilation, strict=True)]
    padded = [n + low + high for n, (low, high) in zip(dilated, windows.padding, strict=True)]
    cells = [max(-(-n // s), o + t - 1) for n, s, o, t in zip(padded, strides, cotangent.shape, reach, strict=True)]
    offsets = (range(0, k, d) for k, d in zip(windows.extent, windows.dilation, strict=True))
    codes = {offset: code for code, offset in enumerate(itertools.product(*offsets))}
    # A sum that starts at zero never gives -0.0, so no cotangent may bring one in.
    zero = jnp.zeros((), cotangent.dtype)
    cotangent = jnp.where(cotangent != 0, cotangent, zero)
    margins = [(t - 1, cell - n, 0) for t, cell, n in zip(reach, cells, cotangent.shape, strict=True)]
    positions = lax.pad(position, np.zeros((), position.dtype), margins)
    cotangents = lax.pad(cotangent, zero, margins)

    def sums(first: tuple[int, ...]) -> Array:
        """Return the sums of all elements whose first ``r`` these are."""
        dimension = len(first)
        if dimension < len(strides):
            return _interleave([sums((*first, r)) for r in range(strides[dimension])], dimension)
        codes_of = {
            shift: code
            for shift in itertools.product(*(range(t - 1, -1, -1) for t in reach))
            if (code := codes.get(tuple(r + s * t for r, s, t in zip(first, strides, shift, strict=True)))) is not None
        }
        most, total, seen, sent = current().fused_slices or len(codes), [], positions, cotangents
        for k in range(0, len(codes_of), most):
            if total:
                total, seen, sent = lax.optimization_barrier((total, seen, sent))
            for shift, code in itertools.islice(codes_of.items(), k, k + most):
                start = [t - 1 - moved for t, moved in zip(reach, shift, strict=True)]
                stop = [low + cell for low, cell in zip(start, cells, strict=True)]
                hit = lax.slice(seen, start, stop) == code
                total.append(jnp.where(hit, lax.slice(sent, start, stop), zero))
            total = [functools.reduce(jnp.add, total)]
        return total[0] if total else jnp.zeros(cells, cotangent.dtype)

    starts = [low for low, _ in windows.padding]
    apart = windows.base_dilation if set(windows.base_dilation) != {1} else None
    return lax.slice(sums(()), starts, [low + n for low, n in zip(starts, dilated, strict=True)], apart)


def _interleave(arrays: Sequence[Array], dimension: int) -> Array:
    """Return an array with the elements of each in turn along a dimension."""
    return arrays[0] if len(arrays) == 1 else lax.collapse(jnp.stack(arrays, dimension + 1), dimension, dimension + 2)
