"""Meshes of the first of the eight simulated devices."""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def named_mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """Return a mesh with an axis of each given size, the first one outermost."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())]).reshape(*sizes.values())
    return Mesh(devices, tuple(sizes), axis_types=(kind,) * len(sizes))


def mesh_of(stages: int, replicas: int | None = None) -> Mesh:
    """Return a mesh of so many stages, and of replicas of them."""
    return named_mesh(stage=stages) if replicas is None else named_mesh(data=replicas, stage=stages)
