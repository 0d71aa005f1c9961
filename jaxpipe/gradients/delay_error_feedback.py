"""Error feedback for updates that come from late gradients."""

import optax


def delay_error_feedback(scale: float = 1.0) -> optax.GradientTransformation:
    """Add to each update what the one before it lacked, because its gradient was one step late.

    With double buffers (``schedule="double_buffered"``) an update comes from the gradient at the weights before the
    last ones: ``w[t+1] = w[t] + u[t]`` with ``u[t]`` of the gradient at ``w[t-1]``. What should have been added is
    known one step later: ``u[t+1]``, of the gradient at ``w[t]``. The difference is then made good::

        w[t+1] = w[t] + u[t] + scale * (u[t] - u[t-1])

    It is the last of a chain, behind any optimizer with all that belongs to it (momentum, learning rate, weight
    decay). The same updates on gradients that are not late are those of optimistic gradient descent, for which optax
    has the transformation, ``optax.scale_by_optimistic_gradient``.

    Args:
      scale: of what is made good: 1.0 for all of it, 0.0 for nothing.

    Returns:
      A transformation that keeps the last update, as large as the parameters and in their types. The first update is
      left as it is.

    The method: P. Zmushko et al., "One-step gradient delay is not a barrier for large-scale asynchronous pipeline
    parallel LLM pretraining", ICML 2026, arXiv 2606.30634; the formula is derived here from what it says of it, an
    error feedback of updates that stores one of them.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = optax.chain(optax.sgd(1.0), delay_error_feedback())
      >>> state = optimizer.init(jnp.zeros(1))
      >>> for gradient in (1.0, 3.0, 4.0):
      ...     update, state = optimizer.update(jnp.array([gradient]), state)
      ...     print(update)
      [-1.]
      [-5.]
      [-5.]
    """
    return optax.scale_by_optimistic_gradient(1.0, scale)
