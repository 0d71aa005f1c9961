"""A bound that no storage can pass: what a device holds whatever its stages store, for plans with the same stages."""

from dataclasses import dataclass

from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.runtime.stages import Stage
from jaxpipe.schedules.table import DeviceNumber
from jaxpipe.targets.building import current
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
      kernel: the convolution whose kernel is the largest parameter, if a GPU writes its gradient twice.
      kernel_bytes: of that gradient.
    """

    held: dict[str, int]
    operator: str = ""
    operator_bytes: int = 0
    kernel: str = ""
    kernel_bytes: int = 0

    @property
    def bytes(self) -> int:
        """The bound. Gradients may be written after the largest operator has run, so these are not added up."""
        besides = sum(n for name, n in self.held.items() if name != "gradients")
        return max(sum(self.held.values()) + self.kernel_bytes, besides + self.operator_bytes)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in self.held.items() if n)
        if self.kernel_bytes:
            parts += f", {bytes_text(self.kernel_bytes)} for the kernel's gradient as {self.kernel} writes it"
        largest = f"; the largest operator, {self.operator}, needs {bytes_text(self.operator_bytes)}"
        return f"{bytes_text(self.bytes)} ({parts}{largest if self.operator_bytes else ''})"


def lower_bound(planned: PlannedStep) -> LowerBound:
    """Return the bound of the device with the highest one, for plans with the cuts and the schedule of this one."""
    memory, program = planned.plan.stage_memory, planned.program
    by_device: dict[DeviceNumber, LowerBound] = {}
    for s, stage in zip(program.stage_numbers, program.stages, strict=True):
        held = {name: memory[s][name] for name in HELD if name in memory[s]}
        is_last, on_one_device = s == len(program.stages) - 1, program.specs.submesh.size == 1
        operator = _largest_operator(stage.graph, is_last) if on_one_device else ("", 0)
        writes_twice = on_one_device and program.schedule.num_chunks == 1 and current().order == "joined"
        kernel = _kernel_written_twice(stage) if writes_twice else ("", 0)
        bound, d = LowerBound(held, *operator, *kernel), program.device(s)
        by_device[d] = max(by_device.get(d, bound), bound, key=lambda bound: bound.bytes)
    return max(by_device.values(), key=lambda bound: bound.bytes)


def _kernel_written_twice(stage: Stage) -> tuple[str, int]:
    """Return the convolution of the largest parameter of a stage and the bytes of that; none if it is another's, too.

    On a GPU a convolution writes the gradient of its kernel with the outputs first. Before that is turned, it is in no
    other gradient's place: each of those is smaller, or, of equal kernels, written before the last one.
    """
    graph, vjp = stage.graph, stage.vjp
    size = {t: graph.tensors[t].bytes for t in stage.parameters if vjp is not None and t in vjp.backward_graph.wrt}
    largest = {t for t, count in size.items() if count == max(size.values())}
    turned = {op.inputs[1]: op for op in graph.operators if op.name == "conv_general_dilated" and _turns_gradient(op)}
    if not largest or not largest <= turned.keys():
        return "", 0
    t = min(largest)
    return tensor_text(graph.tensors[turned[t].outputs[0]], turned[t], ""), size[t]


def _turns_gradient(op: Operator) -> bool:
    """Return whether a convolution's kernel has its outputs last, more than one, and something before them."""
    kernel, numbers = op.equation.invars[1].aval, op.params["dimension_numbers"].rhs_spec
    grouped = op.params["feature_group_count"] > 1 or op.params["batch_group_count"] > 1
    return not grouped and numbers[0] == kernel.ndim - 1 and 1 < kernel.shape[-1] < kernel.size


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
