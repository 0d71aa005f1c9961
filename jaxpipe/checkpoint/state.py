"""A pipeline's training state in the model's own layout, and back into stages.

What is saved knows nothing of stages, so it can be restored into any number of them, onto any mesh. Devices get the
rows of their own stage, and a host reads one stage at a time. Of several processes the first one writes.
"""

import functools
import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import hosts
from jaxpipe.checkpoint.contents import OPTIMIZER, RESIDUALS, VARIABLES, Contents, differences, expected, is_key
from jaxpipe.checkpoint.files import Saved, read
from jaxpipe.checkpoint.tree import Path, leaf_paths
from jaxpipe.errors import CheckpointError
from jaxpipe.pipeline.gather import stage_arrays
from jaxpipe.pipeline.initialize import assemble, stage_devices
from jaxpipe.pipeline.program import DATA, STAGE
from jaxpipe.pipeline.state import TrainState


if TYPE_CHECKING:
    from jaxpipe.pipeline.planned import Planned


@dataclass(frozen=True)
class _Names:
    """Paths of parameters, state variables and optimizer state, by leaf as the model and optax have them."""

    parameters: tuple[Path, ...]
    state: tuple[Path, ...]
    optimizer: tuple[Path, ...]


@dataclass(frozen=True)
class _Part:
    """What a stage wants of an array of a checkpoint: all of it, or some rows."""

    group: str
    path: Path
    rows: slice | None

    def of(self, leaves: dict[Path, np.ndarray]) -> np.ndarray:
        return leaves[self.path] if self.rows is None else leaves[self.path][self.rows]


def _names(planned: "Planned") -> _Names:
    model = planned.model.own
    count, total = len(model.parameters), len(model.parameters) + len(model.state)
    numbered = model.variable_tree(list(range(count)), list(range(count, total)))
    found = dict(zip(jax.tree.leaves(numbered), leaf_paths(jax.tree.structure(numbered)), strict=True))
    return _Names(
        tuple(found[k] for k in range(count)),
        tuple(found[k] for k in range(count, total)),
        tuple(leaf_paths(jax.tree.structure(planned.update.coloured.state_shape))),
    )


