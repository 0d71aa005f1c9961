"""Models that compute in bfloat16, with parameters of 16 or 32 bits: encoded, and cut into stages.

Expected values are those of plain ``jax.grad`` of the same model.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models as zoo
from tests.support.compare import assert_same_bits


HALF = jnp.bfloat16


class Products(nn.Module):
    """Products and ReLU."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.Dense(32, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class Pools(nn.Module):
    """Convolutions with ReLU, each before a max-pool, overlapping ones too."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        for width, window, strides in ((8, (2, 2), (2, 2)), (16, (3, 3), (2, 2))):
            x = nn.relu(nn.Conv(width, (3, 3), dtype=self.dtype)(x))
            x = nn.max_pool(x, window, strides=strides)
        return nn.Dense(10, dtype=self.dtype)(x.reshape(x.shape[0], -1))


class Decoder(nn.Module):
    """Two blocks with grouped heads and gates."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        sizes = {"vocab": 32, "num_layers": 2, "width": 16, "num_heads": 4, "num_kv_heads": 2, "hidden": 32}
        return zoo.Llama(**sizes, dtype=self.dtype)(tokens, train=True)


MODELS = {"products": (Products, (8, 24)), "pools": (Pools, (8, 12, 12, 3)), "decoder": (Decoder, (8, 6))}


@functools.cache
def case_of(name, dtype=HALF, parameters=HALF):
    """A model as a function of its parameters, these, and a batch."""
    cls, shape = MODELS[name]
    model = cls(dtype=dtype)
    if name == "decoder":
        x = jax.random.randint(jax.random.key(1), shape, 0, 32)
        labels = jnp.roll(x, -1, axis=1)
    else:
        x = jax.random.normal(jax.random.key(1), shape, dtype)
        labels = jax.random.randint(jax.random.key(2), shape[:1], 0, 10)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    # Biases that are not zero: an addition of zero would be exact.
    variables = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), variables)
    return model.apply, jax.tree.map(lambda p: p.astype(parameters), variables), {"x": x, "y": labels}


def loss(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def gradient(apply, batch):
    return jax.value_and_grad(lambda v: loss(functools.partial(apply, v), batch))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("products", jnp.bfloat16),
        ("products", jnp.float32),
        pytest.param("pools", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("pools", jnp.float32, marks=pytest.mark.slow),
        pytest.param("decoder", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("decoder", jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_encoded_gradients_have_the_bits_of_plain_ones(name, parameters):
    """Operator by operator."""
    apply, variables, batch = case_of(name, parameters=parameters)
    with jax.disable_jit():
        actual, expected = (gradient(f, batch)(variables) for f in (jaxpipe.memory_encoded(apply), apply))
    assert {g.dtype for g in jax.tree.leaves(actual[1])} == {np.dtype(parameters)}
    assert_same_bits(actual, expected)


@pytest.mark.versions
@pytest.mark.parametrize("parameters", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["products", "pools"])
def test_compiled_too_if_xla_rounds_where_it_is_told(name, parameters):
    apply, variables, batch = case_of(name, parameters=parameters)
    options = {"xla_allow_excess_precision": False}
    actual, expected = (
        jax.jit(gradient(f, batch), compiler_options=options)(variables) for f in (jaxpipe.memory_encoded(apply), apply)
    )
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", ["products", "pools"])
def test_masks_and_positions_are_those_of_float32(name):
    rows = {}
    for dtype in (jnp.bfloat16, jnp.float32):
        apply, variables, batch = case_of(name, dtype, dtype)
        report = jaxpipe.residual_report(lambda v, a=apply, b=batch: loss(functools.partial(a, v), b), variables)
        rows[dtype] = report.tensors
    encoded = {d: [(r.shape, r.storage, r.bytes) for r in rs if r.storage != "keep"] for d, rs in rows.items()}
    assert sorted(encoded[jnp.bfloat16]) == sorted(encoded[jnp.float32])
    for shape, storage, size in encoded[HALF]:
        elements = np.prod(shape)
        assert (storage, size) in (("mask", elements / 8), ("pool index", elements / 4), ("pool index", elements / 2))
    # What a product reads is stored as it is, in half of the bytes; its mask follows from it.
    assert {storage for _, storage, _ in encoded[HALF]} == ({"mask", "pool index"} if name == "pools" else set())
    kept = {d: {(r.shape, r.bytes) for r in rs if r.storage == "keep" and r.dtype == d.dtype} for d, rs in rows.items()}
    assert kept[HALF] and {(shape, 2 * size) for shape, size in kept[HALF]} <= kept[jnp.float32]


def compare_stages(name, parameters):
    """Compare gradients of two stages and four micro-batches with plain ones, widened and added up by NumPy."""
    apply, variables, batch = case_of(name, parameters=parameters)
    pipeline = jaxpipe.partition(
        jax.tree_util.Partial(apply, variables),
        jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]),
        batch,
        loss=loss,
        optimizer=optax.sgd(0.5),
        num_microbatches=4,
        profile="analytic",
        runtime="mpmd",
    )
    actual = pipeline.value_and_grad(pipeline.init(jax.random.key(3)), batch)[1].args[0]
    step = jax.jit(lambda v, part: gradient(apply, part)(v)[1])
    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
    each = [step(variables, jax.tree.map(lambda x, j=j: x[j], parts)) for j in range(4)]
    wide = [jax.tree.map(lambda g: np.asarray(g).astype(np.float32), g) for g in each]
    total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), wide)
    expected = jax.tree.map(lambda g: (g / np.float32(4)).astype(parameters), total)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "name", ["decoder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("products", "pools"))]
)
def test_stages_add_up_in_float32_what_plain_gradients_are(name):
    """In a process where XLA rounds to bfloat16 where it is told to.

    It may keep what is bfloat16 in float32 while it stays in one kernel. Bits then depend on where kernels end.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    compare_stages(sys.argv[1], jnp.bfloat16)
    if sys.argv[1] != "decoder":  # whose norms sum float32 gradients, in another order where XLA fuses them otherwise
        compare_stages(sys.argv[1], jnp.float32)
