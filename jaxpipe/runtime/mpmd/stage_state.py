"""A training state as arrays of the stages: parameters, state and optimizer state are leaves on their stage's devices.

    TrainState, batch ──LoadedGraph──▶ inputs of a step's graph, run
    its outputs ──StateLayout.state_of──▶ TrainState

What every stage needs (shared optimizer state, the random key, numbers of steps) is one array on all devices.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Array, ArrayLike, Device, PyTree, Shaped
from jaxpipe.errors import ModelError
from jaxpipe.runtime import check_state, shard_batch
from jaxpipe.runtime.mpmd.dispatch import Dispatch
from jaxpipe.runtime.mpmd.instructions import Place
from jaxpipe.runtime.mpmd.send_between_processes import of_member
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Port
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.state_arrays import check_key, of_replicas
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA


class StateArray(NamedTuple):
    """An array of a training state that belongs to a stage."""

    port: Port  # of a step's graph
    aval: jax.ShapeDtypeStruct  # with its sharding
    name: str


@dataclass(frozen=True, eq=False)
class StateLayout:
    """The arrays of a training state at the ports of a graph."""

    layout: StageLayout

    @property
    def by_stage(self) -> PartitionedUpdate:
        """The optimizer."""
        return self.layout.update.by_stage

    @cached_property
    def arrays(self) -> dict[str, list[StateArray]]:
        """The arrays that belong to a stage, by field of ``TrainState``."""
        objective, planned, by_stage = self.layout.objective, self.layout.planned, self.by_stage
        placement, names = planned.program.placement, [v.name for v in planned.model.parameters]
        parameters = list(zip(objective.parameters, placement.parameters, names, strict=True))
        variables = zip(objective.state, placement.state, planned.model.state, strict=True)
        owned = enumerate(zip(by_stage.state_stage, by_stage.state_names, strict=True))
        exchanged = parameters if planned.update.exchange else []
        rows = {
            "parameters": parameters,
            "variables": [(t, s, v.name) for t, s, v in variables],
            "optimizer": [(k, s, name) for k, (s, name) in owned if s is not None],
            "residual": [row for row in exchanged if row[0] not in objective.frozen],
        }
        return {field: [self._array(field, *row) for row in group] for field, group in rows.items()}

    def _array(self, field: str, number: int, s: int, name: str) -> StateArray:
        devices, stage = self.layout.devices, self.layout.stages[s]
        aval, form = self.layout.given(stage, field, number)
        sharding = NamedSharding(devices.mesh(Place(stage)), form.spec)
        port = Port(devices.place(stage), field, number)
        return StateArray(port, jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding), name)

    @property
    def shared(self) -> list[int]:
        """The leaves of the optimizer state that every stage has."""
        return [k for k, owner in enumerate(self.by_stage.state_stage) if owner is None]

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that all devices have."""
        return NamedSharding(self.layout.planned.all_devices, P())

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the shapes of a training state, where its devices have them."""
        groups = {field: tuple(x.aval for x in arrays) for field, arrays in self.arrays.items()}
        return TrainState(**groups, **self.layout.planned.everywhere, plan=self.layout.planned.plan.identity)

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of the arrays of a training state, by field."""
        names = {field: [x.name for x in arrays] for field, arrays in self.arrays.items()}
        return names | {"shared": [self.by_stage.state_names[k] for k in self.shared]}

    def state_of(self, old: TrainState, outputs: dict[Port, Array | None]) -> TrainState:
        """Return the state after a step, of the outputs of its graph; arrays elsewhere stay as they are."""
        new: dict[str, PyTree] = {}
        for field, arrays in self.arrays.items():
            pairs = zip(arrays, getattr(old, field), strict=True)
            new[field] = tuple(before if (after := outputs.get(x.port)) is None else after for x, before in pairs)
        pairs = zip(self.shared, old.shared, strict=True)
        new["shared"] = tuple(self._everywhere("shared", k, x, outputs) for k, x in pairs)
        for field in ("step", "skipped"):
            new[field] = self._everywhere(field, 0, getattr(old, field), outputs)
        return replace(old, **new)

    def _everywhere(self, field: str, number: int, old: Array, outputs: dict[Port, Array | None]) -> Array:
        """A value of all devices, of what the stages have made of it; the old one if they have not."""
        parts: dict[Device, Array] = {}
        for port, x in outputs.items():
            if (port.field, port.number) == (field, number) and x is not None:
                parts |= {shard.device: shard.data for shard in x.addressable_shards}
        if not parts:
            return old
        local = multihost.mine(self.layout.planned.all_devices.devices.flatten().tolist())
        return jax.make_array_from_single_device_arrays(old.shape, self.everywhere, [parts[d] for d in local])


