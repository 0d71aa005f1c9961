"""The order of operators, and what crosses and what may be cut, against plain enumeration."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.graph.graph import trace
from jaxpipe.graph.operator_order import allowed_cuts, in_stage_order, parameter_work_in_place, spans
from tests.support.compare import assert_same_bits


#: What a random program is made of; every array is a scalar or [3, 3].
STEPS = (
    lambda x, y: jnp.sin(x),
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: x.sum(),
    lambda x, y: x.T,
    lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32),
    lambda x, y: jnp.square(x).sum(),
    lambda x, y: x @ y if x.ndim == y.ndim == 2 else x - y,
)


@st.composite
def programs(draw):
    """Three parameters and one input, up to 15 steps, each over any two earlier values; three results."""
    picks = st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 99), st.integers(0, 99))
    steps = draw(st.lists(picks, min_size=1, max_size=15))
    results = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))

    def body(*pool):
        pool = list(pool)
        for kind, a, b in steps:
            pool.append(STEPS[kind](pool[a % len(pool)], pool[b % len(pool)]))
        return [pool[-1], *(pool[k % len(pool)] for k in results)]

    x = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    return trace(body, x, x, x, x).with_parameters([True, True, True, False])


def crossing_bytes(graph, c):
    """Bytes of float32 tensors that are made before an operator and read from it on."""
    written = {t for op in graph.operators[:c] for t in op.outputs}
    return sum(4 * graph.tensors[t].size for t in written & {t for op in graph.operators[c:] for t in op.inputs})


def assert_topological(graph):
    known = {*graph.inputs, *graph.constants}
    for op in graph.operators:
        assert known.issuperset(op.inputs)
        known.update(op.outputs)
    assert known.issuperset(graph.outputs)


@given(programs())
@settings(deadline=None, max_examples=60)
def test_the_new_order_computes_the_same(graph):
    ordered = parameter_work_in_place(graph)
    assert_topological(ordered)
    assert sorted(map(id, ordered.operators)) == sorted(map(id, graph.operators))
    values = list(jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 3)), jnp.float32))
    # Operator by operator, so that order alone could change a bit.
    assert_same_bits(ordered.evaluate(values), graph.evaluate(values))


@given(programs())
@settings(deadline=None, max_examples=60)
def test_spans_and_cuts(graph):
    operators = graph.operators
    users = {t: [k for k, op in enumerate(operators) if t in op.inputs] for t in graph.parameters}
    ranges = spans(graph, graph.parameters, {})
    assert ranges == {t: (min(at), max(at)) for t, at in users.items() if at}

    positions = range(len(operators) + 1)
    split = [any(min(at) < c <= max(at) for at in users.values() if at) for c in positions]
    assert allowed_cuts(graph, ranges.values()) == [not s for s in split]


@pytest.mark.core
def test_a_new_value_is_made_where_the_old_one_is_used():
    def body(mean, w, x):
        h = jnp.sin(x)
        y = h * mean
        z = jnp.cos(y @ w)
        return [z.sum(), h + 1]

    x = jnp.ones((2, 2))
    graph = trace(body, x, x, x)
    mean, w, _ = graph.inputs
    at = {op.name: k for k, op in enumerate(graph.operators)}
    assert spans(graph, [mean, w], {}) == {mean: (at["mul"],) * 2, w: (at["dot_general"],) * 2}
    both = sorted((at["mul"], at["add"]))
    assert spans(graph, [mean, w], {mean: graph.outputs[1]})[mean] == tuple(both)
    # A variable that is written and never read stands where it is made; one that nothing touches stands nowhere.
    unread = trace(lambda old, x: [jnp.sin(x)], x, x)
    assert spans(unread, unread.inputs[:1], {unread.inputs[0]: unread.outputs[0]}) == {unread.inputs[0]: (0, 0)}
    assert spans(unread, unread.inputs[:1], {}) == {}


def decayed(*values):
    *weights, x = values
    for w in weights:
        x = jnp.tanh(x @ w)
    return [x.mean() + 1e-4 * sum(jnp.square(w).sum() for w in weights)]


@pytest.mark.core
def test_weight_decay_in_the_loss_ties_nothing_together():
    avals = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 5
    graph = trace(decayed, *avals).with_parameters([True] * 4 + [False])

    def tied(graph):
        ranges = sorted(spans(graph, graph.parameters, {}).values())
        return [high >= low for (_, high), (low, _) in itertools.pairwise(ranges)]

    assert all(tied(graph))  # as written: every weight is read once more at the end
    ordered = parameter_work_in_place(graph)
    assert_topological(ordered)
    assert not any(tied(ordered))
    # What then travels between two layers is [4, 4] activations, and one scalar: the sum so far.
    starts = [low for low, _ in sorted(spans(ordered, ordered.parameters, {}).values())]
    assert [crossing_bytes(ordered, c) for c in starts] == [0, 68, 68, 68]


def test_a_cast_stays_with_its_reader():
    def body(a, b, x):
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # all casts first, as a mixed-precision policy does
        return [(jnp.tanh(x @ a) @ b).sum()]

    x = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    graph = trace(body, w, w, x).with_parameters([True, True, False])
    assert [op.name for op in graph.operators][:2] == ["convert_element_type"] * 2
    names = [op.name for op in parameter_work_in_place(graph).operators]
    first = names.index("dot_general")
    assert names[first - 1] == "convert_element_type"
    second = names.index("dot_general", first + 1)
    assert names[second - 1] == "convert_element_type" and "tanh" in names[first:second]


@given(programs(), st.tuples(*[st.integers(0, 3)] * 3))
@settings(deadline=None, max_examples=60)
def test_operators_in_the_order_of_stages(graph, stages):
    """Of those that depend on parameters, none comes before one of an earlier stage."""
    stage_of = dict(zip(graph.inputs[:3], stages, strict=True))
    ordered = in_stage_order(graph, stage_of)
    assert_topological(ordered)
    assert sorted(map(id, ordered.operators)) == sorted(map(id, graph.operators))
    latest, order = dict(stage_of), []
    for op in ordered.operators:
        needed = [latest[t] for t in op.inputs if t in latest]
        if needed:
            latest |= dict.fromkeys(op.outputs, max(needed))
            order.append(max(needed))
    assert order == sorted(order)
