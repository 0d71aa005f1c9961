import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Var

from jaxpipe.graph.graph import trace
from jaxpipe.graph.liveness import peak_bytes
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import ResidualPlan, derived_from
from jaxpipe.residuals.codecs.bits import Mask
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.targets.building import building_for
from tests.support.backward_parts import backward_in_parts, seeds_of
from tests.support.compare import assert_same_bits
from tests.support.encoded_models import LINEN


@functools.cache
def traced(name):
    """A model's loss as a graph, its arguments, and plain gradients, operator by operator."""
    loss, (params, rest, x) = LINEN[name].losses(lambda cls: cls)
    leaves, treedef = jax.tree.flatten(params)

    def flat(*leaves):
        value, _ = loss(jax.tree.unflatten(treedef, leaves), rest, x)
        return value

    with jax.disable_jit():
        graph = trace(lambda *leaves: [flat(*leaves)], *leaves)
        expected = jax.value_and_grad(flat, argnums=tuple(range(len(leaves))))(*leaves)
    return graph.with_parameters([True] * len(leaves)), leaves, expected


@pytest.mark.parametrize("name", ["cnn", pytest.param("transformer", marks=pytest.mark.slow)])
def test_the_split_backward_pass_is_the_whole_one(name):
    graph, leaves, (value, gradients) = traced(name)
    built = vjp_program.build(graph, graph.inputs)
    parameters = [leaves[graph.inputs.index(t)] for t in built.parameters]
    with jax.disable_jit():
        (output,), stash = vjp_program.forward(built, leaves)
        whole = vjp_program.backward(built, parameters, stash, [jnp.ones(())])
        early, late = backward_in_parts(built, parameters, stash, [jnp.ones(())])
    assert output == value
    assert_same_bits(whole, list(gradients))
    parts = early | late
    assert_same_bits([parts[t] for t in graph.inputs], list(gradients))
    assert built.weight_part and built.input_part


@pytest.mark.versions
@pytest.mark.parametrize("name", ["cnn", pytest.param("transformer", marks=pytest.mark.slow)])
def test_the_programs_for_a_gpu_give_the_same_gradients(name):
    graph, leaves, (value, gradients) = traced(name)
    with building_for("gpu"):
        built = vjp_program.build(graph, graph.inputs)
    parameters = [leaves[graph.inputs.index(t)] for t in built.parameters]
    with jax.disable_jit(), building_for("gpu"):
        (output,), stash = vjp_program.forward(built, leaves)
        whole = vjp_program.backward(built, parameters, stash, [jnp.ones(())])
    assert output == value
    assert_same_bits(whole, list(gradients))


def residual_blocks(x, *weights):
    """Three blocks of two products with a long elementwise chain between them, around which a sum goes."""
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        x = x + jnp.tanh(jnp.sin(x @ first)) @ second
    return x.sum()


@pytest.mark.core
def test_on_a_gpu_blocks_that_run_again_keep_what_products_write():
    shapes = [(64, 16), *[(16, 512), (512, 16)] * 3]
    leaves = [jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(shapes)]
    graph = trace(lambda *values: [residual_blocks(*values)], *leaves)
    with jax.disable_jit():
        gradients = jax.grad(residual_blocks, range(7))(*leaves)
    wide = 4 * 64 * 512
    with building_for("gpu"):
        built = vjp_program.build(graph, graph.inputs, held=graph.inputs)
        held = dict.fromkeys(graph.inputs, KEEP)
        producers = {t: op for op in built.graph.operators for t in op.outputs}
        again = vjp_program.assemble(built.backward_graph, derived_from(built.backward_graph, held, producers))
        step = functools.partial(vjp_program.backward, again)
        assert again.plan.stash_bytes(built.graph) == 4 * sum(leaf.size for leaf in leaves)
        stash = [(leaf,) for leaf in leaves]
        with jax.disable_jit():
            assert_same_bits(step([], stash, [jnp.ones(())]), list(gradients))
        # The first products of three blocks, and at the most an operand and a cotangent of one; no tanh of the others.
        assert peak_bytes(step, [], stash, [jnp.ones(())]) < 6 * wide


