"""The bytes that programs may take of a device: what its pool holds, which is less than the device has."""

import os
import re

from jaxpipe.array_types import Device
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.targets.known import target_of
from jaxpipe.targets.target import Target


def memory_of(device: Device) -> int | None:
    """Return the bytes of a device's memory, or of the host's for a CPU; None for an unknown kind.

    Of a device that is here they are its pool's, divided by the part that the pool takes.
    """
    target, limit = target_of(device), pool_limit(device)
    if limit:
        return int(limit / pool_fraction(target))
    if target.is_host:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = re.findall(r"\b(\d+)GB\b", device.device_kind)
    return int(said[0]) << 30 if said else target.memory


def pool_fraction(target: Target) -> float:
    """Return the part of a device's memory that JAX's pool takes in this process."""
    value = next((os.environ[name] for name in target.pool_variables if os.environ.get(name)), None)
    try:
        return float(value) if value else target.pool_fraction
    except ValueError:
        return target.pool_fraction


def pool_bytes(device: Device) -> int:
    """Return the bytes of a device that programs may take: its pool's limit, where there is a pool.

    Raises:
      MemoryBudgetError: if nothing is known of the device.
    """
    limit = pool_limit(device)
    if limit:
        return limit
    size = memory_of(device)
    if size is None:
        raise MemoryBudgetError(
            f"memory='device': it is not known how much memory a {device.device_kind} has. Pass a size, such as "
            "memory='16GiB'."
        )
    return int(pool_fraction(target_of(device)) * size)


def pool_limit(device: Device) -> int | None:
    """Return the bytes that a device's pool may hold; None where there is no pool, or the device is not here."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # of one that is only compiled for
        return None
