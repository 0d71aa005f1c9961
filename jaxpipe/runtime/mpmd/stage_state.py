"""A training state as arrays of the stages: parameters, state and optimizer state are leaves on their stage's devices.

    TrainState, batch ──Loader──▶ inputs of a list
    outputs of a list ──StateLayout.state_of──▶ TrainState

What every stage needs (shared optimizer state, the random key, numbers of steps) is one array on all devices.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat, multihost
from jaxpipe.runtime import shard_batch
from jaxpipe.runtime.mpmd.call_list import CallList
from jaxpipe.runtime.mpmd.instructions import Key, Place
from jaxpipe.runtime.mpmd.stage_placement import Layout
from jaxpipe.runtime.mpmd.stage_work import Name, Role
from jaxpipe.runtime.mpmd.update_work import SKIPPED
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.stages import Placement
from jaxpipe.runtime.train_state import TrainState
from jaxpipe.sharding.mesh_axes import DATA
from jaxpipe.sharding.partition_specs import side_by_side
from jaxpipe.sharding.submesh import joined_mesh


@dataclass(frozen=True, eq=False)
class StateLayout:
    """Keys of the arrays of a training state in a list.

    Attributes:
      layout: where stages are.
      placement: the stage of each variable.
      by_stage: the optimizer.
      mesh: the first devices of all members.
      residuals: the parameters that have residuals of a block-sparse exchange, by position.
    """

    layout: Layout
    placement: Placement
    by_stage: PartitionedUpdate
    mesh: Mesh
    residuals: tuple[int, ...] = ()

    def place(self, s: int) -> Place:
        """A stage, with all its members."""
        return Place(s, 0 if len(self.layout.devices.members(s)) == 1 else -1)

    def parameter(self, k: int) -> Key:
        """The key of parameter ``k``."""
        name = Name(Role.PARAMETER, self.layout.context.objective.parameters[k])
        return Key(self.place(self.placement.parameters[k]), name)

    def variable(self, k: int) -> Key:
        """The key of state variable ``k``."""
        name = Name(Role.STATE, self.layout.context.objective.state[k])
        return Key(self.place(self.placement.state[k]), name)

    def residual(self, k: int) -> Key:
        """The key of the residual of parameter ``k``."""
        return self.parameter(k)._replace(
            name=Name(Role.RESIDUAL, self.layout.context.objective.parameters[k]),
        )

    def optimizer(self, k: int) -> Key:
        """The key of leaf ``k`` of the optimizer state, which belongs to a stage."""
        owner = self.by_stage.state_stage[k]
        assert owner is not None
        return Key(self.place(owner), Name(Role.OPTIMIZER, k))

    def held_by(self, s: int) -> tuple[list[Key], ...]:
        """The keys of a stage's parameters, variables, leaves of the optimizer state, and residuals."""
        parameters, variables = self.placement.held_by(s)
        return (
            [self.parameter(k) for k in parameters],
            [self.variable(k) for k in variables],
            [self.optimizer(k) for k in self.owned if self.by_stage.state_stage[k] == s],
            [self.residual(k) for k in self.residuals if self.placement.parameters[k] == s],
        )

    @property
    def owned(self) -> list[int]:
        """The leaves of the optimizer state that belong to a stage."""
        return [k for k, owner in enumerate(self.by_stage.state_stage) if owner is not None]

    @property
    def shared(self) -> list[int]:
        """The leaves of the optimizer state that every stage has."""
        return [k for k, owner in enumerate(self.by_stage.state_stage) if owner is None]

    def sharding(self, key: Key) -> NamedSharding:
        """Sharding of an array of the state."""
        spec = self.layout.context.spec(key.place.stage, key.name)
        if key.name.role is Role.RESIDUAL:
            spec = side_by_side(spec, DATA)
        return NamedSharding(self.layout.devices.mesh(Place(key.place.stage)), spec)

    @property
    def all_devices(self) -> Mesh:
        """The mesh of all devices."""
        return joined_mesh(self.mesh, self.layout.devices.submesh)

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that all devices have."""
        return NamedSharding(self.all_devices, P())

    def state_of(self, old: TrainState, outputs: dict[Key, Any]) -> TrainState:
        """Return the state after a step, of the outputs of its list; arrays elsewhere stay as they are."""

        def new_arrays(keys: Iterable[Key], before: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(x if outputs.get(key) is None else outputs[key] for key, x in zip(keys, before, strict=True))

        new = replace(
            old,
            parameters=new_arrays(map(self.parameter, range(len(old.parameters))), old.parameters),
            variables=new_arrays(map(self.variable, range(len(old.variables))), old.variables),
            optimizer=new_arrays(map(self.optimizer, self.owned), old.optimizer),
            residual=new_arrays(map(self.residual, self.residuals), old.residual),
        )
        shared = tuple(
            self._everywhere(Name(Role.SHARED, k), x, outputs) for k, x in zip(self.shared, old.shared, strict=True)
        )
        step = self._everywhere(Name(Role.STEP), old.step, outputs)
        skipped = self._everywhere(SKIPPED, old.skipped, outputs)
        return replace(new, shared=shared, step=step, skipped=skipped)

    def _everywhere(self, name: Name, old: Any, outputs: dict[Key, Any]) -> Any:
        """A value of all devices, of what the stages have made of it; the old one if they have not."""
        parts: dict[Any, Any] = {}
        for key, x in outputs.items():
            if key.name == name and x is not None:
                parts |= {shard.device: shard.data for shard in x.addressable_shards}
        if not parts:
            return old
        local = multihost.mine(self.all_devices.devices.flatten().tolist())
        return jax.make_array_from_single_device_arrays(old.shape, self.everywhere, [parts[d] for d in local])


@dataclass(frozen=True)
class _Target:
    """Devices of this process at a place, and the sharding of arrays of all replicas there."""

    devices: list[Any]
    sharding: NamedSharding | None


class Loader:
    """The arrays of a training state, and constants, by register of a list."""

    def __init__(self, where: StateLayout, calls: CallList):
        """Find out what goes where."""
        self._where = where
        keys = calls.inputs
        self._leaves: list[tuple[str, int, int]] = []
        fields = {"parameters": where.parameter, "variables": where.variable}
        for name, key_of in fields.items():
            count = len(where.placement.parameters if name == "parameters" else where.placement.state)
            self._leaves += [(name, k, keys[key_of(k)]) for k in range(count) if key_of(k) in keys]
        owned = [(n, where.optimizer(k)) for n, k in enumerate(where.owned)]
        self._leaves += [("optimizer", n, keys[key]) for n, key in owned if key in keys]
        kept = [(n, where.residual(k)) for n, k in enumerate(where.residuals)]
        self._leaves += [("residual", n, keys[key]) for n, key in kept if key in keys]
        positions = {k: n for n, k in enumerate(where.shared)}
        self._common: list[tuple[Any, _Target, int]] = []
        self._keys: list[tuple[_Target, int]] = []
        self._batch: list[tuple[int, int, NamedSharding, int]] = []
        self._constants: dict[int, Any] = {}
        devices = where.layout.devices
        for key, register in keys.items():
            name, mesh = key.name, devices.mesh(key.place)
            sharding = NamedSharding(mesh, P())
            target = _Target(multihost.mine(list(mesh.devices.flat)), sharding if mesh.size > 1 else None)
            if not target.devices:
                continue
            if name.role is Role.SHARED:
                self._common.append((positions[name.number], target, register))
            elif name.role is Role.STEP:
                self._common.append((name, target, register))
            elif name.role is Role.KEY:
                self._keys.append((target, register))
            elif name.role is Role.BATCH:
                self._batch.append((name.number, devices.replica(key.place), sharding, register))
            elif name.role in (Role.INDEX, Role.WEIGHT):
                self._constants[register] = multihost.place(self._constant(key), sharding)
        self._key: Any = None
        self._key_data: dict[int, Any] = {}

    def load(self, state: TrainState) -> dict[int, Any]:
        """Return the arrays of a state, by register."""
        given = dict(self._constants)
        for field, k, register in self._leaves:
            given[register] = getattr(state, field)[k]
        for what, target, register in self._common:
            x = state.skipped if what == SKIPPED else state.step if isinstance(what, Name) else state.shared[what]
            given[register] = _at(x, target)
        if state.key is not self._key:
            data = jax.random.key_data(state.key)
            self._key_data = {register: _at(data, target) for target, register in self._keys}
            self._key = state.key
        return given | self._key_data

    def _constant(self, key: Key) -> Any:
        context, devices = self._where.layout.context, self._where.layout.devices
        m = context.num_microbatches
        if key.name.role is Role.WEIGHT:
            return np.float32(m * devices.replicas)
        return np.array([key.microbatch, devices.replica(key.place) * m + key.microbatch], np.int32)

    def place_batch(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """Return a batch's leaves on the devices of the stages that read them, by register.

        Args:
          leaves: the rows of the replicas of which this process has a stage, or global arrays.
        """
        shared, mesh = self._where.layout.context.shared, self._where.all_devices
        parts = [_parts(x, common, mesh) for x, common in zip(leaves, shared, strict=True)]
        return {
            register: multihost.place(parts[k](replica), sharding) for k, replica, sharding, register in self._batch
        }


def _at(x: Any, target: _Target) -> Any:
    """Return the part of a value of all devices that is at a place."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    local = [shards[d] for d in target.devices]
    if target.sharding is None:
        return local[0]
    return jax.make_array_from_single_device_arrays(x.shape, target.sharding, local)


def _parts(x: Any, shared: bool, mesh: Mesh) -> Callable[[int], Any]:
    """Return a function that gives the part of a leaf for a replica, of which this process has a stage."""
    replicas, local = mesh.shape.get(DATA, 1), shard_batch.own_replicas(mesh)
    x = _compat.in_default_layout(x)
    if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1:
        if not x.is_fully_replicated:
            x = jax.device_put(x, NamedSharding(mesh, P() if shared or replicas == 1 else P(DATA)))
            by_device = {shard.device: shard.data for shard in x.addressable_shards}
            rows = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0) if replicas > 1 else mesh.devices[None]
            return lambda r: by_device[multihost.mine(list(rows[r].flat))[0]]
        x, local = x.addressable_data(0), list(range(replicas))
    if shared or len(local) == 1:
        return lambda _: x
    rows = x.shape[0] // len(local)
    return lambda r: x[local.index(r) * rows : (local.index(r) + 1) * rows]
