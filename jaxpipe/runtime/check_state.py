"""Checks of a training state, before a step takes it."""

import dataclasses
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import ModelError
from jaxpipe.models.check_batch import shape_of
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.schedules.table import StageNumber


#: The call that takes the state of another pipeline, whatever its runtime and devices.
GO_ON = "init(key, variables=other.parameters(state), optimizer_state=other.optimizer_state(state))"

#: What to do instead of changing a state's arrays.
_AS_A_WHOLE = (
    "A state may be copied, pickled and moved as a whole. To change values in it, pass them to init(key, "
    "variables=pipeline.parameters(state), optimizer_state=pipeline.optimizer_state(state))."
)


def fitted(state: TrainState, expected: TrainState, names: Mapping[str, Sequence[str]]) -> TrainState:
    """Return a state with the arrays that programs were compiled for; what is elsewhere, or on the host, is copied.

    Compiled programs read their operands as they lie, and name no leaf in what they raise.

    Args:
      state: of the plan, not made by its pipeline: read from a file, moved, changed.
      expected: shapes, with their shardings.
      names: by field, names of its arrays, where they have any.

    Raises:
      ModelError: if a part has another structure, or an array another shape or dtype.
    """
    residuals, expected_residuals = ([np.shape(x) for x in s.residual] for s in (state, expected))
    if residuals != expected_residuals:
        raise ModelError(
            f"The state has residuals of a gradient exchange of shapes {residuals}, this pipeline expects "
            f"{expected_residuals}: the exchange, or the number of replicas, is another. Go on with {GO_ON}."
        )
    for field in (field.name for field in dataclasses.fields(TrainState) if field.name != "plan"):
        given, wanted = getattr(state, field), getattr(expected, field)
        if jax.tree.structure(given) != jax.tree.structure(wanted):
            raise ModelError(f"state.{field} is {_described(given)}; this plan has {_described(wanted)}. {_AS_A_WHOLE}")
    rows, tree = jax.tree_util.tree_flatten_with_path(expected)
    before = tree.flatten_up_to(state)
    after = [_fitted_array(_label(path, names), x, aval) for (path, aval), x in zip(rows, before, strict=True)]
    return state if all(map(operator.is_, before, after)) else tree.unflatten(after)


def _label(path: Sequence[Any], names: Mapping[str, Sequence[str]]) -> str:
    """Return the place of an array in a state, and its name if it has one."""
    field, *numbers = path
    named = [names[field.name][number.idx] for number in numbers if field.name in names]
    return "".join([f"state{jax.tree_util.keystr(tuple(path))}", *(f" ({name})" for name in named)])


def _fitted_array(label: str, x: object, expected: jax.ShapeDtypeStruct) -> Array:
    """Return an array on the devices that programs expect it on."""
    if isinstance(x, bool | int | float):
        x = np.asarray(x)
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise ModelError(f"{label} is of type {type(x).__name__}; it must be an array. {_AS_A_WHOLE}")
    aval = shape_of(x)
    if (aval.shape, aval.dtype) != (expected.shape, expected.dtype):
        raise ModelError(
            f"{label} has shape {aval.shape} and dtype {aval.dtype}; this plan has shape {expected.shape} and dtype "
            f"{expected.dtype} there. {_AS_A_WHOLE}"
        )
    sharding = expected.sharding
    assert isinstance(sharding, NamedSharding)
    if not isinstance(x, jax.Array):
        return multihost.place(np.asarray(x, expected.dtype), sharding)
    if x.sharding.is_equivalent_to(sharding, x.ndim) and _compat.in_default_layout(x) is x:
        return x
    if not x.is_fully_addressable:
        raise ModelError(
            f"{label} lies on devices of several processes in another way than this plan has it. Save the state with "
            "the pipeline that made it, and restore it with this one."
        )
    return multihost.place(_compat.in_default_layout(x.copy()), sharding)  # a copy: a step donates it


def _described(part: PyTree) -> str:
    if isinstance(part, tuple) and jax.tree_util.all_leaves(part):
        return f"a tuple of {len(part)} arrays"
    return f"of type {type(part).__name__}"


def check_state(state: object, expected: str | None = None) -> None:
    """Raise ``ModelError`` if something is no state, or one of another than the expected plan, or one that was used."""
    if not isinstance(state, TrainState):
        raise ModelError(
            f"state is of type {type(state).__name__}; it must be the TrainState that init, step or restore returned. "
            "The state comes first, then the batch: pipeline.step(state, batch)."
        )
    if expected not in (None, state.plan):
        raise ModelError(
            f"The state belongs to the plan {state.plan}, this pipeline has the plan {expected}: variables are placed "
            f"differently. Use the pipeline that made the state, or go on with {GO_ON}."
        )
    if not state.is_donated:
        return
    if state.lost is not None:
        raise ModelError(state.lost)
    raise ModelError(
        "This state was passed to pipeline.step before, which used its memory for the state that it returned. Go on "
        "with that one: state, metrics = pipeline.step(state, batch). To go on from one state twice, save it with "
        "pipeline.save and restore it for each."
    )


def lose(
    state: TrainState,
    error: BaseException,
    stages: Sequence[StageNumber],
    saved: tuple[str | os.PathLike[str], int] | None,
) -> None:
    """Note in a state, and in the error that ended its step, that the step had begun to write over it.

    Args:
      stages: of each parameter, where stages are updated one by one.
      saved: the folder and the step of a checkpoint.
    """
    kind, reason = type(error).__name__, str(error).strip().partition("\n")[0][:300]
    pairs = zip(stages, state.parameters, strict=False)
    taken = sorted({s for s, x in pairs if isinstance(x, jax.Array) and x.is_deleted()})
    where = f" of stage{'s' if len(taken) > 1 else ''} {', '.join(map(str, taken))}" if taken else ""
    restore = "Go on from a checkpoint; a Checkpointer saves one now and then"
    if saved is not None:
        restore = f"Go on from the checkpoint of step {saved[1]}: pipeline.restore({os.fspath(saved[0])!r})"
    text = (
        f"This state is lost: its step ended with {kind}{': ' * bool(reason)}{reason}, when the update{where} had "
        f"begun to write the new state over it. {restore}."
    )
    object.__setattr__(state, "lost", text)
    error.add_note(text)
