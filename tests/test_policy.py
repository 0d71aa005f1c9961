"""Codecs by module path."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe.graph.allowed_codecs import CODEC_SETS, fits, parse


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("Net/Encoder_0/Conv_1", "*", True),
        ("", "*", True),
        ("Net/Encoder_0/Conv_1", "Encoder_0", True),
        ("Net/Encoder_0/Conv_1", "Net/Encoder_0", True),
        ("Net/Encoder_0/Conv_1", "Encoder_?", True),
        ("Net/Encoder_0/Conv_1", "*/Conv_1", True),
        ("Net/Encoder_0/Conv_1", "Conv_1", False),
        ("Net/Encoder_10", "Encoder_1", False),
        ("", "Net", False),
    ],
)
def test_patterns(path, pattern, expected):
    assert fits(path, pattern) is expected


def test_the_first_pattern_decides_and_the_rest_is_fast():
    policy = parse({"Head": {"mask"}, "Net/*": "smallest"})
    assert policy.at("Net/Head/Dense_0") == {"mask"}
    assert policy.at("Net/Body") == CODEC_SETS["smallest"]
    assert policy.at("Loss") == CODEC_SETS["fast"]


def test_equal_policies_have_equal_names():
    assert parse("fast").name == parse(CODEC_SETS["fast"]).name != parse("smallest").name
    assert parse({"a": "fast"}).name == parse({"a": ["mask", "index", "alias", "recompute"]}).name
    assert parse({"a": "fast"}).name != parse({"b": "fast"}).name


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128, name="first")(x))
        x = nn.relu(nn.Dense(128, name="second")(x))
        return nn.Dense(1, name="last")(x).sum()


@pytest.mark.core
def test_a_module_can_be_left_as_it_is():
    x = jnp.ones((64, 128))
    variables = Net().init(jax.random.key(0), x)

    def storage(codecs):
        net = jaxpipe.memory_encoded(Net, codecs=codecs)()
        report = jaxpipe.residual_report(lambda v: net.apply(v, x), variables)
        return sorted(row.storage for row in report.tensors if row.shape == (64, 128))

    assert storage("smallest") == ["bitmap", "bitmap"]
    assert storage("fast") == ["keep", "keep"]
    # The ReLUs are at the path of the module that calls them.
    assert storage({"Net/first": "fast", "Net": "smallest"}) == ["bitmap", "bitmap"]
    assert storage({"Net": {"recompute"}, "*": "smallest"}) == ["keep", "keep"]


def test_a_decoration_inside_keeps_its_own_codecs():
    inner = jaxpipe.memory_encoded(lambda x: jax.nn.relu(x), codecs={"recompute"})
    outer = jaxpipe.memory_encoded(lambda x, w: (inner(x @ w) @ w).sum(), codecs="smallest")
    report = jaxpipe.residual_report(outer, jnp.ones((64, 128)), jnp.ones((128, 128)))
    assert {row.storage for row in report.tensors} == {"keep"}


def test_a_pattern_that_fits_no_module_is_warned_of():
    net = jaxpipe.memory_encoded(Net, codecs={"Encoder_*": "smallest", "first": "fast"})()
    x = jnp.ones((4, 128))
    variables = net.init(jax.random.key(0), x)
    net.apply(variables, x)  # nothing is stored
    message = (
        r"codecs=\{'Encoder_\*': \.\.\.\}: no module fits .* Module paths are Net/first, Net, Net/second, Net/last"
    )
    with pytest.warns(jaxpipe.CodecWarning, match=message) as given:
        jax.grad(net.apply)(variables, x)
    assert len(given) == 1


def test_a_pattern_of_storage_that_fits_no_module_is_warned_of():
    mesh = jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1])
    options = {"loss": lambda model, x: model(x), "optimizer": optax.sgd(0.1), "profile": "analytic"}
    with pytest.warns(jaxpipe.CodecWarning, match=r"storage=\{'Encoder_\*'"):
        jaxpipe.partition(Net(), mesh, jnp.ones((4, 128)), storage={"Encoder_*": "smallest", "*": "fast"}, **options)


def test_a_function_without_operators_has_no_unused_pattern():
    def same(x):
        return x

    x = jnp.ones(3)
    value, pullback = jax.vjp(jaxpipe.memory_encoded(same), x)  # a CodecWarning would be an error
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(pullback(x)[0], x)
