"""A pipeline's training state in the model's own layout, and back into stages.

What is saved knows nothing of stages, so it can be restored into any number of them, onto any mesh. Devices get the
rows of their own stage, and a host reads one stage at a time. Of several processes the first one writes.
"""

import json
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import multihost
from jaxpipe.checkpoint.arrays_by_path import Path, leaf_paths
from jaxpipe.checkpoint.contents import OPTIMIZER, RESIDUALS, VARIABLES, Contents, differences, expected, is_key
from jaxpipe.checkpoint.orbax_files import Saved, read
from jaxpipe.errors import CheckpointError
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.interface import Runtime
from jaxpipe.runtime.state_arrays import CommonArrays, StageArrays
from jaxpipe.runtime.train_state import TrainState


@dataclass(frozen=True)
class _Names:
    """Paths of parameters, state variables and optimizer state, by leaf as the model and optax have them."""

    parameters: tuple[Path, ...]
    state: tuple[Path, ...]
    optimizer: tuple[Path, ...]


@dataclass(frozen=True)
class _Part:
    """The part of an array of a checkpoint that a stage reads: all of it, or some rows."""

    group: str
    path: Path
    rows: slice | None

    def of(self, leaves: dict[Path, np.ndarray]) -> np.ndarray:
        return leaves[self.path] if self.rows is None else leaves[self.path][self.rows]


def _names(planned: ExecutablePlan) -> _Names:
    model = planned.model.original
    count, total = len(model.parameters), len(model.parameters) + len(model.state)
    numbered = model.variable_tree(list(range(count)), list(range(count, total)))
    path_of = dict(zip(jax.tree.leaves(numbered), leaf_paths(jax.tree.structure(numbered)), strict=True))
    return _Names(
        tuple(path_of[k] for k in range(count)),
        tuple(path_of[k] for k in range(count, total)),
        tuple(leaf_paths(jax.tree.structure(planned.update.by_stage.state_shape))),
    )


def take(runtime: Runtime, state: TrainState, data: Any = None) -> Contents | None:
    """A copy of a training state on the host of the first process, in the model's own layout.

    Copies, as a step donates the state, and its memory is used again while a checkpoint is written.

    Returns:
      None in the other processes, which send what their stages hold.

    Raises:
      CheckpointError: if ``data`` is not JSON.
    """
    data = multihost.from_first(lambda: _as_json(data))
    planned = runtime.planned
    names, arrays = _names(planned), runtime.to_host(state, multihost.is_first())
    if not multihost.is_first():
        return None
    of_parameters, of_state = planned.model.stacks
    parameters, variables = of_parameters.join(arrays.parameters), of_state.join(arrays.variables)
    optimizer = planned.update.by_stage.state_stacks.join(arrays.optimizer)
    return Contents(
        step=int(state.step),
        skipped=int(state.skipped),
        key=np.array(jax.random.key_data(state.key)),
        key_impl=str(jax.random.key_impl(state.key)),
        arrays={
            VARIABLES: dict(zip((*names.parameters, *names.state), (*parameters, *variables), strict=True)),
            OPTIMIZER: {p: _data(x) for p, x in zip(names.optimizer, optimizer, strict=True)},
            RESIDUALS: dict(zip(names.parameters, arrays.residuals, strict=False)),
        },
        types={(OPTIMIZER, p): str(x.dtype) for p, x in zip(names.optimizer, optimizer, strict=True) if is_key(x)},
        data=data,
    )


def _as_json(data: Any) -> Any:
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"data= must be what JSON can hold (numbers, texts, lists, dictionaries), as it is kept as text: {error}."
        ) from error


def _data(x: Any) -> np.ndarray:
    return np.array(jax.random.key_data(x) if is_key(x) else x)


