"""``Network``: devices and the links between them."""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jaxpipe.array_types import Device
from jaxpipe.costs.link_speed import SIZES, measure_host_links, measure_links, measure_speeds, memory_limits
from jaxpipe.costs.topology import PCIE_3_X16, Node
from jaxpipe.errors import PartitionError
from jaxpipe.targets.known import target_of
from jaxpipe.text.checked_json import LARGEST, read_json
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.short_names import number_ranges
from jaxpipe.text.units import bytes_text, parse_bytes, whole_number
from jaxpipe.text.value_text import shown


Numbers = TypeVar("Numbers", float, np.ndarray)

#: A link of fewer bytes a second, or a device with fewer bytes of memory, is a number in another unit.
SLOWEST, SMALLEST = 1e6, 1e6

#: The largest such number that is one of gigabytes; a larger one is of megabytes.
MOST_GIGABYTES = 5e3

#: A matrix of more devices does not fit into 120 columns.
MOST_COLUMNS = 16


class Link(NamedTuple):
    """The slowest link within a group of devices: bytes per second, and seconds."""

    bandwidth: float
    latency: float

    def all_reduce_seconds(self, count: Numbers, devices: int) -> Numbers:
        """Return the seconds of an all-reduce of so many bytes on each device, around a ring."""
        if not self.bandwidth:
            return math.inf + 0 * count
        return 2 * (devices - 1) * (count / devices / self.bandwidth + self.latency)


