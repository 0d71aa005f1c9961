"""The axes of a caller's mesh: ``stage`` and ``data``, by their common names, and those that shard inside a stage.

    mesh (stage 2, data 2, model 2) ──split_mesh──▶ outer mesh (stage 2, data 2) of first devices, and a Submesh

Each stage of a replica is on a group of devices, its submesh. Plans are made for the outer mesh, in which the first
device of a group stands for all of them. Partition specs of a stage's arrays are over the axes of its submesh.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Device, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.schedules.replicas import StageReplicas


T = TypeVar("T")


#: Names of the mesh axes.
STAGE, DATA = "stage", "data"

#: The axis within a stage of replicas that compute each micro-batch together.
REPLICA = "replica"

#: Names for the axis of stages and for the axis of replicas.
COMMON_NAMES = {STAGE: (STAGE, "stages", "pipe", "pipeline", "pp"), DATA: (DATA, "dp", "batch", "replica", "replicas")}

_MEANING = {name: axis for axis, names in COMMON_NAMES.items() for name in names}


def stage_places(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return by stage the places of its devices in ``mesh.devices.flat``."""
    places = np.moveaxis(np.arange(mesh.devices.size).reshape(mesh.devices.shape), mesh.axis_names.index(STAGE), 0)
    return list(map(tuple, places.reshape(len(places), -1).tolist()))


def stage_devices(mesh: Mesh, stage_replicas: StageReplicas, s: int) -> list[Device]:
    """Return the devices of a stage, one for each replica."""
    return list(np.take(mesh.devices, stage_replicas.groups[s], axis=mesh.axis_names.index(STAGE)).flat)


def with_own_names(mesh: T, stage_axis: str | None = None, data_axis: str | None = None) -> T | Mesh:
    """Return a mesh whose axes of stages and replicas are called ``stage`` and ``data``; or anything else unchanged.

    Args:
      stage_axis, data_axis: what the caller calls them; left out: any of the usual names.

    Raises:
      PartitionError: if the mesh has no axis of a name that was given.

    Example:
      >>> import jax
      >>> with_own_names(jax.make_mesh((1, 1, 1), ("dp", "pp", "model"))).axis_names
      ('data', 'stage', 'model')
    """
    if not isinstance(mesh, Mesh):
        return mesh
    given = {axis: name for axis, name in ((STAGE, stage_axis), (DATA, data_axis)) if name is not None}
    for axis, name in given.items():
        if name not in mesh.axis_names:
            raise PartitionError(
                f"PlanOptions({axis}_axis={name!r}), and the mesh has the axes {mesh.axis_names}. Pass the name of one "
                "of these."
            )
    meaning = {name: axis for name, axis in _MEANING.items() if axis not in given and name not in given.values()}
    meaning |= {name: axis for axis, name in given.items()}
    names = [meaning.get(str(name), str(name)) for name in mesh.axis_names]
    if len(set(names)) < len(names) or tuple(names) == mesh.axis_names:
        return mesh
    return Mesh(mesh.devices, tuple(names), axis_types=mesh.axis_types)


def with_joined_replicas(mesh: Mesh) -> Mesh:
    """Return a mesh in which the axis of replicas is one within a stage."""
    if REPLICA in mesh.axis_names:
        raise PartitionError(
            f"PlanOptions(axis_name=...) puts the axis of replicas within a stage, as {REPLICA!r}, and the mesh has an "
            "axis of this name. Give that another name."
        )
    names = [REPLICA if name == DATA else str(name) for name in mesh.axis_names]
    return Mesh(mesh.devices, tuple(names), axis_types=mesh.axis_types)


def own_name(name: str | None) -> str | None:
    """Return the name that is used here for an axis that a caller calls ``name``."""
    return None if name is None else _MEANING.get(name, name)