class LoadedGraph:
    """A compiled graph, and the arrays of a training state, of a batch, and constants that it begins with."""

    def __init__(self, where: StateLayout, dispatch: Dispatch):
        """Find out what goes where."""
        self.layout, self.where, self.dispatch = where.layout, where, dispatch
        inputs, devices = dispatch.graph.inputs, where.layout.devices
        leaves = ((field, n, x.port) for field, arrays in where.arrays.items() for n, x in enumerate(arrays))
        self._leaves = [(field, n, inputs[port]) for field, n, port in leaves if port in inputs]
        positions = {k: n for n, k in enumerate(where.shared)}
        self._common: list[tuple[str, int, Mesh, int]] = []
        self._batch: list[tuple[int, int, NamedSharding, int]] = []
        self._constants: dict[int, Array] = {}
        for port, number in inputs.items():
            mesh, leaf = devices.mesh(port.place), cast(int, port.number)
            sharding = NamedSharding(mesh, P())
            if not multihost.mine(list(mesh.devices.flat)):
                continue
            if port.field in ("shared", "step", "skipped", "key"):
                self._common.append((port.field, positions.get(leaf, 0), mesh, number))
            elif port.field == "batch":
                self._batch.append((leaf, devices.replica(port.place), sharding, number))
            elif port.field in ("index", "weight"):
                self._constants[number] = multihost.place(self._constant(port), sharding)
        self._key: tuple[Array | None, dict[int, Array]] = None, {}

    def _constant(self, port: Port) -> np.ndarray:
        devices, m = self.layout.devices, self.layout.num_microbatches
        if port.field == "weight":
            return np.array(m * devices.replicas, np.float32)
        return np.array([port.microbatch, devices.replica(port.place) * m + port.microbatch], np.int32)

    def given(self, state: TrainState, batch: PyTree) -> dict[int, Array]:
        """Return the arrays of a state, and of a batch on the devices that read them, by number of their value."""
        given = self._constants | self._placed(jax.tree.leaves(batch))
        for field, k, number in self._leaves:
            given[number] = getattr(state, field)[k]
        for field, k, mesh, number in self._common:
            if field != "key":
                given[number] = _at(state.shared[k] if field == "shared" else getattr(state, field), mesh)
        if state.key is not self._key[0]:
            data = jax.random.key_data(state.key)
            keys = {number: _at(data, mesh) for field, _, mesh, number in self._common if field == "key"}
            self._key = state.key, keys
        return given | self._key[1]

    def _placed(self, leaves: Sequence[ArrayLike]) -> dict[int, Array]:
        """Return a batch's leaves, global or of this process's replicas, by number."""
        shared, mesh = self.layout.planned.batching.shared, self.layout.planned.all_devices
        parts = [_parts(x, common, mesh) for x, common in zip(leaves, shared, strict=True)]
        return {number: multihost.place(parts[k](replica), sharding) for k, replica, sharding, number in self._batch}

    def outputs(self, state: TrainState, batch: PyTree) -> dict[Port, Array | None]:
        """Return the outputs of the graph."""
        return self.dispatch.run(self.given(state, batch))

    def run(self, state: TrainState, batch: PyTree) -> tuple[dict[Port, Array | None], Array, list[Array]]:
        """Return the outputs of a graph with a loss, that, and the leaves of the metrics."""
        outputs = self.outputs(state, batch)
        loss, metrics = outputs[Port(self.layout.home, "loss")], self.reports(outputs, "metrics")
        return outputs, cast(Array, loss), [metrics[k] for k in range(len(metrics))]

    def reports(self, outputs: dict[Port, Array | None], field: str) -> dict[Any, Array]:
        """Return the reports of a field, on the device that computes them or where they are sent."""
        home = self.layout.home
        return {p.number: x for p, x in outputs.items() if (p.place, p.field) == (home, field) and x is not None}


def _at(x: Array, mesh: Mesh) -> Array:
    """Return the part of a value of all devices that is at a place."""
    return cast(Array, of_member(x.shape, {shard.device: shard.data for shard in x.addressable_shards}, mesh, P()))


def _parts(x: ArrayLike, shared: bool, mesh: Mesh) -> Callable[[int], ArrayLike]:
    """Return a function that gives the part of a leaf for a replica, of which this process has a stage."""
    replicas, local = mesh.shape.get(DATA, 1), shard_batch.own_replicas(mesh)
    x = _compat.in_default_layout(x)
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        if not x.is_fully_replicated:
            spread = jax.device_put(x, NamedSharding(mesh, P() if shared or replicas == 1 else P(DATA)))
            by_device = {shard.device: shard.data for shard in spread.addressable_shards}
            rows = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0) if replicas > 1 else mesh.devices[None]
            return lambda r: by_device[multihost.mine(list(rows[r].flat))[0]]
        x, local = x.addressable_data(0), list(range(replicas))
    if shared or len(local) == 1:
        return lambda _: x
    rows = x.shape[0] // len(local)
    return lambda r: x[local.index(r) * rows : (local.index(r) + 1) * rows]


def adopt(where: StateLayout, state: TrainState) -> TrainState:
    """Copy a state of another pipeline to the devices of this one, whatever its cuts, devices and batches.

    Layers of a scan that it has in other groups are grouped again, on the host.

    With another number of replicas, each gets the mean of the residuals of a block-sparse exchange.
    """
    check_state.check_state(state)
    fields = "parameters", "variables", "optimizer"
    given = {field: _grouped(where, field, getattr(state, field)) for field in fields}
    for field in fields:
        _check(field, given[field], [x.aval for x in where.arrays[field]])
    check_key(state.key, where.abstract_state.key)
    _check("optimizer (shared)", state.shared, [where.by_stage.state_avals[k] for k in where.shared])

    def placed(field: str, arrays: Sequence[ArrayLike]) -> tuple[Array, ...]:
        pairs = zip(arrays, where.arrays[field], strict=True)
        return tuple(jax.device_put(x.copy(), held.aval.sharding) for x, held in pairs)

    common = {name: getattr(state, name) for name in ("shared", "key", "step", "skipped")}
    groups = {field: placed(field, given[field]) for field in fields}
    groups |= jax.tree.map(lambda x: jax.device_put(x.copy(), where.everywhere), common)
    return replace(
        state, **groups, residual=placed("residual", _residuals(where, state)), plan=where.layout.planned.plan.identity
    )


def _grouped(where: StateLayout, field: str, arrays: Sequence[ArrayLike]) -> list[ArrayLike]:
    """Return arrays of a state with the layers of each stacked one in the groups that this pipeline has."""
    by_stage, (parameters, variables) = where.by_stage, where.layout.planned.model.stacks
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
