"""Data that break careless encodings: ties, zeros of both signs, NaN, infinities, odd sizes, short floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpipe import memory_encoded, residual_report


CODECS = {
    "mask": ("mask",),
    "mask, index": ("mask", "index"),
    "fast": "fast",
    "smallest": "smallest",
    "sparse": {"bitmap", "csr"},
}


def network(params, x):
    """Convolution, ReLU, pool, convolution, ReLU, dense, on ``[batch, height, width, 2]``."""
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.nn.relu(lax.conv_general_dilated(x, params["k1"], (1, 1), "SAME", dimension_numbers=layout))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    x = jax.nn.relu(lax.conv_general_dilated(x, params["k2"], (1, 1), "SAME", dimension_numbers=layout))
    return x.reshape(x.shape[0], -1) @ params["w"]


def numbers(shape, scale=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, scale, shape)


def spoiled(shape, value):
    """Every fortieth number or so is another."""
    x = numbers(shape)
    x[np.random.default_rng(1).random(shape) < 0.025] = value
    return x


SHAPE = (4, 8, 8, 2)

#: Name -> images. Every map that a sparse format may hold has at least 1024 elements.
DATA = {
    "special": {
        "ties": np.round(numbers(SHAPE)),
        "zeros": np.zeros(SHAPE),
        "zeros of both signs": np.random.default_rng(0).choice([-0.0, 0.0, 1.0], SHAPE),
        "nan": spoiled(SHAPE, np.nan),
        "inf": spoiled(SHAPE, np.inf),
        "-inf": spoiled(SHAPE, -np.inf),
    },
    "odd sizes": {"ties": np.round(numbers((3, 7, 9, 2)))},
    "one example": {"ties": np.round(numbers((1, 15, 13, 2)))},
}


def parameters(shape, dtype):
    """Multiples of a quarter, so that rounded images give maps with ties."""
    _, height, width, channels = shape
    cells = -(-height // 2) * -(-width // 2)
    drawn = {
        "k1": numbers((3, 3, channels, 16), 0.5, seed=2),
        "k2": numbers((3, 3, 16, 24), 0.3, seed=3),
        "w": numbers((cells * 24, 5), 0.3, seed=4),
    }
    return {name: jnp.asarray(np.round(4 * a) / 4, dtype) for name, a in drawn.items()}


def weighted(function):
    """A loss whose cotangent does not depend on the data, or a NaN in an image would spread over all gradients."""

    def loss(params, x):
        y = function(params, x).astype(jnp.float32)
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

    return loss


@functools.cache
def plain(kind, dtype):
    """The gradients of the undecorated network for each array of images."""
    derivative = jax.jit(jax.grad(weighted(network), (0, 1)))
    cases = {name: jnp.asarray(images, dtype) for name, images in DATA[kind].items()}
    return {name: derivative(parameters(x.shape, dtype), x) for name, x in cases.items()}


def assert_same_numbers(actual, expected, name):
    """Equal bits; of a NaN only the position counts: its sign and payload depend on the order of a sum."""
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (actual, expected)), strict=True):
        unknown = np.asarray(jnp.isnan(a) & jnp.isnan(b))
        bits = [np.asarray(leaf).view(f"u{leaf.dtype.itemsize}") for leaf in (a, b)]
        differing = int(((bits[0] != bits[1]) & ~unknown).sum())
        assert differing == 0, f"{differing} of {a.size} elements differ at {jax.tree_util.keystr(path)} ({name})"


def check(kind, dtype, codecs):
    encoded = weighted(memory_encoded(network, codecs=codecs))
    derivative = jax.jit(jax.grad(encoded, (0, 1)))
    for name, expected in plain(kind, dtype).items():
        x = jnp.asarray(DATA[kind][name], dtype)
        assert np.isfinite(expected[1]).all()
        assert_same_numbers(derivative(parameters(x.shape, dtype), x), expected, name)


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.core) if kind == "special" else kind for kind in DATA]
)
def test_gradients_of_pathological_data(kind, codecs):
    check(kind, jnp.float32, CODECS[codecs])


@pytest.mark.parametrize("codecs", ["fast", "smallest"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_short_floats(dtype, codecs):
    check("special", dtype, CODECS[codecs])


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_these_networks_use_sparse_formats(dtype, kind):
    x = jax.ShapeDtypeStruct(next(iter(DATA[kind].values())).shape, dtype)
    for codecs in ("smallest", "sparse"):
        encoded = weighted(memory_encoded(network, codecs=CODECS[codecs]))
        report = residual_report(encoded, parameters(x.shape, dtype), x)
        assert {"bitmap", "csr"} & {row.storage for row in report.tensors}
