"""``MemoryReport``: predicted beside compiled bytes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on each device, in the order of ``mesh.devices.flat``.

    Attributes:
      predicted_bytes: from the plan, before anything is compiled.
      compiled_bytes: what XLA reserves for the training step: arguments, results and temporaries, less what is
        donated. With stage programs: the most that a device holds at any point of the list of calls, its arrays and
        the temporaries of the program that runs.
      temporary_bytes: the temporaries among them.
      predicted_host_bytes, compiled_host_bytes: in the host's memory, for each device; in none of the others.
    """

    predicted_bytes: tuple[int, ...]
    compiled_bytes: tuple[int, ...]
    temporary_bytes: tuple[int, ...]
    predicted_host_bytes: tuple[int, ...] = ()
    compiled_host_bytes: tuple[int, ...] = ()
