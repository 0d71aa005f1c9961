"""What a training step takes and gives."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, state and optimizer state of all stages; a pytree of global arrays, to be treated as a whole.

    Attributes:
      parameters, variables, optimizer: buffers ``[devices, length]``, one row on each device along the stage axis.
      residual: buffers ``[devices, replicas, length]`` with what each replica has not sent of its gradients; none
        if gradients are exchanged whole.
      shared: optimizer state that every device has (step counts, schedules).
      key: the random key of the run.
      step: steps taken.
      skipped: how many of them changed nothing, as the loss or a gradient was not finite.
      plan: fingerprint of the plan that it belongs to.
    """

    parameters: tuple[Any, ...]
    variables: tuple[Any, ...]
    optimizer: tuple[Any, ...]
    residual: tuple[Any, ...]
    shared: tuple[Any, ...]
    key: Any
    step: Any
    skipped: Any
    plan: str = field(metadata={"static": True})

    @property
    def is_donated(self) -> bool:
        """Whether a step has taken its arrays for the state that it returned."""
        buffers = (self.parameters, self.variables, self.optimizer, self.residual, self.shared)
        leaves = (*(x for group in buffers for x in group), self.key, self.step, self.skipped)
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def take_over(state: TrainState, new: TrainState) -> None:
    """Give a donated state the arrays of the state that its step has made, for a caller who will not get that one."""
    for part in dataclasses.fields(TrainState):
        object.__setattr__(state, part.name, getattr(new, part.name))
