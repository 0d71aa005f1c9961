"""The interface of codecs, which keep a tensor in another form between the passes: jaxpipe's own, and a user's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import jax

from jaxpipe.array_types import Array, DType
from jaxpipe.errors import ModelError


#: What a backward pass needs of a tensor.
Demand = Literal["value", "sign", "predicate", "window index", "index"]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that may be stored between the passes, as a codec sees it.

    Attributes:
      shape, dtype: of the tensor.
      demand: what the backward pass needs of it: its ``"value"``; the ``"sign"`` of another tensor (ReLU) or another
        ``"predicate"`` (``where``, dropout), both as booleans; the ``"window index"`` of each maximum of a max-pool;
        or an ``"index"`` along an axis (of a sort).
      path: the module path of the operator that made it, such as ``"Net/blocks/0/inner"``.
      operator: the name of that operator, such as ``"dot_general"``; empty for an argument.
      bits: how many bits hold an element: 1 for a boolean, 2 for a window of 2 x 2.
      nonzeros: for how many values that are not zero there should be room, as measured (``measure_density``) or assumed
        of what a ReLU writes; None for other tensors.
    """

    shape: tuple[int, ...]
    dtype: DType
    demand: Demand
    path: str = ""
    operator: str = ""
    bits: int = 0
    nonzeros: int | None = None

    @property
    def shape_and_type(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype, as the methods of a codec take them."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Codec:
    """A form in which tensors are kept between the forward and the backward pass, without loss of a bit.

    Subclass it, set ``name``, and write ``encode``, ``decode`` and ``allows``; ``jaxpipe.testing.check_codec`` tells
    whether every bit comes back. Pass objects of it beside names: ``codecs=["fast", MyCodec()]``. Codecs are compared,
    and are equal if their attributes are; a frozen dataclass is good for one with settings.

    Attributes:
      name: in reports and plans.
      moves: how often the bytes of a tensor are moved to encode and decode it, for estimates of time.

    Example:
      >>> import jax.numpy as jnp
      >>> class Small(Codec):
      ...     name = "uint8"
      ...
      ...     def allows(self, tensor):
      ...         return tensor.dtype == jnp.int32
      ...
      ...     def encode(self, x):
      ...         return x.astype(jnp.uint8), jnp.all((x >= 0) & (x < 256))
      ...
      ...     def decode(self, arrays, shape_and_type):
      ...         return arrays[0].astype(shape_and_type.dtype)
      ...
      ...     def fits(self, arrays):
      ...         return arrays[1]
      >>> Small().nbytes(jax.ShapeDtypeStruct((100,), jnp.int32))
      101
    """

    name: str
    moves: float = 4.0

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether a tensor may be kept in this form; it is if nothing else that is allowed has fewer bytes."""
        raise NotImplementedError

    def encode(self, x: Array) -> Sequence[Array]:
        """Return the arrays that are kept in place of a tensor, as a tuple; traced."""
        raise NotImplementedError

    def decode(self, arrays: Sequence[Array], shape_and_type: jax.ShapeDtypeStruct) -> Array:
        """Return the tensor, with every bit of it, if it fits; traced."""
        raise NotImplementedError

    def fits(self, arrays: Sequence[Array]) -> Array:
        """Return whether ``decode`` gives the tensor back, ``bool[]``; traced.

        Leave it out if it always does. Else the backward pass computes a tensor that does not fit again, from others
        that are kept as they are.
        """
        raise NotImplementedError

    def nbytes(self, shape_and_type: jax.ShapeDtypeStruct) -> int:
        """Return the bytes of the arrays of a tensor. Left out, they are those of what ``encode`` returns, traced."""
        parts = jax.tree.leaves(jax.eval_shape(self.encode, shape_and_type))
        return sum(part.size * part.dtype.itemsize for part in parts)

    def for_tensor(self, tensor: SavedTensor) -> Self | None:
        """Return the codec with settings for one tensor, such as room for so many values; None to leave it alone.

        Left out, it is the codec itself where it ``allows`` the tensor.
        """
        return self if self.allows(tensor) else None

    @property
    def may_overflow(self) -> bool:
        """True if there may be tensors that do not fit."""
        return type(self).fits is not Codec.fits

    @property
    def fuses(self) -> bool:
        """True if decoding is so little work that it runs inside of what reads the tensor."""
        return self.moves <= PACKING

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self).items())))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{k}={v!r}' for k, v in sorted(vars(self).items()))})"


#: How often the bytes of a tensor are moved to pack and unpack its elements.
PACKING = 2.0


def check_own(codec: object, taken: Sequence[str], argument: str) -> None:
    """Raise ``ModelError`` unless an object is a codec with a name of its own that can be compared."""
    given, name = f"{argument} has {codec!r}", getattr(codec, "name", None)
    if not isinstance(codec, Codec):
        raise ModelError(f"{given}, which is no codec. Pass an object of a subclass of jaxpipe.Codec: MyCodec().")
    if not isinstance(name, str) or not name or name in taken:
        raise ModelError(
            f"{given}, whose name is {name!r}. Reports and plans tell codecs by their names: give it one of its own, "
            f"other than {', '.join(map(repr, taken)) or 'an empty one'}."
        )
    kind = type(codec)
    if (
        kind.encode is Codec.encode
        or kind.decode is Codec.decode
        or (kind.allows is Codec.allows and kind.for_tensor is Codec.for_tensor)
    ):
        raise ModelError(f"{given}, which lacks a method. Write encode, decode and allows.")
    if not isinstance(codec.moves, int | float):
        raise ModelError(f"{given}, whose moves is {codec.moves!r}. It is a number.")
    try:
        hash(codec)
    except TypeError as error:
        raise ModelError(
            f"{given}, which cannot be hashed ({error}). Codecs are compared and looked up: make it a frozen dataclass "
            "whose fields are numbers, texts and tuples."
        ) from error
