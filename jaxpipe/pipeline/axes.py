"""The axes of a caller's mesh, by their common names."""

from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpipe.schedules.teams import Teams


#: Names of the mesh axes.
STAGE, DATA = "stage", "data"

#: Names for the axis of stages and for the axis of replicas.
COMMON_NAMES = {
    STAGE: (STAGE, "stages", "pipe", "pipeline", "pp"),
    DATA: (DATA, "dp", "batch", "replica", "replicas"),
}

_MEANING = {name: axis for axis, names in COMMON_NAMES.items() for name in names}


def stage_devices(mesh: Mesh, teams: Teams, s: int) -> list[Any]:
    """Return the devices of a stage, one for each replica."""
    return list(np.take(mesh.devices, teams.groups[s], axis=mesh.axis_names.index(STAGE)).flat)


def with_own_names(mesh: Any) -> Any:
    """Return a mesh with its axes called ``stage`` and ``data``; or anything else unchanged.

    Example:
      >>> import jax
      >>> with_own_names(jax.make_mesh((1, 1), ("dp", "pp"))).axis_names
      ('data', 'stage')
    """
    if not isinstance(mesh, Mesh):
        return mesh
    names = [_MEANING.get(str(name)) for name in mesh.axis_names]
    if None in names or len(set(names)) < len(names) or tuple(names) == mesh.axis_names:
        return mesh
    return Mesh(mesh.devices, tuple(map(str, names)), axis_types=mesh.axis_types)


def own_name(name: str | None) -> str | None:
    """Return the name that is used here for an axis that a caller calls ``name``."""
    return None if name is None else _MEANING.get(name, name)
