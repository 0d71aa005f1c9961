"""The default plan against brute force, and the checks of a plan."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.graph.graph import live, trace
from jaxpipe.graph.op_cost import is_product, rerun_work, weight
from jaxpipe.residuals import choose_formats
from jaxpipe.residuals.backward_graph import build_backward_graph
from jaxpipe.residuals.choose_formats import ResidualPlan
from jaxpipe.residuals.codecs.bits import Mask, PoolIndex
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.stored_formats import Derived
from jaxpipe.targets.building import building_for


def backward_graph_of(function, *shapes, parameters=(), wrt=None):
    graph = trace(lambda *a: [function(*a)], *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    graph = graph.with_parameters([k in parameters for k in range(len(shapes))])
    return build_backward_graph(graph, graph.inputs if wrt is None else [graph.inputs[k] for k in wrt])


def is_cheap(op):
    """The one product of each of these programs is all of its work, and never cheap."""
    return rerun_work(op) is not None and not is_product(op)


def cheapest(backward_graph):
    """The fewest stored bytes, by trying every set of tensors. Work limits do not matter at these sizes."""
    graph = backward_graph.graph
    available = graph.derived_from_parameters
    producers = {t: op for op in graph.operators for t in op.outputs}
    related = set()
    pending = [t for t in backward_graph.needs if t not in available]
    while pending:
        t = pending.pop()
        if t not in related:
            related.add(t)
            if t in producers and is_cheap(producers[t]):
                pending.extend(u for u in producers[t].inputs if u not in available)

    def follows(t, chosen):
        if t in chosen or t in available:
            return True
        op = producers.get(t)
        return op is not None and is_cheap(op) and all(follows(u, chosen) for u in op.inputs)

    def size(t):
        tensor = graph.tensors[t]
        elements = int(np.prod(tensor.shape[1:])) if len(tensor.shape) > 1 else tensor.size
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        return rows * -(-elements * tensor.bits // 8)

    best, sizes = None, {t: size(t) for t in related}
    for count in range(len(related) + 1):
        for chosen in itertools.combinations(sorted(related), count):
            total = sum(sizes[t] for t in chosen)
            if (best is None or total < best) and all(follows(t, set(chosen)) for t in backward_graph.needs):
                best = total
    return best


def gelu_block(x, w):
    return jax.nn.gelu(x @ w, approximate=False)


def norm(x, w):
    h = x @ w
    mean = h.mean(-1, keepdims=True)
    return jax.nn.relu((h - mean) * jax.lax.rsqrt(((h - mean) ** 2).mean(-1, keepdims=True) + 1e-5))


def residual(x, w):
    h = x + jnp.tanh(x @ w)
    return h * jax.nn.relu(h)


@pytest.mark.core
@pytest.mark.parametrize("function", [gelu_block, norm, residual, lambda x, w: jnp.where(x @ w > 0, x, 1.0) * 3])
def test_default_plan_is_the_smallest_by_brute_force(function):
    backward_graph = backward_graph_of(function, (8, 16), (16, 16), parameters=[1])
    plan = choose_formats.default_plan(backward_graph)
    choose_formats.check_plan(backward_graph, plan)
    assert plan.stash_bytes(backward_graph.graph) == cheapest(backward_graph)


def test_of_equal_cuts_the_one_nearest_to_the_backward_pass():
    # x and sin(x) and sin(x) + 1 have one size; exp needs its output, which is nearest.
    backward_graph = backward_graph_of(lambda x: jnp.exp(jnp.sin(x) + 1), (8,), wrt=[0])
    plan = choose_formats.default_plan(backward_graph)
    (step,) = [s for s in backward_graph.steps if s.name == "exp"]
    assert plan.formats[step.needs[0]] in (KEEP, Derived.RECOMPUTE)
    assert plan.stash_bytes(backward_graph.graph) == 32


@pytest.mark.versions
@pytest.mark.parametrize("function", [jnp.square, jnp.sin])
def test_what_the_backward_pass_alone_reads_is_made_there(function):
    """Twice the difference, or the cosine: as large as what it is of, which the forward pass writes in any case."""

    def loss(x, w, y):
        return function(x @ w - y).mean()

    backward_graph = backward_graph_of(loss, (64, 8), (8, 32), (64, 32), parameters=[1], wrt=[1])
    graph, plan = backward_graph.graph, choose_formats.default_plan(backward_graph, held=backward_graph.graph.inputs)
    forward = {t for op in live(graph.operators, graph.outputs) for t in op.outputs}
    assert forward.union(graph.inputs).issuperset(plan.stored)
    assert {graph.tensors[t].shape for t in plan.stored} == {(64, 8), (64, 32)}
    if jax.__version_info__ >= (0, 11):  # XLA:CPU of jax 0.10 drops barriers, and writes both
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 8), (8, 32), (64, 32))]
        steps = [jax.jit(jax.value_and_grad(f, argnums=1)) for f in (loss, jaxpipe.memory_encoded(loss))]
        plain, encoded = (step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes for step in steps)
        assert encoded <= plain


def test_swap_store_the_convolution_and_recompute_the_normalization():
    def block(x, kernel):
        h = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, square = h.mean((0, 1, 2)), (h**2).mean((0, 1, 2))
        return jax.nn.relu((h - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5))

    backward_graph = backward_graph_of(block, (4, 8, 8, 32), (3, 3, 32, 8), parameters=[1], wrt=[1])
    plan = choose_formats.default_plan(backward_graph, held=backward_graph.graph.inputs)
    maps = [t for t in plan.stored if backward_graph.graph.tensors[t].size == 4 * 8 * 8 * 8]
    producers = {t: op.name for op in backward_graph.graph.operators for t in op.outputs}
    assert [producers[t] for t in maps] == ["conv_general_dilated"]


def test_parameters_and_what_follows_from_them_are_never_stored():
    backward_graph = backward_graph_of(lambda x, a, b: x @ (a @ b), (4, 8), (8, 8), (8, 8), parameters=[1, 2])
    plan = choose_formats.default_plan(backward_graph)
    assert plan.stored == (backward_graph.graph.inputs[0],)


def test_an_input_is_stored_rather_than_a_view_of_it():
    backward_graph = backward_graph_of(lambda x, scale: jnp.sin(x) * scale.reshape(1, 8), (4, 8), (8,))
    plan = choose_formats.default_plan(backward_graph)
    x, scale = backward_graph.graph.inputs
    assert plan.stored == (x, scale)
    assert Derived.ALIAS in plan.formats.values()


def test_held_inputs_cost_nothing():
    backward_graph = backward_graph_of(lambda x: jax.nn.relu(x), (8, 8))
    (x,) = backward_graph.graph.inputs
    bought = choose_formats.default_plan(backward_graph)
    assert set(bought.formats.values()) == {Mask()}
    held = choose_formats.default_plan(backward_graph, held=[x])
    assert held.formats[x] == KEEP


def test_recomputation_is_bounded():
    def chain(x, w):
        h = x @ w
        for _ in range(40):
            h = jnp.exp(jnp.sin(h))
        return h

    backward_graph = backward_graph_of(chain, (8, 8), (8, 8), parameters=[1])
    plan = choose_formats.default_plan(backward_graph)
    producers = {t: op for op in backward_graph.graph.operators for t in op.outputs}

    def work(t):
        if t in plan.codecs:
            return 0
        return (weight(producers[t]) or 0) + max((work(u) for u in producers[t].inputs if u in plan.formats), default=0)

    assert 0 < max(map(work, plan.formats)) <= choose_formats.RECOMPUTE_WORK_LIMIT


@pytest.mark.parametrize(
    ("codecs", "allowed"),
    [
        ((), {KEEP}),
        (("mask",), {KEEP, Mask()}),
        (("index",), {KEEP, PoolIndex(2)}),
        (("alias", "recompute"), {KEEP, Derived.ALIAS, Derived.RECOMPUTE}),
    ],
)
def test_codecs_bound_the_plan(codecs, allowed):
    def net(x):
        y = jax.nn.relu(jnp.sin(x) * x).reshape(2, 4, 4, 1)
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") + y[:, ::2, ::2]

    graph = trace(lambda x: [net(x)], jnp.ones((2, 16)))
    backward_graph = build_backward_graph(graph, graph.inputs, policy=parse(codecs))
    plan = choose_formats.default_plan(backward_graph, parse(codecs))
    choose_formats.check_plan(backward_graph, plan)
    assert set(plan.formats.values()) <= allowed


def test_check_plan_names_what_is_wrong():
    backward_graph = backward_graph_of(lambda x: jax.nn.relu(jnp.sin(x)), (4, 4))
    plan = choose_formats.default_plan(backward_graph)
    (some,) = plan.stored[:1]
    missing = ResidualPlan({t: fmt for t, fmt in plan.formats.items() if t != some})
    with pytest.raises(ValueError, match=rf"needs tensor %{some}, for which there is no choice"):
        choose_formats.check_plan(backward_graph, missing)
    surplus = ResidualPlan({**plan.formats, 999: KEEP})
    with pytest.raises(ValueError, match=r"nothing in the backward pass reads tensors \[999\]"):
        choose_formats.check_plan(backward_graph, surplus)
    (x,) = backward_graph.graph.inputs
    with pytest.raises(ValueError, match=rf"tensor %{x} is to be recomputed, but it is an input"):
        choose_formats.check_plan(backward_graph, ResidualPlan({**plan.formats, x: Derived.RECOMPUTE}))


def test_a_product_runs_again_only_if_it_is_cheap_and_a_small_part():
    def net(x, a, b):
        return jnp.sin(jnp.sin(x @ a) @ b)

    def stored(inner):
        shapes = (64, inner), (inner, 256), (256, 512)
        backward_graph = backward_graph_of(net, *shapes, parameters=[1, 2], wrt=[1, 2])
        plan = choose_formats.default_plan(backward_graph, held=backward_graph.graph.inputs)
        return {backward_graph.graph.tensors[t].shape for t in plan.stored} - {(64, inner)}

    assert stored(8) == {(64, 512)}  # 1.5 % of all multiplications
    assert stored(40) == {(64, 256), (64, 512)}  # 40 of 552 for each element: 7.2 %, above the bound of 7 %


def test_a_narrow_convolution_counts_for_the_time_that_it_takes():
    def net(x, stem, kernel):
        for k in [stem] + 6 * [kernel]:
            x = jnp.sin(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return x

    def is_stored(width):
        shapes = (2, 8, 8, 3), (3, 3, 3, width), (3, 3, width, width)
        backward_graph = backward_graph_of(net, *shapes, parameters=[1, 2], wrt=[1, 2])
        plan = choose_formats.default_plan(backward_graph, held=backward_graph.graph.inputs)
        first, *_ = [op for op in backward_graph.graph.operators if is_product(op)]
        return first.outputs[0] in plan.codecs

    # Of 432 + 6 * 2304 multiplications for each pixel 3 %, but with as much time as 2000 of them 13 %.
    assert is_stored(16) and not is_stored(64)


@pytest.mark.core
def test_on_a_gpu_products_run_again_by_what_they_free_up_to_a_quarter_of_their_time():
    depth, width = 10, 512

    def mlp(*values):
        *weights, x = values
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = jnp.tanh(jnp.tanh(x @ up) @ down)
        return x.sum()

    shapes = [shape for _ in range(depth) for shape in ((width, 4 * width), (4 * width, width))]
    backward_graph = backward_graph_of(mlp, *shapes, (4096, width), parameters=range(2 * depth), wrt=range(2 * depth))
    with building_for("gpu"):
        plan = choose_formats.default_plan(backward_graph, held=backward_graph.graph.inputs)
    by_default = choose_formats.default_plan(backward_graph, held=backward_graph.graph.inputs)
    graph = backward_graph.graph
    wide = [op.outputs[0] for op in graph.operators if is_product(op) and op.equation.outvars[0].aval.shape[1] > width]
    narrow = [op.outputs[0] for op in graph.operators if is_product(op) and op.outputs[0] not in wide]
    again = [t for t, fmt in plan.formats.items() if fmt is Derived.RECOMPUTE]
    # Wide results are four times the bytes for the same multiplications; 20 equal products, of which 5 are a quarter.
    assert [t for t in again if t in (*wide, *narrow)] == wide[:5]
    saved = by_default.stash_bytes(graph) - plan.stash_bytes(graph)
    assert saved == 5 * 4096 * 4 * width * 4


def test_on_a_gpu_the_result_of_a_product_is_stored_rather_than_what_follows_from_it():
    def loss(w, v, x):
        return (jnp.exp(x @ w) @ v).sum()

    backward_graph = backward_graph_of(loss, (512, 512), (512, 512), (64, 512), parameters=(0, 1))
    graph = backward_graph.graph
    (product, _) = (op.outputs[0] for op in graph.operators if is_product(op))
    assert product not in choose_formats.default_plan(backward_graph).stored
    with building_for("gpu"):
        assert product in choose_formats.default_plan(backward_graph).stored


def test_on_a_gpu_the_mask_of_a_product_that_runs_again_is_stored():
    """The product's result is then gone before the mask is read. Without masks it is computed from that."""

    def loss(first, second, x):
        return jax.nn.relu(jax.nn.relu(x @ first) @ second).sum()

    shapes = (16, 4096), (4096, 4096), (4096, 16)
    graph = trace(lambda *a: [loss(*a)], *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    graph = graph.with_parameters([True, True, False])
    backward_graph = build_backward_graph(graph, graph.inputs[:2])
    (inner, _) = (op.outputs[0] for op in graph.operators if op.name == "custom_jvp_call")
    formats = {}
    for codecs in ("fast", ("alias", "recompute")):
        with building_for("gpu"):
            plan = choose_formats.default_plan(backward_graph, parse(codecs), held=graph.inputs)
        assert plan.formats[inner] is Derived.RECOMPUTE
        masks = [fmt for t, fmt in plan.formats.items() if backward_graph.graph.tensors[t].bits == 1]
        formats[codecs] = masks[0]
    assert formats == {"fast": Mask(), ("alias", "recompute"): Derived.RECOMPUTE}
