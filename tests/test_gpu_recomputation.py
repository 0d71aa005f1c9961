"""Values that a GPU's backward pass computes again: anew for each product, so that none waits for a later reader."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.graph.graph import trace
from jaxpipe.residuals.choose_formats import sums_of_branches
from jaxpipe.targets.building import building_for
from tests.support.compare import assert_same_bits


class NormalizedConvs(nn.Module):
    """Three convolutions, each with group normalization and gelu."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.gelu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3))(x)))
        return nn.Dense(2)(x.mean((1, 2)))


def loss_of(model, variables, x):
    return jnp.square(model.apply(variables, x)).sum()


def encoded(what):
    """The loss, of which the model or the whole is decorated; jaxpipe differentiates one by ``variables`` alone."""
    if what == "model":
        return functools.partial(loss_of, jaxpipe.memory_encoded(NormalizedConvs)())
    return jaxpipe.memory_encoded(functools.partial(loss_of, NormalizedConvs()))


def example():
    x = jax.random.normal(jax.random.key(0), (2, 8, 8, 3))
    return NormalizedConvs().init(jax.random.key(1), x), x


def read_across_convolutions(jaxpr):
    """The results of ``tanh`` that are read both before and after a convolution, straight from a program's text."""
    readers = {}
    convolutions = [k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "conv_general_dilated"]
    for k, equation in enumerate(jaxpr.eqns):
        for atom in equation.invars:
            if not hasattr(atom, "val"):
                readers.setdefault(atom, []).append(k)
    tanhs = [e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "tanh"]
    assert len(tanhs) > 3  # some run again
    between = [(t, k) for t in tanhs for k in convolutions if min(readers[t]) < k < max(readers[t])]
    return {t for t, _ in between}


@pytest.mark.core
@pytest.mark.parametrize("what", ["model", "loss"])
def test_no_value_of_an_activation_waits_for_a_convolution(what):
    """The gradient of a kernel and the derivative of the activation before it share no value that is computed again."""
    variables, x = example()
    with building_for("gpu"):
        program = jax.make_jaxpr(jax.grad(encoded(what)))(variables, x)
    assert read_across_convolutions(program.jaxpr) == set()


@pytest.mark.parametrize("what", ["model", "loss"])
def test_gradients_are_those_of_jax(what):
    """Operator by operator, on a CPU: the order for GPUs changes no bit."""
    variables, x = example()
    with building_for("gpu"):
        program = jax.make_jaxpr(jax.grad(encoded(what)))(variables, x)
    gradients = jax.core.eval_jaxpr(program.jaxpr, program.consts, *jax.tree.leaves((variables, x)))
    plain = jax.make_jaxpr(jax.grad(functools.partial(loss_of, NormalizedConvs())))(variables, x)
    expected = jax.core.eval_jaxpr(plain.jaxpr, plain.consts, *jax.tree.leaves((variables, x)))
    assert_same_bits(gradients, expected)


def test_a_bias_is_no_branch():
    def loss(x, w, bias):
        h = x @ w + bias  # read twice, and never a residual connection
        y = jnp.sin(h) * h
        z = y + x @ w
        return [(jnp.sin(z) * z).sum()]

    shapes = (4, 4), (4, 4), (4,)
    graph = trace(loss, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    biased, branches, *_ = (op.outputs[0] for op in graph.operators if op.name == "add")
    assert biased not in sums_of_branches(graph, ())
    assert branches in sums_of_branches(graph, ())