@dataclass(frozen=True, eq=False)
class Submesh:
    """The axes over which the programs of a stage are sharded; by first device of a group, all its devices."""

    shape: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[Device, tuple[Device, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Devices of a group."""
        return math.prod(self.shape.values())

    def group(self, device: Device) -> tuple[Device, ...]:
        """Return all devices of the group that a device is the first of."""
        return self.groups.get(device, (device,))

    def mesh(self, devices: Sequence[Device]) -> Mesh:
        """Return the groups of some first devices as a mesh, with an axis ``data`` over the groups."""
        every = [d for device in devices for d in self.group(device)]
        grid = np.array(every).reshape(len(devices), *self.shape.values())
        return Mesh(grid, (DATA, *self.shape), axis_types=(AxisType.Auto,) * grid.ndim)

    def abstract(self, groups: int = 1) -> AbstractMesh:
        """Return the mesh of so many groups, whatever their devices."""
        return AbstractMesh(
            (groups, *self.shape.values()), (DATA, *self.shape), axis_types=(AxisType.Auto,) * (1 + len(self.shape))
        )

    def shards(self, spec: P, groups: int = 1) -> int:
        """Return the number of parts that arrays of a spec are in, over so many groups."""
        return count_parts(spec, {DATA: groups, **self.shape})


def axis_names(axes: object) -> tuple[str, ...]:
    """Return the mesh axes that split one dimension, of an entry of a ``PartitionSpec``.

    Example:
      >>> axis_names("model"), axis_names(("fsdp", "model")), axis_names(None)
      (('model',), ('fsdp', 'model'), ())
    """
    return (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, tuple) else ()


def axes_by_dimension(spec: P, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each of an array's dimensions.

    Example:
      >>> axes_by_dimension(P(None, "model"), 3)
      ((), ('model',), ())
    """
    named = [axis_names(axes) for axes in tuple(spec)]
    return (*named, *((),) * (ndim - len(named)))


def count_parts(spec: P, shape: Mapping[str, int]) -> int:
    """Return the number of parts that an array of a spec is in, over mesh axes of some sizes.

    Example:
      >>> count_parts(P(("data", "model"), None), {"data": 2, "model": 4})
      8
    """
    return math.prod(shape[axis] for axes in tuple(spec) for axis in axis_names(axes))


def kept_spec(spec: P, axes: Collection[str]) -> P:
    """Return a spec without the axes that are not among some.

    Example:
      >>> kept_spec(P(("data", "fsdp"), None, "model"), {"fsdp"})
      P('fsdp', None, None)
    """
    return P(*(_kept(entry, axes) for entry in spec))


def _kept(entry: object, axes: Collection[str]) -> object:
    names = [axis for axis in axis_names(entry) if axis in axes]
    if not isinstance(entry, (str, tuple)):  # None, or P.UNCONSTRAINED
        return entry
    return (names[0] if len(names) == 1 else tuple(names)) if names else None


def spec_of(dimensions: Iterable[Sequence[str]]) -> P:
    """Return the spec of the axes that split each dimension.

    Example:
      >>> spec_of([("data", "fsdp"), (), ("model",), ()])
      P(('data', 'fsdp'), None, 'model')
    """
    entries = [(axes[0] if len(axes) == 1 else tuple(axes)) if axes else None for axes in dimensions]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def split_mesh(mesh: Mesh) -> tuple[Mesh, Submesh]:
    """Split a mesh into the mesh of first devices, with the axes ``stage`` and perhaps ``data``, and the submeshes."""
    inner = [axis for axis in mesh.axis_names if axis not in (STAGE, DATA)]
    if not inner:
        return mesh, Submesh()
    outer = [axis for axis in mesh.axis_names if axis in (STAGE, DATA)]
    grid = np.transpose(mesh.devices, [mesh.axis_names.index(axis) for axis in (*outer, *inner)])
    rows = grid.reshape(*(mesh.shape[axis] for axis in outer), -1)
    groups = {row[0]: tuple(row) for row in rows.reshape(-1, rows.shape[-1])}
    return Mesh(rows[..., 0], tuple(outer)), Submesh({axis: mesh.shape[axis] for axis in inner}, groups)


def joined_mesh(mesh: Mesh, submesh: Submesh) -> Mesh:
    """Return all devices of an outer mesh, the axes of the submeshes behind its own."""
    if not submesh.shape:
        return mesh
    every = [d for device in mesh.devices.flat for d in submesh.group(device)]
    grid = np.array(every).reshape(*mesh.devices.shape, *submesh.shape.values())
    return Mesh(grid, (*mesh.axis_names, *submesh.shape))


@dataclass(frozen=True, eq=False)
class Specs:
    """Partition specs of the arrays that a plan names: by tensor of the objective, by leaf of the optimizer state."""

    submesh: Submesh = field(default_factory=Submesh)
    tensors: Mapping[TensorNumber, P] = field(default_factory=dict)
    optimizer: tuple[P, ...] = ()

    def of_tensor(self, t: TensorNumber) -> P:
        """Return the spec of a tensor."""
        return self.tensors.get(t, P())

    def of_leaf(self, k: int) -> P:
        """Return the spec of a leaf of the optimizer state."""
        return self.optimizer[k] if self.optimizer else P()


def side_by_side(spec: P, axis: str) -> P:
    """Return the spec of arrays of all groups along ``axis``, side by side along their first dimension.

    Example:
      >>> side_by_side(P("model"), "data"), side_by_side(P(), "data")
      (P(('data', 'model'),), P('data',))
    """
    first, *rest = spec or (None,)
    axes = (axis, *axis_names(first))
    return P(axes if len(axes) > 1 else axis, *rest)
