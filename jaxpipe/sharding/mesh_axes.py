"""The axes of a caller's mesh, by their common names."""

from typing import TypeVar

import numpy as np
from jax.sharding import Mesh

from jaxpipe.array_types import Device
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
