"""The ways in which the backward pass gets a tensor: from the arrays of a codec, or from other tensors.

    tensor --encode--> parts (one array, or several) --decode--> tensor

The stash of a stage is a list with the parts of each stored tensor.
"""

import enum
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.array_types import Array, Shaped
from jaxpipe.errors import ModelError
from jaxpipe.graph.codec import Codec
from jaxpipe.graph.graph import Tensor


class Derived(enum.Enum):
    """The ways to get a tensor that is not stored."""

    ALIAS = "alias"  # a view of what is stored: no bytes, no work
    RECOMPUTE = "recompute"  # computed again from what is stored


#: The codec that stores a tensor, or how it is derived.
Format = Codec | Derived


def encode(value: Array, codec: Codec) -> tuple[Array, ...]:
    """The parts of a tensor."""
    parts = codec.encode(value)
    if not isinstance(parts, tuple | list) or not all(isinstance(part, jax.Array | np.ndarray) for part in parts):
        raise ModelError(
            f"The codec {codec.name!r} encoded {type_text(value)} as {type(parts).__name__}. encode returns a tuple of "
            "arrays, also of a single one."
        )
    return tuple(parts)


def decode(parts: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct, codec: Codec) -> Array:
    """The tensor; if it does not fit its codec, something else."""
    value = codec.decode(parts, shape_and_type)
    given = type_text(value) if isinstance(value, jax.Array | np.ndarray) else type(value).__name__
    if given != type_text(shape_and_type):
        raise ModelError(
            f"The codec {codec.name!r} decoded {type_text(shape_and_type)} as {given}. decode returns an "
            "array of the shape and type that it is given; jaxpipe.testing.check_codec tries it on many."
        )
    return value


def has_overflowed(parts: Sequence[Array], codec: Codec) -> Array:
    """Return whether a tensor did not fit its codec, ``bool[]``."""
    fits = codec.fits(parts)
    if not isinstance(fits, jax.Array | np.bool_) or (fits.shape, fits.dtype) != ((), np.bool_):
        raise ModelError(f"The codec {codec.name!r}: fits returned {fits!r}. It returns one boolean array, bool[].")
    return jnp.logical_not(fits)


def type_text(x: Shaped) -> str:
    """Return element type and shape, ``float32[3,4]``."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


@functools.lru_cache(maxsize=4096)  # a search for storage asks for the same shapes thousands of times
def part_avals(tensor: Tensor, codec: Codec) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each part."""
    return jax.eval_shape(lambda x: encode(x, codec), tensor.shape_and_type)


@functools.lru_cache(maxsize=4096)
def stored_bytes(tensor: Tensor, codec: Codec) -> int:
    """Bytes of one stored tensor."""
    return codec.nbytes(tensor.shape_and_type)
