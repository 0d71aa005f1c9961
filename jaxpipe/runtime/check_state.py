"""Checks of a training state, before a step takes it."""

from collections.abc import Sequence

from jaxpipe.errors import ModelError
from jaxpipe.runtime.train_state import TrainState


#: The call that takes the state of another pipeline, whatever its runtime and devices.
GO_ON = "init(key, variables=other.parameters(state), optimizer_state=other.optimizer_state(state))"


def check_residual(given: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> None:
    """Raise ``ModelError`` if a state has residuals of another gradient exchange."""
    if list(given) != list(expected):
        raise ModelError(
            f"The state has residuals of a gradient exchange of shapes {list(given)}, this pipeline expects "
            f"{list(expected)}: the exchange, or the number of replicas, is another. Go on with {GO_ON}."
        )


def _training_state(state: object) -> TrainState:
    """Return a state; raise ``ModelError`` if something is none."""
    if not isinstance(state, TrainState):
        raise ModelError(
            f"state is of type {type(state).__name__}; it must be the TrainState that init, step or restore returned. "
            "The state comes first, then the batch: pipeline.step(state, batch)."
        )
    return state


def check_state(state: object, expected: str) -> None:
    """Raise ``ModelError`` if something is no state, or one of another plan or one that was used."""
    state = _training_state(state)
    if state.plan != expected:
        raise ModelError(
            f"The state belongs to the plan {state.plan}, this pipeline has the plan {expected}: variables are placed "
            f"differently. Use the pipeline that made the state, or go on with {GO_ON}."
        )
    check_unused(state)


def check_unused(state: object) -> None:
    """Raise ``ModelError`` if something is no state, or a step has donated it."""
    if _training_state(state).is_donated:
        raise ModelError(
            "This state was passed to pipeline.step before, which used its memory for the state that it returned. Go "
            "on with that one: state, metrics = pipeline.step(state, batch). To go on from one state twice, save it "
            "with pipeline.save and restore it for each."
        )
