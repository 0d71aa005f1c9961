"""Sends between devices of one process, and between a device and its host's memory: ``jax.device_put``."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import multihost
from jaxpipe.array_types import Array
from jaxpipe.runtime.mpmd.instructions import Send
from jaxpipe.runtime.mpmd.stage_devices import StageDevices


def send(instruction: Send, devices: StageDevices, specs: Sequence[P]) -> Callable[..., Sequence[Array]] | None:
    """Return what this process does for a message between devices of its own; None if it is not the sender."""
    source, target = devices.of(instruction.source), devices.of(instruction.target)
    if not multihost.mine(source):
        return None
    kind = None
    if source == target:  # between the device's memory and its host's
        kind = "pinned_host" if instruction.to_host else "device"
    if len(target) > 1:
        mesh = devices.mesh(instruction.target)
        shardings = tuple(NamedSharding(mesh, specs[k], memory_kind=kind) for k in instruction.writes)
        if len(multihost.mine(target)) == len(target):
            return lambda *arrays: jax.device_put(arrays, shardings)
        return lambda *arrays: [_moved(x, to) for x, to in zip(arrays, shardings, strict=True)]
    # A device as the target takes half of the time that a sharding takes.
    device = devices.at(instruction.target)
    to = device if kind is None else SingleDeviceSharding(device, memory_kind=kind)
    if len(instruction.reads) == 1:
        return lambda x: (jax.device_put(x, to),)
    return lambda *arrays: jax.device_put(arrays, to)


def _moved(x: Array, to: NamedSharding) -> Array:
    """Copy this process's parts of an array to the devices at their places in another mesh."""
    assert isinstance(x.sharding, NamedSharding)
    source, goal = x.sharding.mesh, to.mesh
    assert isinstance(source, Mesh) and isinstance(goal, Mesh)
    target = dict(zip(source.devices.flat, goal.devices.flat, strict=True))
    local = [
        jax.device_put(shard.data, SingleDeviceSharding(target[shard.device], memory_kind=to.memory_kind))
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, to, local)
