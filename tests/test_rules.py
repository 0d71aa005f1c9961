import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe import memory_encoded
from jaxpipe.graph import rules
from jaxpipe.graph.graph import trace
from jaxpipe.graph.rules import max_pool, pick, relu
from jaxpipe.residuals import choose_formats, vjp_program
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.targets.building import building_for
from tests.support.compare import assert_same_bits, relative_l2


pytestmark = pytest.mark.optimized


def pool(x, window, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), padding)


def special(rng, shape, dtype):
    """Values with ties, zeros of both signs, infinities and NaN."""
    values = rng.choice([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0], shape)
    spoiled = rng.random(shape)
    values[spoiled < 0.04] = np.nan
    values[(spoiled > 0.04) & (spoiled < 0.08)] = -np.inf
    values[(spoiled > 0.08) & (spoiled < 0.12)] = np.inf
    return jnp.asarray(values, dtype)


def encoded_vjp(function, x, cotangent):
    graph = trace(lambda x: [function(x)], x)
    built = vjp_program.build(graph, graph.inputs)
    outputs, stash = vjp_program.forward(built, [x])
    (gradient,) = vjp_program.backward(built, [], stash, [cotangent])
    return outputs[0], gradient


ONES = (1, 1, 1, 1)
WINDOWS = [
    ((2, 2), (2, 2)),
    ((3, 3), (2, 2)),
    ((3, 3), (1, 1)),
    ((2, 3), (3, 2)),
    ((1, 2), (1, 1)),
    ((4, 5), (2, 3)),
    ((5, 5), (5, 4)),
]


@pytest.mark.parametrize("before", [lambda x: x, jax.nn.relu], ids=["pool", "relu-pool"])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((0, 0), (1, 0), (2, 1), (0, 0))], ids=["same", "valid", "own"])
@pytest.mark.parametrize(
    ("window", "strides"), [*WINDOWS[:4], *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in WINDOWS[4:])]
)
def test_max_pool_gradient_is_that_of_jax_bit_for_bit(window, strides, padding, before):
    rng = np.random.default_rng(0)
    shape, dtype = (2, 7, 8, 3), jnp.bfloat16 if window == (3, 3) else jnp.float32

    def function(x):
        return pool(before(x), window, strides, padding)

    def plain(x, cotangent):
        y, pullback = jax.vjp(function, x)
        return y, pullback(cotangent)[0]

    out = jax.eval_shape(function, jax.ShapeDtypeStruct(shape, dtype)).shape
    expected, actual = jax.jit(plain), jax.jit(lambda x, ct: encoded_vjp(function, x, ct))
    for x in (special(rng, shape, dtype), jnp.asarray(rng.normal(size=shape), dtype), jnp.zeros(shape, dtype)):
        for cotangent in (special(rng, out, dtype), jnp.asarray(rng.normal(size=out), dtype)):
            assert_same_bits(actual(x, cotangent), expected(x, cotangent))


DILATED = [  # window, strides, padding, window dilation, base dilation; rows and columns
    ((2, 2), (2, 2), ((0, 0), (0, 0)), (2, 2), (1, 1)),
    ((3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2), (1, 1)),
    ((3, 2), (2, 1), ((1, 0), (0, 3)), (2, 3), (1, 1)),
    ((3, 3), (2, 3), ((3, 3), (3, 3)), (3, 1), (1, 1)),
    ((2, 2), (1, 1), ((0, 0), (0, 0)), (5, 6), (1, 1)),
    ((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), (2, 2)),
    ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), (2, 3)),
    ((2, 3), (3, 1), ((0, 1), (2, 0)), (1, 1), (3, 1)),
    ((2, 2), (1, 1), ((0, 0), (0, 0)), (2, 2), (2, 2)),
    ((3, 2), (2, 3), ((2, 1), (0, 2)), (2, 3), (3, 2)),
]


def dilated_pool(x, window, strides, padding, window_dilation, base_dilation):
    return lax.reduce_window(
        x,
        -jnp.inf,
        lax.max,
        (1, *window, 1),
        (1, *strides, 1),
        ((0, 0), *padding, (0, 0)),
        base_dilation=(1, *base_dilation, 1),
        window_dilation=(1, *window_dilation, 1),
    )


def brute_force_pool(x, cotangent, window, strides, padding, window_dilation, base_dilation):
    """The gradient: every window in turn hands its cotangent to the first of its greatest elements."""
    (top, bottom), (left, right) = padding
    rows, columns = ((n - 1) * b + 1 for n, b in zip(x.shape[1:3], base_dilation, strict=True))
    shape = (x.shape[0], top + rows + bottom, left + columns + right, x.shape[3])
    inside = (slice(None), *map(slice, (top, left), (top + rows, left + columns), base_dilation))
    padded, gradient = np.full(shape, -np.inf, x.dtype), np.zeros(shape, x.dtype)
    padded[inside] = x
    for example, row, column, channel in np.ndindex(*cotangent.shape):
        selected = None
        for place in np.ndindex(*window):
            down, across = np.multiply((row, column), strides) + np.multiply(place, window_dilation)
            candidate = (example, down, across, channel)
            if selected is None or not padded[selected] >= padded[candidate]:
                selected = candidate
        gradient[selected] += cotangent[example, row, column, channel]
    return gradient[inside]


