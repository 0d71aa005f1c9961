"""``Network``: devices and the links between them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxpipe.errors import NetworkError


@dataclass(frozen=True)
class Network:
    """How fast devices compute, how much they hold, and how fast they send to each other.

    Sending ``n`` bytes over a link takes ``latency + n / bandwidth`` seconds. Links are used in both directions at
    that rate; a bandwidth of 0 means that there is no link.

    Attributes:
      bandwidth_bytes_per_second: ``[devices, devices]``, symmetric; the diagonal is not used.
      latency_seconds: the same, or one number for all links.
      speed: how fast each device computes, relative to the one that was profiled; all 1 if left out.
      memory_bytes: how much each device holds; unlimited if left out.
      names: of the devices.

    Raises:
      NetworkError: if a matrix is not square, not symmetric, negative or not a number, or a device has no link.

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

    def __post_init__(self) -> None:
        bandwidth = _matrix(self.bandwidth_bytes_per_second, "bandwidth_bytes_per_second")
        count = len(bandwidth)
        latency = np.asarray(self.latency_seconds, np.float64)
        if latency.ndim == 0:
            latency = np.full((count, count), float(latency))
        latency = _matrix(latency, "latency_seconds")
        if latency.shape != bandwidth.shape:
            raise NetworkError(f"latency_seconds is for {len(latency)} devices, the bandwidth for {count}.")
        for k in range(count):
            if count > 1 and not np.any(np.delete(bandwidth[k], k) > 0):
                raise NetworkError(
                    f"Device {k} has no link: row {k} of bandwidth_bytes_per_second is zero. Leave the device out, or "
                    "give its bandwidth to at least one other."
                )
        np.fill_diagonal(bandwidth, 0.0)
        np.fill_diagonal(latency, 0.0)
        settle = object.__setattr__
        settle(self, "bandwidth_bytes_per_second", tuple(map(tuple, bandwidth.tolist())))
        settle(self, "latency_seconds", tuple(map(tuple, latency.tolist())))
        for field, default in (("speed", 1.0), ("memory_bytes", math.inf)):
            values = tuple(float(v) for v in getattr(self, field)) or (default,) * count
            if len(values) != count or not all(v > 0 for v in values):
                raise NetworkError(f"{field} is {values}; it needs a positive number for each of {count} devices.")
            settle(self, field, values)
        names = tuple(map(str, self.names)) or tuple(f"device {k}" for k in range(count))
        if len(names) != count:
            raise NetworkError(f"names has {len(names)} entries for {count} devices.")
        settle(self, "names", names)

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return len(self.bandwidth_bytes_per_second)

    @cached_property
    def bandwidth(self) -> np.ndarray:
        """The bandwidths as an array, infinite on the diagonal."""
        return _with_diagonal(self.bandwidth_bytes_per_second, np.inf)

    @cached_property
    def latency(self) -> np.ndarray:
        """The latencies as an array."""
        return _with_diagonal(self.latency_seconds, 0.0)

    @property
    def is_uniform(self) -> bool:
        """Whether all links are alike."""
        off = ~np.eye(self.num_devices, dtype=bool)
        return all(len(np.unique(matrix[off])) <= 1 for matrix in (self.bandwidth, self.latency))

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
        if num_devices < 1:
            raise NetworkError(f"num_devices={num_devices}; a network has at least one device.")
        return cls(np.full((num_devices, num_devices), bandwidth_bytes_per_second), latency_seconds)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The network as JSON, one device on a line."""
        rows = [
            {"name": name, "speed": speed, "memory_bytes": None if memory == math.inf else memory}
            for name, speed, memory in zip(self.names, self.speed, self.memory_bytes, strict=True)
        ]
        parts = {
            "devices": rows,
            "bandwidth_bytes_per_second": self.bandwidth_bytes_per_second,
            "latency_seconds": self.latency_seconds,
        }
        lists = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, part)) + "\n ]" for name, part in parts.items()]
        return "{\n" + ",\n".join(lists) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Network":
        """The network that ``to_json`` has written; ``latency_seconds`` and what a device lacks may be left out.

        Raises:
          NetworkError: naming the line, if it is not JSON; or what is missing or wrong in it.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise NetworkError(f"The network is not JSON: line {error.lineno}: {error.msg}.") from None
        try:
            rows = data.get("devices", ())
            return cls(
                data["bandwidth_bytes_per_second"],
                data.get("latency_seconds", 0.0),
                speed=tuple(row.get("speed", 1.0) for row in rows),
                memory_bytes=tuple(math.inf if (m := row.get("memory_bytes")) is None else m for row in rows),
                names=tuple(row.get("name", f"device {k}") for k, row in enumerate(rows)),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise NetworkError(f"The network lacks a field or has one of the wrong kind: {error}.") from None


def _with_diagonal(rows: Sequence[Sequence[float]], value: float) -> np.ndarray:
    matrix = np.array(rows, np.float64)
    np.fill_diagonal(matrix, value)
    return matrix


def _matrix(values: Any, name: str) -> np.ndarray:
    try:
        matrix = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise NetworkError(f"{name} must be a square matrix of numbers, with a row for each device.") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise NetworkError(f"{name} has the shape {matrix.shape}; it must be square, with a row for each device.")
    off = matrix[~np.eye(len(matrix), dtype=bool)]
    bad = ~np.isfinite(off) | (off < 0)
    if bad.any():
        raise NetworkError(f"{name} holds {off[bad][0]}; every entry must be a finite number that is not negative.")
    unequal = np.argwhere(matrix != matrix.T)
    if len(unequal):
        a, b = map(int, unequal[0])
        raise NetworkError(
            f"{name} is not symmetric: [{a}][{b}] is {matrix[a, b]:g}, [{b}][{a}] is {matrix[b, a]:g}. A pipeline "
            "sends both ways over a link; give the slower rate twice."
        )
    return matrix
