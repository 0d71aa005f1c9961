"""Variables of all stages, gathered on the host of every process, one stage at a time."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import Array
from jaxpipe.runtime.spmd.buffer_layout import Layout
from jaxpipe.runtime.uint32_words import from_words, to_words
from jaxpipe.sharding.mesh_axes import DATA, STAGE


T = TypeVar("T")


def stage_arrays(
    mesh: Mesh,
    layout: Layout,
    owners: Sequence[int | None],
    buffers: Sequence[Array],
    shared: Iterable[T] = (),
    keep: bool = True,
) -> list[np.ndarray | T]:
    """Return arrays in the model's order, as host arrays in memory of their own. Every process calls it.

    Buffers are ``[devices, length]``, or ``[devices, replicas, length]``, which gives arrays ``[replicas, ...]``. Those
    without an owner come from ``shared``. A process that does not keep them gets none.
    """
    by_stage = []
    for s in range(mesh.shape[STAGE]):
        rows = [device_row(mesh, x, s) for x in buffers]
        if not keep:
            continue
        if rows and rows[0].ndim == 2:
            copies = [layout.unpack(s, [x[r] for x in rows]) for r in range(len(rows[0]))]
            by_stage.append(map(np.stack, zip(*copies, strict=True)))
        else:
            by_stage.append(iter(layout.unpack(s, rows)))
    if not keep:
        return []
    rest = iter(shared)
    return [next(rest) if owner is None else next(by_stage[owner]) for owner in owners]


def device_row(mesh: Mesh, x: Array, s: int) -> np.ndarray:
    """The row of a buffer on one device along the stage axis, copied to the host of every process."""
    if not x.is_fully_addressable:
        spec = P(STAGE, DATA) if x.ndim == 3 else P(STAGE)
        return np.array(_spread(mesh, spec)(x, np.int32(s)))
    row = np.empty(x.shape[1:], x.dtype)
    for shard in x.addressable_shards:
        if shard.index[0].indices(x.shape[0])[0] == s:
            row[shard.index[1:]] = shard.data[0]
    return row


@functools.lru_cache(maxsize=8)
def _spread(mesh: Mesh, spec: P) -> Callable[[Array, np.int32], Array]:
    """``(buffer, device along the stage axis) -> row``, from the devices that hold it to all, bit for bit."""

    def send(x: Array, s: Array) -> Array:
        words = to_words(x)
        words = lax.psum(jnp.where(lax.axis_index(STAGE) == s, words, jnp.zeros_like(words)), STAGE)
        row = from_words(words, jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        return lax.all_gather(row, DATA, tiled=True) if len(spec) > 1 else row

    return jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(spec, P()), out_specs=P(), check_vma=False))