@pytest.mark.versions
@pytest.mark.parametrize("before", [lambda x: x, jax.nn.relu], ids=["pool", "relu-pool"])
@pytest.mark.parametrize("geometry", DILATED, ids=str)
def test_dilated_max_pool_against_brute_force(geometry, before):
    rng = np.random.default_rng(0)
    shape, dtype = (1, 7, 8, 2), jnp.bfloat16 if geometry[0] == (3, 3) else jnp.float32

    def function(x):
        return dilated_pool(before(x), *geometry)

    actual = jax.jit(lambda x, ct: encoded_vjp(function, x, ct))
    out = jax.eval_shape(function, jax.ShapeDtypeStruct(shape, dtype)).shape
    for x in (special(rng, shape, dtype), jnp.asarray(rng.normal(size=shape), dtype), jnp.zeros(shape, dtype)):
        for cotangent in (rng.choice([-2.0, -0.0, 0.0, 1.0], out), rng.normal(size=out)):
            seed = jnp.asarray(cotangent, dtype)
            expected = brute_force_pool(np.asarray(before(x)), np.asarray(seed), *geometry)
            if before is jax.nn.relu:
                expected = np.where(np.asarray(x > 0), expected, np.zeros((), dtype))
            assert_same_bits(actual(x, seed), (function(x), expected))


@pytest.mark.parametrize("geometry", [g for g in DILATED if g[3] == (1, 1)], ids=str)
def test_max_pool_of_a_dilated_map_is_that_of_jax_bit_for_bit(geometry):
    rng = np.random.default_rng(0)
    shape = (2, 7, 8, 3)

    def function(x):
        return dilated_pool(x, *geometry)

    def plain(x, cotangent):
        y, pullback = jax.vjp(function, x)
        return y, pullback(cotangent)[0]

    out = jax.eval_shape(function, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    expected, actual = jax.jit(plain), jax.jit(lambda x, ct: encoded_vjp(function, x, ct))
    for x in (special(rng, shape, jnp.float32), jnp.zeros(shape)):
        for cotangent in (special(rng, out, jnp.float32), jnp.asarray(rng.normal(size=out), jnp.float32)):
            assert_same_bits(actual(x, cotangent), expected(x, cotangent))


@pytest.mark.parametrize(("rows", "height", "stride"), [(3, 4, 1), (3, 5, 2), (3, 9, 1), (0, 1, 1)])
def test_a_max_pool_without_windows(rows, height, stride):
    def function(x):
        return pool(x, (height, 2), (stride, 2), "VALID")

    x = jnp.ones((1, rows, 4, 2))
    y, gradient = encoded_vjp(function, x, jnp.ones((1, 0, 2, 2)))
    assert y.shape == (1, 0, 2, 2)
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize(
    ("window", "strides", "barriers"), [((3, 3), (1, 1), 2), ((3, 5), (2, 1), 3), ((3, 3), (2, 2), 0)]
)
def test_a_target_that_fuses_few_slices_adds_up_in_the_same_order(window, strides, barriers):
    """Of windows of 3 x 5 at strides of 2 x 1, ten positions meet in every other row, and five in the rest."""
    x, shape, strides = jax.random.normal(jax.random.key(0), (2, 9, 8, 3)), (1, *window, 1), (1, *strides, 1)
    y, vjp = jax.vjp(lambda x: pool(x, window, strides[1:3], "SAME"), x)
    cotangent = jax.random.normal(jax.random.key(1), y.shape)
    windows = max_pool.Windows(shape, strides, lax.padtype_to_pads(x.shape, shape, strides, "SAME"), ONES, ONES)

    def gradient(x, cotangent):
        return max_pool.scatter_to_maxima(cotangent, max_pool.find_maxima(x, windows)[1], x.shape, windows)

    with building_for("v5e"):
        text = str(jax.make_jaxpr(gradient)(x, cotangent))
        actual = jax.jit(gradient)(x, cotangent)
    assert text.count("optimization_barrier") == barriers
    assert_same_bits(actual, vjp(cotangent)[0])


@pytest.mark.core
def test_relu_before_a_pool_stores_nothing_at_full_size():
    graph = trace(lambda x: [pool(jax.nn.relu(x), (2, 2), (2, 2), "VALID")], jnp.ones((2, 8, 8, 4)))
    backward_graph = build_backward_graph(graph, graph.inputs)
    plan = choose_formats.default_plan(backward_graph)
    stored = sorted(
        (choose_formats.stored_bytes(backward_graph.graph.tensors[t], plan.formats[t])) for t in plan.stored
    )
    # 2 * 4 * 4 * 4 outputs: 1 bit each for the sign, 2 bits each for the position.
    assert stored == [16, 32]


def test_a_relu_that_others_read_keeps_its_own_predicate():
    def both(x):
        y = jax.nn.relu(x)
        return [pool(y, (2, 2), (2, 2), "VALID"), jnp.sin(y)]

    graph = trace(both, jnp.ones((1, 4, 4, 1)))
    (match,) = [op for op in rules.matched(graph, lambda op: True) if isinstance(op, rules.Match)]
    assert match.name == "max_pool"


@pytest.mark.versions
@pytest.mark.parametrize("window", [(2, 2), (3, 3)])
def test_the_gradient_of_a_bias_before_a_pool(window):
    """To a few roundings of a sum of 128: what XLA fuses it with, and how wide the processor adds, sets the order."""

    def pooled(bias, x):
        return nn.max_pool(nn.relu(x + bias), window, (2, 2))

    def gradient(function):
        x = jax.random.normal(jax.random.key(0), (2, 8, 8, 16))
        return jax.jit(jax.grad(lambda bias: (function(bias, x) ** 2).sum()))(jnp.zeros(16))

    assert relative_l2(gradient(memory_encoded(pooled)), gradient(pooled)) < 1e-6


def test_position_bits():
    assert [max_pool.position_bits(w) for w in ((1, 2), (2, 2), (3, 3), (5, 5), (17, 17))] == [1, 2, 4, 8, 16]


def straight_through():
    @jax.custom_jvp
    def same_body_other_derivative(x):
        return jnp.maximum(x, 0.0)

    @same_body_other_derivative.defjvp
    def rule(primals, tangents):
        return jnp.maximum(primals[0], 0.0), tangents[0]

    return same_body_other_derivative


@pytest.mark.core
def test_relu_is_recognized_by_what_it_computes():
    def only(function):
        (op,) = trace(lambda x: [function(x)], jnp.ones((2, 3))).operators[-1:]
        return relu.applies(op)

    assert only(jax.nn.relu)
    assert not only(jax.nn.relu6)
    assert not only(lambda x: jnp.maximum(x, 0))
    assert not only(straight_through())
    assert not only(jax.nn.softplus)


def test_a_straight_through_relu_before_a_pool_keeps_its_derivative():
    function = lambda x: pool(straight_through()(x), (2, 2), (2, 2), "VALID")  # noqa: E731
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 4, 2)), jnp.float32) - 2
    expected, pullback = jax.vjp(function, x)
    assert_same_bits(encoded_vjp(function, x, jnp.ones_like(expected))[1], pullback(jnp.ones_like(expected))[0])


