"""A training state as arrays of the stages: parameters, state and optimizer state are leaves on their stage's devices.

    TrainState, batch ──Loader──▶ inputs of a list
    outputs of a list ──StateLayout.state_of──▶ TrainState

What every stage needs (shared optimizer state, the random key, numbers of steps) is one array on all devices.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

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


@dataclass(frozen=True, eq=False)
class StateLayout:
    """Keys of the arrays of a training state in a list."""

    layout: Layout
    planned: ExecutablePlan

    @property
    def by_stage(self) -> PartitionedUpdate:
        """The optimizer."""
        return self.planned.update.by_stage

    @cached_property
    def keys(self) -> dict[str, tuple[Key, ...]]:
        """By field of ``TrainState``, the keys of the arrays that belong to a stage."""
        objective, placement = self.layout.context.objective, self.planned.stage_placement

        def keys(role: Role, numbers: Iterable[int], stages: Iterable[int | None]) -> tuple[Key, ...]:
            pairs = zip(numbers, stages, strict=True)
            return tuple(
                Key(self.layout.devices.place(self.layout.stages[s]), Name(role, k)) for k, s in pairs if s is not None
            )

        parameters = keys(Role.PARAMETER, objective.parameters, placement.parameters)
        return {
            "parameters": parameters,
            "variables": keys(Role.STATE, objective.state, placement.state),
            "optimizer": keys(Role.OPTIMIZER, range(len(self.by_stage.state_stage)), self.by_stage.state_stage),
            "residual": tuple(
                key._replace(name=key.name._replace(role=Role.RESIDUAL))
                for key in map(parameters.__getitem__, self.residuals)
            ),
        }

    @cached_property
    def avals(self) -> dict[str, list[Shaped]]:
        """The shapes of the same arrays."""
        model, owned = self.planned.model, zip(self.by_stage.state_avals, self.by_stage.state_stage, strict=True)
        trained = [model.parameters[k].aval for k in self.residuals]
        counts = [len(self.layout.devices.members(key.place.stage)) for key in self.keys["residual"]]
        return {
            "parameters": [v.aval for v in model.parameters],
            "variables": [v.aval for v in model.state],
            "optimizer": [aval for aval, owner in owned if owner is not None],
            "residual": [
                jax.ShapeDtypeStruct((n, *aval.shape), jnp.promote_types(aval.dtype, jnp.float32))
                for n, aval in zip(counts, trained, strict=True)
            ],
        }

    @cached_property
    def residuals(self) -> tuple[int, ...]:
        """The parameters, by position, that have residuals of a block-sparse exchange."""
        objective = self.planned.program.objective
        has_any = self.planned.update.exchange is not None
        return tuple(k for k, t in enumerate(objective.parameters) if has_any and t not in objective.frozen)

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
        return joined_mesh(self.planned.mesh, self.layout.devices.submesh)

    @property
    def everywhere(self) -> NamedSharding:
        """Sharding of an array that all devices have."""
        return NamedSharding(self.all_devices, P())

    @cached_property
    def abstract_state(self) -> TrainState:
        """Return the shapes of a training state, where its devices have them."""

        def placed(aval: Shaped, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

        groups: dict[str, PyTree] = {
            part: tuple(placed(aval, self.sharding(key)) for key, aval in zip(keys, self.avals[part], strict=True))
            for part, keys in self.keys.items()
        }
        groups["shared"] = tuple(placed(self.by_stage.state_avals[k], self.everywhere) for k in self.shared)
        step = placed(jax.ShapeDtypeStruct((), np.int32), self.everywhere)
        return TrainState(
            **groups,
            key=cast(Array, placed(self.layout.context.key, self.everywhere)),
            step=cast(Array, step),
            skipped=cast(Array, step),
            plan=self.planned.plan.identity,
        )

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of the arrays of a training state, by field."""
        model, by_stage = self.planned.model, self.by_stage
        flat, _ = jax.tree_util.tree_flatten_with_path(by_stage.state_shape)
        paths = [jax.tree_util.keystr(flat[leaf][0]) for leaf in by_stage.state_stacks.leaf_of]
        return {
            "parameters": [v.name for v in model.parameters],
            "variables": [v.name for v in model.state],
            "optimizer": [path for path, s in zip(paths, by_stage.state_stage, strict=True) if s is not None],
            "shared": [paths[k] for k in self.shared],
            "residual": [model.parameters[k].name for k in self.residuals],
        }

    def state_of(self, old: TrainState, outputs: dict[Key, Array | None]) -> TrainState:
        """Return the state after a step, of the outputs of its list; arrays elsewhere stay as they are."""

        new: dict[str, PyTree] = {}
        for field, keys in self.keys.items():
            pairs = zip(map(outputs.get, keys), getattr(old, field), strict=True)
            new[field] = tuple(before if after is None else after for after, before in pairs)
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
        leaves = ((field, n, key) for field, held in where.keys.items() for n, key in enumerate(held))
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
