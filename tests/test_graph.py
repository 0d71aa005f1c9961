import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import memory_encoded
from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.graph.graph import encoded_policy, trace


def names(graph):
    return [op.name for op in graph.operators]


@pytest.mark.core
def test_inlines_jit_and_keeps_module_paths():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.jit(jnp.sin)(nn.Dense(3, use_bias=False)(x))

    net, x = Net(), jnp.ones((2, 4))
    w = net.init(jax.random.key(0), x)["params"]["Dense_0"]["kernel"]
    graph = trace(lambda w, x: [net.apply({"params": {"Dense_0": {"kernel": w}}}, x)], w, x)
    assert [(op.name, op.path) for op in graph.operators] == [("dot_general", "Net/Dense_0"), ("sin", "Net")]


def test_marks_the_border_of_a_call_that_uses_an_argument_twice():
    graph = trace(lambda x: [jax.jit(lambda a: a * a + a)(x), x + 1], jnp.ones(3))
    assert names(graph)[0] == "call_boundary"
    assert names(trace(lambda x: [jax.jit(lambda a: a + 1)(x)], jnp.ones(3))) == ["add"]


@pytest.mark.core
def test_the_border_of_a_call_has_no_literals():
    inner = jax.jit(lambda x: x * x + 2)
    graph = trace(lambda x: inner(x) * 3, jnp.ones(3))
    assert [[float(x) for x in op.literals] for op in graph.operators] == [[], [], [2.0], [3.0]]


def test_operators_with_a_derivative_of_their_own_stay_whole():
    def body(x):
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=3)
        return [jax.nn.relu(y), jax.checkpoint(jnp.sin)(x), jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x)]

    wholes = names(trace(body, jnp.ones(3)))
    assert {"scan", "custom_jvp_call", "cond"} <= set(wholes)
    assert any(name.startswith(("checkpoint", "remat")) for name in wholes)


def test_nested_memory_encoded_is_inlined_and_recognized():
    inner = memory_encoded(lambda x: jnp.sin(x) * 2, codecs={"mask"})
    closed = jax.make_jaxpr(inner)(jnp.ones(3))
    assert encoded_policy(closed.eqns[0]) == parse({"mask"})
    assert names(trace(lambda x: [inner(x)], jnp.ones(3))) == ["sin", "mul"]


def test_dead_operators_are_dropped():
    graph = trace(lambda x: [(jnp.sin(x), jnp.cos(x))[1]], jnp.ones(3))
    assert names(graph) == ["cos"]


@pytest.mark.core
def test_sections_put_together_are_the_whole():
    def body(w, x):
        h = jnp.sin(x @ w)
        skip = h * 2
        return [jnp.tanh(skip + jnp.cos(h)), skip.sum()]

    # JAX arrays: NumPy would run the product in `expected` with a BLAS of its own.
    w, x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32))
    graph = trace(body, w, x)
    expected = body(w, x)
    for cut in range(1, len(graph.operators)):
        first, second = graph.section(0, cut), graph.section(cut, len(graph.operators))
        known = dict(zip(graph.inputs, (w, x), strict=True))
        for part in (first, second):
            known.update(zip(part.outputs, part.evaluate([known[t] for t in part.inputs]), strict=True))
        for t, value in zip(graph.outputs, expected, strict=True):
            assert np.array_equal(known[t], value)


def test_a_section_passes_on_what_later_ones_need():
    graph = trace(lambda x: [(lambda h: jnp.cos(jnp.tan(h)) * h)(jnp.sin(x))], jnp.ones(3))
    assert names(graph) == ["sin", "tan", "cos", "mul"]
    skip = graph.operators[0].outputs[0]
    middle = graph.section(2, 3)
    assert skip in middle.inputs and skip in middle.outputs
    assert graph.inputs[0] not in middle.inputs


def test_derived_from_parameters():
    table = np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def body(w, x):
        return [x @ (w.T * 2), w @ table]

    graph = trace(body, jnp.ones((3, 2)), jnp.ones((4, 2))).with_parameters([True, False])
    derived = graph.derived_from_parameters
    output_of = {op.name: op.outputs[0] for op in graph.operators if op.name != "dot_general"}
    assert output_of["transpose"] in derived and output_of["mul"] in derived
    # Neither what depends on the input, nor what depends on a constant array (it may be a batch).
    products = [op.outputs[0] for op in graph.operators if op.name == "dot_general"]
    assert len(products) == 2 and not any(product in derived for product in products)
