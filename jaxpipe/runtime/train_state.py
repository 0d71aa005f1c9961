"""The state and the metrics of a training step."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jax import core

from jaxpipe.array_types import Array, PyTree
from jaxpipe.text.units import bytes_text


#: By attribute of other libraries' training states, what does the same in a pipeline.
_INSTEAD = {
    "params": 'pipeline.parameters(state), for a Linen module pipeline.parameters(state)["params"]',
    "batch_stats": 'pipeline.parameters(state)["batch_stats"]',
    "model": "pipeline.parameters(state), which nnx.update(model, ...) takes",
    "opt_state": "pipeline.optimizer_state(state)",
    "apply_gradients": "pipeline.step(state, batch), which computes gradients and applies them",
    "update": "pipeline.step(state, batch), which computes gradients and applies them",
    "apply_fn": "pipeline.predict(state, batch), or the model with pipeline.parameters(state)",
    "tx": "the optimizer that partition was given",
    "create": "pipeline.init(key)",
    "replace": "pipeline.init(key, variables=..., optimizer_state=...) for a state with other values",
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class TrainState:
    """Parameters, state and optimizer state of all stages; a pytree of global arrays, to be treated as a whole.

    Attributes:
      parameters, variables, optimizer: arrays of the stages; of one program vectors, a part of each on every device.
      residual: the same of what each replica has not sent of its gradients; none if gradients are exchanged whole. In
        an outer loop with a delay, of what its parameters are to be moved by.
      outer: in an outer loop, its parameters and the state of its optimizer; replicas then have parameters, variables
        and optimizer state of their own.
      shared: optimizer state that every device has (step counts, schedules).
      key: the random key of the run.
      step: steps taken.
      skipped: how many of them changed nothing, as the loss or a gradient was not finite.
      plan: fingerprint of the plan that it belongs to.
    """

    parameters: tuple[Array, ...]
    variables: tuple[Array, ...]
    optimizer: tuple[Array, ...]
    residual: tuple[Array, ...]
    shared: tuple[Array, ...]
    key: Array
    step: Array
    skipped: Array
    plan: str = field(metadata={"static": True})
    outer: tuple[Array, ...] = ()

    #: The token of the runtime whose programs take these arrays as they are; None where nothing has checked them.
    fits: ClassVar[object] = None
    #: What became of a state that is neither here nor in a newer one; None while it is.
    lost: ClassVar[str | None] = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Say what stands for an attribute of plain training states, as ``flax.training.train_state`` has them."""
            text = f"{type(self).__name__!r} object of jaxpipe has no attribute {name!r}"
            if name in _INSTEAD:
                text += f": its arrays are spread over stages. Use {_INSTEAD[name]}."
            # With a name and without the object, Python does not offer attributes that are spelled alike.
            raise AttributeError(text, name=name)

    @property
    def is_donated(self) -> bool:
        """Return whether a step has taken its arrays for the state that it returned."""
        leaves = jax.tree.leaves(self)
        return any(isinstance(x, jax.Array) and not isinstance(x, core.Tracer) and x.is_deleted() for x in leaves)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, for ``pickle`` and ``copy``. A state that is read from a file fits no runtime yet."""
        return {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}

    def __repr__(self) -> str:
        kinds = {"parameters": self.parameters, "variables": self.variables, "optimizer": self.optimizer}
        sizes = [f"{name}={_size(buffers)}" for name, buffers in kinds.items() if buffers]
        steps = [f"{name}={_number(getattr(self, name))}" for name in ("step", "skipped")]
        return f"TrainState({', '.join([*steps, *sizes])} on all devices, plan={self.plan!r})"


def take_over(state: TrainState, new: TrainState) -> None:
    """Give a donated state the arrays of the state that its step has made, for a caller who will not get that one."""
    for name in (*(part.name for part in dataclasses.fields(TrainState)), "fits"):
        object.__setattr__(state, name, getattr(new, name))


def made_for(token: object, state: TrainState) -> TrainState:
    """Note that a state has the arrays that a runtime's programs take; returns the state."""
    object.__setattr__(state, "fits", token)
    return state


def _size(buffers: PyTree) -> str:
    """Return the bytes of some buffers as text, or what a tree of something else has in their place."""
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in buffers):
        return repr(buffers)
    return bytes_text(sum(math.prod(x.shape) * x.dtype.itemsize for x in buffers))


def _number(x: object) -> str:
    """Return a number that this process can read as text; else the name of what it is, a tracer or a donated array."""
    if isinstance(x, core.Tracer) or not isinstance(x, jax.Array):
        return repr(x)
    return "donated" if x.is_deleted() else str(int(x))
