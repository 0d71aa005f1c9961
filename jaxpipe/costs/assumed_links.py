"""Links between the devices of a mesh, where the caller of ``partition`` has not passed a network."""

import itertools
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from jaxpipe import _compat
from jaxpipe.costs.link_speed import measure_links
from jaxpipe.costs.network import Network
from jaxpipe.sharding.mesh_axes import stage_places
from jaxpipe.text.progress import tell


#: Bytes of the messages with which a link between processes is measured.
SIZES = (2**16, 2**20, 2**22)


def assumed_links(mesh: Mesh, memory_rate: float, measures: bool) -> Network:
    """Return the links between the devices of a mesh.

    Within a process they are taken to be as fast as memory. Between processes all are taken to be like one pair of
    devices that exchange messages in a step; its latency and bandwidth are measured, which all processes take part in.
    """
    devices = mesh.devices.flatten().tolist()
    crossing = [pair for pair in _neighbors(mesh) if devices[pair[0]].process_index != devices[pair[1]].process_index]
    if not crossing or not measures or _compat.is_absent(devices[0]):
        return Network.uniform(len(devices), memory_rate)
    tell("Measuring the link between processes")
    rates, delays = measure_links([devices[k] for k in crossing[0]], SIZES, repeats=5)
    process = np.array([device.process_index for device in devices])
    crosses = process[:, None] != process
    bandwidth: np.ndarray = np.where(crosses, rates[0, 1], memory_rate)
    return Network(bandwidth, np.where(crosses, delays[0, 1], 0.0))  # type: ignore[arg-type]


def slowest_used(links: Network, mesh: Mesh) -> Network:
    """Return a network all of whose links are like the slowest that a step uses, as a mesh that stays needs it."""
    pairs = list(_neighbors(mesh))
    bandwidth = min((links.bandwidth[pair] for pair in pairs), default=1.0)
    latency = max((links.latency[pair] for pair in pairs), default=0.0)
    return Network.uniform(links.num_devices, float(bandwidth), float(latency))


def _neighbors(mesh: Mesh) -> Iterator[tuple[int, int]]:
    """Yield the pairs of devices that exchange messages: of neighboring stages, and of the replicas of a stage."""
    rows = stage_places(mesh)
    for row, following in itertools.pairwise(rows):
        yield from zip(row, following, strict=True)
    for row in rows:
        yield from itertools.combinations(row, 2)
