"""A pipeline's training state in the model's own layout, and back into stages.

What is saved knows nothing of stages, so it can be restored into any number of them, onto any mesh. Devices get the
rows of their own stage, and a host reads one stage at a time. Of several processes the first one writes.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jaxpipe import multihost
from jaxpipe.array_types import ArrayLike, DType
from jaxpipe.checkpoint import contents
from jaxpipe.checkpoint.contents import OPTIMIZER, OUTER, PENDING, REPLICAS, RESIDUALS, VARIABLES, Contents
from jaxpipe.checkpoint.orbax_files import Saved, read
from jaxpipe.errors import CheckpointError
from jaxpipe.graph.stacked_layers import Stacks, side_by_side
from jaxpipe.models.variable_trees import Path
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.initialize_state import ArraysByPlace, Values, arrays_by_place, place_state
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.train_state import StageArrays, TrainState, mean_of_replicas
from jaxpipe.runtime.uint32_words import typed


def _optimizer_paths(planned: ExecutablePlan) -> list[Path]:
    return contents.leaf_paths(jax.tree.structure(planned.update.by_stage.state_shape))


def take(runtime: Runtime, state: TrainState, data: object = None) -> Contents | None:
    """Copy a training state to the host of the first process, in the model's own layout; None in the others.

    Copies, as a step donates the state, and its memory is used again while a checkpoint is written.
    """
    data = multihost.from_first(lambda: _as_json(data))
    planned = runtime.planned
    arrays = runtime.to_host(state, apart=True)
    if not multihost.is_first():
        return None
    model, each = planned.model.original, [_leaves(planned, x) for x in arrays.replicas]
    groups = _leaves(planned, arrays)
    residuals = dict(zip(model.paths[: len(model.parameters)], arrays.residuals, strict=False))
    groups[RESIDUALS] = {} if each else residuals
    if each:
        groups[OPTIMIZER] = {path: mean_of_replicas([x[OPTIMIZER][path] for x in each]) for path in groups[OPTIMIZER]}
        groups[OUTER] = _outer_leaves(planned, arrays.outer)
        groups[REPLICAS] = {
            (str(r), group, *path): x
            for r, leaves in enumerate(each)
            for group, by_path in leaves.items()
            for path, x in by_path.items()
        }
        groups[PENDING] = residuals
    return contents.contents(groups, int(state.step), int(state.skipped), state.key, data)


def _leaves(planned: ExecutablePlan, arrays: StageArrays) -> dict[str, dict[Path, ArrayLike]]:
    """Return variables and optimizer state by path, in the model's own layout."""
    variables = side_by_side(planned.model.stacks).join([*arrays.parameters, *arrays.variables])
    optimizer = planned.update.by_stage.state_stacks.join(arrays.optimizer)
    return {
        VARIABLES: dict(zip(planned.model.original.paths, variables, strict=True)),
        OPTIMIZER: dict(zip(_optimizer_paths(planned), optimizer, strict=True)),
    }


def _outer_leaves(planned: ExecutablePlan, rows: Sequence[Sequence[ArrayLike]]) -> dict[Path, ArrayLike]:
    """Return by number and path the outer parameters, 0, and the leaves of their optimizer's states."""
    stacks, paths = planned.model.stacks[0], planned.model.original.paths
    leaves = {}
    for i, column in enumerate(zip(*rows, strict=True)):
        # A count is the same for all pieces of a leaf.
        joined = stacks.join(column) if column[0].ndim else [group[0] for group in stacks.groups(column)]
        leaves |= {(str(i), *path): x for path, x in zip(paths, joined, strict=False)}
    return leaves


def _as_json(data: object) -> object:
    try:
        text = json.dumps(data)
        keys = [key for path, _ in jax.tree_util.tree_leaves_with_path(data, is_leaf=lambda x: not x) for key in path]
        if not all(isinstance(getattr(key, "key", ""), str) for key in keys):
            raise TypeError("keys of dictionaries must be strings")
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"data= must be what JSON can hold (numbers, texts, lists, dictionaries), as it is kept as text: {error}."
        ) from error