def bottlenecks(x, *kernels):
    """Blocks of a convolution to few channels and one back to many, around which a sum goes."""
    for narrow, wide in zip(kernels[::2], kernels[1::2], strict=True):
        x = jax.nn.relu(x + convolve(jnp.tanh(convolve(x, narrow)), wide))
    return x.sum()


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_on_a_gpu_sums_of_convolutions_that_run_again_are_computed_anew():
    """Or the sums of all blocks would be in memory until the backward pass of the first."""
    count = 3
    leaves = [
        jax.random.normal(jax.random.key(k), shape)
        for k, shape in enumerate([(2, 8, 8, 16), *[(1, 1, 16, 2), (1, 1, 2, 16)] * count])
    ]
    graph = trace(lambda *values: [bottlenecks(*values)], *leaves).with_parameters([False, *[True] * (2 * count)])
    with jax.disable_jit():
        gradients = jax.grad(bottlenecks, range(1, len(leaves)))(*leaves)
    with building_for("gpu"):
        built = vjp_program.build(graph, graph.inputs[1:], held=graph.inputs)
        producers = {t: op for op in built.graph.operators for t in op.outputs}
        narrow = [op for op in built.graph.operators if op.name == "conv_general_dilated"][::2]
        stored = [graph.inputs[0], *(op.outputs[0] for op in narrow)]
        plan = derived_from(built.backward_graph, dict.fromkeys(stored, KEEP), producers)
        again = vjp_program.assemble(built.backward_graph, plan)
        with jax.disable_jit():
            _, stash = vjp_program.forward(again, leaves)
            step = functools.partial(vjp_program.backward, again, leaves[1:])
            assert_same_bits(step(stash, [jnp.ones(())]), list(gradients))
        names = equations(jax.make_jaxpr(step)(stash, [jnp.ones(())]).jaxpr)
    assert sum(name in ("max", "custom_jvp_call") for name in names) > count


def equations(jaxpr):
    return [equation.primitive.name for equation in jaxpr.eqns]


def test_on_a_gpu_a_product_waits_for_what_is_packed_before_it():
    def loss(v, w, x):
        return jnp.tanh(jnp.where(x @ v > 0, x, 0.5) @ w).sum()

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (16, 16), (8, 16))]
    graph = trace(lambda *values: [loss(*values)], *arguments).with_parameters([True, True, False])
    built = vjp_program.build(graph, graph.inputs, held=graph.inputs)
    assert list(built.plan.codecs.values()).count(Mask()) == 1
    by_platform = {}
    for platform in ("cpu", "gpu"):
        with building_for(platform):
            by_platform[platform] = equations(
                jax.make_jaxpr(functools.partial(vjp_program.forward, built))(arguments).jaxpr
            )
    assert "optimization_barrier" not in by_platform["cpu"]
    barrier, products = (
        [k for k, name in enumerate(by_platform["gpu"]) if name == wanted]
        for wanted in ("optimization_barrier", "dot_general")
    )
    assert products[0] < barrier[0] < products[1]


def test_on_a_gpu_no_barrier_stands_amid_elementwise_work():
    def loss(v, w, x):
        return jnp.tanh(jnp.sin(jnp.exp(x @ v))).sum() + (x @ w).sum()

    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (16, 16), (8, 16))]
    graph = trace(lambda *values: [loss(*values)], *arguments).with_parameters([True, True, False])
    with building_for("gpu"):
        built = vjp_program.build(graph, graph.inputs, held=graph.inputs)
        _, stash = jax.eval_shape(functools.partial(vjp_program.forward, built), arguments)
        parameters = [arguments[graph.inputs.index(t)] for t in built.parameters]
        backward = functools.partial(vjp_program.backward, built)
        names = equations(jax.make_jaxpr(backward)(parameters, stash, [jnp.ones(())]).jaxpr)
    elementwise = [k for k, name in enumerate(names) if name in ("exp", "cos", "sin", "tanh", "mul")]
    assert "optimization_barrier" in names[: elementwise[0]]
    assert "optimization_barrier" not in names[elementwise[0] : elementwise[-1]]


@pytest.mark.core
@pytest.mark.parametrize("name", ["cnn", pytest.param("transformer", marks=pytest.mark.slow)])
def test_steps_behind_barriers_give_the_same_gradients(name):
    graph, leaves, (_, gradients) = traced(name)
    built = vjp_program.build(graph, graph.inputs)
    parameters = [leaves[graph.inputs.index(t)] for t in built.parameters]
    with jax.disable_jit():
        _, stash = vjp_program.forward(built, leaves)
        actual = vjp_program.backward(built, parameters, stash, [jnp.ones(())], barriers=True)
    assert_same_bits(actual, list(gradients))


