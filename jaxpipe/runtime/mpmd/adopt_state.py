"""Training states of other pipelines of the same model and optimizer."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import ModelError
from jaxpipe.runtime import check_state
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.mpmd.instructions import Key
from jaxpipe.runtime.mpmd.stage_state import StateLayout
from jaxpipe.runtime.train_state import TrainState


def adopt(planned: ExecutablePlan, where: StateLayout, state: TrainState) -> TrainState:
    """Copy a state of another pipeline to the devices of this one, whatever its cuts, devices and batches.

    With another number of replicas, each gets the mean of the residuals of a block-sparse exchange.

    Raises:
      ModelError: if the state is of another model or optimizer, or of ``runtime="spmd"``.
    """
    check_state.check_unused(state)
    model, by_stage = planned.model, planned.update.by_stage
    _check("parameters", state.parameters, [v.aval for v in model.parameters])
    _check("variables", state.variables, [v.aval for v in model.state])
    _check("optimizer", state.optimizer, [by_stage.state_avals[k] for k in where.owned])
    _check("optimizer (shared)", state.shared, [by_stage.state_avals[k] for k in where.shared])

    def placed(arrays: Sequence[Any], keys: Iterable[Key]) -> tuple[Any, ...]:
        pairs = zip(arrays, keys, strict=True)
        return tuple(jax.device_put(x.copy(), where.sharding(key)) for x, key in pairs)

    everywhere = where.everywhere
    common = state.shared, state.key, state.step, state.skipped
    shared, key, step, skipped = jax.tree.map(lambda x: jax.device_put(x.copy(), everywhere), common)
    return replace(
        state,
        parameters=placed(state.parameters, map(where.parameter, range(len(state.parameters)))),
        variables=placed(state.variables, map(where.variable, range(len(state.variables)))),
        optimizer=placed(state.optimizer, map(where.optimizer, where.owned)),
        residual=_residuals(planned, where, state),
        shared=shared,
        key=key,
        step=step,
        skipped=skipped,
        plan=planned.plan.identity,
    )


def _residuals(planned: ExecutablePlan, where: StateLayout, state: TrainState) -> tuple[Any, ...]:
    count, avals = where.layout.devices.replicas, [v.aval for v in planned.model.parameters]
    if not where.residuals:
        return ()
    given = [np.asarray(x) for x in state.residual]
    if not given:
        given = [np.zeros((1, *avals[k].shape), np.promote_types(avals[k].dtype, np.float32)) for k in where.residuals]
    spread = [x if len(x) == count else np.broadcast_to(x.mean(0, dtype=x.dtype), (count, *x.shape[1:])) for x in given]
    keys = map(where.residual, where.residuals)
    return tuple(jax.device_put(x, where.sharding(key)) for x, key in zip(spread, keys, strict=True))


def _check(name: str, given: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raise ``ModelError`` unless arrays have the shapes and dtypes that are expected."""
    have, wanted = ([(tuple(x.shape), x.dtype) for x in arrays] for arrays in (given, expected))
    if have != wanted:
        pair = next(((a, b) for a, b in zip(have, wanted, strict=False) if a != b), (len(have), len(wanted)))
        raise ModelError(
            f"adopt: the state's {name} are {pair[0]} where this pipeline has {pair[1]}. A state moves between "
            'pipelines of one model and one optimizer with runtime="mpmd"; for others, pass the state\'s variables to '
            "init(key, variables=other.parameters(state)), or save and restore it."
        )
