"""Squared norms of gradients of any type."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpipe.array_types import Array, DType


def norm_dtype(dtypes: Iterable[DTypeLike]) -> DType:
    """Return the type of a norm of arrays of some types: float64 if there are such numbers among them, else float32.

    Example:
      >>> norm_dtype([jnp.bfloat16, jnp.complex64]), norm_dtype([jnp.float32, jnp.float64])
      (dtype('float32'), dtype('float64'))
    """
    is_wide = any(jnp.finfo(dtype).bits > 32 for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
    return np.dtype(np.float64 if is_wide else np.float32)


def squared_norm(arrays: Iterable[Array], dtype: DTypeLike = jnp.float32) -> Array:
    """Return the sum of the squared absolute values of arrays, in the type of a norm.

    Example:
      >>> float(squared_norm([jnp.array([3 + 4j]), jnp.array([1.0])]))
      26.0
    """
    sums = [jnp.sum(squares_of(x, dtype)) for x in arrays]
    return sum(sums, start=jnp.zeros((), dtype))


def squares_of(x: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Return the squared absolute values of the elements of an array."""
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    first, *rest = [jnp.square(part.astype(dtype)) for part in parts]
    return first + rest[0] if rest else first
