"""``MemoryReport``: predicted beside compiled bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.units import bytes_text


@dataclass(frozen=True)
class MemoryReport(Printed):
    """Bytes on each device, in the order of ``mesh.devices.flat``; ``str()`` and notebooks show a table.

    Attributes:
      predicted_bytes: from the plan, before anything is compiled.
      compiled_bytes: what XLA reserves for the training step: arguments, results and temporaries, less what is
        donated. With stage programs: the most that a device holds at any point of the step's graph, its arrays and
        the temporaries of the program that runs.
      temporary_bytes: the temporaries among them.
      predicted_host_bytes, compiled_host_bytes: in the host's memory, for each device; in none of the others.
    """

    predicted_bytes: tuple[int, ...]
    compiled_bytes: tuple[int, ...]
    temporary_bytes: tuple[int, ...]
    predicted_host_bytes: tuple[int, ...] = ()
    compiled_host_bytes: tuple[int, ...] = ()

    def _printed(self) -> Sequence[PlainTable | str]:
        columns = {
            "predicted": self.predicted_bytes,
            "compiled": self.compiled_bytes,
            "temporaries among them": self.temporary_bytes,
            "host memory, predicted": self.predicted_host_bytes,
            "host memory, compiled": self.compiled_host_bytes,
        }
        shown = {name: sizes for name, sizes in columns.items() if any(sizes)}
        table = PlainTable()
        for name in ("device", *shown):
            table.add_column(name, justify="right")
        for device, sizes in enumerate(zip(*shown.values(), strict=True)):
            table.add_row(str(device), *map(bytes_text, sizes))
        return [table]
