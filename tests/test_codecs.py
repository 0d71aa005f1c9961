import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.codecs import bits


@pytest.mark.core
def test_mask_layout_is_the_drawn_one():
    # One example of 16 booleans: byte 0 takes the even ones, byte 1 the odd ones, first element in bit 0.
    x = np.array([[1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1]], bool)
    assert np.asarray(bits.pack(x, 1)).tolist() == [[0b10000101, 0b10100100]]


def test_two_bit_layout():
    assert np.asarray(bits.pack(np.array([[3, 0, 1, 2, 2, 1, 0, 3]], np.uint8), 2)).tolist() == [
        [0b00100111, 0b11011000]
    ]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (2, 3, 3, 1), (4, 8, 2), (0,), (0, 3), (3, 0)])
def test_round_trip_and_bytes(width, shape):
    x = np.random.default_rng(0).integers(0, 2**width, shape).astype(np.uint8)
    packed = bits.pack(jnp.asarray(x), width)
    batch, length = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, int(np.prod(shape)))
    if width < 8:
        assert packed.dtype == jnp.uint8
        assert packed.nbytes == batch * -(-length * width // 8) == bits.packed_bytes(shape, width)
    assert np.array_equal(bits.unpack(packed, shape, width, jnp.uint8), x)


def test_unpack_gives_the_dtype_asked_for():
    x = jnp.array([True, False, True])
    back = bits.unpack(bits.pack(x, 1), (3,), 1, jnp.bool_)
    assert back.dtype == jnp.bool_ and back.tolist() == [True, False, True]


def test_works_under_vmap_and_jit():
    x = np.random.default_rng(1).random((5, 4, 9)) < 0.5
    packed = jax.jit(jax.vmap(lambda v: bits.pack(v, 1)))(x)
    back = jax.jit(jax.vmap(lambda v: bits.unpack(v, (4, 9), 1, jnp.bool_)))(packed)
    assert np.array_equal(back, x)
