import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.residuals.codecs import CSR, Bitmap, bits, sparse
from jaxpipe.targets.building import building_for


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


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SHAPES = [(1,), (64,), (65,), (4, 7, 9, 3), (2, 256), (300, 7)]


def sparse_array(shape, density, dtype, seed=0):
    """Random values, zeros, and what is easily taken for zero or lost: -0.0, NaN, infinities, subnormals."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random(shape) < density, rng.normal(size=shape), 0.0)
    rare = np.array([-0.0, np.nan, np.inf, -np.inf, 1e-7])
    x = np.where(rng.random(shape) < density / 8, rng.choice(rare, shape), x)
    return jnp.asarray(x).astype(dtype)


def words_of(x):
    return np.asarray(x).reshape(-1).view({2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


@pytest.mark.parametrize("codec", [Bitmap, CSR])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(
            pytest.param(s, jnp.float32, marks=pytest.mark.slow if s in ((64,), (2, 256)) else pytest.mark.versions)
            for s in SHAPES
        ),
        *(pytest.param(SHAPES[3], dtype, marks=pytest.mark.core) for dtype in DTYPES[1:]),
    ],
)
def test_sparse_round_trip_keeps_every_bit(codec, dtype, shape):
    for density, spare in ((0.0, 1), (0.1, 5), (0.5, 0), (1.0, 0)):
        x = sparse_array(shape, density, dtype)
        values = int((words_of(x) != 0).sum())
        sized = codec(values + spare)
        parts = jax.jit(sized.encode)(x)
        assert sum(part.nbytes for part in parts) == sized.nbytes(x)
        assert int(sized.nonzeros(parts)) == values
        back = jax.jit(lambda parts, sized=sized, x=x: sized.decode(parts, x))(parts)
        assert back.dtype == x.dtype and back.shape == shape
        assert np.array_equal(words_of(back), words_of(x))


def test_double_precision_round_trip():
    with jax.enable_x64(True):
        x = sparse_array((5, 77), 0.4, jnp.float64)
        assert x.dtype == jnp.float64
        for codec in (Bitmap(385), CSR(385)):
            assert np.array_equal(words_of(codec.decode(codec.encode(x), x)), words_of(x))


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("codec", [Bitmap(385), CSR(385)])
def test_sparse_round_trip_without_promotion_of_types(codec, target):
    x = sparse_array((5, 77), 0.4, jnp.float32)
    with jax.numpy_dtype_promotion("strict"), building_for(target):
        assert np.array_equal(words_of(codec.decode(codec.encode(x), x)), words_of(x))


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
@pytest.mark.parametrize("codec", [Bitmap, CSR])
def test_sparse_round_trip_of_at_most_one_element(codec, shape, target):
    x = jnp.full(shape, -0.0)
    with building_for(target):
        parts = codec(1).encode(x)
        back = codec(1).decode(parts, x)
    assert sum(part.nbytes for part in parts) == codec(1).nbytes(x)
    assert int(codec(1).nonzeros(parts)) == x.size
    assert back.shape == shape and np.array_equal(words_of(back), words_of(x))


@pytest.mark.parametrize("codec", [Bitmap, CSR])
def test_too_many_values_are_counted_and_the_first_ones_kept(codec):
    x = sparse_array((40, 30), 0.5, jnp.float32)
    values = int((words_of(x) != 0).sum())
    small = codec(values // 3)
    parts = small.encode(x)
    assert int(small.nonzeros(parts)) == values > values // 3
    kept = np.asarray(small.decode(parts, x)).reshape(-1)
    first = np.flatnonzero(words_of(x))[: values // 3]
    assert np.array_equal(kept.view(np.uint32)[first], words_of(x)[first])


def test_csr_arrays_are_the_textbook_ones():
    x = np.zeros((2, 256), np.float32)
    x[0, 3], x[1, 0], x[1, 255] = 5, 6, 7
    values, columns, offsets = CSR(4).encode(jnp.asarray(x))
    assert values[:3].tolist() == [5, 6, 7]
    assert columns.dtype == jnp.uint8 and columns[:3].tolist() == [3, 0, 255]
    assert offsets.tolist() == [0, 1, 3]


def test_bitmap_arrays_are_the_drawn_ones():
    words, values, count = Bitmap(3).encode(jnp.array([0, 7, 0, 0, 3, 9, 0, 0], jnp.float32))
    assert words.tolist() == [0b00110010, 0] and values[:3].tolist() == [7, 3, 9] and count == 3


@pytest.mark.core
def test_both_ways_to_move_values_agree():
    """Blocks are for the CPU, scatter and gather for other devices; NumPy says what is right."""
    for seed, density in enumerate((0.02, 0.3, 0.6, 0.97)):
        flat = sparse_array((2000,), density, jnp.float32, seed)
        words = sparse.occupancy(flat)
        expected = words_of(flat)[words_of(flat) != 0]
        for compact in (sparse._compact_by_blocks, sparse._compact_by_scatter):
            values, count = compact(flat, words, 1990)
            assert count == expected.size and np.array_equal(words_of(values)[: expected.size], expected)
        values = jnp.asarray(np.pad(expected, (0, 2064 - expected.size)).view(np.float32))
        for expand in (sparse._expand_by_blocks, sparse._expand_by_gather):
            assert np.array_equal(words_of(expand(values, words, 2000)), words_of(flat))


def test_sparse_codecs_work_under_vmap():
    x = sparse_array((3, 50, 9), 0.4, jnp.float32)
    parts = jax.vmap(Bitmap(450).encode)(x)
    back = jax.vmap(lambda *p: Bitmap(450).decode(p, jax.ShapeDtypeStruct((50, 9), x.dtype)))(*parts)
    assert np.array_equal(words_of(back), words_of(x))


@pytest.mark.parametrize("codec", [Bitmap, CSR])
def test_sparse_codecs_work_inside_shard_map(codec):
    """A loop's carry has to vary over the mesh axes that its results vary over."""
    mesh = jax.make_mesh((1,), ("data",))
    x = jax.device_put(sparse_array((1, 50, 9), 0.4, jnp.float32), jax.NamedSharding(mesh, jax.P("data")))
    there_and_back = jax.shard_map(
        lambda v: codec(450).decode(codec(450).encode(v), v),
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
        mesh=mesh,
    )
    assert np.array_equal(words_of(jax.jit(there_and_back)(x)), words_of(x))
