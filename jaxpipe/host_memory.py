"""Memory of the host that stashes may use: as it is asked for, and what comes of that."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxpipe.errors import PartitionError
from jaxpipe.units import parse_bytes


@dataclass(frozen=True)
class HostMemory:
    """Memory of the host for stashes, as ``partition(host_memory=...)`` takes it.

    Attributes:
      size: for each device, as an int or a text such as ``"64GiB"``.
      on_paper: plan with it whatever the devices of the mesh are, because the plan is for others. It cannot be run.

    Raises:
      MemoryBudgetError: if ``size`` is no number of bytes.

    Example:
      >>> HostMemory("64GiB").bytes
      68719476736
    """

    size: int | str
    on_paper: bool = False

    def __post_init__(self) -> None:
        parse_bytes(self.size, "host_memory")

    @property
    def bytes(self) -> int:
        """Bytes for each device."""
        return parse_bytes(self.size, "host_memory")


@dataclass(frozen=True)
class HostUse:
    """What comes of it.

    Attributes:
      asked: bytes for each device that were asked for.
      refused: why none are used; empty if they may be.
      on_paper: whether the plan is for devices that are not here.
    """

    asked: int
    refused: str = ""
    on_paper: bool = False

    @property
    def bytes(self) -> int:
        """Bytes for each device that may be used."""
        return 0 if self.refused else self.asked


def check_host_memory(given: Any, budget: int | None, mesh: Mesh) -> HostUse | None:
    """What comes of ``partition(host_memory=...)``; the devices are tried if they can do it at all.

    Raises:
      PartitionError: if there is no budget, or the devices are CPUs.
      MemoryBudgetError: if it is no number of bytes.
    """
    if given is None:
        return None
    wanted = given if isinstance(given, HostMemory) else HostMemory(given)
    if budget is None:
        raise PartitionError(
            f"host_memory={wanted.size!r} without memory=: stashes go to the host only where the memory of a device is "
            "limited. Pass memory= too, the most bytes on a device, or leave host_memory= out."
        )
    if wanted.on_paper:
        return HostUse(wanted.bytes, on_paper=True)
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]  # none of devices that are not here
    if kinds and "pinned_host" not in kinds:
        reason = f"a {device.device_kind} has memory of the kinds {', '.join(kinds)}, and none is pinned_host"
        return HostUse(wanted.bytes, reason)
    return HostUse(wanted.bytes)
