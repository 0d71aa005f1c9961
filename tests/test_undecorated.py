"""Traces of decorated functions within others, beside traces as if nothing were decorated."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe import memory_encoded
from jaxpipe.graph.allowed_codecs import parse
from jaxpipe.step.step_arguments import Call
from jaxpipe.step.step_variants import StepVariants


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
