"""The residuals of `memory_encoded` for each family of operators, as a literal table.

The operand is ``float32[4, 64]``, the result of a product that is too long to be run again: it is stored only if the
derivative cannot do with less. What the derivative depends on stands beside each entry.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxpipe import memory_encoded, residual_report


PRODUCTS = 128
ONE_BIT = [("mask", 32)]  # 4 * 64 elements, 8 in a byte
ONE_FLOAT = [("keep", 1024)]  # 4 * 64 elements of 4 bytes
A_FLOAT_AND_A_ROW = [("keep", 16), ("keep", 1024)]  # and one of 4 bytes for each of 4 rows
NOTHING = []


def stored(function, *more, shape=(4, 64)):
    """Storage and bytes of what the gradient of ``function`` of a product of that shape keeps, smallest first."""
    encoded = memory_encoded(lambda x, w, *rest: function((x @ w).reshape(shape), *rest))
    arguments = jnp.ones((4, PRODUCTS)), jnp.ones((PRODUCTS, 64)), *more
    return sorted((row.storage, row.bytes) for row in residual_report(encoded, *arguments).tensors)


def but_for_maxima(rows):
    """The gradient of ``maximum(x, 0)`` on JAX 0.10 compares both with the maximum; what that says is stored."""
    return [row for row in rows if row[0] != "mask" or jax.__version_info__ >= (0, 11)]


ACTIVATIONS = {
    # Straight pieces: the slope is one of two, so one bit tells it.
    "relu": (jax.nn.relu, ONE_BIT),
    "relu6": (jax.nn.relu6, ONE_BIT),
    "leaky_relu": (jax.nn.leaky_relu, ONE_BIT),
    "hard_sigmoid": (jax.nn.hard_sigmoid, ONE_BIT),
    "abs": (jnp.abs, ONE_BIT),
    "where": (lambda x: jnp.where(x > 0.5, 2 * x, -x), ONE_BIT),
    # The slope is 0 on either side: the union of two masks.
    "hard_tanh": (jax.nn.hard_tanh, ONE_BIT),
    "threshold": (lambda x: jnp.where(x > 1, jax.nn.relu(x), 0.0), ONE_BIT),
    # The slope 0, 1 or, at a tie, 1/2: two bits.
    "maximum": (lambda x: jnp.maximum(x, 0), ONE_BIT * 2),
    # A maximum and a minimum, whose slopes are factors. A zero slope is no mask (0 * inf is NaN) and two factors are no
    # single one (numbers below the normal range round twice), so that they stay two times two bits.
    "clip": (lambda x: jnp.clip(x, -1, 1), ONE_BIT * 4),
    # The slope takes any value, and follows from the input or from the output.
    "hard_silu": (jax.nn.hard_silu, ONE_FLOAT),
    "hard_swish": (jax.nn.hard_swish, ONE_FLOAT),
    "elu": (jax.nn.elu, ONE_FLOAT),
    "selu": (jax.nn.selu, ONE_FLOAT),
    "celu": (jax.nn.celu, ONE_FLOAT),
    "gelu, tanh": (jax.nn.gelu, ONE_FLOAT),
    "gelu, erf": (lambda x: jax.nn.gelu(x, approximate=False), ONE_FLOAT),
    "silu": (jax.nn.silu, ONE_FLOAT),
    "tanh": (jnp.tanh, ONE_FLOAT),
    "sigmoid": (jax.nn.sigmoid, ONE_FLOAT),
    "softplus": (jax.nn.softplus, ONE_FLOAT),
    "exp": (jnp.exp, ONE_FLOAT),
    "log": (jnp.log, ONE_FLOAT),
    # y = e / s with e = exp(x - max), s = sum(e): JAX differentiates it as written, from e and s.
    "softmax": (jax.nn.softmax, A_FLOAT_AND_A_ROW),
    "log_softmax": (jax.nn.log_softmax, A_FLOAT_AND_A_ROW),
}

STRUCTURE = {
    # Linear with constant coefficients: the derivative does not depend on the values.
    "residual add": lambda x: x + 3 * x,
    "concatenate": lambda x: jnp.concatenate([x, 2 * x], 1),
    "slice": lambda x: x[1:3, ::2],
    "pad": lambda x: jnp.pad(x, 1),
    "transpose": lambda x: x.T.reshape(8, 32),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    # Integers have no derivative.
    "argmax": lambda x: jnp.argmax(x, -1),
    "argmax beside a sum": lambda x: (jnp.argmax(x, -1), x.sum()),
    "one hot of argmax": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 64) + x,
}


@pytest.mark.core
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    function, expected = ACTIVATIONS[name]
    rows = stored(function)
    assert (rows if "mask" in dict(expected) else but_for_maxima(rows)) == expected


@pytest.mark.parametrize("name", STRUCTURE)
def test_what_only_moves_or_adds_elements_stores_nothing(name):
    assert stored(STRUCTURE[name]) == NOTHING


@pytest.mark.core
@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        # Input, and for each row mean and variance; of RMSNorm only the mean square.
        (nn.LayerNorm(), [("keep", 16), ("keep", 16), ("keep", 1024)]),
        (nn.RMSNorm(), [("keep", 16), ("keep", 1024)]),
        # Four groups of 16 channels in each of 4 examples: 16 means and 16 variances.
        (nn.GroupNorm(num_groups=4), [("keep", 64), ("keep", 64), ("keep", 1024)]),
        # Mean and variance for each of 64 channels.
        (nn.BatchNorm(use_running_average=False), [("keep", 256), ("keep", 256), ("keep", 1024)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_normalizations_store_their_input_and_the_statistics(norm, expected):
    @memory_encoded
    class Normalized(nn.Module):
        @nn.compact
        def __call__(self, x):
            return norm.copy()(nn.Dense(64, use_bias=False)(x))

    x = jnp.ones((4, PRODUCTS))
    variables = Normalized().init(jax.random.key(0), x)
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def outputs(params, x):
        return Normalized().apply({"params": params, **rest}, x, mutable=list(rest))[0]

    report = residual_report(outputs, variables["params"], x)
    assert but_for_maxima(sorted((row.storage, row.bytes) for row in report.tensors)) == expected


@pytest.mark.core
def test_dropout_stores_one_bit():
    layer = nn.Dropout(0.3, deterministic=False)
    assert stored(lambda x, key: layer.apply({}, x, rngs={"dropout": key}), jax.random.key(0)) == ONE_BIT


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        # 1 * 4 * 4 * 4 outputs with 4 places each: 64 * 2 bits.
        (lambda x: nn.max_pool(x, (2, 2), (2, 2)), [("pool index", 16)]),
        # 1 * 3 * 3 * 4 outputs with 9 places each: 36 * 4 bits.
        (lambda x: nn.max_pool(x, (3, 3), (2, 2)), [("pool index", 18)]),
        (lambda x: nn.avg_pool(x, (2, 2), (2, 2)), NOTHING),
        (lambda x: nn.avg_pool(x, (3, 3), (2, 2), padding="SAME", count_include_pad=False), NOTHING),
        # And whether the greatest element is positive: 64 bits.
        (lambda x: nn.max_pool(nn.relu(x), (2, 2), (2, 2)), [("mask", 8), ("pool index", 16)]),
    ],
    ids=["max 2x2", "max 3x3", "mean", "mean without padding", "relu, max 2x2"],
)
def test_pooling(pool, expected):
    assert stored(pool, shape=(1, 8, 8, 4)) == expected


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda x: jnp.sort(x, -1), (2, 128), [("index", 256)]),  # 8 bits for each of 256 elements
        (lambda x: jnp.sort(x, 0), (4, 64), [("index", 256)]),
        (lambda x: jnp.sort(x.reshape(-1)), (4, 64), [("index", 256)]),  # positions up to 255
        (lambda x: jnp.sort(jnp.append(x.reshape(-1), 0)), (4, 64), [("index", 514)]),  # up to 256: 16 bits
        (lambda x: jax.lax.top_k(x, 3)[0], (4, 64), [("index", 12)]),
    ],
    ids=["rows", "columns", "256", "257", "top 3"],
)
def test_a_sort_stores_where_each_element_came_from(function, shape, expected):
    assert stored(function, shape=shape) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    # Arguments do not count; rows that are computed are stored, 6 of int32.
    [(lambda i: i, NOTHING), (lambda i: jnp.cumsum(i), [("keep", 24)])],
    ids=["given", "computed"],
)
def test_an_embedding_stores_the_rows_that_it_looks_up(rows, expected):
    def embed(table, i):
        return nn.Embed(50, 8).apply({"params": {"embedding": table}}, rows(i))

    report = residual_report(memory_encoded(embed), jnp.ones((50, 8)), jnp.arange(6))
    assert sorted((row.storage, row.bytes) for row in report.tensors) == expected


@pytest.mark.parametrize(
    "function",
    [lambda x: x[:, :32] * x[:, 32:], lambda x: x * x, lambda x: jnp.exp(x) * jnp.sin(x)],
    ids=["halves", "square", "two of one"],
)
def test_factors_that_follow_from_one_tensor_take_its_bytes_once(function):
    assert sum(size for _, size in stored(function)) == 1024
