"""Checks of what users add to jaxpipe."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.array_types import Array, ArrayLike
from jaxpipe.errors import ModelError
from jaxpipe.graph.codec import Codec, SavedTensor, check_own
from jaxpipe.residuals.stored_formats import decode, encode, type_text


#: Scalars, empty arrays, odd sizes, whole bytes; one that is large enough for sparse codecs.
_SHAPES = ((), (0,), (1,), (7,), (3, 0), (3, 5), (2, 3, 3, 1), (16, 64), (5, 33, 7))


def check_codec(codec: Codec, tensors: Iterable[SavedTensor | ArrayLike] = ()) -> None:
    """Check that a codec returns every bit of the tensors that it allows.

    It is tried on all element types and many shapes that it allows: NaN with payloads, -0.0, infinities, subnormals,
    random bits, whole numbers, powers of two, what ``bfloat16`` holds, zeros with few other values, empty arrays,
    scalars, odd sizes; under ``jit`` and ``vmap``. Where ``fits`` returns False, nothing has to come back, and nothing
    is compared: give arrays that the codec is made for.

    Args:
      codec: an object of ``jaxpipe.Codec``.
      tensors: more to try: arrays; or descriptions, ``jaxpipe.graph.codec.SavedTensor``, for a codec that allows
        those of some operators or paths only, for which values are drawn.

    Raises:
      ModelError: if the codec loses a bit, with the element and its bits before and after; if it returns another shape
        or type, counts bytes wrong, raises an error, has no name, cannot be compared, or allows or fits nothing, or not
        an array that was given.

    Example:
      >>> import jax.numpy as jnp, jaxpipe
      >>> class Half(jaxpipe.Codec):
      ...     name = "half"
      ...
      ...     def allows(self, tensor):
      ...         return tensor.dtype == jnp.float32
      ...
      ...     def encode(self, x):
      ...         return (x.astype(jnp.float16),)
      ...
      ...     def decode(self, arrays, shape_and_type):
      ...         return arrays[0].astype(jnp.float32)
      >>> check_codec(Half())
      Traceback (most recent call last):
      ...
      jaxpipe.errors.ModelError: check_codec was given Half(), which lost bits of float32[] under jit: ...
    """
    check_own(codec, (), "check_codec")
    arrays, described = [], list(_tensors())
    for x in tensors:
        described.append(x) if isinstance(x, SavedTensor) else arrays.append(np.asarray(x))
    for k, x in enumerate(arrays):
        tensor = SavedTensor(x.shape, x.dtype, "value", "", "", 8 * x.dtype.itemsize)
        form = codec.for_tensor(tensor)
        if form is None or not _fits_some(form, tensor, x[None]):
            raise ModelError(
                f"check_codec was given {codec!r} and arrays, of which {type_text(tensor.shape_and_type)}, number {k}, "
                f"is none of its own: {'allows' if form is None else 'fits'} returned False. Arrays come from no "
                "operator and no module; describe tensors that do as SavedTensor(...)."
            )
    trials = {(c, x.shape_and_type): x for x in described if (c := codec.for_tensor(x)) is not None}
    fitted = [_fits_some(form, tensor, _values(tensor)) for (form, _), tensor in trials.items()]
    if not any(fitted):
        method = "fits" if fitted else "allows"
        raise ModelError(
            f"check_codec was given {codec!r}, whose {method} returned False for all that was tried: floats, integers "
            "and booleans of up to 1,155 elements, made by dot_general. Pass what it is for as tensors=[...], or "
            "return True where decode gives all bits back."
        )


def _tensors() -> Iterator[SavedTensor]:
    """Yield tensors of every type and demand."""
    kinds: list[tuple[Any, Any, int]] = [(bool, "predicate", 1), (bool, "sign", 1)]
    kinds += [(jnp.uint8, "window index", bits) for bits in (1, 2, 4)] + [(jnp.int32, "index", b) for b in (8, 16)]
    values = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64, jnp.complex64, jnp.complex128, jnp.float8_e4m3fn]
    values += [jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32, jnp.int64, jnp.uint64]
    kinds += [(kind, "value", 0) for kind in values]
    for kind, demand, bits in kinds:
        dtype = np.dtype(kind)
        if jax.dtypes.canonicalize_dtype(dtype) == dtype:
            for shape in _SHAPES if dtype == np.float32 else _SHAPES[::3] + _SHAPES[1:2]:
                nonzeros = math.prod(shape) // 4 if jnp.issubdtype(dtype, jnp.floating) else None
                yield SavedTensor(shape, dtype, demand, "Net", "dot_general", bits or 8 * dtype.itemsize, nonzeros)


def _values(tensor: SavedTensor) -> np.ndarray:
    """Return arrays for a tensor, stacked: random ones, full ones, zeros with something at one place, plain numbers."""
    rng, dtype = np.random.default_rng(0), tensor.dtype
    words = np.dtype(f"uint{8 * dtype.itemsize}")
    highest = 2**tensor.bits - 1
    rare = [highest, 0, 1, highest // 2]
    if jnp.issubdtype(dtype, jnp.floating):
        mantissa, sign = jnp.finfo(dtype).nmant, 1 << (tensor.bits - 1)
        infinity, quiet = (sign - 1) >> mantissa << mantissa, 1 << (mantissa - 1)
        special = [sign, infinity | quiet | 5, infinity | quiet, infinity | 1, sign | infinity | quiet | 3]  # -0.0, NaN
        rare = [*special, infinity, sign | infinity, quiet, infinity - 1, infinity >> 1, *rare]
    pieces = [np.full(tensor.shape, word, words) for word in rare]
    for word in rare:
        few = np.zeros(math.prod(tensor.shape), words)
        few[few.size // 2 : few.size // 2 + 1] = word
        pieces.append(few.reshape(tensor.shape))
    pieces += [rng.choice(np.array(rare, words), tensor.shape), rng.integers(0, highest, tensor.shape, words, True)]
    stacked = np.stack(pieces).view(dtype)
    plain = [rng.integers(0, 2, (2, *tensor.shape))]
    if tensor.demand == "value":
        least = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -1
        numbers = [rng.integers(least * n, n, (1, *tensor.shape)) for n in (4, 128)]
        plain += [*numbers, least * np.abs(numbers[1])]
        if jnp.issubdtype(dtype, jnp.inexact):
            powers = np.ldexp(1.0, rng.integers(-6, 7, numbers[0].shape))
            plain += [powers, -powers, numbers[1] / 2]
    return np.concatenate([stacked, *(x.astype(dtype) for x in plain)])


def _fits_some(codec: Codec, tensor: SavedTensor, values: np.ndarray) -> bool:
    """Raise ``ModelError`` if values of a tensor do not come back; return whether some fit."""
    form = tensor.shape_and_type
    given, what = f"check_codec was given {codec!r}", type_text(form)

    def back(arrays: Sequence[Array]) -> tuple[Array, Array]:
        return decode(arrays, form, codec), codec.fits(arrays) if codec.may_overflow else jnp.bool_(True)

    forth = functools.partial(encode, codec=codec)
    compiled, batched = (jax.jit(forth), jax.jit(back)), (jax.jit(jax.vmap(forth)), jax.jit(jax.vmap(back)))
    try:
        fits = jax.eval_shape(back, jax.eval_shape(forth, form))[1]
        counted, returned = codec.nbytes(form), Codec.nbytes(codec, form)
        results = {"jit": [compiled[1](compiled[0](x)) for x in values]}
        results["vmap"] = list(zip(*batched[1](batched[0](values)), strict=True))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{given}, which raised {type(error).__name__} for {what}: {error}. Its methods are traced, under jit and "
            "vmap, for every tensor that is allowed: let allows refuse what they cannot take."
        ) from error
    if (fits.shape, fits.dtype) != ((), np.bool_):
        raise ModelError(f"{given}, whose fits returned {type_text(fits)} for {what}. Return one boolean, bool[].")
    if counted != returned:
        raise ModelError(
            f"{given}, whose nbytes returned {counted} for {what}, but encode returned {returned} bytes. Count all "
            "arrays, or leave nbytes out."
        )
    for how, outcomes in results.items():
        for before, (after, fit) in zip(values, outcomes, strict=True):
            if fit and (lost := _first_difference(before, np.asarray(after))):
                raise ModelError(
                    f"{given}, which lost bits of {what} under {how}: {lost}. A codec gives back every bit: work on "
                    "bit patterns (jax.lax.bitcast_convert_type), allow fewer tensors, or return False from fits."
                )
    return any(bool(fit) for _, fit in results["jit"])


def _first_difference(before: np.ndarray, after: np.ndarray) -> str:
    """Return the first element that differs, with its bits; empty if none does."""
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (before, after)]
    words = [x.view(f"uint{8 * x.dtype.itemsize}") for x in flat]
    for k in np.flatnonzero(words[0] != words[1]):
        was, became = (f"{x[k]} ({word[k]:#0{2 * x.dtype.itemsize + 2}x})" for x, word in zip(flat, words, strict=True))
        return f"element {tuple(map(int, np.unravel_index(k, before.shape)))} was {was} and became {became}"
    return ""