def test_delayed_are_the_weights_of_products_and_nothing_large_is_saved_twice():
    def two(x, w1, b1, w2):
        return [jax.nn.relu(x @ w1.astype(jnp.float32) + b1) @ w2]

    shapes = [(4, 8), (8, 8), (8,), (8, 3)]
    graph = trace(two, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    graph = graph.with_parameters([False, True, True, True])
    built = vjp_program.build(graph, graph.inputs)
    x, w1, b1, w2 = graph.inputs
    assert built.input_part == (x, b1) and built.weight_part == (w1, w2)
    assert len(built.saved) == 2  # the cotangents of both products


@pytest.mark.core
@pytest.mark.parametrize("cuts", [(7,), (3, 9, 20)])
def test_stages_in_a_row_have_the_gradients_of_the_whole(cuts):
    graph, leaves, (_, gradients) = traced("cnn")
    borders = [0, *cuts, len(graph.operators)]
    sections = [graph.section(a, b) for a, b in itertools.pairwise(borders)]
    known = dict(zip(graph.inputs, leaves, strict=True))
    done = []
    with jax.disable_jit():
        for part in sections:
            built = vjp_program.build(part, part.inputs)
            outputs, stash = vjp_program.forward(built, [known[t] for t in part.inputs])
            known.update(zip(part.outputs, outputs, strict=True))
            done.append((built, [known[t] for t in built.parameters], stash))
        cotangents = {graph.outputs[0]: jnp.ones(())}
        for built, parameters, stash in reversed(done):
            source = built.backward_graph.source
            arrived = [cotangents.get(t) for t in source.outputs]
            returned = vjp_program.backward(built, parameters, stash, arrived)
            for t, value in zip(built.backward_graph.wrt, returned, strict=True):
                shared = t in graph.inputs and t in cotangents
                cotangents[t] = cotangents[t] + value if shared else value
    assert_same_bits([cotangents[t] for t in graph.inputs], list(gradients))


def test_the_stash_is_what_was_announced():
    graph, leaves, _ = traced("cnn")
    built = vjp_program.build(graph, graph.inputs)
    _, stash = vjp_program.forward(built, leaves)
    actual = [[(part.shape, part.dtype) for part in parts] for parts in stash]
    assert actual == [[(a.shape, a.dtype) for a in avals] for avals in built.stash_avals]
    assert sum(part.nbytes for parts in stash for part in parts) == built.plan.stash_bytes(built.graph)
    stored = {id(part) for parts in stash for part in parts}
    assert not stored & {id(leaf) for leaf in leaves}


@pytest.mark.slow
def test_two_programs_need_less_than_one_plain_program():
    """Forward and backward compiled apart: what crosses is the stash, and the backward's temporaries stay small."""
    case = replace(LINEN["resnet18"], shape=(16, 16, 16, 3), fields={"width": 32})
    loss, (params, rest, x) = case.losses(lambda cls: cls)
    leaves, treedef = jax.tree.flatten(params)
    graph = trace(lambda *a: [loss(jax.tree.unflatten(treedef, a[:-1]), rest, a[-1])[0]], *leaves, x)
    graph = graph.with_parameters([True] * len(leaves) + [False])
    built = vjp_program.build(graph, graph.inputs[:-1], held=graph.inputs)
    plain = jax.jit(jax.grad(lambda leaves, x: loss(jax.tree.unflatten(treedef, leaves), rest, x)[0]))
    temporaries = plain.lower(leaves, x).compile().memory_analysis().temp_size_in_bytes
    parameters = [leaves[graph.inputs.index(t)] for t in built.parameters]
    backward = jax.jit(lambda p, s: vjp_program.backward(built, p, s, [jnp.ones(())]))
    apart = backward.lower(parameters, list(built.stash_avals)).compile().memory_analysis().temp_size_in_bytes
    assert apart + built.plan.stash_bytes(built.graph) < 0.8 * temporaries


def test_cotangents_of_an_output_returned_twice_add_up():
    graph = trace(lambda x: (lambda y: [y, y])(jnp.sin(x)), jnp.ones(3))
    built = vjp_program.build(graph, graph.inputs)
    x = jnp.arange(3.0)
    _, stash = vjp_program.forward(built, [x])
    (gradient,) = vjp_program.backward(built, [], stash, [jnp.ones(3), 2 * jnp.ones(3)])
    assert np.array_equal(gradient, 3 * jnp.cos(x))
    assert vjp_program.backward(built, [], stash, [None, None]) == [None]


def test_on_a_gpu_stored_products_are_matrices_only_where_no_device_would_gather_them():
    """A sharded stage leaves them their dimensions, one of which may be split."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 2, 16, 16), (2, 2, 8, 16))]
    whole = trace(lambda v, x: [jnp.sin(jnp.matmul(x, v)).sum()], *arguments)
    reshapes = []
    for shape in ({}, {"model": 2}):
        graph = replace(whole.with_parameters([True, False]), stage_shape=shape)
        with building_for("gpu"):
            built = vjp_program.build(graph, graph.inputs, held=graph.inputs)
            _, stash = jax.eval_shape(functools.partial(vjp_program.forward, built), arguments)
            backward = functools.partial(vjp_program.backward, built)
            parameters = [arguments[graph.inputs.index(t)] for t in built.parameters]
            names = equations(jax.make_jaxpr(backward)(parameters, stash, [jnp.ones(())]).jaxpr)
        assert [built.graph.tensors[t].shape for t in built.plan.stored if t not in graph.inputs] == [(2, 2, 8, 16)]
        reshapes.append(names.count("reshape"))
    assert reshapes[0] and not reshapes[1]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_a_mask_is_made_of_what_a_convolution_reads_as_it_was_written(platform):
    """Behind a barrier, so that the ReLU has one reader and XLA leaves it to the convolution before."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 4, 8, 8), (4, 4, 3, 3), (8, 4, 3, 3))]

    def function(x, first, second):
        return jax.lax.conv(jax.nn.relu(jax.lax.conv(x, first, (1, 1), "SAME")), second, (1, 1), "SAME").sum()

    with building_for(platform):
        graph = trace(function, *arguments).with_parameters([False, True, True])
        built = vjp_program.build(graph, graph.inputs[1:], held=graph.inputs)
        (inner,) = (op.outputs[0] for op in built.graph.operators if op.name == "gt")
        plan = ResidualPlan({**built.plan.formats, inner: Mask()})
        built = vjp_program.assemble(built.backward_graph, plan)
        jaxpr = jax.make_jaxpr(functools.partial(vjp_program.forward, built))(arguments).jaxpr
    makers = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    (test,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "gt")
    assert (makers[test.invars[0]] == "optimization_barrier") == (platform == "gpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_gradients_are_absorbed_by_their_sums(platform):
    graph, leaves, (_, gradients) = traced("cnn")
    with jax.disable_jit(), building_for(platform):
        built = vjp_program.build(graph, graph.inputs)
        parameters = [leaves[graph.inputs.index(t)] for t in built.parameters]
        _, stash = vjp_program.forward(built, leaves)
        sums = {t: jnp.full_like(leaf, 0.375) for t, leaf in zip(graph.inputs, leaves, strict=True)}
        absorb = {t: functools.partial(jnp.add, total) for t, total in sums.items()}
        steps, seeds = built.backward_graph.steps, seeds_of(built, [jnp.ones(())])
        whole = vjp_program.run_backward(built, steps, parameters, stash, seeds, absorb=absorb)
        early, late = backward_in_parts(built, parameters, stash, [jnp.ones(())], absorb=absorb)
    expected = [jnp.float32(0.375) + g for g in gradients]
    assert_same_bits([whole[t] for t in graph.inputs], expected)
    parts = early | late
    assert_same_bits([parts[t] for t in graph.inputs], expected)


@pytest.mark.core
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_a_gradient_is_added_to_its_sum_before_the_next_product(platform):
    """The second product's weight is first. All gradients would be in memory if the sums came at the end."""
    x, first, second = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (4, 16), (16, 32)))

    def function(x, first, second):
        return jnp.tanh(jnp.tanh(x @ first) @ second).sum()

    def run(x, first, second, sums):
        outputs, stash = vjp_program.forward(built, [x, first, second])
        absorb = dict(zip(built.backward_graph.wrt, (functools.partial(jnp.add, total) for total in sums), strict=True))
        steps, seeds = built.backward_graph.steps, seeds_of(built, [jnp.ones_like(outputs[0])])
        results = vjp_program.run_backward(built, steps, [first, second], stash, seeds, absorb=absorb)
        return [results[t] for t in built.backward_graph.wrt]

    with building_for(platform):
        graph = trace(function, x, first, second).with_parameters([False, True, True])
        built = vjp_program.build(graph, graph.inputs[1:])
        jaxpr = jax.make_jaxpr(run)(x, first, second, [first, second]).jaxpr
    results = [(eqn.primitive.name, eqn.outvars[0].aval.size) for eqn in jaxpr.eqns]
    added, next_product = results.index(("add", 16 * 32)), results.index(("dot_general", 4 * 16))
    assert (added < next_product) == (platform == "gpu")


