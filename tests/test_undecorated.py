"""Traces as if nothing were decorated, and what the traces of decorated functions take from them."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe import memory_encoded
from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.step.step_arguments import Call
from jaxpipe.step.step_variants import StepVariants
from tests.support.compare import assert_same_bits


W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def variants_of(loss):
    return StepVariants(Call(jax.grad(loss), {}, (W, X), {}, jax.devices()[0]))


@pytest.mark.core
@pytest.mark.parametrize("jitted", [False, True], ids=["called", "under jit"])
def test_codecs_of_functions_within_others_count_within_a_budget(jitted):
    inner = memory_encoded(lambda x: jax.nn.relu(x) * 2, codecs={"csr"})
    inner = jax.jit(inner) if jitted else inner
    alone = variants_of(memory_encoded(lambda w, x: jnp.sum(jax.nn.relu(x @ w) * 2)))
    for _ in range(2):  # the second time after a trace without decorations
        variants = variants_of(memory_encoded(lambda w, x: jnp.sum(inner(x @ w))))
        (program,), (same,) = variants.programs.values(), alone.programs.values()
        kinds = {operator.policy for operator in program.graph.operators}
        assert parse({"csr"}) in kinds and len(kinds) == 2
        assert {operator.policy for operator in same.graph.operators} == kinds - {parse({"csr"})}


def test_what_a_plain_step_calls_under_jit_is_not_traced_again():
    traces = []

    @jax.jit
    def double(x):
        traces.append(x)
        return x * 2

    @memory_encoded
    def loss(w, x):
        return jnp.sum(double(jnp.tanh(x @ w)))

    variants = variants_of(loss)
    assert len(traces) == 1  # of the plain step
    assert len(variants.programs) == 1 and len(traces) == 1
    gradient = jax.jit(jax.grad(loss))(W, X)  # elsewhere, it is
    assert len(traces) == 2
    assert_same_bits(gradient, jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) * 2)))(W, X))
