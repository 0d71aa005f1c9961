"""The residuals that each operator's backward pass reads, as literal tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe import memory_encoded
from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.graph.graph import trace
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.residuals.vjp_program import build, forward
from jaxpipe.targets.building import building_for
from tests.support.compare import assert_same_bits


X = jnp.ones((4, 6))


def needed(function, *args, wrt=None, **options):
    """dtype and shape of every tensor that the backward pass reads and that depends on an argument."""
    graph = trace(lambda *a: [function(*a)], *args)
    inputs = graph.inputs if wrt is None else [graph.inputs[k] for k in wrt]
    result = build_backward_graph(graph, inputs, **options)
    dependent = set(result.graph.inputs)
    for op in result.graph.operators:
        if not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
    tensors = [result.graph.tensors[t] for t in result.needs if t in dependent]
    return [f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in tensors]


@pytest.mark.core
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + 1, []),
        (lambda x: x.reshape(6, 4).T[1:3], []),
        (lambda x: x.sum(0), []),
        (lambda x: jnp.concatenate([x, 2 * x]), []),
        (lambda x: jnp.pad(x, 1), []),
        (lambda x: jnp.cumsum(x, 0), []),
        (jax.nn.relu, ["bool[4,6]"]),
        (jnp.abs, ["bool[4,6]"]),
        (lambda x: jnp.where(x > 0, x, 3.0), ["bool[4,6]"]),
        (jnp.exp, ["float32[4,6]"]),
        (jnp.floor, []),
        (jax.lax.stop_gradient, []),
    ],
)
def test_needs_of_one_operator(function, expected):
    assert needed(function, X) == expected


def hidden_and_clipped(x):
    y = jax.nn.relu(x)
    return y, jnp.where(x < 1, y, 0.0)


def hidden_plus_clipped(x):
    return sum(hidden_and_clipped(x))


@pytest.mark.core
@pytest.mark.parametrize(
    ("function", "masks"),
    [
        (jax.nn.hard_tanh, 1),
        (lambda x: jnp.where(x < 1, jnp.where(x < -1, 0.0, x), 0.0), 1),  # zero where false, zero where true
        (lambda x: jax.nn.relu6(jax.nn.relu(jnp.where(jnp.isnan(x), 0.0, x))), 1),
        (lambda x: jnp.where(x[:, :1].sum() > 0, jax.nn.relu(x), 0.0), 2),  # a single boolean, broadcast
        # What lies between the masks gets a cotangent of its own.
        (hidden_and_clipped, 2),
        (hidden_plus_clipped, 2),
    ],
)
def test_masks_in_a_row_are_one_mask(function, masks):
    assert len([need for need in needed(function, X) if need.startswith("bool")]) == masks
    x = jnp.array([[-jnp.inf, -1.5, -1, -0.0, 0, 0.5, 1, 6, 7, jnp.inf, jnp.nan]])
    (y, plain), (_, encoded) = (jax.vjp(f, x) for f in (function, memory_encoded(function)))
    seed = jax.tree.map(lambda y: jnp.arange(-3.0, 8).reshape(y.shape), y)
    assert_same_bits(encoded(seed), plain(seed))


def test_exp_needs_its_output_and_log_its_input():
    graph = trace(lambda x: [jnp.exp(x)], X)
    assert build_backward_graph(graph, graph.inputs).needs == graph.outputs
    graph = trace(lambda x: [jnp.log(x)], X)
    assert build_backward_graph(graph, graph.inputs).needs == graph.inputs


def test_a_product_needs_only_the_factor_of_what_moves():
    w = jnp.ones((6, 3))
    assert needed(lambda x, w: x @ w, X, w) == ["float32[4,6]", "float32[6,3]"]
    assert needed(lambda x, w: x @ w, X, w, wrt=[0]) == ["float32[6,3]"]
    assert needed(lambda x, w: x @ w, X, w, wrt=[1]) == ["float32[4,6]"]


def test_max_pool_needs_positions_or_its_input():
    def pool(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID")

    assert "float32[4,6]" not in needed(pool, X)
    assert needed(pool, X, policy=parse({"mask"})) == ["float32[4,6]"]


@pytest.mark.core
def test_opaque_operators_use_their_own_vjp():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))
    assert needed(clipped, X) == []
    assert needed(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), X) == ["float32[4,6]"]
    stacked = needed(lambda x: jax.lax.scan(lambda c, _: (jnp.exp(c), None), x, length=3)[0], X)
    assert stacked == ["float32[3,4,6]"]


def test_a_gradient_that_does_not_look_at_its_cotangent_is_not_zero():
    @jax.custom_vjp
    def loss(x):
        return jnp.square(x).sum()

    loss.defvjp(lambda x: (jnp.square(x).sum(), 2 * x), lambda gradient, _: (gradient,))
    gradient = jax.grad(memory_encoded(loss))(jnp.arange(3.0))
    np.testing.assert_array_equal(gradient, [0.0, 2.0, 4.0])


def test_what_leads_to_no_output_is_not_differentiated():
    graph = trace(lambda x: [jnp.sin(x), jnp.argmax(jnp.exp(x))], X)
    assert [step.name for step in build_backward_graph(graph, graph.inputs).steps] == ["sin"]


def test_equal_operators_share_a_cut():
    graph = trace(lambda x: [jnp.sin(jnp.sin(jnp.sin(x)))], X)
    programs = {id(step.program) for step in build_backward_graph(graph, graph.inputs).steps}
    assert len(programs) == 1


def test_cotangents_of_an_unused_output_are_zero():
    def two(x):
        carry, _rows = jax.lax.scan(lambda c, r: (c * r, jnp.sin(r)), jnp.ones(6), x)
        return [carry]

    graph = trace(two, X)
    (step,) = [s for s in build_backward_graph(graph, graph.inputs).steps if s.name == "scan"]
    assert np.all([t in (*graph.outputs, *step.cotangents_in) for t in graph.outputs])


def test_results_without_a_cotangent_are_not_multiplied_by_zero():
    """A conditional has two results and one is read: the derivative of the other, at infinity, must not count."""

    def one_of_two(x, y):
        return jax.lax.cond(x.sum() > 0, lambda a, b: (a * 2.0, b * b), lambda a, b: (jnp.sin(b), a), x, y)[1]

    x, y = jnp.array([-1.0, 2.0, -5.0]), jnp.array([1.0, jnp.inf, jnp.nan])
    expected = jax.vjp(one_of_two, x, y)[1](jnp.ones(3))
    assert expected[1].tolist() == [0, 0, 0]
    actual = jax.vjp(jaxpipe.memory_encoded(one_of_two), x, y)[1](jnp.ones(3))
    assert [a.tolist() for a in actual] == [e.tolist() for e in expected]


@pytest.mark.parametrize("target", ["cpu", "H100", "v5e"])
@pytest.mark.parametrize("codecs", ["fast", "smallest", {"recompute"}])
def test_two_computed_numbers_are_compared_once(codecs, target):
    """One of two equal ones that is computed again may be rounded otherwise: no gradient would reach it."""
    with building_for(target):
        graph = trace(lambda x, y: jnp.maximum(jnp.tanh(x) * y, jnp.tanh(x) * 0.5 + y).max(1), X, X)
        program = build(graph, graph.inputs, policy=parse(codecs))
    compared = {t for op in program.graph.operators if op.name == "eq" for t in op.outputs}
    assert len(compared) in (3, 5)  # JAX 0.10 compares for each side of a maximum with both
    assert compared <= program.plan.codecs.keys()


@pytest.mark.parametrize("target", ["cpu", "H100", "v5e"])
def test_a_maximum_and_the_comparison_with_it_read_the_same_numbers(target):
    """XLA fuses packing with what it packs: without a barrier it would make the numbers again, rounded otherwise."""
    with building_for(target):
        graph = trace(lambda x, y: (x * y + y).max(1), X, X)
        program = build(graph, graph.inputs)
        equations = jax.make_jaxpr(functools.partial(forward, program))([X, X]).eqns
    makers = {out: eqn.primitive.name for eqn in equations for out in eqn.outvars}
    (maximum,) = (eqn for eqn in equations if eqn.primitive.name == "reduce_max")
    (numbers,) = maximum.invars
    assert any(numbers in eqn.invars for eqn in equations if eqn.primitive.name == "eq")
    assert makers[numbers] in ("optimization_barrier", "cond")
