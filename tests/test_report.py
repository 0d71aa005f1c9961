import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpipe
from examples.models import VGG16, NNXDigitsCNN, ResNet18
from jaxpipe import memory_encoded, residual_report


MIB = 2**20


def shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def abstract(model, x, **kwargs):
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype), **kwargs))


@pytest.mark.core
def test_vgg16_numbers():
    """Plain: 92 MiB, 159.5 MiB with ReLU's zeros. Both follow from the shapes of VGG-16 at 64 x 32 x 32 x 3."""
    model, x = VGG16(), jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)
    report = residual_report(lambda v, x: model.apply(v, x), abstract(model, x), x)
    assert report.plain_bytes / MIB == pytest.approx(92.0, abs=0.01)
    assert report.plain_bytes_raw / MIB == pytest.approx(159.5, abs=0.01)
    assert report.total_bytes / MIB < 46


@pytest.mark.core
def test_resnet18_recomputes_its_normalizations():
    model, x = ResNet18(), jax.ShapeDtypeStruct((32, 32, 32, 3), jnp.float32)
    variables = abstract(model, x, train=True)
    report = residual_report(
        lambda p, s, x: model.apply({"params": p, **s}, x, train=True, mutable=["batch_stats"])[0],
        variables["params"],
        {"batch_stats": variables["batch_stats"]},
        x,
    )
    assert report.total_bytes < 0.36 * report.plain_bytes


def test_rows_of_a_small_function():
    report = residual_report(lambda x: jax.nn.relu(x).sum(), jnp.ones((32, 8)))
    (row,) = report.tensors
    assert (row.producer, row.shape, row.dtype, row.storage, row.bytes) == ("relu", (32, 8), "bool", "mask", 32)
    # Plain: a boolean map; with constants also ReLU's map of float zeros.
    assert (report.plain_bytes, report.plain_bytes_raw) == (256, 256 + 1024)


def test_decorated_parts_are_encoded_and_the_rest_is_as_jax_has_it():
    part = memory_encoded(jax.nn.relu)
    report = residual_report(lambda x: jnp.sin(part(x)).sum(), jnp.ones((4, 8)))
    assert sorted((row.storage, row.bytes) for row in report.tensors) == [("mask", 4), ("vjp", 128)]


def test_rows_inside_a_scan_are_found():
    part = memory_encoded(jax.nn.relu)

    def function(x):
        return jax.lax.scan(lambda c, _: (part(c) - 1, None), x, length=5)[0].sum()

    (row,) = residual_report(function, jnp.ones((4, 8))).tensors
    assert (row.storage, row.bytes) == ("mask", 5 * 4)


def test_nnx_module_and_its_names():
    report = residual_report(NNXDigitsCNN(nnx.Rngs(0), width=4), jnp.ones((2, 8, 8, 1)))
    assert "DigitsCNN/norm1/sub" in {row.producer for row in report.tensors}
    text = str(report)
    assert f"{report.total_bytes:,}" in text and f"{report.plain_bytes:,}" in text and "pool index" in text


def test_reporting_leaves_the_module_as_it_was():
    model = NNXDigitsCNN(nnx.Rngs(0), width=4)
    before = jax.tree.leaves(nnx.state(model))
    residual_report(model, jnp.ones((2, 8, 8, 1)))
    assert all(a is b for a, b in zip(jax.tree.leaves(nnx.state(model)), before, strict=True))


def test_a_buffer_counts_once_and_arguments_do_not_count():
    def function(x, w):
        y = jnp.exp(x)
        return (y * w + y).sum()

    report = residual_report(memory_encoded(function), jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert [(row.producer, row.bytes) for row in report.tensors] == [("exp", 64)]
    assert report.plain_bytes == 64


def test_a_jitted_function_is_reported_as_the_plain_one():
    def function(x):
        return jnp.sin(memory_encoded(jax.nn.relu)(x)).sum()

    x = jnp.ones((4, 8))
    plain, jitted = residual_report(function, x), residual_report(jax.jit(function), x)
    assert (jitted.total_bytes, jitted.plain_bytes) == (plain.total_bytes, plain.plain_bytes)
    assert jitted.plain_bytes > jitted.total_bytes


def test_nothing_to_differentiate():
    with pytest.raises(jaxpipe.DifferentiationError, match=r"found none among \(0: int32\)"):
        residual_report(lambda x: x, jnp.arange(3))


def test_the_print_has_the_ratio_first_and_the_largest_tensors_next():
    def function(x, y):
        return (jnp.sin(x).sum() + jax.nn.relu(y).sum()) * jnp.tanh(y[0, 0]) * jnp.tanh(y[0, 1])

    x, y = jnp.ones((64, 64)), jnp.ones((32, 32))
    for report, how in (
        (
            residual_report(function, x, y),
            "Stored for the backward pass, as if the function were decorated with memory",
        ),
        (residual_report(memory_encoded(function), x, y), "Stored for the backward pass: "),
    ):
        first, *lines = str(report).splitlines()
        assert first.startswith(how)
        assert first.endswith(f"{report.plain_bytes / report.total_bytes:.1f}x as much")
        rows = [line for line in lines if "float32[" in line or "bool[" in line]
        sizes = [int(re.search(r"  ([\d,]+)  ", line)[1].replace(",", "")) for line in rows]
        assert sizes == sorted((row.bytes for row in report.tensors), reverse=True)[: len(sizes)]
        folded = next(line for line in lines if "smaller ones" in line)
        assert len(rows) + int(folded.split()[0]) == len(report.tensors)
        assert int(folded.split()[3]) == report.total_bytes - sum(sizes) < 0.03 * report.total_bytes
        constants = next(line for line in lines if "and constants" in line)
        assert int(constants.split()[-1].replace(",", "")) == report.plain_bytes_raw - report.plain_bytes == 4 * 32 * 32


def test_a_model_that_is_given_a_whole_batch():
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    message = (
        r"called the model Linear\(a dict of 'x', 'y'\), which raised .* as in residual_report\(model, batch\['x'\]\)"
    )
    with pytest.raises(jaxpipe.ModelError, match=message):
        residual_report(model, {"x": jnp.ones((2, 3)), "y": jnp.ones(2)})
    with pytest.raises(
        jaxpipe.ModelError, match=r"the Linen module VGG16, .*lambda variables, x: VGG16\(\.\.\.\)\.apply"
    ):
        residual_report(VGG16(), jnp.ones((1, 32, 32, 3)))
