"""Arrays as 32-bit words: NumPy's bytes say what the words must be."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpipe.runtime.uint32_words import from_words, pack_words, to_words, unpack_words, word_count
from tests.support.compare import assert_same_bits


FLOATS = [np.float32, ml_dtypes.bfloat16, np.float16, np.float64]
COMPLEX = [np.complex64, np.complex128]
DTYPES = [*FLOATS, *COMPLEX, np.int8, np.uint8, np.int16, np.bool_, np.int32, np.uint32, np.int64]
SHAPES = [(), (5,), (2, 4), (7, 1, 3), (0,), (3, 0)]


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def random_bits(shape, dtype, seed=0):
    """Every bit pattern may occur, NaNs with any payload included; a boolean is 0 or 1."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    raw = rng.integers(0, 256, (math.prod(shape) * dtype.itemsize,), np.uint8)
    return raw.view(dtype).reshape(shape)


def aval(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_are_the_bytes_in_order(shape, dtype):
    value = random_bits(shape, dtype)
    x = jnp.asarray(value)
    assert x.dtype == value.dtype
    words = to_words(x)
    count = math.ceil(value.nbytes / 4)
    assert words.dtype == np.uint32 and words.shape == (count,)
    assert word_count(aval(x)) == count
    assert np.asarray(words).astype("<u4").tobytes() == value.tobytes().ljust(4 * count, b"\0")
    assert_same_bits(from_words(words, aval(x)), value)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, np.int8, np.bool_], ids=lambda d: np.dtype(d).name)
def test_round_trip_compiled(dtype):
    value = random_bits((3, 7), dtype)
    assert_same_bits(jax.jit(lambda x: from_words(to_words(x), aval(x)))(value), value)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_random_keys(shape, impl):
    keys = jax.random.split(jax.random.key(7, impl=impl), shape)
    words = to_words(keys)
    raw = np.asarray(jax.random.key_data(keys))
    assert np.array_equal(words, raw.reshape(-1))
    assert word_count(aval(keys)) == raw.size
    again = from_words(words, aval(keys))
    assert again.dtype == keys.dtype and again.shape == shape
    assert np.array_equal(jax.random.key_data(again), raw)


@pytest.mark.versions
@pytest.mark.parametrize("room", [0, 3])
def test_pack_and_unpack(room):
    values = [random_bits(SHAPES[k % len(SHAPES)], dtype, k) for k, dtype in enumerate(DTYPES)]
    arrays = list(map(jnp.asarray, values))
    length = sum(math.ceil(v.nbytes / 4) for v in values)
    words = pack_words(arrays, length + room)
    assert words.shape == (length + room,)
    assert not np.asarray(words)[length:].any()
    assert_same_bits(unpack_words(words, list(map(aval, arrays))), values)


@pytest.mark.versions
def test_what_comes_behind_values_of_less_than_a_byte():
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = {
        ml_dtypes.int4: np.arange(-8, 7),
        ml_dtypes.uint4: np.arange(1, 16),
        ml_dtypes.float4_e2m1fn: np.array([*positive, *np.negative(positive[:7], dtype=float)]),
        np.float32: np.arange(5) / 3,
    }
    values = [x.astype(dtype) for dtype, x in numbers.items()]
    arrays = list(map(jnp.asarray, values))
    length = sum(word_count(aval(x)) for x in arrays)
    for x, value in zip(unpack_words(pack_words(arrays, length), list(map(aval, arrays))), values, strict=True):
        assert x.dtype == value.dtype
        assert_same_bits(np.asarray(x).astype(np.float32), value.astype(np.float32))


def test_what_is_not_given_is_zero():
    values = [random_bits(SHAPES[k % len(SHAPES)], dtype, k) for k, dtype in enumerate(DTYPES)]
    words = pack_words([jnp.asarray(x) if k % 2 else aval(x) for k, x in enumerate(values)])
    zeros = [x if k % 2 else np.zeros_like(x) for k, x in enumerate(values)]
    assert_same_bits(unpack_words(words, list(map(aval, values))), zeros)


def test_trees_keep_their_structure():
    tree = {3: (random_bits((5,), np.int8), random_bits((2, 2), np.float32, 1)), 1: random_bits((), np.float16, 2)}
    words = pack_words(jax.tree.map(jnp.asarray, tree))
    assert word_count(tree) == words.size == 1 + 2 + 4
    assert_same_bits(unpack_words(words, jax.tree.map(aval, tree)), tree)


def test_pack_of_nothing():
    assert np.array_equal(pack_words([], 2), [0, 0])
    assert pack_words([], 0).shape == (0,)
    assert unpack_words(pack_words([], 2), []) == []
