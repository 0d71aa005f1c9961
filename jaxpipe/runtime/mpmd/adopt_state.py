"""Training states of other pipelines of the same model and optimizer."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxpipe.array_types import Array, ArrayLike, Shaped
from jaxpipe.errors import ModelError
from jaxpipe.runtime import check_state
from jaxpipe.runtime.mpmd.stage_state import StateLayout
from jaxpipe.runtime.state_arrays import of_replicas
from jaxpipe.runtime.train_state import TrainState


def adopt(where: StateLayout, state: TrainState) -> TrainState:
    """Copy a state of another pipeline to the devices of this one, whatever its cuts, devices and batches.

    Layers of a scan that it has in other groups are grouped again, on the host.

    With another number of replicas, each gets the mean of the residuals of a block-sparse exchange.
    """
    check_state.check_unused(state)
    fields = "parameters", "variables", "optimizer"
    given = {field: _grouped(where, field, getattr(state, field)) for field in fields}
    for field in fields:
        _check(field, given[field], [x.aval for x in where.arrays[field]])
    _check("optimizer (shared)", state.shared, [where.by_stage.state_avals[k] for k in where.shared])

    def placed(field: str, arrays: Sequence[ArrayLike]) -> tuple[Array, ...]:
        pairs = zip(arrays, where.arrays[field], strict=True)
        return tuple(jax.device_put(x.copy(), held.aval.sharding) for x, held in pairs)

    common = {name: getattr(state, name) for name in ("shared", "key", "step", "skipped")}
    groups = {field: placed(field, given[field]) for field in fields}
    groups |= jax.tree.map(lambda x: jax.device_put(x.copy(), where.everywhere), common)
    return replace(
        state, **groups, residual=placed("residual", _residuals(where, state)), plan=where.planned.plan.identity
    )


def _grouped(where: StateLayout, field: str, arrays: Sequence[ArrayLike]) -> list[ArrayLike]:
    """Return arrays of a state with the layers of each stacked one in the groups that this pipeline has."""
    by_stage, (parameters, variables) = where.by_stage, where.planned.model.stacks
    owned = [
        k for k, stage in zip(by_stage.state_stacks.leaf_of, by_stage.state_stage, strict=True) if stage is not None
    ]
    leaf_of = {"parameters": parameters.leaf_of, "variables": variables.leaf_of, "optimizer": owned}[field]
    given, grouped = list(arrays), []
    for _, pairs in itertools.groupby(zip(leaf_of, where.arrays[field], strict=True), key=operator.itemgetter(0)):
        wanted = [held.aval.shape for _, held in pairs]
        rows, taken = sum(shape[0] for shape in wanted if shape), given[:1]
        while sum(x.shape[0] for x in taken if x.shape) < rows and len(taken) < len(given):
            taken.append(given[len(taken)])
        del given[: len(taken)]
        shapes = {tuple(x.shape[1:]) for x in taken}
        if (
            [tuple(x.shape) for x in taken] != wanted
            and shapes == {tuple(wanted[0][1:])}
            and sum(x.shape[0] for x in taken) == rows
        ):
            bounds = list(itertools.accumulate(shape[0] for shape in wanted))[:-1]
            taken = np.split(np.concatenate([np.asarray(x) for x in taken]), bounds)
        grouped += taken
    return [*grouped, *given]


def _residuals(where: StateLayout, state: TrainState) -> list[np.ndarray]:
    avals = [x.aval for x in where.arrays["residual"]]
    if not state.residual:
        return [np.zeros(aval.shape, aval.dtype) for aval in avals]
    pairs = zip(state.residual[: len(avals)], avals, strict=True)
    return [of_replicas(np.asarray(x), aval.shape[0]) for x, aval in pairs]


def _check(name: str, given: Sequence[Shaped], expected: Sequence[Shaped]) -> None:
    """Raise ``ModelError`` unless arrays have the shapes and dtypes that are expected."""
    have, wanted = ([(tuple(x.shape), x.dtype) for x in arrays] for arrays in (given, expected))
    if have != wanted:
        pair = next(((a, b) for a, b in zip(have, wanted, strict=False) if a != b), (len(have), len(wanted)))
        raise ModelError(
            f"adopt: the state's {name} are {pair[0]} where this pipeline has {pair[1]}. A state moves between "
            'pipelines of one model and one optimizer with runtime="mpmd"; for others, pass the state\'s variables to '
            "init(key, variables=other.parameters(state)), or save and restore it."
        )
