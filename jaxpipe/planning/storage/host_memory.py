"""Check of the host's memory that a caller gives to stashes."""

from jax.sharding import Mesh

from jaxpipe.errors import PartitionError
from jaxpipe.plan import HostPlan
from jaxpipe.text.units import device_bytes


def check_host_memory(
    given: int | str | None, budget: int | None, mesh: Mesh, devices_per_stage: bool | tuple[int, ...]
) -> HostPlan | None:
    """Return ``PlanOptions(host_memory=...)`` as a plan has it, with nothing used yet; None if it was left out.

    Args:
      budget: bytes of a device; None if they are not limited.
      mesh: with devices that may have no such memory.
      devices_per_stage: how many devices each stage has.

    Raises:
      PartitionError: if there is no budget, or a stage has several devices.
      MemoryBudgetError: if it is no number of bytes.
    """
    if given is None:
        return None
    size = device_bytes(given, "host_memory")
    if budget is None:
        raise PartitionError(
            f"host_memory={given!r} without memory=: stashes go to the host only where the memory of a device is "
            "limited. Pass memory= too, the most bytes on a device, or leave host_memory= out."
        )
    if isinstance(devices_per_stage, tuple) and max(devices_per_stage) > 1:
        raise PartitionError(
            f"host_memory={given!r} with devices_per_stage={devices_per_stage}: stashes go to the host only from "
            "stages with one device each. Leave out one of the two."
        )
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]  # none of devices that are not here
    if kinds and "pinned_host" not in kinds:
        reason = f"{device.device_kind} has memory of the kinds {', '.join(kinds)}, and none is pinned_host"
        return HostPlan(size, 0, reason)
    return HostPlan(size, 0)