def put(runtime: Runtime, saved: Saved) -> TrainState:
    """A training state from a checkpoint, stage by stage; every process reads what its own devices hold.

    With another number of replicas, each gets the mean of the residuals that there were: the average over the
    replicas, which is what is still to be added to the parameters, stays the same.

    Raises:
      CheckpointError: if the checkpoint is of another model or optimizer, or is damaged.
    """
    planned = runtime.planned
    names, by_stage, exchange = _names(planned), planned.update.by_stage, planned.update.exchange
    check(saved, VARIABLES, _variable_leaves(planned, names), "the model")
    check(saved, OPTIMIZER, expected(names.optimizer, jax.tree.leaves(by_stage.state_shape)), "the optimizer")
    has_residuals = bool(saved.leaves[RESIDUALS])
    if has_residuals and exchange is None:
        warnings.warn(
            f"The checkpoint {saved.folder} has residuals of a block-sparse gradient exchange, and this pipeline "
            "exchanges gradients whole: what had not been sent is lost.",
            stacklevel=4,
        )
    parts, common = multihost.on_all(lambda: _read_stages(runtime, saved, names, has_residuals))
    shared = [k for k, owner in enumerate(by_stage.state_stage) if owner is None]
    values = [typed(x, by_stage.state_avals[k].dtype) for k, x in zip(shared, common, strict=True)]
    return runtime.assemble(parts, CommonArrays(values, saved.key, np.int32(saved.step), np.int32(saved.skipped)))


def _read_stages(
    runtime: Runtime, saved: Saved, names: _Names, has_residuals: bool
) -> tuple[dict[int, Any], list[np.ndarray]]:
    """The parts of this process's places, and the optimizer state that all stages share."""
    planned, parts = runtime.planned, {}
    by_stage, exchange = planned.update.by_stage, planned.update.exchange
    for place in runtime.places:
        every = runtime.devices_of(place)
        if not multihost.mine(every):
            continue
        parameters, variables = planned.placement.held_by(place)
        slot_numbers = [k for k, owner in enumerate(by_stage.state_stage) if owner == place]
        stacks = *planned.model.stacks, by_stage.state_stacks
        paths = names.parameters, names.state, names.optimizer
        of_parameters, of_state, of_optimizer = (
            [_Part(group, leaves[cuts.leaf_of[k]], cuts.rows_of[k]) for k in pieces]
            for group, leaves, cuts, pieces in zip(
                (VARIABLES, VARIABLES, OPTIMIZER), paths, stacks, (parameters, variables, slot_numbers), strict=True
            )
        )
        held = [part.path for part in of_parameters]
        wanted = {
            VARIABLES: list(dict.fromkeys(part.path for part in (*of_parameters, *of_state))),
            OPTIMIZER: list(dict.fromkeys(part.path for part in of_optimizer)),
            RESIDUALS: held if has_residuals and exchange is not None else [],
        }
        arrays = read(saved, wanted)
        leaves = {group: dict(zip(wanted[group], arrays[group], strict=True)) for group in (VARIABLES, OPTIMIZER)}
        parameters, variables, slots = (
            [x.of(leaves[x.group]) for x in group] for group in (of_parameters, of_state, of_optimizer)
        )
        residuals = [_spread(x, len(every)) for x in arrays[RESIDUALS]]
        parts[place] = runtime.stage_part(place, StageArrays(parameters, variables, slots, residuals))
    leaf_of = by_stage.state_stacks.leaf_of
    shared = [names.optimizer[leaf_of[k]] for k, owner in enumerate(by_stage.state_stage) if owner is None]
    return parts, read(saved, {OPTIMIZER: shared})[OPTIMIZER]


def _variable_leaves(planned: ExecutablePlan, names: _Names) -> Any:
    model = planned.model.original
    avals = [v.aval for v in (*model.parameters, *model.state)]
    return expected((*names.parameters, *names.state), avals)


def check(saved: Saved, group: str, wanted: Any, owner: str) -> None:
    """Raise ``CheckpointError`` unless a checkpoint has the arrays that its reader expects."""
    what = differences(saved.leaves.get(group, {}), wanted, owner)
    if what is not None:
        raise CheckpointError(
            f"The checkpoint {saved.folder} does not fit {owner}: {what}. Restore it with {owner} that it was saved "
            "with; jaxpipe.checkpoint.load(directory) gives what is in it."
        )


def typed(x: np.ndarray, dtype: Any) -> Any:
    """An array of a checkpoint; a random key, if its dtype is one."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(jnp.empty((), dtype)))


def _spread(residual: np.ndarray, replicas: int) -> np.ndarray:
    """Residuals of so many replicas, whose mean is that of the given ones."""
    if residual.shape[0] == replicas:
        return residual
    return np.broadcast_to(residual.mean(axis=0, dtype=residual.dtype), (replicas, *residual.shape[1:]))
