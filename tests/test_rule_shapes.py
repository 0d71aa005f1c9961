"""Derivative rules on scalars, on arrays without elements, and on axes of one element.

Expected values are those of plain ``jax.vjp``, bit for bit.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe import memory_encoded
from jaxpipe.graph.allowed_codecs import SMALLEST
from jaxpipe.graph.graph import trace
from jaxpipe.graph.rules import max_pool, relu
from jaxpipe.residuals import vjp_program
from jaxpipe.targets.building import building_for
from tests.support.compare import assert_same_bits


pytestmark = pytest.mark.optimized


#: In every program each operator rounds to its own type.
OPTIONS = {"xla_allow_excess_precision": False}


def pool(x, size, stride, padding="SAME", axes=None):
    """Max-pool some axes, all by default."""
    axes = range(x.ndim) if axes is None else axes
    window, strides = ([n if d in axes else 1 for d in range(x.ndim)] for n in (size, stride))
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def pick(x, axis):
    """Take an element of each row, the first one or the second."""
    shape = [1 if d == axis else n for d, n in enumerate(x.shape)]
    return jnp.take_along_axis(x, jnp.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, axis)


def convolve(x, stride):
    """Convolve images, of batch-spatial-feature order, with kernels of two pixels."""
    spatial = "HWD"[: x.ndim - 2]
    shape = (*[2] * len(spatial), x.shape[-1], 3)
    kernel = jnp.cos(jnp.arange(np.prod(shape, dtype=int))).reshape(shape).astype(x.dtype)
    layout = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    return lax.conv_general_dilated(x, kernel, [stride] * len(spatial), "SAME", dimension_numbers=layout)


def rules(shape):
    """Return functions of an array of a shape, by name."""
    functions = {
        "relu": jax.nn.relu,
        "relu, read twice": lambda x: jax.nn.relu(x) * jnp.sin(jax.nn.relu(x)),
        "relu, summed": lambda x: jax.nn.relu(x).sum(),
        "relu6": jax.nn.relu6,
        "leaky_relu": jax.nn.leaky_relu,
        "hard_tanh": jax.nn.hard_tanh,
        "elu": jax.nn.elu,
        "gelu": jax.nn.gelu,
        "maximum": lambda x: jnp.maximum(x, 0),
        "masks in a row": lambda x: jnp.where(x > 1, 1, jnp.where(x < -1, -1, x)),
    }
    rank = len(shape)
    if rank > 0:
        functions |= {
            "pool": lambda x: pool(x, 2, 1),
            "pool of whole windows": lambda x: pool(x, 2, 2, "VALID"),
            "relu, pool": lambda x: pool(jax.nn.relu(x), 3, 2),
            "sort": jnp.sort,
            "cummax": lambda x: lax.cummax(x, rank - 1),
            "product": lambda x: jnp.tensordot(jax.nn.relu(x), jnp.sin(x), axes=((0,), (0,))) if rank < 4 else x,
            **{f"pick along {axis}": lambda x, axis=axis: pick(x, axis) for axis in (0, rank - 1)},
        }
    if rank > 0 and shape[-1] > 0:
        functions |= {
            "maximum of a row": lambda x: x.max(-1),
            "argmax": lambda x: jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1),
            "top_k": lambda x: lax.top_k(x, 1)[0],
            "lookup": lambda x: jnp.take(x, jnp.array([0, -1]), axis=-1),
        }
    if rank > 2:
        spatial = range(1, rank - 1)
        functions |= {
            "relu, spatial pool": lambda x: pool(jax.nn.relu(x), 2, 2, axes=spatial),
            "convolution, relu, spatial pool": lambda x: pool(jax.nn.relu(convolve(x, 1)), 3, 1, axes=spatial),
            "relu, convolution": lambda x: convolve(jax.nn.relu(x), 2),
        }
    return functions


def on_a_gpu(function, x, cotangent):
    """Return a result and the gradient by the rules for GPUs, which choose others for products and picks."""
    with building_for("gpu"):
        graph = trace(lambda x: [function(x)], x)
        built = vjp_program.build(graph, graph.inputs, policy=SMALLEST)
        (output,), stash = vjp_program.forward(built, [x])
        (gradient,) = vjp_program.backward(built, [], stash, [cotangent])
    return output, jnp.zeros_like(x) if gradient is None else gradient


def result_and_gradient(function, x, cotangent):
    output, pullback = jax.vjp(function, x)
    return output, pullback(cotangent)[0]


def check(functions, shape, dtype, jit):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.choice([-2.0, -1.0, -0.3, -0.0, 0.0, 0.25, 1.0, 2.0], shape), dtype)
    outputs = {name: jax.eval_shape(function, x) for name, function in functions.items()}
    cotangents = {name: jnp.asarray(rng.normal(size=y.shape), y.dtype) for name, y in outputs.items()}

    def plain(x):
        return {name: result_and_gradient(function, x, cotangents[name]) for name, function in functions.items()}

    def encoded(x):
        by_codecs = {codecs: {} for codecs in ("fast", "smallest")}
        for (codecs, results), (name, function) in itertools.product(by_codecs.items(), functions.items()):
            results[name] = result_and_gradient(memory_encoded(function, codecs=codecs), x, cotangents[name])
        by_rules = {name: on_a_gpu(function, x, cotangents[name]) for name, function in functions.items()}
        return {**by_codecs, "gpu": by_rules}

    expected = jit(plain)(x)
    for actual in jit(encoded)(x).values():
        assert_same_bits(actual, expected)


def compiled(function):
    return jax.jit(function, compiler_options=OPTIONS)


FEW_SHAPES = [(), (0,), (1,), (0, 3), (3, 0), (2, 3), (0, 1, 3), (2, 3, 2), (2, 4, 0, 2), (2, 1, 3, 0, 2)]
SHAPES = [(1,) * 4, (2, 4, 3, 2), (1,) * 5, (2, 3, 2, 2, 2), (0, 2, 2, 2, 1)]
SHAPES += [s for n in range(1, 4) for s in itertools.product((0, 1, 3), repeat=n) if s not in FEW_SHAPES]
SHAPES += [tuple(0 if d == empty else 2 for d in range(n)) for n in (4, 5) for empty in range(n)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", FEW_SHAPES, ids=str)
def test_rules_in_every_rank(shape, dtype):
    check(rules(shape), shape, dtype, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rules_in_all_shapes(shape, dtype):
    check(rules(shape), shape, dtype, compiled)


@pytest.mark.core
@pytest.mark.parametrize("shape", [(), (0,)], ids=str)
def test_rules_without_jit(shape):
    functions = {name: rules(shape)[name] for name in ("relu", "relu, read twice", "masks in a row")}
    check(functions, shape, jnp.float16, lambda function: function)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3)], ids=str)
def test_relu_is_recognized_in_every_shape(shape):
    """In a scalar program the zero is a literal, in others an array."""

    def rectified_with(tangent):
        rectified = jax.custom_jvp(lambda x: jnp.maximum(x, 0.0))
        rectified.defjvps(tangent)
        return rectified

    def only(function):
        (op,) = trace(lambda x: [function(x)], jnp.ones(shape)).operators[-1:]
        return relu.applies(op)

    assert only(jax.nn.relu)
    assert only(rectified_with(lambda g, _, x: lax.select(x > 0, g, jnp.zeros_like(g))))
    assert not only(rectified_with(lambda g, _, x: lax.select(x > 0, jnp.zeros_like(g), g)))
    assert not only(rectified_with(lambda g, _, x: g))


@pytest.mark.parametrize("codecs", ["fast", "smallest"])
def test_a_max_pool_of_a_scalar(codecs):
    """XLA:CPU cannot compile the plain gradient."""
    function = memory_encoded(lambda x: 2 * pool(jax.nn.relu(x), 1, 1), codecs=codecs)
    assert jax.jit(jax.value_and_grad(function))(1.5) == (3.0, 2.0)
    assert jax.jit(jax.value_and_grad(function))(-1.5) == (0.0, 0.0)


def test_a_max_pool_of_a_number_in_the_program():
    @jax.custom_jvp
    def rectified(x):
        return lax.max(x, 0.0)

    rectified.defjvps(lambda g, _, x: lax.select(x > 0, g, lax.full_like(g, 0)))

    def function(x):
        return x * pool(rectified(np.float32(2)), 1, 1) * pool(np.float32(3), 1, 1)

    assert not any(max_pool.applies(op) and not op.inputs for op in trace(function, jnp.ones(())).operators)
    assert jax.value_and_grad(memory_encoded(function))(0.5) == (3.0, 6.0)
