"""Results of the runtimes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxpipe.array_types import Array, ArrayLike, PyTree
from jaxpipe.runtime.train_state import TrainState


@dataclass(frozen=True, eq=False)
class StepResults:
    """A training step's results."""

    state: TrainState
    loss: Array
    counters: dict[str, Array]  # such as ``gradient_norm``; under a guard ``nonfinite_stages`` and ``stopped``
    metrics: Sequence[Array]  # leaves of the user's


@dataclass(frozen=True)
class Bytes:
    """Bytes on each device, in the order of the mesh: all that is reserved in a step, the temporaries, the host's."""

    reserved: tuple[int, ...]
    temporary: tuple[int, ...]
    host: tuple[int, ...]


#: Loss, metrics, and the mean gradient of each trained parameter on the host; None of others.
Gradients: TypeAlias = tuple[Array, Sequence[Array], Sequence[ArrayLike | None]]

#: State and batch to loss and metrics, or to leaves of a prediction.
ForwardPass: TypeAlias = Callable[[TrainState, PyTree], PyTree]
