"""The state of a training step, and its arrays in parts that do not depend on the runtime that holds them."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jaxpipe.array_types import Array, ArrayLike, PyTree, Shaped
from jaxpipe.errors import PartitionError
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


@dataclass(frozen=True, eq=False)
class StageArrays:
    """Arrays of one stage, on the host or on the stage's first device; or of all stages, shared optimizer state too.

    Attributes:
      residuals: ``[replicas, ...]`` by parameter; empty if nothing is left to send.
      outer: in an outer loop by parameter the outer one, and the state of its optimizer; empty: the first.
      replicas: in an outer loop what each replica has of its own; empty: the same as the others.
    """

    parameters: Sequence[ArrayLike]
    variables: Sequence[ArrayLike]
    optimizer: Sequence[ArrayLike]
    residuals: Sequence[ArrayLike] = ()
    outer: Sequence[Sequence[ArrayLike]] = ()
    replicas: Sequence["StageArrays"] = ()


def mean_of_replicas(rows: Sequence[ArrayLike]) -> ArrayLike:
    """Return the mean of what each replica has; counts and random keys are the same on all of them."""
    return np.mean(rows, 0, rows[0].dtype) if jnp.issubdtype(rows[0].dtype, jnp.inexact) else rows[0]


def of_replicas(residual: np.ndarray, count: int) -> np.ndarray:
    """Return residuals of so many replicas, whose mean is that of the given ones."""
    if len(residual) == count:
        return residual
    return np.broadcast_to(residual.mean(axis=0, dtype=residual.dtype), (count, *residual.shape[1:]))


def off_mesh(x: Array) -> Array:
    """Return a value that all devices hold as an array of no mesh, which goes with arrays on any device.

    A traced value, and one on the host, is returned as it is.
    """
    if isinstance(x, core.Tracer) or not isinstance(x, jax.Array):
        return x
    with jax.ensure_compile_time_eval():  # under jit too, where the state is a constant
        local = x.addressable_data(0)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(local))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(local))


def check_key(key: Array, traced: Shaped) -> None:
    """Raise ``PartitionError`` unless a run's key is of the implementation that steps are traced for."""
    given, planned = (str(jax.random.key_impl(jnp.empty((), x.dtype))) for x in (key, traced))
    if given != planned:
        raise PartitionError(
            f"The random key is of the implementation {given!r}; the steps of this pipeline are traced for {planned!r},"
            f" JAX's default where partition was called. Use such a key, jax.random.key(0, impl={planned!r}), or change"
            f" the default before partition: jax.config.update('jax_default_prng_impl', {given!r})."
        )


def microbatch_key(state: TrainState, j: int | Array) -> Array:
    """Return the random key of a micro-batch, counted over the replicas, of no mesh."""
    return jax.random.fold_in(jax.random.fold_in(off_mesh(state.key), off_mesh(state.step)), j)


def on_host(x: Array) -> ArrayLike:
    """Copy an array to the host, of several processes one that each has whole; a random key to the default device.

    A step donates its state, and must not take what a caller has got of it.
    """
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return off_mesh(x)
    return np.array(x if x.is_fully_addressable else x.addressable_data(0))