@dataclass(frozen=True)
class Network(Printed):
    """The speed and memory of devices, and the bandwidth and latency of their links.

    Sending ``n`` bytes over a link takes ``latency + n / bandwidth`` seconds. Links are used in both directions at
    that rate; a bandwidth of 0 means that there is no link.

    Attributes:
      bandwidth_bytes_per_second: ``[devices, devices]``, symmetric; the diagonal is not used.
      latency_seconds: the same, or one number for all links.
      speed: how fast each device computes, relative to the one that was profiled, or one number for all; 1 if left out.
      memory_bytes: how much each device holds, a number or a text such as ``"80GB"``, or one for all; unlimited if left
        out.
      names: of the devices.
      host_bandwidth_bytes_per_second: between each device and the memory of its host, in each direction while the
        other is in use; 16 lanes of PCIe 3.0 if left out, the slowest link that GPUs for training have.
      host_latency_seconds: the same, or one number for all.

    Raises:
      PartitionError: if a matrix is not square, not symmetric, negative or not a number, or a device has no link.

    Example:
      >>> network = Network([[0, 50e9, 12e9], [50e9, 0, 12e9], [12e9, 12e9, 0]])
      >>> network.num_devices, network.seconds(0, 1, 25e9)
      (3, 0.5)
    """

    bandwidth_bytes_per_second: tuple[tuple[float, ...], ...]
    latency_seconds: Any = 0.0
    speed: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    host_bandwidth_bytes_per_second: tuple[float, ...] = ()
    host_latency_seconds: Any = 0.0

    def __post_init__(self) -> None:
        bandwidth = _matrix(self.bandwidth_bytes_per_second, "bandwidth_bytes_per_second")
        count = len(bandwidth)
        latency = _matrix(self.latency_seconds, "latency_seconds", count)
        if latency.shape != bandwidth.shape:
            raise PartitionError(f"latency_seconds is for {len(latency)} devices, the bandwidth for {count}.")
        _check_linked(bandwidth, "device")
        set_field = object.__setattr__
        set_field(self, "bandwidth_bytes_per_second", tuple(map(tuple, bandwidth.tolist())))
        set_field(self, "latency_seconds", tuple(map(tuple, latency.tolist())))
        rates = ("speed", 1.0), ("memory_bytes", math.inf), ("host_bandwidth_bytes_per_second", PCIE_3_X16)
        for field, default in rates:
            given = getattr(self, field)
            each = (given,) * count if np.ndim(given) == 0 else given
            numbers = (parse_bytes(v, field) if isinstance(v, str) else v for v in each)
            values = tuple(map(float, numbers)) or (default,) * count
            if len(values) != count or not all(v >= 1 / LARGEST and (v < LARGEST or v == default) for v in values):
                raise PartitionError(
                    f"{field} is {values}; it needs a positive number for each of {count} devices, between 2**-63 and "
                    "2**63."
                )
            set_field(self, field, values)
        given = np.array(self.host_latency_seconds, np.float64)
        if given.shape not in ((), (count,)) or not np.all((given >= 0) & (given < LARGEST)):
            raise PartitionError(
                f"host_latency_seconds is {self.host_latency_seconds}; it needs a finite number that is not negative "
                f"for each of {count} devices, or one for all."
            )
        set_field(self, "host_latency_seconds", tuple(np.broadcast_to(given, count).tolist()))
        names = tuple(map(str, self.names)) or tuple(f"device {k}" for k in range(count))
        if len(names) != count:
            raise PartitionError(f"names has {len(names)} entries for {count} devices.")
        set_field(self, "names", names)

    @property
    def num_devices(self) -> int:
        """Return how many devices there are."""
        return len(self.bandwidth_bytes_per_second)

    @cached_property
    def bandwidth(self) -> np.ndarray:
        """The bandwidths as an array, infinite on the diagonal."""
        return _with_diagonal(self.bandwidth_bytes_per_second, np.inf)

    @cached_property
    def latency(self) -> np.ndarray:
        """The latencies as an array."""
        return _with_diagonal(self.latency_seconds, 0.0)

    @cached_property
    def fastest_link(self) -> float:
        """The bandwidth of the fastest link; 1 without links."""
        return float(self.bandwidth[np.isfinite(self.bandwidth)].max(initial=1.0))

    @property
    def is_uniform(self) -> bool:
        """Return whether all links are alike."""
        off = ~np.eye(self.num_devices, dtype=bool)
        return all(len(np.unique(matrix[off])) <= 1 for matrix in (self.bandwidth, self.latency))

    def slowest_link(self, devices: Sequence[int], others: Sequence[int] | None = None) -> Link:
        """Return the least bandwidth and the largest latency between some devices and others, or any two of them."""
        between = np.ix_(devices, devices if others is None else others)
        return Link(float(self.bandwidth[between].min()), float(self.latency[between].max()))

    def seconds(self, source: int, target: int, count: float) -> float:
        """Time to send ``count`` bytes from one device to another; infinite where there is no link."""
        bandwidth = self.bandwidth[source, target]
        return float(self.latency[source, target] + count / bandwidth) if bandwidth else math.inf

    @classmethod
    def uniform(cls, num_devices: int, bandwidth_bytes_per_second: float, latency_seconds: float = 0.0) -> "Network":
        """Equal links between all devices.

        Example:
          >>> Network.uniform(2, 1e9).bandwidth_bytes_per_second
          ((0.0, 1000000000.0), (1000000000.0, 0.0))
        """
        num_devices = whole_number(num_devices, "num_devices", PartitionError)
        if num_devices < 1:
            raise PartitionError(f"num_devices={num_devices}; a network has at least one device.")
        return cls(np.full((num_devices, num_devices), bandwidth_bytes_per_second), latency_seconds)  # type: ignore[arg-type]

    @classmethod
    def from_nodes(
        cls, nodes: Sequence[Node], bandwidth_bytes_per_second: ArrayLike = 0.0, latency_seconds: ArrayLike = 0.0
    ) -> "Network":
        """The devices of one or several machines, numbered node by node.

        Args:
          nodes: each with its devices and the links inside it.
          bandwidth_bytes_per_second: between two devices of different nodes: one number (all nodes on one switch), or a
            symmetric matrix ``[nodes, nodes]`` whose diagonal is not used; 0 means that there is no link.
          latency_seconds: the same.

        Raises:
          PartitionError: if there is no node, a matrix is not symmetric, negative, or not of the nodes' number, or a
            node or a device has no link.

        Example:
          Two machines, each with two pairs of GPUs; and sixteen GPUs of three kinds.

          >>> from jaxpipe.costs.topology import ETHERNET_10G, INFINIBAND_HDR, NVLINK_A100, PCIE_3_X16, PCIE_4_X16
          >>> pairs = Node(4, PCIE_3_X16, latency_seconds=5e-6, links={(0, 1): 50e9, (2, 3): 50e9})
          >>> network = Network.from_nodes([pairs, pairs], ETHERNET_10G, latency_seconds=30e-6)
          >>> (network.bandwidth[0, 1:] / 1e9).round(2).tolist()
          [50.0, 15.75, 15.75, 1.25, 1.25, 1.25, 1.25]
          >>> fast = Node(8, NVLINK_A100, speed=2.5, memory_bytes=80e9, name="a100")
          >>> slow = Node(4, PCIE_4_X16, speed=(1, 1, 0.5, 0.5), memory_bytes=24e9)
          >>> between = [[0, INFINIBAND_HDR, 1.25e9], [INFINIBAND_HDR, 0, 1.25e9], [1.25e9, 1.25e9, 0]]
          >>> cluster = Network.from_nodes([fast, slow, slow], between)
          >>> cluster.num_devices, cluster.names[7], cluster.names[8], cluster.speed[7:11]
          (16, 'a100/7', 'node 1/0', (2.5, 1.0, 1.0, 0.5))
        """
        if not nodes:
            raise PartitionError("nodes is empty; a network has at least one device.")
        for k, node in enumerate(nodes):
            if not isinstance(node, Node):
                raise PartitionError(
                    f"nodes[{k}] is {shown(node)}; it must be a jaxpipe.Node, such as "
                    "Node(4, bandwidth_bytes_per_second=50e9) for four devices."
                )
        between = []
        for value, name in ((bandwidth_bytes_per_second, "bandwidth"), (latency_seconds, "latency")):
            matrix = _matrix(value, f"{name} between nodes", len(nodes))
            if len(matrix) != len(nodes):
                raise PartitionError(f"The {name} between nodes is for {len(matrix)} nodes; there are {len(nodes)}.")
            between.append(matrix)
        _check_linked(between[0], "node")
        owner = np.repeat(np.arange(len(nodes)), [node.devices for node in nodes])
        bandwidth, latency = (matrix[np.ix_(owner, owner)] for matrix in between)
        given = [node.name for node in nodes]
        names = []
        for k, node in enumerate(nodes):
            inside = np.ix_(owner == k, owner == k)
            bandwidth[inside] = node.bandwidth
            latency[inside] = node.latency_seconds
            name = node.name if node.name and given.count(node.name) == 1 else f"{node.name or 'node'} {k}"
            names += [f"{name}/{d}" for d in range(node.devices)]
        of_devices = {
            field: np.concatenate([np.broadcast_to(np.array(getattr(x, field), object), x.devices) for x in nodes])
            for field in ("speed", "memory_bytes", "host_bandwidth_bytes_per_second")
        }
        return cls(bandwidth, latency, names=tuple(names), **of_devices)  # type: ignore[arg-type]

    @classmethod
    def measure(
        cls,
        devices: Mesh | Sequence[Device] | None = None,
        *,
        sizes: Sequence[int] = SIZES,
        repeats: int = 5,
        speed: bool = False,
    ) -> "Network":
        """The network between real devices: every pair exchanges messages with ``jax.lax.ppermute``.

        Latency and bandwidth of a link are fitted to the fastest run of each size, compilation and first run excluded.
        Links to the host are measured too, all devices and both directions at once, unless devices are CPUs. In
        several processes all must call it, and all get the same network. Simulated CPU devices share the machine's
        memory and cores, and their links mean little.

        Args:
          devices: a mesh, or a sequence of devices; all of ``jax.devices()`` if left out.
          sizes: of the messages, in bytes, two or more.
          repeats: runs of each size.
          speed: whether to compare how fast the devices multiply matrices; else all count as equal.

        Raises:
          PartitionError: if there are fewer than two sizes, or a device occurs twice.

        Warns:
          UserWarning: with the numbers, if a link's time does not follow latency + bytes / bandwidth.

        Example:
          >>> import jax
          >>> Network.measure(jax.devices()[:1]).num_devices
          1
        """
        if devices is None:
            devices = jax.devices()
        chosen = list(devices.devices.flat if isinstance(devices, Mesh) else devices)
        bandwidth, latency = measure_links(chosen, sizes, repeats)
        host: dict[str, tuple[float, ...]] = {}
        if not any(target_of(device).is_host for device in chosen):
            rates, delays = measure_host_links(chosen, sizes, repeats)
            host = {"host_bandwidth_bytes_per_second": rates, "host_latency_seconds": delays}
        return cls(
            bandwidth,  # type: ignore[arg-type]
            latency,
            speed=measure_speeds(chosen, repeats) if speed else (),
            memory_bytes=memory_limits(chosen),
            names=tuple(f"{device.platform}:{device.id}" for device in chosen),
            **host,
        )

    def _printed(self) -> list[PlainTable | str]:
        return [_link_table(self) if self.num_devices <= MOST_COLUMNS else _kinds_table(self)]

    def to_json(self) -> str:
        """The network as JSON, one device on a line."""
        columns = {
            "name": self.names,
            "speed": self.speed,
            "memory_bytes": [None if size == math.inf else size for size in self.memory_bytes],
            "host_bandwidth_bytes_per_second": self.host_bandwidth_bytes_per_second,
            "host_latency_seconds": self.host_latency_seconds,
        }
        parts = {
            "devices": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            "bandwidth_bytes_per_second": self.bandwidth_bytes_per_second,
            "latency_seconds": self.latency_seconds,
        }
        lists = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, part)) + "\n ]" for name, part in parts.items()]
        return "{\n" + ",\n".join(lists) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Network":
        """The network that ``to_json`` has written; ``latency_seconds`` and what a device lacks may be left out.

        Raises:
          PartitionError: naming the line, if it is not JSON; or what is missing or wrong in it.
        """
        return read_json(text, NetworkFile, "The network").network()


@dataclass(frozen=True)
class _Device:
    """A device as JSON has it."""

    name: str | None = None
    speed: float = 1.0
    memory_bytes: float | None = None
    host_bandwidth_bytes_per_second: float = PCIE_3_X16
    host_latency_seconds: float = 0.0


@dataclass(frozen=True)
class NetworkFile:
    """A network as JSON has it."""

    bandwidth_bytes_per_second: tuple[tuple[float, ...], ...]
    latency_seconds: float | tuple[tuple[float, ...], ...] = 0.0
    devices: tuple[_Device, ...] = ()

    def network(self) -> Network:
        """Return the network."""
        return Network(
            self.bandwidth_bytes_per_second,
            self.latency_seconds,
            speed=tuple(device.speed for device in self.devices),
            memory_bytes=tuple(math.inf if (m := device.memory_bytes) is None else m for device in self.devices),
            names=tuple(f"device {k}" if d.name is None else d.name for k, d in enumerate(self.devices)),
            host_bandwidth_bytes_per_second=tuple(device.host_bandwidth_bytes_per_second for device in self.devices),
            host_latency_seconds=tuple(device.host_latency_seconds for device in self.devices) or 0.0,
        )


def check_network_units(network: Network) -> None:
    """Raise ``PartitionError`` if a bandwidth or the memory of a device is none of real devices: its unit is another.

    A network of a partition on paper, whose seconds and bytes have any unit, is not checked.
    """
    links = [rate for row in network.bandwidth_bytes_per_second for rate in row]
    for name, values, least, of in (
        ("bandwidth_bytes_per_second", links, SLOWEST, "a second"),
        ("host_bandwidth_bytes_per_second", network.host_bandwidth_bytes_per_second, SLOWEST, "a second"),
        ("memory_bytes", network.memory_bytes, SMALLEST, "of memory"),
    ):
        small = min((value for value in values if 0 < value < least), default=None)
        if small is not None:
            unit, power = ("gigabytes", 9) if small <= MOST_GIGABYTES else ("megabytes", 6)
            raise PartitionError(
                f"network= has {name}={small:g}, which is {small:g} bytes {of}: too few for training. Did you mean "
                f"{small:g} {unit} {of}? Pass {small:g}e{power}."
            )


def _with_diagonal(rows: Sequence[Sequence[float]], value: float) -> np.ndarray:
    matrix = np.array(rows, np.float64)
    np.fill_diagonal(matrix, value)
    return matrix


def _matrix(values: ArrayLike, name: str, count: int = 0) -> np.ndarray:
    """A checked copy of a matrix, zero on the diagonal; one number stands for all entries of ``[count, count]``."""
    try:
        matrix = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise PartitionError(f"{name} must be a square matrix of numbers; its rows differ or hold others.") from None
    if matrix.ndim == 0 and count:
        matrix = np.full((count, count), float(matrix))
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise PartitionError(f"{name} has the shape {matrix.shape}; it must be a square matrix.")
    np.fill_diagonal(matrix, 0.0)
    for a, b in np.argwhere(~((matrix == 0) | (matrix >= 1 / LARGEST) & (matrix < LARGEST))):
        raise PartitionError(
            f"{name} holds {matrix[a, b]:g} at [{a}][{b}]; every entry must be a finite number that is not negative: "
            "0, or between 2**-63 and 2**63."
        )
    for a, b in np.argwhere(matrix != matrix.T):
        raise PartitionError(
            f"{name} is not symmetric: [{a}][{b}] is {matrix[a, b]:g}, [{b}][{a}] is {matrix[b, a]:g}. A pipeline "
            "sends both ways over a link; give the slower rate twice."
        )
    return matrix


