"""Arrays of any type as 32-bit words: what is sent between stages and kept for later."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxpipe.array_types import AbstractArray, Array, ArrayLike, DType, PyTree, Shaped, is_key


#: The types of shapes, which may be among arrays.
_SHAPE = jax.ShapeDtypeStruct | AbstractArray


def word_count(avals: PyTree) -> int:
    """Words that the arrays of a tree take."""
    return sum(-(-math.prod(x.shape) * x.dtype.itemsize // 4) for x in jax.tree.leaves(avals))


def to_words(x: Array) -> Array:
    """An array's bits as a vector of ``uint32``; the last word is filled up with zeros."""
    flat = jnp.ravel(jax.random.key_data(x) if is_key(x) else x)  # a constant may be a number
    flat = flat.astype(_of_bytes(flat.dtype))
    missing = -flat.nbytes % 4 // flat.dtype.itemsize
    return (jnp.pad(flat, (0, missing)) if missing else flat).view(jnp.uint32)


def from_words(words: Array, aval: Shaped) -> Array:
    """The inverse of ``to_words``, for an array of the shape and dtype of ``aval``."""
    if is_key(aval):
        raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return typed(from_words(words, raw), aval.dtype)
    flat = words.view(_of_bytes(aval.dtype))
    return lax.slice(flat, (0,), (math.prod(aval.shape),)).reshape(aval.shape).astype(aval.dtype)


def typed(x: ArrayLike, dtype: DType) -> Any:
    """Return an array as it is; or random keys made of their words, if its dtype is to be one of keys."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(jnp.empty((), dtype)))


def _of_bytes(dtype: DTypeLike) -> DTypeLike:
    """Return a type of whole bytes that has all values of one of fewer bits (int4, float4); another type as it is."""
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8
    return jnp.float8_e4m3fn if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8 else dtype


def pack_words(values: PyTree, length: int | None = None) -> Array:
    """The arrays of a tree as words, one after the other; with zeros for a shape that is in the place of an array.

    Up to a ``length``, zeros follow.
    """
    leaves = jax.tree.leaves(values)
    parts = [jnp.zeros(word_count(x), jnp.uint32) if isinstance(x, _SHAPE) else to_words(x) for x in leaves]
    missing = 0 if length is None else length - sum(p.size for p in parts)
    if missing or not parts:
        parts.append(jnp.zeros((missing,), jnp.uint32))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def unpack_words(words: Array, avals: PyTree) -> PyTree:
    """The arrays of a tree of shapes, as ``pack_words`` packs them."""
    return read_words(avals, lambda start, count: lax.slice(words, (start,), (start + count,)))


def read_words(avals: PyTree, read: Callable[[int, int], Array]) -> PyTree:
    """The arrays of a tree of shapes, where ``read(start, count)`` gives so many of their words."""
    leaves, tree = jax.tree.flatten(avals)
    counts = list(map(word_count, leaves))
    starts = itertools.accumulate(counts, initial=0)
    return tree.unflatten([from_words(read(*span), x) for *span, x in zip(starts, counts, leaves, strict=False)])