@pytest.mark.parametrize("shape", [{}, {"model": 2}])
def test_in_a_sharded_stage_cotangents_are_added_up_before_the_next_barrier(shape):
    """Behind a barrier each of the two would be added up over the devices by itself."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (4, 16), (16, 32), (16, 32))]
    traced = trace(lambda x, w, up, gate: (lambda y: ((y @ up) * (y @ gate)).sum())(jnp.sin(x @ w)), *arguments)
    graph = replace(traced.with_parameters([False, True, True, True]), stage_shape=shape)
    with building_for("gpu"):
        built = vjp_program.build(graph, graph.inputs, held=graph.inputs)
        _, stash = jax.eval_shape(functools.partial(vjp_program.forward, built), arguments)
        parameters = [arguments[graph.inputs.index(t)] for t in built.parameters]
        backward = functools.partial(vjp_program.backward, built)
        jaxpr = jax.make_jaxpr(backward)(parameters, stash, [jnp.ones(())]).jaxpr
    makers = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "add" and eqn.outvars[0].aval.shape == (8, 16)]
    products = [makers[v] == "dot_general" for eqn in sums for v in eqn.invars]
    assert sums and all(products) == bool(shape)


def convolutions(platform, sizes, pixels):
    """Return, by elements of the result of a product in a backward pass, those of the products that it waits for."""
    kernels = [jax.ShapeDtypeStruct((3, 3, m, n), jnp.float32) for m, n in itertools.pairwise(sizes)]
    image = jax.ShapeDtypeStruct((2, pixels, pixels, sizes[0]), jnp.float32)

    def loss(x, *kernels):
        for kernel in kernels:
            x = jax.nn.relu(convolve(x, kernel))
        return [x.sum()]

    with building_for(platform):
        graph = trace(loss, image, *kernels).with_parameters([False, *(True for _ in kernels)])
        built = vjp_program.build(graph, graph.inputs[1:])
        _, stash = jax.eval_shape(functools.partial(vjp_program.forward, built), [image, *kernels])
        backward = functools.partial(vjp_program.backward, built)
        jaxpr = jax.make_jaxpr(backward)(kernels, stash, [jnp.ones(())]).jaxpr
    behind, products = {}, {}
    for eqn in jaxpr.eqns:
        before = set().union(*(behind.get(v, ()) for v in eqn.invars if isinstance(v, Var)))
        if eqn.primitive.name == "conv_general_dilated":
            size = eqn.outvars[0].aval.size
            products[size] = before
            before = before | {size}
        behind.update((v, before) for v in eqn.outvars)
    return products


@pytest.mark.core
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_a_convolution_waits_for_the_gradient_of_its_kernel(platform):
    """Or it would stay in memory with all that the gradient reads."""
    products = convolutions(platform, (3, 8, 10), 16)
    gradient, cotangent = 3 * 3 * 8 * 10, 2 * 16 * 16 * 8
    assert (gradient in products[cotangent]) == (platform == "gpu")


@pytest.mark.core
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_on_a_gpu_gradients_larger_than_what_they_follow_from_come_last(platform):
    """XLA:GPU writes a kernel's gradient in a layout of its own first, beside all else that is in memory then."""
    products = convolutions(platform, (3, 4, 64, 128), 8)
    first, second, third = 3 * 3 * 3 * 4, 3 * 3 * 4 * 64, 3 * 3 * 64 * 128
    assert third * 4 > 4 * (2 * 8 * 8 * 64 + 2 * 8 * 8 * 128) > second * 4
    assert (first in products[third]) == (platform == "gpu")
    assert third not in products[first]
