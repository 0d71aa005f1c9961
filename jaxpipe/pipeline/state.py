"""What a training step takes and gives."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import core

from jaxpipe.units import bytes_text


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        kinds = {"parameters": self.parameters, "variables": self.variables, "optimizer": self.optimizer}
        sizes = [f"{name}={_size(buffers)}" for name, buffers in kinds.items() if buffers]
        steps = [f"{name}={_number(getattr(self, name))}" for name in ("step", "skipped")]
        return f"TrainState({', '.join([*steps, *sizes])} on all devices, plan={self.plan!r})"


def _size(buffers: Any) -> str:
    """Bytes of some buffers, or what stands in their place in a tree of something else."""
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in buffers):
        return repr(buffers)
    return bytes_text(sum(math.prod(x.shape) * x.dtype.itemsize for x in buffers))


def _number(x: Any) -> str:
    """A number that is at hand on this process; else its type, as of a tracer or of a donated array."""
    if isinstance(x, core.Tracer) or not isinstance(x, jax.Array):
        return repr(x)
    return "donated" if x.is_deleted() else str(int(x))
