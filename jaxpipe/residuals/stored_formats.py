"""How the backward pass gets a tensor: from the arrays that a codec makes of it, or from other tensors.

    tensor --encode--> parts (one array, or several) --decode--> tensor

The stash of a stage is a list with the parts of each stored tensor.
"""

import enum
import functools
from collections.abc import Sequence

import jax

from jaxpipe.array_types import Array
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
    if not isinstance(parts, tuple | list):
        raise ModelError(
            f"The codec {codec.name!r} encoded {jax.typeof(value).str_short()} as {type(parts).__name__}. encode "
            "returns a tuple of arrays; put a comma behind a single one."
        )
    return tuple(parts)


def decode(parts: Sequence[Array], tensor: Tensor, codec: Codec) -> Array:
    """The tensor; if it does not fit its codec, something else."""
    value = codec.decode(parts, tensor.shape_and_type)
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise ModelError(
            f"The codec {codec.name!r} decoded {tensor.aval.str_short()} as {jax.typeof(value).str_short()}. decode "
            "returns an array of the given shape and type; jaxpipe.testing.check_codec tells where it does not."
        )
    return value


@functools.lru_cache(maxsize=4096)  # a search for storage asks for the same shapes thousands of times
def part_avals(tensor: Tensor, codec: Codec) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape and dtype of each part."""
    return jax.eval_shape(lambda x: encode(x, codec), tensor.shape_and_type)


@functools.lru_cache(maxsize=4096)
def stored_bytes(tensor: Tensor, codec: Codec) -> int:
    """Bytes of one stored tensor."""
    return codec.nbytes(tensor.shape_and_type)
