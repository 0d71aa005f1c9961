"""Interface of a runtime: a plan as programs on devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.executable_plan import Batching, ExecutablePlan
from jaxpipe.runtime.state_arrays import CommonArrays, HostArrays, StageArrays
from jaxpipe.runtime.train_state import TrainState


@dataclass(frozen=True, eq=False)
class StepResults:
    """A training step's results.

    Attributes:
      state: after the step.
      loss: of the batch.
      counters: the gradient's norm, overflows; ``sent_share`` and ``residual_norm`` of a block-sparse exchange; if
        a step may be stopped, ``nonfinite_stages`` and ``stopped``.
      metrics: leaves of the user's metrics.
    """

    state: TrainState
    loss: Any
    counters: dict[str, Any]
    metrics: Sequence[Any]


@dataclass(frozen=True)
class Bytes:
    """Bytes on each device, in the order of the mesh: all that is reserved in a step, the temporaries, the host's."""

    reserved: tuple[int, ...]
    temporary: tuple[int, ...]
    host: tuple[int, ...]


class Runtime(Protocol):
    """A plan as programs on devices. A place is what holds variables together: a stage, or a device with several."""

    planned: ExecutablePlan

    @property
    def places(self) -> range:
        """Numbers of the places."""
        ...

    def devices_of(self, place: int) -> list[Any]:
        """Return the devices of a place, one for each replica."""
        ...

    def stage_part(self, place: int, arrays: StageArrays) -> Any:
        """Put a place's arrays onto its devices."""
        ...

    def assemble(self, parts: Mapping[int, Any], common: CommonArrays) -> TrainState:
        """Return the state of the parts of this process's places."""
        ...

    def check_batch(self, shapes: Any) -> None:
        """Raise ``BatchError`` if a step cannot take a batch of some shapes, those of all processes together."""
        ...

    def prepare(self, shapes: Any) -> None:
        """Compile the training step for batches of some shapes."""
        ...

    def step(self, state: TrainState, batch: Any, shapes: Any) -> StepResults:
        """Run a training step; donates the state."""
        ...

    def gradients(self, state: TrainState, batch: Any, shapes: Any) -> tuple[Any, Sequence[Any], list[Any]]:
        """Return loss, metrics and the mean gradient of each trained parameter, None of others."""
        ...

    def forward(
        self, name: str, objective: MicrobatchProgram, shapes: Any, batching: Batching
    ) -> Callable[[Any, Any], Any]:
        """Compile a function of state and batch: loss and metrics of ``"evaluate"``, leaves of ``"predict"``."""
        ...

    def to_host(self, state: TrainState, keep: bool = True) -> HostArrays:
        """Copy a state to the host of every process that keeps it; all processes call it."""
        ...

    def adopt(self, state: TrainState) -> TrainState:
        """Copy a state of another pipeline of the same model and optimizer to the devices of this one."""
        ...

    def check_state(self, state: TrainState) -> None:
        """Raise ``ModelError`` if a state does not fit."""
        ...

    def bytes(self) -> Bytes:
        """Compile the training step, and return its bytes."""
        ...
