"""A pipeline's training state in the model's own layout, and back into stages.

What is saved knows nothing of stages, so it can be restored into any number of them, onto any mesh. Devices get the
rows of their own stage, and a host reads one stage at a time. Of several processes the first one writes.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import multihost
from jaxpipe.array_types import ArrayLike, DType
from jaxpipe.checkpoint.arrays_by_path import Path, leaf_paths
from jaxpipe.checkpoint.contents import OPTIMIZER, RESIDUALS, VARIABLES, Contents, Leaf, differences, expected, is_key
from jaxpipe.checkpoint.orbax_files import Saved, read
from jaxpipe.errors import CheckpointError
from jaxpipe.graph.stacked_layers import Stacks, side_by_side
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.initialize_state import Sources, Values, place_state
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.train_state import TrainState


#: Paths of parameters, state variables and optimizer state, by leaf as the model and optax have them.
_Paths: TypeAlias = tuple[Sequence[Path], Sequence[Path], Sequence[Path]]


def _paths(planned: ExecutablePlan) -> _Paths:
    model = planned.model.original
    count, total = len(model.parameters), len(model.parameters) + len(model.state)
    numbered = model.variable_tree(list(range(count)), list(range(count, total)))
    path_of = dict(zip(jax.tree.leaves(numbered), leaf_paths(jax.tree.structure(numbered)), strict=True))
    variables = [path_of[k] for k in range(total)]
    return variables[:count], variables[count:], leaf_paths(jax.tree.structure(planned.update.by_stage.state_shape))


def take(runtime: Runtime, state: TrainState, data: object = None) -> Contents | None:
    """Copy a training state to the host of the first process, in the model's own layout; None in the others.

    Copies, as a step donates the state, and its memory is used again while a checkpoint is written.
    """
    data = multihost.from_first(lambda: _as_json(data))
    planned = runtime.planned
    names, arrays = _paths(planned), runtime.to_host(state, multihost.is_first())
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
            VARIABLES: {
                p: np.asarray(x) for p, x in zip((*names[0], *names[1]), (*parameters, *variables), strict=True)
            },
            OPTIMIZER: {p: _data(x) for p, x in zip(names[2], optimizer, strict=True)},
            RESIDUALS: dict(zip(names[0], arrays.residuals, strict=False)),
        },
        types={(OPTIMIZER, p): str(x.dtype) for p, x in zip(names[2], optimizer, strict=True) if is_key(x)},
        data=data,
    )


def _as_json(data: object) -> object:
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"data= must be what JSON can hold (numbers, texts, lists, dictionaries), as it is kept as text: {error}."
        ) from error


def _data(x: ArrayLike) -> np.ndarray:
    return np.array(jax.random.key_data(x) if is_key(x) else x)


def put(runtime: Runtime, saved: Saved) -> TrainState:
    """A training state from a checkpoint, stage by stage; every process reads what its own devices hold.

    With another number of replicas, each gets the mean of the residuals that there were: the average over the
    replicas, which is what is still to be added to the parameters, stays the same.
    """
    planned = runtime.planned
    names, by_stage, exchange = _paths(planned), planned.update.by_stage, planned.update.exchange
    avals = [v.aval for v in (*planned.model.original.parameters, *planned.model.original.state)]
    check(saved, VARIABLES, expected((*names[0], *names[1]), avals), "the model")
    check(saved, OPTIMIZER, expected(names[2], jax.tree.leaves(by_stage.state_shape)), "the optimizer")
    has_residuals = bool(saved.leaves[RESIDUALS])
    if has_residuals and exchange is None:
        warnings.warn(
            f"The checkpoint {saved.folder} has residuals of a block-sparse gradient exchange, and this pipeline "
            "exchanges gradients whole: what had not been sent is lost.",
            stacklevel=4,
        )
    state_types = [aval.dtype for aval in jax.tree.leaves(by_stage.state_shape)]
    sources = Sources(
        variables=_values(saved, VARIABLES, (*names[0], *names[1]), side_by_side(planned.model.stacks)),
        optimizer=_values(saved, OPTIMIZER, names[2], by_stage.state_stacks, state_types),
        residuals=_residuals(saved, names[0]) if has_residuals and exchange is not None else None,
    )
    return place_state(runtime, sources, saved.key, saved.step, saved.skipped)


def _values(
    saved: Saved, group: str, names: Sequence[Path], stacks: Stacks, types: Sequence[DType] | None = None
) -> Values:
    """Return a function that reads pieces of a group of arrays."""

    def values(positions: Sequence[int]) -> list[ArrayLike]:
        leaves = list(dict.fromkeys(stacks.leaf_of[k] for k in positions))
        arrays = dict(zip(leaves, read(saved, {group: [names[n] for n in leaves]})[group], strict=True))
        pieces = [(stacks.leaf_of[k], stacks.cut(k, arrays[stacks.leaf_of[k]])) for k in positions]
        return [x if types is None else typed(x, types[n]) for n, x in pieces]

    return values


def _residuals(saved: Saved, names: Sequence[Path]) -> Callable[[Sequence[int]], list[np.ndarray]]:
    return lambda positions: read(saved, {RESIDUALS: [names[k] for k in positions]})[RESIDUALS]


def check(saved: Saved, group: str, wanted: Mapping[Path, Leaf], owner: str) -> None:
    """Raise ``CheckpointError`` unless a checkpoint has the arrays that its reader expects."""
    what = differences(saved.leaves.get(group, {}), wanted, owner)
    if what is not None:
        raise CheckpointError(
            f"The checkpoint {saved.folder} does not fit {owner}: {what}. Restore it with {owner} that it was saved "
            "with; jaxpipe.checkpoint.load(directory) gives what is in it."
        )


def typed(x: np.ndarray, dtype: DType) -> ArrayLike:
    """An array of a checkpoint; a random key, if its dtype is one."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(jnp.empty((), dtype)))
