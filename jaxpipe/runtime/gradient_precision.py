"""The types in which gradients are added up, and the one rounding at the end.

    gradient of a micro-batch, bfloat16 ──widened──▶ sums over micro-batches, stages and replicas, float32
    sums ──divided by the total weight──▶ mean, float32 ──rounded──▶ gradient, bfloat16 ──▶ optimizer

A sum of n terms in bfloat16 is rounded n times, to 8 bits: that of 64 micro-batches is wrong by 0.8 %. The optimizer
gets gradients of the parameters' own types, as from ``jax.grad``, so that its state has the types that optax gives it;
for a parameter that has a float32 copy (``jaxpipe.gradients.master_weights``) it gets the float32 mean.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxpipe.array_types import Array, DType
from jaxpipe.errors import PartitionError


#: The type in which gradients of narrower ones are added up, unless the caller says otherwise.
DEFAULT = np.dtype(np.float32)


def check_gradient_dtype(gradient_dtype: DTypeLike | None) -> DType | None:
    """Return the type that ``gradient_dtype=`` names; None if it was left out."""
    if gradient_dtype is None:
        return None
    rule = "it must be a floating-point type of at least 16 bits, such as 'float32' or jnp.bfloat16"
    try:
        dtype = jnp.dtype(gradient_dtype)
    except TypeError:
        raise PartitionError(
            f"gradient_dtype={gradient_dtype!r} names no type; {rule}. Leave it out for float32."
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise PartitionError(f"gradient_dtype={dtype.name} holds no fractions; {rule}. Leave it out for float32.")
    if dtype.itemsize < 2:
        raise PartitionError(
            f"gradient_dtype={dtype.name} has {8 * dtype.itemsize} bits, in which a sum of gradients stops growing "
            f"after a few micro-batches; {rule}. Leave it out for float32."
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise PartitionError(
            f"gradient_dtype={dtype.name}, but JAX has no arrays of this type as it is configured. Set "
            "jax.config.update('jax_enable_x64', True) first, or leave gradient_dtype out for float32."
        )
    return dtype


def check_effect(gradient_dtype: DType | None, dtypes: Iterable[DTypeLike]) -> None:
    """Raise ``PartitionError`` if ``gradient_dtype`` is narrower than every parameter, so that none can use it."""
    if gradient_dtype is None:
        return
    floats = {jnp.dtype(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    if floats and all(dtype.itemsize > gradient_dtype.itemsize for dtype in floats):
        names = ", ".join(sorted(dtype.name for dtype in floats))
        raise PartitionError(
            f"gradient_dtype={gradient_dtype.name}, but all parameters are {names}; gradients are never added up in a "
            "narrower type than that of their parameter. Leave gradient_dtype out, or give the model narrower "
            "parameters (param_dtype=)."
        )


def sum_dtype(dtype: DTypeLike, gradient_dtype: DTypeLike | None = None) -> DType:
    """The type in which gradients of a parameter are added up: ``gradient_dtype``, if it is wider than its own.

    Example:
      >>> sum_dtype(jnp.bfloat16), sum_dtype(jnp.float16, jnp.bfloat16), sum_dtype(jnp.int8)
      (dtype('float32'), dtype('float16'), dtype('int8'))
    """
    narrow, asked = np.dtype(dtype), DEFAULT if gradient_dtype is None else np.dtype(gradient_dtype)
    return asked if jnp.issubdtype(narrow, jnp.floating) and asked.itemsize > narrow.itemsize else narrow


def add_gradient(total: Array, gradient: Array) -> Array:
    """Return a sum with one more gradient."""
    return total + widened(gradient, total.dtype)


def larger_gradient(largest: Array, gradient: Array) -> Array:
    """Return the elementwise maximum with one more gradient, of a parameter that becomes its gradient."""
    return jnp.maximum(largest, gradient.astype(largest.dtype))


def widened(gradient: Array, dtype: DTypeLike) -> Array:
    """Return a gradient in the type of its sum, rounded to its own type before, as it is outside a pipeline.

    XLA would otherwise cancel the rounding and the widening against each other where both are in one computation, and
    add an unrounded gradient: sums would depend on where stages begin.
    """
    return gradient if gradient.dtype == dtype else lax.optimization_barrier(gradient).astype(dtype)
