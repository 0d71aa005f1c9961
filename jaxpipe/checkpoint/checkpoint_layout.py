"""A pipeline's training state in the model's own layout, and back into stages.

What is saved knows nothing of stages, so it can be restored into any number of them, onto any mesh. Devices get the
rows of their own stage, and a host reads one stage at a time. Of several processes the first one writes.
"""

import json
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import multihost
from jaxpipe.array_types import ArrayLike, DType
from jaxpipe.checkpoint.contents import OPTIMIZER, RESIDUALS, VARIABLES, Contents, check, contents, leaf_paths
from jaxpipe.checkpoint.orbax_files import Saved, read
from jaxpipe.errors import CheckpointError
from jaxpipe.graph.stacked_layers import Stacks, side_by_side
from jaxpipe.models.variable_trees import Path
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.initialize_state import Sources, Values, place_state
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.train_state import TrainState


def _optimizer_paths(planned: ExecutablePlan) -> list[Path]:
    return leaf_paths(jax.tree.structure(planned.update.by_stage.state_shape))


def take(runtime: Runtime, state: TrainState, data: object = None) -> Contents | None:
    """Copy a training state to the host of the first process, in the model's own layout; None in the others.

    Copies, as a step donates the state, and its memory is used again while a checkpoint is written.
    """
    data = multihost.from_first(lambda: _as_json(data))
    planned = runtime.planned
    if planned.update.outer is not None:
        raise CheckpointError(
            "save: in an outer loop each replica has parameters and optimizer state of its own, of which checkpoints "
            "have one. Pickle the state, which goes on with the same bits on the same mesh; or keep "
            "pipeline.parameters(state), the outer parameters, for init(key, variables=...)."
        )
    arrays = runtime.to_host(state, multihost.is_first())
    if not multihost.is_first():
        return None
    model, stacks = planned.model.original, side_by_side(planned.model.stacks)
    variables = stacks.join([*arrays.parameters, *arrays.variables])
    optimizer = planned.update.by_stage.state_stacks.join(arrays.optimizer)
    groups = {
        VARIABLES: dict(zip(model.paths, variables, strict=True)),
        OPTIMIZER: dict(zip(_optimizer_paths(planned), optimizer, strict=True)),
        RESIDUALS: dict(zip(model.paths[: len(model.parameters)], arrays.residuals, strict=False)),
    }
    return contents(groups, int(state.step), int(state.skipped), state.key, data)


def _as_json(data: object) -> object:
    try:
        return json.loads(json.dumps(data))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"data= must be what JSON can hold (numbers, texts, lists, dictionaries), as it is kept as text: {error}."
        ) from error


def put(runtime: Runtime, saved: Saved) -> TrainState:
    """A training state from a checkpoint, stage by stage; every process reads what its own devices hold.

    With another number of replicas, each gets the mean of the residuals that there were: the average over the
    replicas, which is what is still to be added to the parameters, stays the same.
    """
    planned = runtime.planned
    model, by_stage, exchange = planned.model.original, planned.update.by_stage, planned.update.exchange
    paths, slots = _optimizer_paths(planned), jax.tree.leaves(by_stage.state_shape)
    avals = [v.aval for v in (*model.parameters, *model.state)]
    check(saved.folder, saved.leaves[VARIABLES], model.paths, avals, "the model")
    check(saved.folder, saved.leaves[OPTIMIZER], paths, slots, "the optimizer")
    has_residuals = bool(saved.leaves[RESIDUALS])
    if has_residuals and exchange is None:
        warnings.warn(
            f"The checkpoint {saved.folder} has residuals of a block-sparse gradient exchange, and this pipeline "
            "exchanges gradients whole: what had not been sent is lost.",
            stacklevel=4,
        )

    def residuals(positions: Sequence[int]) -> list[np.ndarray]:
        return read(saved, RESIDUALS, [model.paths[k] for k in positions])

    sources = Sources(
        variables=_values(saved, VARIABLES, model.paths, side_by_side(planned.model.stacks)),
        optimizer=_values(saved, OPTIMIZER, paths, by_stage.state_stacks, [x.dtype for x in slots]),
        residuals=None if exchange is None or not has_residuals else residuals,
    )
    return place_state(runtime, sources, saved.key, saved.about.step, saved.about.skipped)


def _values(
    saved: Saved, group: str, names: Sequence[Path], stacks: Stacks, types: Sequence[DType] | None = None
) -> Values:
    """Return a function that reads pieces of a group of arrays."""

    def values(positions: Sequence[int]) -> list[ArrayLike]:
        leaves = list(dict.fromkeys(stacks.leaf_of[k] for k in positions))
        arrays = dict(zip(leaves, read(saved, group, [names[n] for n in leaves]), strict=True))
        pieces = [(stacks.leaf_of[k], stacks.cut(k, arrays[stacks.leaf_of[k]])) for k in positions]
        return [x if types is None else typed(x, types[n]) for n, x in pieces]

    return values


def typed(x: np.ndarray, dtype: DType) -> ArrayLike:
    """An array of a checkpoint; a random key, if its dtype is one."""
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return x
    return jax.random.wrap_key_data(jnp.asarray(x), impl=jax.random.key_impl(jnp.empty((), dtype)))
