"""``Node``: the devices of one machine and the links inside it; nominal rates of common links."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxpipe.errors import PartitionError
from jaxpipe.text.units import whole_number


# Bytes per second in one direction. These are the rates that standards and data sheets state; what a program sees is
# lower, and ``Network.measure`` finds it.

#: All NVLinks of one GPU together, through an NVSwitch: 6, 12 and 18 links of 25 GB/s each way. NVIDIA's data sheets of
#: V100, A100 and H100 give both directions together: 300, 600 and 900 GB/s.
NVLINK_V100, NVLINK_A100, NVLINK_H100 = 150e9, 300e9, 450e9

#: 16 lanes of 8, 16 and 32 GT/s, of which 128 of 130 bits are data (PCI Express Base Specification 3.0, 4.0, 5.0).
PCIE_3_X16, PCIE_4_X16, PCIE_5_X16 = (16 * rate / 8 * 128 / 130 for rate in (8e9, 16e9, 32e9))

#: IEEE 802.3 data rates of 10, 25 and 100 Gb/s.
ETHERNET_10G, ETHERNET_25G, ETHERNET_100G = 1.25e9, 3.125e9, 12.5e9

#: InfiniBand ports of four lanes: 200 and 400 Gb/s (InfiniBand Trade Association's roadmap).
INFINIBAND_HDR, INFINIBAND_NDR = 25e9, 50e9


@dataclass(frozen=True)
class Node:
    """Devices that share a machine: a path between any two of them, and direct links between some.

    Two devices use the faster of their direct link and the shared path, not both. Paths do not slow each other down.

    Attributes:
      devices: how many there are.
      bandwidth_bytes_per_second: between any two, through PCIe or an NVLink switch; 0 if only direct links join them.
      latency_seconds: of every path inside the node.
      links: direct links, ``{(device, device): bytes per second}``, devices numbered from 0 inside the node.
      speed: how fast the devices compute, relative to the one that was profiled: one number, or one for each.
      memory_bytes: what a device holds, a number or a text such as ``"80GB"``: one for all, or one for each.
      host_bandwidth_bytes_per_second: between each device and the memory of this machine, as in ``Network``.
      name: for tables and pictures; ``Network.from_nodes`` numbers nodes that have none, or one in common.

    Raises:
      PartitionError: if a number is negative or not finite, a link is not between two of the devices, or ``speed`` or
        ``memory_bytes`` has not one entry for each device.

    Example:
      >>> node = Node(3, PCIE_3_X16, links={(0, 1): 2 * 25e9})
      >>> (node.bandwidth / 1e9).round(1).tolist()
      [[0.0, 50.0, 15.8], [50.0, 0.0, 15.8], [15.8, 15.8, 0.0]]
    """

    devices: int
    bandwidth_bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    speed: float | Sequence[float] = 1.0
    memory_bytes: float | Sequence[float] = math.inf
    name: str = ""
    host_bandwidth_bytes_per_second: float = PCIE_3_X16

    def __post_init__(self) -> None:
        node = f"Node {self.name!r}" if self.name else "A node"
        if whole_number(self.devices, "devices", PartitionError) < 1:
            raise PartitionError(f"{node} has devices={self.devices}; it needs at least one.")
        set_field = object.__setattr__
        for name in ("bandwidth_bytes_per_second", "latency_seconds", "host_bandwidth_bytes_per_second"):
            set_field(self, name, _rate(getattr(self, name), f"{node} has {name}"))
        links = {}
        for pair, bandwidth in self.links.items():
            ends = tuple(sorted(pair))
            if len(ends) != 2 or not 0 <= ends[0] < ends[1] < self.devices:
                raise PartitionError(
                    f"{node} has a link {pair}; a link is between two different devices of 0..{self.devices - 1}."
                )
            if ends in links:
                raise PartitionError(f"{node} has the link {ends} twice; give it once, with the rate of one direction.")
            links[ends] = _rate(bandwidth, f"{node} has a link {pair} with the bandwidth")
        set_field(self, "links", links)
        for name in ("speed", "memory_bytes"):
            shape = np.shape(getattr(self, name))
            if shape not in ((), (self.devices,)):
                raise PartitionError(
                    f"{node} has {name} of the shape {shape} for {self.devices} devices; give one number, or one for "
                    "each device."
                )

    @property
    def bandwidth(self) -> np.ndarray:
        """Bytes per second between any two devices, ``[devices, devices]``, zero on the diagonal."""
        matrix = np.full((self.devices, self.devices), self.bandwidth_bytes_per_second)
        for (a, b), bandwidth in self.links.items():
            matrix[a, b] = matrix[b, a] = max(bandwidth, matrix[a, b])
        np.fill_diagonal(matrix, 0.0)
        return matrix


def _rate(value: float, what: str) -> float:
    if not 0 <= value < math.inf:
        raise PartitionError(f"{what} {value}; it must be a finite number that is not negative.")
    return float(value)