def take(planned: "Planned", state: TrainState, data: Any = None) -> Contents | None:
    """A copy of a training state on the host of the first process, in the model's own layout.

    Copies, as a step donates the state, and its memory is used again while a checkpoint is written.

    Returns:
      None in the other processes, which send what their stages hold.

    Raises:
      CheckpointError: if ``data`` is not JSON.
    """
    data = hosts.from_first(lambda: _as_json(data))
    names, program, update = _names(planned), planned.program, planned.update
    shared = iter(state.shared)
    places = program.teams.first
    gather = functools.partial(stage_arrays, planned.mesh, keep=hosts.is_first())
    coloured, (of_parameters, of_state) = update.coloured, planned.model.stacks
    optimizer = gather(update.layout, places, coloured.state_stage, state.optimizer, lambda: next(shared))
    residuals: dict[Path, np.ndarray] = {}
    if update.exchange is not None:
        stacked = gather(update.exchange.residuals, places, planned.placement.parameters, state.residual)
        residuals = dict(zip(names.parameters, stacked, strict=False))
    parameters = gather(program.parameters, places, planned.placement.parameters, state.parameters)
    variables = gather(program.state, places, planned.placement.state, state.variables)
    if not hosts.is_first():
        return None
    parameters, variables = of_parameters.join(parameters), of_state.join(variables)
    optimizer = coloured.state_stacks.join(optimizer)
    return Contents(
        step=int(state.step),
        skipped=int(state.skipped),
        key=np.array(jax.random.key_data(state.key)),
        key_impl=str(jax.random.key_impl(state.key)),
        arrays={
            VARIABLES: dict(zip((*names.parameters, *names.state), (*parameters, *variables), strict=True)),
            OPTIMIZER: {p: _data(x) for p, x in zip(names.optimizer, optimizer, strict=True)},
            RESIDUALS: residuals,
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


def put(planned: "Planned", saved: Saved) -> TrainState:
    """A training state from a checkpoint, stage by stage; every process reads what its own devices hold.

    With another number of replicas, each gets the mean of the residuals that there were: the average over the
    replicas, which is what is still to be added to the parameters, stays the same.

    Raises:
      CheckpointError: if the checkpoint is of another model or optimizer, or is damaged.
    """
    names, update, mesh = _names(planned), planned.update, planned.mesh
    coloured, exchange = update.coloured, update.exchange
    check(saved, VARIABLES, _variable_leaves(planned, names), "the model")
    check(saved, OPTIMIZER, expected(names.optimizer, jax.tree.leaves(coloured.state_shape)), "the optimizer")
    has_residuals = bool(saved.leaves[RESIDUALS])
    if has_residuals and exchange is None:
        warnings.warn(
            f"The checkpoint {saved.folder} has residuals of a block-sparse gradient exchange, and this pipeline "
            "exchanges gradients whole: what had not been sent is lost.",
            stacklevel=4,
        )
    parts, common = hosts.on_all(lambda: _read_stages(planned, saved, names, has_residuals))
    everywhere = NamedSharding(mesh, P())
    shared = [k for k, owner in enumerate(coloured.state_stage) if owner is None]
    return TrainState(
        *(assemble(mesh, P(STAGE), part) for part in parts[:3]),
        residual=assemble(mesh, P(STAGE, DATA), parts[3]) if exchange is not None else (),
        shared=tuple(
            hosts.replicate(typed(x, coloured.state_avals[k].dtype), everywhere)
            for k, x in zip(shared, common, strict=True)
        ),
        key=hosts.replicate(saved.key, everywhere),
        step=hosts.replicate(np.int32(saved.step), everywhere),
        skipped=hosts.replicate(np.int32(saved.skipped), everywhere),
        plan=planned.plan.identity,
    )


def _read_stages(
    planned: "Planned", saved: Saved, names: _Names, has_residuals: bool
) -> tuple[list[list[list[Any]]], list[np.ndarray]]:
    """Rows of this process's devices, of each kind by stage and buffer; and the state that all stages share."""
    update, mesh = planned.update, planned.mesh
    coloured, exchange = update.coloured, update.exchange
    parts: list[list[list[Any]]] = [[], [], [], []]
    teams = planned.program.teams
    for s in range(len(teams.widths)):
        every = stage_devices(mesh, teams, s)
        devices = hosts.mine(every)
        if not devices:
            continue
        parameters, variables = planned.placement.held_by(s)
        own = [k for k, owner in enumerate(coloured.state_stage) if owner == s]
        stacks = *planned.model.stacks, coloured.state_stacks
        paths = names.parameters, names.state, names.optimizer
        of_parameters, of_state, of_optimizer = (
            [_Part(group, leaves[cuts.leaf_of[k]], cuts.rows_of[k]) for k in pieces]
            for group, leaves, cuts, pieces in zip(
                (VARIABLES, VARIABLES, OPTIMIZER), paths, stacks, (parameters, variables, own), strict=True
            )
        )
        held = [part.path for part in of_parameters]
        wanted = {
            VARIABLES: list(dict.fromkeys(part.path for part in (*of_parameters, *of_state))),
            OPTIMIZER: list(dict.fromkeys(part.path for part in of_optimizer)),
            RESIDUALS: held if has_residuals and exchange is not None else [],
        }
        found = read(saved, wanted)
        leaves = {group: dict(zip(wanted[group], found[group], strict=True)) for group in (VARIABLES, OPTIMIZER)}
        layouts = planned.program.parameters, planned.program.state, update.layout
        for part, layout, wanted_here in zip(parts, layouts, (of_parameters, of_state, of_optimizer), strict=False):
            values = [x.of(leaves[x.group]) for x in wanted_here]
            part.append([[jax.device_put(x[None], d) for d in devices] for x in layout.pack(s, values)])
        if exchange is not None:
            residuals = [_spread(x, len(every)) for x in found[RESIDUALS]] or [
                np.zeros((len(every), *aval.shape), aval.dtype) for aval in exchange.residuals.avals[s]
            ]
            rows = [exchange.residuals.pack(s, [x[every.index(d)] for x in residuals]) for d in devices]
            parts[3].append(
                [
                    [jax.device_put(x[None, None], d) for x, d in zip(copies, devices, strict=True)]
                    for copies in zip(*rows, strict=True)
                ]
            )
    leaf_of = coloured.state_stacks.leaf_of
    shared = [names.optimizer[leaf_of[k]] for k, owner in enumerate(coloured.state_stage) if owner is None]
    return parts, read(saved, {OPTIMIZER: shared})[OPTIMIZER]


def _variable_leaves(planned: "Planned", names: _Names) -> Any:
    own = planned.model.own
    avals = [v.aval for v in (*own.parameters, *own.state)]
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
