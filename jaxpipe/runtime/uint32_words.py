"""Arrays of any type as 32-bit words: what is sent between stages and kept for later."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxpipe.array_types import Array, ArrayLike, DType, Shaped, is_key


def word_count(aval: Shaped) -> int:
    """Words that an array takes."""
    return -(-math.prod(aval.shape) * aval.dtype.itemsize // 4)


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


def pack_words(values: Sequence[Array], length: int) -> Array:
    """Arrays one after the other in a vector of ``length`` words; the rest is filled with zeros."""
    parts = [to_words(x) for x in values]
    missing = length - sum(p.size for p in parts)
    if missing or not parts:
        parts.append(jnp.zeros((missing,), jnp.uint32))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def pack_given(values: Mapping[int, Array], avals: Sequence[Shaped]) -> Array:
    """The arrays that are given, by position, as ``pack_words`` packs all of some shapes; zeros for the others."""
    parts = [to_words(values[k]) if k in values else jnp.zeros(word_count(a), jnp.uint32) for k, a in enumerate(avals)]
    return jnp.concatenate(parts)


def unpack_words(words: Array, avals: Sequence[Shaped]) -> list[Array]:
    """The arrays that ``pack_words`` or ``pack_given`` packed."""
    arrays, start = [], 0
    for aval in avals:
        count = word_count(aval)
        arrays.append(from_words(lax.slice(words, (start,), (start + count,)), aval))
        start += count
    return arrays
