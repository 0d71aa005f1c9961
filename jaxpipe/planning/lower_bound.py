"""A bound that no storage can pass: what a device holds whatever its stages store, for plans with the same stages."""

from dataclasses import dataclass

from jaxpipe.graph.graph import Graph
from jaxpipe.planning.planned_step import PlannedStep
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.schedules.table import DeviceNumber
from jaxpipe.text.units import bytes_text


#: Components of a device's memory that are there at the end of a step, or from its beginning to its end.
HELD = ("parameters", "gradients", "optimizer", "residual", "state", "batch")


@dataclass(frozen=True)
class LowerBound:
    """The bytes that a device holds at least.

    Attributes:
      held: bytes of parameters, gradients and so on, by component.
      operator: the largest operator of its stages.
      operator_bytes: what this reads from other operators and what it writes.
    """

    held: dict[str, int]
    operator: str = ""
    operator_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The bound. Gradients may be written after the largest operator has run, so these are not added up."""
        besides = sum(n for name, n in self.held.items() if name != "gradients")
        return max(sum(self.held.values()), besides + self.operator_bytes)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in self.held.items() if n)
        largest = f"; the largest operator, {self.operator}, needs {bytes_text(self.operator_bytes)}"
        return f"{bytes_text(self.bytes)} ({parts}{largest if self.operator_bytes else ''})"


def lower_bound(planned: PlannedStep) -> LowerBound:
    """Return the bound of the device with the highest one, for plans with the cuts and the schedule of this one."""
    memory, program = planned.plan.stage_memory, planned.program
    by_device: dict[DeviceNumber, LowerBound] = {}
    for s, stage in zip(program.stage_numbers, program.stages, strict=True):
        held = {name: memory[s][name] for name in HELD if name in memory[s]}
        is_last = s == len(program.stages) - 1
        text, size = _largest_operator(stage.graph, is_last) if program.specs.submesh.size == 1 else ("", 0)
        d = program.device(s)
        if d not in by_device or size > by_device[d].operator_bytes:
            by_device[d] = LowerBound(held, text, size)
    return max(by_device.values(), key=lambda bound: bound.bytes)


def _largest_operator(graph: Graph, is_last: bool) -> tuple[str, int]:
    """Return the convolution or matrix product that needs most bytes, and these.

    A convolution reads and writes whole arrays; of a product the operands may be made while they are read. The largest
    product of the last stage may run in slices and does not count.
    """
    computed = {t for op in graph.operators for t in op.outputs}
    products = [op for op in graph.operators if op.name == "dot_general"]
    if is_last and products:
        products.remove(max(products, key=lambda op: graph.tensors[op.outputs[0]].bytes))
    sizes = [(graph.tensors[op.outputs[0]].bytes, op) for op in products]
    for op in graph.operators:
        if op.name == "conv_general_dilated":
            sizes.append((sum(graph.tensors[t].bytes for t in {*op.outputs, *computed.intersection(op.inputs)}), op))
    if not sizes:
        return "", 0
    size, op = max(sizes, key=lambda entry: entry[0])
    return tensor_text(graph.tensors[op.outputs[0]], op, ""), size
