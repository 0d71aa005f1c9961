"""Batches as arrays on devices: the rows that each process passes, and the devices that take them."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import multihost
from jaxpipe.array_types import Array, ArrayLike, PyTree, Shaped
from jaxpipe.errors import BatchError
from jaxpipe.runtime.executable_plan import Batching
from jaxpipe.sharding.mesh_axes import DATA, STAGE
from jaxpipe.text.units import whole_number


def own_replicas(mesh: Mesh) -> list[int]:
    """The replicas of which this process has a stage, in order."""
    if DATA not in mesh.axis_names:
        return [0]
    replicas = np.moveaxis(mesh.devices, mesh.axis_names.index(STAGE), -1)
    return [r for r, devices in enumerate(replicas) if multihost.mine(devices.flat)]


def local_rows(mesh: Mesh, size: int) -> np.ndarray:
    """Return which rows of a batch of so many this process passes: those of its replicas."""
    size, replicas = whole_number(size, "size", BatchError), mesh.shape.get(DATA, 1)
    if size % replicas:
        raise BatchError(f"size={size} rows cannot be split over {replicas} replicas; it must be a multiple of that.")
    return np.arange(size).reshape(replicas, -1)[own_replicas(mesh)].reshape(-1)


def whole_shapes(mesh: Mesh, shapes: PyTree, batch: PyTree) -> PyTree:
    """The shapes of the whole batch, of which this process passes its rows, or a global array.

    Raises:
      BatchError: if it holds something else than arrays, or rows that cannot be split.
    """
    local_replicas, replicas = len(own_replicas(mesh)), mesh.shape.get(DATA, 1)

    def whole(path: jax.tree_util.KeyPath, shape: jax.ShapeDtypeStruct, x: object) -> jax.ShapeDtypeStruct:
        if not isinstance(x, jax.Array | np.ndarray | np.generic) or isinstance(x, np.ma.MaskedArray):
            raise BatchError(
                f"batch{jax.tree_util.keystr(path)} is a {type(x).__name__}; programs run on arrays of JAX or NumPy, "
                "not on shapes. Pass numpy.asarray(values), of a masked array array.filled(0), with its mask beside it."
            )
        if local_replicas == replicas or not shape.shape or _is_global(x):
            return shape
        if shape.shape[0] % local_replicas:
            raise BatchError(
                f"batch{jax.tree_util.keystr(path)} has {shape.shape[0]} rows, for {local_replicas} replica(s) of this "
                f"process; it must be a multiple of {local_replicas}."
            )
        return jax.ShapeDtypeStruct((shape.shape[0] // local_replicas * replicas, *shape.shape[1:]), shape.dtype)

    return jax.tree_util.tree_map_with_path(whole, shapes, batch)


def place_batch(mesh: Mesh, leaves: Sequence[ArrayLike], shapes: Sequence[Shaped], batching: Batching) -> list[Array]:
    """A batch's leaves on the devices."""
    return [
        _place(x, shape.shape, NamedSharding(mesh, spec))
        for x, shape, spec in zip(leaves, shapes, batching.specs(), strict=True)
    ]


def _place(x: ArrayLike, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    if sharding.is_fully_addressable or _is_global(x):
        return jax.device_put(x, sharding)
    if sharding.spec == P():
        return multihost.place(x, sharding)
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        data = jax.make_array_from_process_local_data(sharding, np.asarray(data), (*shape, *data.shape[x.ndim :]))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.make_array_from_process_local_data(sharding, np.asarray(x), shape)


def _is_global(x: object) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable
