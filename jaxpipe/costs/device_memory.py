"""The bytes that programs may take of a device: what its pool holds, which is less than the device has."""

import os
import re

from jaxpipe.array_types import Device
from jaxpipe.errors import MemoryBudgetError


#: The part of a GPU's memory that JAX's pool takes unless a variable says otherwise.
POOL_FRACTION = 0.75

#: Variables that say otherwise, the newer one first.
POOL_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

#: GiB of kinds of devices whose names do not say it, of the variant with the least.
GIBIBYTES = {"H200": 141, "H100": 80, "A100": 40, "V100": 16, "L40S": 48, "L4": 24, "T4": 16}


def memory_of(device: Device) -> int | None:
    """Return the bytes of a device's memory, or of the host's for a CPU; None for an unknown kind.

    Of a device that is here they are its pool's, divided by the part that the pool takes.
    """
    limit = pool_limit(device)
    if limit:
        return int(limit / pool_fraction())
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    words = re.findall(r"\w+", device.device_kind)
    said = [int(word[:-2]) for word in words if re.fullmatch(r"\d+GB", word)]
    known = [GIBIBYTES[word] for word in words if word in GIBIBYTES]
    return next((size << 30 for size in (*said, *known)), None)


def pool_fraction() -> float:
    """Return the part of a GPU's memory that JAX's pool takes in this process."""
    value = next((os.environ[name] for name in POOL_VARIABLES if os.environ.get(name)), None)
    try:
        return float(value) if value else POOL_FRACTION
    except ValueError:
        return POOL_FRACTION


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
    return size if device.platform == "cpu" else int(pool_fraction() * size)


def pool_limit(device: Device) -> int | None:
    """Return the bytes that a device's pool may hold; None where there is no pool, or the device is not here."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # of one that is only compiled for
        return None
