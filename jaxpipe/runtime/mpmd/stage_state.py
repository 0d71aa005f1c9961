"""A training state as arrays of the stages: parameters, state and optimizer state are leaves on their stage's devices.

    TrainState, batch ──Loader──▶ inputs of a list
    outputs of a list ──StateLayout.state_of──▶ TrainState

What every stage needs (shared optimizer state, the random key, numbers of steps) is one array on all devices.
"""

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
from jaxpipe.runtime import shard_batch
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.mpmd.call_list import CallList
from jaxpipe.runtime.mpmd.instructions import Key, Place
from jaxpipe.runtime.mpmd.send_between_processes import of_member
from jaxpipe.runtime.mpmd.stage_placement import Layout
from jaxpipe.runtime.mpmd.stage_work import Name, Role
from jaxpipe.runtime.mpmd.update_work import SKIPPED
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA
from jaxpipe.sharding.partition_specs import side_by_side
from jaxpipe.sharding.submesh import joined_mesh


class StateArray(NamedTuple):
    """An array of a training state that belongs to a stage."""

    key: Key  # in a list
    aval: jax.ShapeDtypeStruct  # with its sharding
    name: str


@dataclass(frozen=True, eq=False)
class StateLayout:
    """The arrays of a training state in a list."""

    layout: Layout
    planned: ExecutablePlan

    @property
    def by_stage(self) -> PartitionedUpdate:
        """The optimizer."""
        return self.planned.update.by_stage

    @cached_property
    def arrays(self) -> dict[str, list[StateArray]]:
        """The arrays that belong to a stage, by field of ``TrainState``."""
        objective, model, placement = self.layout.context.objective, self.planned.model, self.planned.stage_placement
        homes = dict(zip(objective.parameters, placement.parameters, strict=True))
        variables = dict(zip(objective.parameters, model.parameters, strict=True))
        pieces = zip(self.by_stage.state_stage, self.by_stage.state_avals, self.by_stage.state_names, strict=True)
        trained = [t for t in objective.parameters if self.planned.update.exchange and t not in objective.frozen]
        return {
            "parameters": [
                self._array(Role.PARAMETER, t, s, variables[t].aval, variables[t].name) for t, s in homes.items()
            ],
            "variables": [
                self._array(Role.STATE, t, s, v.aval, v.name)
                for t, s, v in zip(objective.state, placement.state, model.state, strict=True)
            ],
            "optimizer": [
                self._array(Role.OPTIMIZER, k, s, aval, name)
                for k, (s, aval, name) in enumerate(pieces)
                if s is not None
            ],
            "residual": [
                self._array(Role.RESIDUAL, t, homes[t], variables[t].aval, variables[t].name) for t in trained
            ],
        }

    def _array(self, role: Role, number: int, s: int, aval: Shaped, name: str) -> StateArray:
        devices, stage = self.layout.devices, self.layout.stages[s]
        key, shape, dtype = Key(devices.place(stage), Name(role, number)), aval.shape, aval.dtype
        spec = self.layout.context.spec(stage, key.name)
        if role is Role.RESIDUAL:  # one of each replica, of at least 32 bits
            shape, dtype = (len(devices.members(stage)), *shape), jnp.promote_types(dtype, jnp.float32)
            spec = side_by_side(spec, DATA)
        sharding = NamedSharding(devices.mesh(Place(stage)), spec)
        return StateArray(key, jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), name)

    @property
    def shared(self) -> list[int]:
        """The leaves of the optimizer state that every stage has."""
        return [k for k, owner in enumerate(self.by_stage.state_stage) if owner is None]

    @property
    def all_devices(self) -> Mesh:
        """The mesh of all devices."""
        return joined_mesh(self.planned.mesh, self.layout.devices.submesh)

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that all devices have."""
        return NamedSharding(self.all_devices, P())

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the shapes of a training state, where its devices have them."""
        groups = {field: tuple(x.aval for x in arrays) for field, arrays in self.arrays.items()}
        step = jax.ShapeDtypeStruct((), np.int32)
        common = {
            "shared": tuple(self.by_stage.state_avals[k] for k in self.shared),
            "key": self.layout.context.key,
            "step": step,
            "skipped": step,
        }
        common = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.everywhere), common)
        return TrainState(**(groups | common), plan=self.planned.plan.identity)

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of the arrays of a training state, by field."""
        names = {field: [x.name for x in arrays] for field, arrays in self.arrays.items()}
        return names | {"shared": [self.by_stage.state_names[k] for k in self.shared]}

    def state_of(self, old: TrainState, outputs: dict[Key, Array | None]) -> TrainState:
        """Return the state after a step, of the outputs of its list; arrays elsewhere stay as they are."""

        new: dict[str, PyTree] = {}
        for field, arrays in self.arrays.items():
            pairs = zip(arrays, getattr(old, field), strict=True)
            new[field] = tuple(before if (after := outputs.get(x.key)) is None else after for x, before in pairs)
        shared = tuple(
            self._everywhere(Name(Role.SHARED, k), x, outputs) for k, x in zip(self.shared, old.shared, strict=True)
        )
        step = self._everywhere(Name(Role.STEP), old.step, outputs)
        skipped = self._everywhere(SKIPPED, old.skipped, outputs)
        return replace(old, **new, shared=shared, step=step, skipped=skipped)

    def _everywhere(self, name: Name, old: Array, outputs: dict[Key, Array | None]) -> Array:
        """A value of all devices, of what the stages have made of it; the old one if they have not."""
        parts: dict[Device, Array] = {}
        for key, x in outputs.items():
            if key.name == name and x is not None:
                parts |= {shard.device: shard.data for shard in x.addressable_shards}
        if not parts:
            return old
        local = multihost.mine(self.all_devices.devices.flatten().tolist())
        return jax.make_array_from_single_device_arrays(old.shape, self.everywhere, [parts[d] for d in local])


class Loader:
    """The arrays of a training state, and constants, by register of a list."""

    def __init__(self, where: StateLayout, calls: CallList):
        """Find out what goes where."""
        self._where = where
        keys = calls.inputs
        leaves = ((field, n, x.key) for field, arrays in where.arrays.items() for n, x in enumerate(arrays))
        self._leaves = [(field, n, keys[key]) for field, n, key in leaves if key in keys]
        positions = {k: n for n, k in enumerate(where.shared)}
        self._common: list[tuple[Name | int, Mesh, int]] = []
        self._keys: list[tuple[Mesh, int]] = []
        self._batch: list[tuple[int, int, NamedSharding, int]] = []
        self._constants: dict[int, Array] = {}
        devices = where.layout.devices
        for key, register in keys.items():
            name, mesh = key.name, devices.mesh(key.place)
            sharding = NamedSharding(mesh, P())
            if not multihost.mine(list(mesh.devices.flat)):
                continue
            if name.role is Role.SHARED:
                self._common.append((positions[name.number], mesh, register))
            elif name.role is Role.STEP:
                self._common.append((name, mesh, register))
            elif name.role is Role.KEY:
                self._keys.append((mesh, register))
            elif name.role is Role.BATCH:
                self._batch.append((name.number, devices.replica(key.place), sharding, register))
            elif name.role in (Role.INDEX, Role.WEIGHT):
                self._constants[register] = multihost.place(self._constant(key), sharding)
        self._key: Array | None = None
        self._key_data: dict[int, Array] = {}

    def load(self, state: TrainState) -> dict[int, Array]:
        """Return the arrays of a state, by register."""
        given = dict(self._constants)
        for field, k, register in self._leaves:
            given[register] = getattr(state, field)[k]
        for what, mesh, register in self._common:
            x = state.skipped if what == SKIPPED else state.step if isinstance(what, Name) else state.shared[what]
            given[register] = _at(x, mesh)
        if state.key is not self._key:
            data = jax.random.key_data(state.key)
            self._key_data = {register: _at(data, mesh) for mesh, register in self._keys}
            self._key = state.key
        return given | self._key_data

    def _constant(self, key: Key) -> np.ndarray:
        context, devices = self._where.layout.context, self._where.layout.devices
        m = context.num_microbatches
        if key.name.role is Role.WEIGHT:
            return np.array(m * devices.replicas, np.float32)
        return np.array([key.microbatch, devices.replica(key.place) * m + key.microbatch], np.int32)

    def place_batch(self, leaves: Sequence[ArrayLike]) -> dict[int, Array]:
        """Return a batch's leaves, global or of this process's replicas, on the devices that read them."""
        shared, mesh = self._where.layout.context.shared, self._where.all_devices
        parts = [_parts(x, common, mesh) for x, common in zip(leaves, shared, strict=True)]
        return {
            register: multihost.place(parts[k](replica), sharding) for k, replica, sharding, register in self._batch
        }


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