def picked_by_narrow_indices(x, index):
    """One element of each row by indices of 8 bits, as no function of jax.numpy makes them."""
    rows = jax.lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return jax.lax.gather(x, index, rows, slice_sizes=(1, 1), mode="fill")


def test_the_gradient_of_a_pick_by_narrow_indices_is_that_of_jax():
    x, index = jnp.ones((4, 1_000)), jnp.array([[0], [3], [200], [255]], jnp.uint8)
    expected, pullback = jax.vjp(lambda x: picked_by_narrow_indices(x, index), x)
    with building_for("gpu"):
        output, gradient = encoded_vjp(lambda x: picked_by_narrow_indices(x, index), x, jnp.ones(4))
    assert_same_bits((output, gradient), (expected, pullback(jnp.ones(4))[0]))


@pytest.mark.core
@pytest.mark.parametrize(
    ("axis", "sizes"), [(0, (3, 4, 5)), (1, (3, 4, 5)), (2, (3, 4, 5)), (2, (1, 4, 5)), (1, (1, 5))]
)
def test_the_gradient_of_a_pick_is_that_of_jax_bit_for_bit(axis, sizes):
    rng = np.random.default_rng(axis)
    x = special(rng, sizes, jnp.float32)
    shape = [1 if d == axis else n for d, n in enumerate(x.shape)]
    index = jnp.asarray(rng.integers(-7, 8, shape))  # some beyond either end
    cotangent = special(rng, shape, jnp.float32)

    def function(x):
        return jnp.take_along_axis(x, index, axis)

    (picked,) = (op for op in trace(function, x).operators if op.name == "gather")
    assert pick.applies(picked)
    expected, pullback = jax.vjp(function, x)
    with building_for("gpu"):
        output, gradient = encoded_vjp(function, x, cotangent)
    assert_same_bits((output, gradient), (expected, pullback(cotangent)[0]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: jnp.take_along_axis(x, jnp.concatenate([i, i], 1), 1),  # two of a row: may be the same one
        lambda x, i: x[i[:, 0]],
        lambda x, i: jnp.take(x, i[0], axis=1),
    ],
    ids=["two of a row", "rows", "columns"],
)
def test_other_gathers_keep_the_gradient_of_jax(function):
    x, index = jnp.arange(12.0).reshape(3, 4), jnp.array([[1], [1], [0]])
    graph = trace(lambda x: [function(x, index)], x)
    assert not any(pick.applies(op) for op in graph.operators)
    expected, pullback = jax.vjp(lambda x: function(x, index), x)
    assert_same_bits(encoded_vjp(lambda x: function(x, index), x, expected), (expected, pullback(expected)[0]))
