"""Arrays of any type as 32-bit words: what is sent between stages and kept for later."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.array_types import Array, Shaped
from jaxpipe.graph.graph import itemsize


def word_count(aval: Shaped) -> int:
    """Words that an array takes."""
    return -(-math.prod(aval.shape) * itemsize(aval.dtype) // 4)


def to_words(x: Array) -> Array:
    """An array's bits as a vector of ``uint32``; the last word is filled up with zeros."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    flat = lax.reshape(x, (x.size,))
    per_word = 4 // x.dtype.itemsize
    if per_word == 0:
        return lax.reshape(lax.bitcast_convert_type(flat, jnp.uint32), (x.size * x.dtype.itemsize // 4,))
    if per_word > 1:
        missing = -x.size % per_word
        if missing:
            flat = jnp.pad(flat, (0, missing))
        flat = lax.reshape(flat, (flat.size // per_word, per_word))
    return lax.bitcast_convert_type(flat, jnp.uint32)


def from_words(words: Array, aval: Shaped) -> Array:
    """The inverse of ``to_words``, for an array of the shape and dtype of ``aval``."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return jax.random.wrap_key_data(from_words(words, raw), impl=jax.random.key_impl(jnp.empty((), aval.dtype)))
    if aval.dtype == jnp.bool_:
        return from_words(words, jax.ShapeDtypeStruct(aval.shape, jnp.uint8)).astype(jnp.bool_)
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        part = np.empty((), aval.dtype).real.dtype
        pairs = from_words(words, jax.ShapeDtypeStruct((*aval.shape, 2), part))
        return lax.complex(pairs[..., 0], pairs[..., 1])
    size, width = math.prod(aval.shape), np.dtype(aval.dtype).itemsize
    if width > 4:
        words = lax.reshape(words, (size, width // 4))
    flat = lax.bitcast_convert_type(words, aval.dtype)
    if width < 4:
        flat = lax.slice(lax.reshape(flat, (flat.size,)), (0,), (size,))
    return lax.reshape(flat, tuple(aval.shape))


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
