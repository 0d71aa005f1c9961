"""Plain training with the micro-batches of a pipeline, to compare with: ``jax.grad`` and optax, nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import optax


def microbatch(batch: Any, m: int, j: int) -> Any:
    """Return the rows of micro-batch ``j`` of ``m``."""
    return jax.tree.map(lambda x: x[j * (len(x) // m) : (j + 1) * (len(x) // m)], batch)


def mean_of(trees: list[Any]) -> Any:
    """Return the mean of some trees."""
    return jax.tree.map(lambda *xs: sum(xs) / len(xs), *trees)


def gradient_of_batch(f: Callable[..., Any], params: Any, state: Any, batch: Any, m: int) -> tuple[Any, Any, Any]:
    """Return loss, gradient and state after a batch: ``f(params, state, microbatch, j) -> (loss, new state)``."""
    losses, gradients = [], []
    for j in range(m):
        (loss, state), gradient = jax.jit(jax.value_and_grad(f, has_aux=True), static_argnums=3)(
            params, state, microbatch(batch, m, j), j
        )
        losses.append(loss)
        gradients.append(gradient)
    return mean_of(losses), mean_of(gradients), state


def train(
    f: Callable[..., Any],
    params: Any,
    state: Any,
    optimizer: optax.GradientTransformation,
    batch: Any,
    m: int,
    steps: int,
) -> tuple[list[float], Any, Any]:
    """Return the losses of some steps on one batch, the parameters and the state after them."""
    optimizer_state, losses = optimizer.init(params), []
    for _ in range(steps):
        loss, gradient, state = gradient_of_batch(f, params, state, batch, m)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params, state
