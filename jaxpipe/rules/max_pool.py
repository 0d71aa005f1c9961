"""Max-pooling: the backward pass needs only where in its window each maximum was.

JAX keeps the whole input map and finds the maxima again (``select_and_scatter_add``). Here the forward pass keeps
the position: 2 bits for a 2x2 window, 4 for 3x3. Positions count the window's elements in row-major order, and the
scan that finds them is XLA's own (``selected >= candidate`` keeps), so that ties, NaN and padding go the same way.

A ReLU before the pool needs no mask of its own: its cotangent is zero everywhere but at the maxima, so one bit for
each *output* element, "was the maximum positive", does the same.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe import _compat
from jaxpipe.graph import Operator, is_differentiable
from jaxpipe.vjp import Cut, from_rule


def applies(op: Operator) -> bool:
    """Whether ``op`` is a max-pool of floats without dilation."""
    return (
        op.name == "reduce_window_max"
        and is_differentiable(op.equation.invars[0].aval)
        and set(op.params["base_dilation"]) == {1}
        and set(op.params["window_dilation"]) == {1}
        and math.prod(op.params["window_dimensions"]) <= 2**16
    )


def position_bits(window: Sequence[int]) -> int:
    """Bits that name a position in a window: 1, 2, 4, 8 or 16, so that a byte holds a whole number of them."""
    return next(bits for bits in (1, 2, 4, 8, 16) if math.prod(window) <= 2**bits)


def rule(pool: Operator, relu: Operator | None) -> Callable[[Any], Cut]:
    """The cut of a max-pool, or of a ReLU and the max-pool that alone reads it."""
    window = tuple(pool.params["window_dimensions"])
    strides = tuple(pool.params["window_strides"])
    padding = tuple(pool.params["padding"])

    def cut(aval: Any) -> Cut:
        def forward(operand: Any) -> tuple[Any, list[Any]]:
            (values,) = (operand,) if relu is None else relu.evaluate(operand)
            result, position, selected = find_maxima(values, window, strides, padding)
            return result, [position] if relu is None else [position, selected > 0]

        def backward(residuals: Sequence[Any], cotangent: Any) -> Any:
            position, *positive = residuals
            size = math.prod(window)
            position = position.astype(jnp.uint8 if size < 255 else jnp.int32)
            if positive:
                position = lax.select(positive[0], position, lax.full_like(position, size + 1))
            # Each position is read by every element of its window: decode it once.
            position = _compat.materialize(position, cotangent)
            return scatter_to_maxima(cotangent, position, aval.shape, window, strides, padding)

        bits = [position_bits(window)] + ([] if relu is None else [1])
        return from_rule(forward, backward, aval, bits)

    return cut


def find_maxima(
    values: Any, window: Sequence[int], strides: Sequence[int], padding: Sequence[tuple[int, int]]
) -> tuple[Any, Any, Any]:
    """Each window's maximum, the row-major position that receives its cotangent, and the element there.

    The two differ only if the window holds a NaN: the maximum is NaN, the cotangent goes where XLA's scan stops.
    Plain elementwise operators on strided slices: they fuse, and may be recomputed like any other.
    """
    lowest = jnp.array(-jnp.inf, values.dtype)
    padded = lax.pad(values, lowest, [(low, high, 0) for low, high in padding])
    counts = [(n - k) // s + 1 for n, k, s in zip(padded.shape, window, strides, strict=True)]
    dtype = jnp.uint8 if position_bits(window) <= 8 else jnp.uint16
    candidates = []
    for offset in itertools.product(*map(range, window)):
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


def scatter_to_maxima(
    cotangent: Any,
    position: Any,
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Any:
    """Send each cotangent to the position of its window's maximum; overlapping windows add up.

    A position of ``prod(window) + 1`` sends its cotangent nowhere. Element ``p = s q + r`` of a dimension with
    stride ``s`` lies in the windows ``q - t`` at position ``r + s t``.
    For each ``t`` the map is laid out as ``[q, r]`` pairs and compared with the positions, so the work is one fused
    elementwise pass. Larger ``t``, that is earlier windows, come first: XLA's order.
    """
    reach = [-(-k // s) for k, s in zip(window, strides, strict=True)]
    padded = [n + low + high for n, (low, high) in zip(shape, padding, strict=True)]
    cells = [max(-(-n // s), o + t - 1) for n, s, o, t in zip(padded, strides, cotangent.shape, reach, strict=True)]
    interleaved = [side for cell, s in zip(cells, strides, strict=True) for side in (cell, s)]
    flat = np.arange(math.prod(window)).reshape(window)
    nowhere = math.prod(window)
    # A sum that starts at zero never gives -0.0, so no cotangent may bring one in.
    cotangent = jnp.where(cotangent != 0, cotangent, jnp.zeros((), cotangent.dtype))
    margins = [(t - 1, cell - n, 0) for t, cell, n in zip(reach, cells, cotangent.shape, strict=True)]
    positions = lax.pad(position, np.zeros((), position.dtype), margins)
    cotangents = lax.pad(cotangent, np.zeros((), cotangent.dtype), margins)
    spread = [side for s in strides for side in (1, s)]
    terms = []
    for shift in itertools.product(*(range(t - 1, -1, -1) for t in reach)):
        # Which position leads to offset r inside a cell; `nowhere` beyond the window.
        code = np.full(strides, nowhere, position.dtype)
        inside = tuple(slice(0, max(0, min(s, k - s * t))) for s, k, t in zip(strides, window, shift, strict=True))
        source = tuple(slice(s * t, s * t + s) for s, t in zip(strides, shift, strict=True))
        code[inside] = flat[source]
        start = [t - 1 - moved for t, moved in zip(reach, shift, strict=True)]
        stop = [low + cell for low, cell in zip(start, cells, strict=True)]
        hit = _interleave(lax.slice(positions, start, stop)) == code.reshape(spread)
        value = _interleave(lax.slice(cotangents, start, stop))
        terms.append(jnp.where(hit, jnp.broadcast_to(value, interleaved), jnp.zeros((), cotangent.dtype)))
    full = lax.reshape(functools.reduce(jnp.add, terms), [cell * s for cell, s in zip(cells, strides, strict=True)])
    starts = [low for low, _ in padding]
    return lax.slice(full, starts, [low + n for low, n in zip(starts, shape, strict=True)])


def _interleave(x: Any) -> Any:
    """``[q0, q1, ...] -> [q0, 1, q1, 1, ...]``."""
    return lax.expand_dims(x, range(1, 2 * x.ndim, 2))
