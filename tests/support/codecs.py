"""A codec that several test modules need."""

import jax
import jax.numpy as jnp

import jaxpipe


class Halves(jaxpipe.Codec):
    """Keeps the bits of what has 4 bytes as two arrays of 16 bits; modules say which tensors it allows."""

    def encode(self, x):
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return (words >> 16).astype(jnp.uint16), words.astype(jnp.uint16)

    def decode(self, arrays, shape_and_type):
        high, low = (x.astype(jnp.uint32) for x in arrays)
        return jax.lax.bitcast_convert_type(high << 16 | low, shape_and_type.dtype)