def _check_linked(bandwidth: np.ndarray, what: str) -> None:
    """Every row of the matrix, one for each device or node, has an entry beside the diagonal."""
    for k, row in enumerate(bandwidth):
        if len(row) > 1 and not np.delete(row, k).any():
            raise PartitionError(
                f"{what.capitalize()} {k} has no link: row {k} of the bandwidth between {what}s is zero. Leave the "
                f"{what} out, or give its bandwidth to at least one other."
            )


def _link_table(network: Network) -> PlainTable:
    """Return a table of every device with its links."""
    table = PlainTable(title="GB/s above the diagonal, µs below", padding=0)
    table.add_column("", justify="right")
    table.add_column("device", max_width=12, no_wrap=True)
    table.add_column("speed", justify="right")
    table.add_column("memory", justify="right", no_wrap=True)
    if len(_kind(network, 0)) > 2:
        table.add_column("host GB/s", justify="right")
    for k in range(network.num_devices):
        table.add_column(str(k), justify="right", no_wrap=True)
    scaled = np.where(np.tri(network.num_devices, dtype=bool), 1e6 * network.latency, network.bandwidth / 1e9)
    for row in range(network.num_devices):
        cells = [_short(x) if network.bandwidth[row, column] else "-" for column, x in enumerate(scaled[row])]
        cells[row] = ""
        table.add_row(str(row), network.names[row], *_kind(network, row), *cells)
    return table


def _kinds_table(network: Network) -> PlainTable:
    """Return a table with a row for each kind of link."""
    kinds = defaultdict(list)
    for a, b in itertools.combinations(range(network.num_devices), 2):
        kinds[network.bandwidth[a, b], network.latency[a, b]].append(f"{a}-{b}")
    alike = defaultdict(list)
    for k in range(network.num_devices):
        alike[network.speed[k], *_kind(network, k)].append(k)
    table = PlainTable(title=f"{network.num_devices} devices")
    table.add_numbers("GB/s", "µs", "links")
    table.add_column("between")
    for (bandwidth, latency), links in sorted(kinds.items(), reverse=True):
        between = ", ".join(links[:6]) + (", ..." if len(links) > 6 else "")
        table.add_row(_short(bandwidth / 1e9), _short(1e6 * latency), str(len(links)), between)
    table.caption = "\n".join(
        f"{len(devices)} of speed {speed} and memory {memory}{f', host {host[0]} GB/s' if host else ''}: "
        f"{number_ranges(devices)}"
        for (_, speed, memory, *host), devices in alike.items()
    )
    return table


def _kind(network: Network, device: int) -> list[str]:
    """Return the speed and the memory of a device, and its rate to the host if something is known of these rates."""
    size, rates = network.memory_bytes[device], network.host_bandwidth_bytes_per_second
    host = [_short(rates[device] / 1e9)] if any(rate != PCIE_3_X16 for rate in rates) else []
    return [_short(network.speed[device]), "no limit" if size == math.inf else bytes_text(size), *host]


def _short(value: float) -> str:
    """Three digits of a number that is not negative, without an exponent where it is between 0.001 and 100000."""
    return f"{value:.0f}" if 1000 <= value < 1e5 else f"{value:.3g}"
