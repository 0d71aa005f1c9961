"""The optimizer state of plain training: one of optax, or in a flax ``TrainState`` or an ``nnx.Optimizer``."""

import numpy as np
from flax import nnx

from jaxpipe.array_types import ArrayLike, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.variable_trees import Argument, by_path, common_level, is_train_state, select


OPTIMIZER_STATE = Argument(
    "optimizer_state", "optimizer", "arrays", "Pipeline.optimizer_state and optimizer.init(parameters)"
)


def holds_optimizer(given: PyTree) -> bool:
    """Return whether something has an optimizer state beside its steps: a ``TrainState``, an NNX optimizer."""
    return isinstance(given, nnx.Optimizer) or is_train_state(given)


def steps_taken(*given: PyTree) -> int:
    """Return how many steps the first that counts them has taken; 0 if only optax does."""
    holder = next(filter(holds_optimizer, given), None)
    step = getattr(holder, "step", 0)
    steps = np.asarray(step.get_value() if isinstance(step, nnx.Variable) else step)
    if steps.ndim or not np.issubdtype(steps.dtype, np.integer) or not 0 <= steps < 2**31:
        raise ModelError(
            f"The {type(holder).__name__} has step={step!r}; it must be the number of steps taken. Pass a replicated "
            "state as flax.jax_utils.unreplicate(train_state)."
        )
    return int(steps)


def optimizer_leaves(given: PyTree, state_shape: PyTree, model: BoundModel) -> list[ArrayLike]:
    """Return the leaves of an optimizer state in the order of optax, from any tree with their paths.

    Args:
      given: a state of optax, its containers or dictionaries in their place, or what holds one.
      state_shape: what ``optimizer.init`` makes of the tree of the model's parameters.

    Raises:
      ModelError: if a leaf is missing, unexpected, or of another shape or dtype; it lists their paths.
    """
    expected = by_path(state_shape)
    arrays = by_path(given.opt_state if holds_optimizer(given) else given)
    for path, aval in expected.items():  # a learning rate that was set to a number
        if isinstance(arrays.get(path), bool | int | float) and not aval.shape:
            arrays[path] = np.asarray(arrays[path], aval.dtype)
    # Plain training may have the parameters with or without the outermost level that the model has them in.
    parameters = by_path(model.parameter_tree([v.aval for v in model.parameters]))
    return select(arrays, expected, [("params",), common_level(parameters)], argument=OPTIMIZER_STATE)
