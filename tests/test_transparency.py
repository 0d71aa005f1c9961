"""A model has the bits of plain ``jax.grad``, decorated and as a pipeline, in either runtime."""

import dataclasses

import jax
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import arrays, assert_same_bits
from tests.support.pipeline_models import (
    Convolutions,
    classifier,
    images,
    linen,
    mlp,
    nnx_case,
    pipeline_of,
    plain_gradients,
)


pytestmark = pytest.mark.optimized


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second, self.head = (nnx.Linear(12, width, rngs=rngs) for width in (12, 12, 10))

    def __call__(self, x):
        x = x + nnx.relu(self.first(x))
        return self.head(x + nnx.relu(self.second(x)))


CASES = {
    "function": mlp(16),
    "Linen": linen(Convolutions(), images(8, 8, 1, rows=16), classifier()),
    "NNX": nnx_case(Residual, images(12, rows=16)),
}


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_decorated_and_pipelined_models_have_the_bits_of_plain_jax_grad(name, key):
    case = CASES[name]
    params, variables = case.start(key)
    loss, gradient, _ = plain_gradients(case, params, variables, jax.random.split(key, 4), 1, 4)
    # A product with a power of two is exact, whatever sum a compiler contracts it with.
    after = jax.tree.map(lambda p, g: p - 2**-4 * g, params, gradient)

    decorated = dataclasses.replace(case, plain=jaxpipe.memory_encoded(case.plain))
    encoded = plain_gradients(decorated, params, variables, jax.random.split(key, 4), 1, 4)
    assert_same_bits(encoded[:2], (loss, gradient))

    for runtime in ("mpmd", "spmd"):
        pipeline = pipeline_of(case, 2, 4, runtime=runtime, optimizer=optax.sgd(2**-4))
        state = pipeline.init(key)
        (value, _), gradients = pipeline.value_and_grad(state, case.batch)
        assert_same_bits([value, *arrays(gradients)], [loss, *arrays(gradient)])
        state, metrics = pipeline.step(state, case.batch)
        assert_same_bits([metrics["loss"], *arrays(pipeline.parameters(state))], [loss, *arrays(after)])
