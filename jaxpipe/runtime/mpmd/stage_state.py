"""A training state as arrays of the stages: parameters, state and optimizer state are leaves on their stage's devices.

    TrainState, batch ──Loader──▶ inputs of a step's graph
    outputs of a graph ──StateLayout.state_of──▶ TrainState

What every stage needs (shared optimizer state, the random key, numbers of steps) is one array on all devices.
"""

# More than 15 of our modules: a state is made of parts of the model, of the optimizer and of the devices.
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat, multihost
from jaxpipe.array_types import Array, ArrayLike, Device, PyTree, Shaped
from jaxpipe.errors import ModelError
from jaxpipe.runtime import check_state, shard_batch
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.mpmd.instructions import Place
from jaxpipe.runtime.mpmd.send_between_processes import of_member
from jaxpipe.runtime.mpmd.stage_devices import StageLayout
from jaxpipe.runtime.mpmd.step_graph import Path, Port, StepGraph
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.state_arrays import of_replicas
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA
from jaxpipe.sharding.partition_specs import side_by_side


class StateArray(NamedTuple):
    """An array of a training state that belongs to a stage."""

    port: Port  # of a step's graph
    aval: jax.ShapeDtypeStruct  # with its sharding
    name: str


@dataclass(frozen=True, eq=False)
class StateLayout:
    """The arrays of a training state at the ports of a graph."""

    layout: StageLayout
    planned: ExecutablePlan

    @property
    def by_stage(self) -> PartitionedUpdate:
        """The optimizer."""
        return self.planned.update.by_stage

    @cached_property
    def arrays(self) -> dict[str, list[StateArray]]:
        """The arrays that belong to a stage, by field of ``TrainState``."""
        objective, model, placement = self.layout.context.objective, self.planned.model, self.planned.program.placement
        homes = dict(zip(objective.parameters, placement.parameters, strict=True))
        variables = dict(zip(objective.parameters, model.parameters, strict=True))
        pieces = zip(self.by_stage.state_stage, self.by_stage.state_avals, self.by_stage.state_names, strict=True)
        trained = [t for t in objective.parameters if self.planned.update.exchange and t not in objective.frozen]
        return {
            "parameters": [
                self._array("parameters", t, s, ("parameters", t), variables[t].aval, variables[t].name)
                for t, s in homes.items()
            ],
            "variables": [
                self._array("variables", t, s, ("state", t), v.aval, v.name)
                for t, s, v in zip(objective.state, placement.state, model.state, strict=True)
            ],
            "optimizer": [
                self._array("optimizer", k, s, ("optimizer", k), aval, name)
                for k, (s, aval, name) in enumerate(pieces)
                if s is not None
            ],
            "residual": [
                self._array("residual", t, homes[t], ("residual", t), variables[t].aval, variables[t].name)
                for t in trained
            ],
        }

    def _array(self, field: str, number: int, s: int, path: Path, aval: Shaped, name: str) -> StateArray:
        devices, stage = self.layout.devices, self.layout.stages[s]
        shape, dtype, spec = aval.shape, aval.dtype, self.layout.context.form(stage, path).spec
        if field == "residual":  # one of each replica, of at least 32 bits
            shape, dtype = (len(devices.members(stage)), *shape), jnp.promote_types(dtype, jnp.float32)
            spec = side_by_side(spec, DATA)
        sharding = NamedSharding(devices.mesh(Place(stage)), spec)
        port = Port(devices.place(stage), field, number)
        return StateArray(port, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), name)

    @property
    def shared(self) -> list[int]:
        """The leaves of the optimizer state that every stage has."""
        return [k for k, owner in enumerate(self.by_stage.state_stage) if owner is None]

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that all devices have."""
        return NamedSharding(self.planned.all_devices, P())

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the shapes of a training state, where its devices have them."""
        groups = {field: tuple(x.aval for x in arrays) for field, arrays in self.arrays.items()}
        return TrainState(**groups, **self.planned.everywhere, plan=self.planned.plan.identity)

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
        local = multihost.mine(self.planned.all_devices.devices.flatten().tolist())
        return jax.make_array_from_single_device_arrays(old.shape, self.everywhere, [parts[d] for d in local])


class Loader:
    """The arrays of a training state, of a batch, and constants, by number of a graph's value."""

    def __init__(self, where: StateLayout, graph: StepGraph):
        """Find out what goes where."""
        self._where, devices = where, where.layout.devices
        leaves = ((field, n, x.port) for field, arrays in where.arrays.items() for n, x in enumerate(arrays))
        self._leaves = [(field, n, graph.inputs[port]) for field, n, port in leaves if port in graph.inputs]
        positions = {k: n for n, k in enumerate(where.shared)}
        self._common: list[tuple[str, int, Mesh, int]] = []
        self._keys: list[tuple[Mesh, int]] = []
        self._batch: list[tuple[int, int, NamedSharding, int]] = []
        self._constants: dict[int, Array] = {}
        for port, number in graph.inputs.items():
            mesh, leaf = devices.mesh(port.place), cast(int, port.number)
            sharding = NamedSharding(mesh, P())
            if not multihost.mine(list(mesh.devices.flat)):
                continue
            if port.field in ("shared", "step", "skipped"):
                self._common.append((port.field, positions.get(leaf, 0), mesh, number))
            elif port.field == "key":
                self._keys.append((mesh, number))
            elif port.field == "batch":
                self._batch.append((leaf, devices.replica(port.place), sharding, number))
            elif port.field in ("index", "weight"):
                self._constants[number] = multihost.place(self._constant(port), sharding)
        self._key: Array | None = None
        self._key_data: dict[int, Array] = {}

    def load(self, state: TrainState) -> dict[int, Array]:
        """Return the arrays of a state, by number of their value."""
        given = dict(self._constants)
        for field, k, number in self._leaves:
            given[number] = getattr(state, field)[k]
        for field, k, mesh, number in self._common:
            given[number] = _at(state.shared[k] if field == "shared" else getattr(state, field), mesh)
        if state.key is not self._key:
            data = jax.random.key_data(state.key)
            self._key_data = {number: _at(data, mesh) for mesh, number in self._keys}
            self._key = state.key
        return given | self._key_data

    def _constant(self, port: Port) -> np.ndarray:
        context, devices = self._where.layout.context, self._where.layout.devices
        m = context.num_microbatches
        if port.field == "weight":
            return np.array(m * devices.replicas, np.float32)
        return np.array([port.microbatch, devices.replica(port.place) * m + port.microbatch], np.int32)

    def place_batch(self, leaves: Sequence[ArrayLike]) -> dict[int, Array]:
        """Return a batch's leaves, global or of this process's replicas, on the devices that read them."""
        shared, mesh = self._where.layout.context.shared, self._where.planned.all_devices
        parts = [_parts(x, common, mesh) for x, common in zip(leaves, shared, strict=True)]
        return {number: multihost.place(parts[k](replica), sharding) for k, replica, sharding, number in self._batch}


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
