"""A training step of GPT-2 small, to be explained: 8 sequences of 512 tokens, AdamW.

    python -m jaxpipe explain scripts.explained_step:train_step --device H100

Needs ``pip install '.[cuda]'``; no GPU. For a TPU ``--device v5e``, and ``'.[tpu]'``.
"""

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from examples.models import GPT2
from jaxpipe.array_types import PyTree


@jax.jit
def train_step(state: TrainState, tokens: jax.Array, key: jax.Array) -> tuple[TrainState, jax.Array]:
    """One update."""

    def loss(params: PyTree) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens, train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def example_args() -> tuple[TrainState, jax.Array, jax.Array]:
    """Return the arguments of the step."""
    model, tokens, key = GPT2(), jnp.zeros((8, 512), jnp.int32), jax.random.key(0)
    params = model.init(key, tokens, train=False)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3)), tokens, key
