"""Layouts of the arrays of stages: nothing lost, nothing overlapping, nothing wasted where stages are alike."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.runtime.spmd.buffer_layout import BufferLayout, lay_out
from tests.support.compare import assert_same_bits


DTYPES = [np.dtype(d) for d in (np.float32, ml_dtypes.bfloat16, np.int8, np.int32)]
SHAPES = st.sampled_from([(), (1,), (4,), (2, 2), (3, 5), (7,), (0,), (2, 0)])
ARRAYS = st.builds(jax.ShapeDtypeStruct, SHAPES, st.sampled_from(DTYPES))
STAGES = st.lists(st.lists(ARRAYS, max_size=6), min_size=1, max_size=4)


def numbered(values):
    return dict(enumerate(values))


def laid_out(stages) -> BufferLayout:
    """The layout of stages whose arrays are numbered from 0 on."""
    return lay_out(list(map(numbered, stages)))


def size_of(avals):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


def filled(avals, seed):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.integers(-100, 100, a.shape), a.dtype) for a in avals]


@pytest.mark.core
@given(STAGES)
@settings(deadline=None, max_examples=30)
def test_every_array_reads_back(stages):
    layout = laid_out(stages)
    for s, avals in enumerate(stages):
        values = filled(avals, s)
        buffers = layout.write(s, numbered(values))
        assert [(x.shape, x.dtype) for x in buffers] == [(b.shape, b.dtype) for b in layout.buffers]
        assert_same_bits(layout.read(s, buffers), numbered(values))
        # All that is not the stage's own is zero.
        assert sum(int((x != 0).sum()) for x in buffers) == sum(int((x != 0).sum()) for x in values)


@given(STAGES, st.data())
@settings(deadline=None, max_examples=30)
def test_one_array_is_replaced_and_nothing_else(stages, data):
    layout = laid_out(stages)
    s = data.draw(st.integers(0, len(stages) - 1))
    values = filled(stages[s], 0)
    buffers = layout.write(s, numbered(values))
    for n, new in enumerate(filled(stages[s], 1)):
        place = layout.places[s][n]
        buffers = place.put(buffers, new)
        values[n] = new
        assert_same_bits(place.get(buffers), new)
        assert_same_bits(buffers, layout.write(s, numbered(values)))


@given(STAGES)
@settings(deadline=None)
def test_arrays_of_a_stage_do_not_overlap(stages):
    layout = laid_out(stages)
    for avals, places in zip(stages, layout.places, strict=True):
        taken = set()
        for a, (_, k, offset) in zip(avals, places.values(), strict=True):
            here = {(k, e) for e in range(offset, offset + math.prod(a.shape))}
            assert layout.buffers[k].dtype == a.dtype and offset + math.prod(a.shape) <= layout.buffers[k].size
            assert taken.isdisjoint(here)
            taken |= here


@given(STAGES)
@settings(deadline=None)
def test_bytes_are_bounded(stages):
    layout = laid_out(stages)
    assert layout.bytes == size_of(layout.buffers)
    assert max(map(size_of, stages)) <= layout.bytes <= sum(map(size_of, stages))
    # Packing all of a stage into one buffer for each type is always possible.
    packed = sum(max(size_of([a for a in avals if a.dtype == d]) for avals in stages) for d in DTYPES)
    assert layout.bytes <= packed


@pytest.mark.core
@given(st.lists(ARRAYS, max_size=8), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_equal_stages_share_every_buffer(avals, count, random):
    # The same arrays in any order: a buffer for each, read without a slice.
    stages = [random.sample(avals, len(avals)) for _ in range(count)]
    layout = laid_out(stages)
    assert layout.bytes == size_of(avals)
    assert len(layout.buffers) == len(avals)
    for stage, places in zip(stages, layout.places, strict=True):
        assert sorted(k for _, k, _ in places.values()) == list(range(len(avals)))
        for a, (_, k, offset) in zip(stage, places.values(), strict=True):
            assert offset == 0 and size_of([layout.buffers[k]]) == size_of([a])


def test_unshared_arrays_are_packed():
    wide, narrow = jax.ShapeDtypeStruct((10,), np.float32), jax.ShapeDtypeStruct((4,), np.float32)
    layout = laid_out([[wide, wide], [wide, narrow, narrow]])
    assert layout.bytes == 80  # one shared buffer of 10, one of 10 in which both narrow ones stand
    places = [[tuple(place[1:]) for place in held.values()] for held in layout.places]
    assert places == [[(0, 0), (1, 0)], [(0, 0), (1, 0), (1, 4)]]


def test_an_empty_array_beside_packed_ones():
    empty = jax.ShapeDtypeStruct((0,), np.int8)
    three, five = (jax.ShapeDtypeStruct((n,), np.float32) for n in (3, 5))
    layout = laid_out([[empty, three], [five]])
    assert layout.bytes == 20
    values = [jnp.zeros((0,), jnp.int8), jnp.arange(3.0)]
    assert_same_bits(layout.read(0, layout.write(0, numbered(values))), numbered(values))


def test_reads_inside_a_compiled_program():
    avals = [jax.ShapeDtypeStruct((n,), np.float32) for n in (2, 3)]
    layout = laid_out([avals, avals[:1]])
    values = filled(avals, 0)
    assert_same_bits(jax.jit(lambda v: layout.read(0, layout.write(0, v)))(numbered(values)), numbered(values))


@given(STAGES)
@settings(deadline=None, max_examples=30)
def test_missing_arrays_are_zero(stages):
    layout = laid_out(stages)
    for s, avals in enumerate(stages):
        values = filled(avals, s)
        zeros = [x if k % 2 else jnp.zeros_like(x) for k, x in enumerate(values)]
        assert_same_bits(layout.write(s, numbered(values[:0])), layout.write(s, numbered(map(jnp.zeros_like, values))))
        assert_same_bits(
            layout.write(s, {k: x for k, x in enumerate(values) if k % 2}), layout.write(s, numbered(zeros))
        )


def test_other_types_in_the_same_places():
    a, b = jax.ShapeDtypeStruct((2,), jnp.bfloat16), jax.ShapeDtypeStruct((3,), np.int8)
    layout = lay_out([{0: a, 1: b}, {2: b}])
    wide = layout.with_dtypes(lambda dtype: jnp.promote_types(dtype, np.float32))
    assert wide.places == layout.places and wide.bytes == 20
    values = {0: jnp.ones(2), 1: jnp.arange(3.0)}
    assert_same_bits(wide.read(0, wide.write(0, values)), values)
    assert_same_bits(wide.write(1, {}), [jnp.zeros(x.shape) for x in wide.buffers])