def put(runtime: Runtime, saved: Saved) -> TrainState:
    """A training state from a checkpoint, stage by stage; every process reads what its own devices hold.

    With another number of replicas, each gets the mean of the residuals that there were: the average over the
    replicas, which is what is still to be added to the parameters, stays the same. In an outer loop each begins at the
    outer parameters then, with the mean of the optimizers' states.
    """
    planned = runtime.planned
    model, update, loop = planned.model.original, planned.update, planned.update.outer
    avals = [v.aval for v in (*model.parameters, *model.state)]
    slots = jax.tree.leaves(update.by_stage.state_shape)
    contents.check(saved.folder, saved.leaves[VARIABLES], model.paths, avals, "the model")
    contents.check(saved.folder, saved.leaves[OPTIMIZER], _optimizer_paths(planned), slots, "the optimizer")
    left, outer, replicas = RESIDUALS if update.exchange is not None else None, None, list[ArraysByPlace]()
    if left is None and saved.leaves[RESIDUALS]:
        warnings.warn(
            f"The checkpoint {saved.folder} has residuals of a block-sparse gradient exchange, and this pipeline "
            "has no such exchange: what had not been sent is lost.",
            stacklevel=4,
        )
    if loop is not None and OUTER in saved.leaves:
        pairs = zip(model.paths, model.parameters, strict=False)
        wanted = {(str(i), *path): x for path, v in pairs for i, x in enumerate(loop.avals(v.aval))}
        contents.check(saved.folder, saved.leaves[OUTER], list(wanted), list(wanted.values()), "the outer optimizer")
        numbers = sorted({path[0] for path in saved.leaves[REPLICAS]}, key=int)
        outer = _outer_values(planned, saved)
        if len(numbers) == planned.batching.replicas:
            left = PENDING if loop.settings.delay else None
            replicas = [_arrays(planned, saved, REPLICAS, number) for number in numbers]
    common = _arrays(planned, saved)

    def arrays(place: int | None) -> StageArrays:
        if place is None:
            return common(None)
        parameters, _ = planned.placement.held_by(place)
        paths = [(left, *model.paths[k]) for k in parameters] if left is not None and saved.leaves[left] else []
        rows = () if outer is None else outer(parameters)
        each = [of_replica(place) for of_replica in replicas]
        return replace(common(place), residuals=read(saved, paths), outer=rows, replicas=each)

    return place_state(runtime, arrays, saved.key, saved.about.step, saved.about.skipped)


def _arrays(planned: ExecutablePlan, saved: Saved, *prefix: str) -> ArraysByPlace:
    """Return variables and optimizer state by place: those of all, or those whose paths begin with some keys."""
    model, by_stage = planned.model.original, planned.update.by_stage
    types = [v.aval.dtype for v in (*model.parameters, *model.state)]
    variables = _values(saved, (*prefix, VARIABLES), model.paths, side_by_side(planned.model.stacks), types)
    types = [x.dtype for x in jax.tree.leaves(by_stage.state_shape)]
    slots = _values(saved, (*prefix, OPTIMIZER), _optimizer_paths(planned), by_stage.state_stacks, types)
    return arrays_by_place(planned, variables, slots)


def _outer_values(planned: ExecutablePlan, saved: Saved) -> Callable[[Sequence[int]], list[tuple[ArrayLike, ...]]]:
    """Return a function that reads outer parameters and the states of their optimizer."""
    model, stacks = planned.model.original, planned.model.stacks[0]
    numbers = sorted({path[0] for path in saved.leaves[OUTER]}, key=int)
    columns = [_values(saved, (OUTER, number), model.paths, stacks) for number in numbers]
    return lambda positions: list(zip(*(column(positions) for column in columns), strict=True))


def _values(
    saved: Saved, prefix: Path, names: Sequence[Path], stacks: Stacks, types: Sequence[DType] | None = None
) -> Values:
    """Return a function that reads pieces of the arrays of some names, whose paths begin with a group."""

    def values(positions: Sequence[int]) -> list[ArrayLike]:
        pairs = [(k, stacks.leaf_of[k]) for k in positions]
        leaves = list(dict.fromkeys(n for _, n in pairs))
        arrays = dict(zip(leaves, read(saved, [(*prefix, *names[n]) for n in leaves]), strict=True))
        pieces = [(n, arrays[n] if not arrays[n].ndim else stacks.cut(k, arrays[n])) for k, n in pairs]
        return [x if types is None else typed(x, types[n]) for n, x in pieces]

    return values
