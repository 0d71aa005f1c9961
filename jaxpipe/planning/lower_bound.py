"""A bound that no storage can pass: what a device holds whatever its stages store, for plans with the same stages."""

from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.runtime.stages import Stage
from jaxpipe.schedules.table import StageNumber
from jaxpipe.targets.building import current
from jaxpipe.text.units import bytes_text


#: Components of a device's memory that are there at the end of a step, or from its beginning to its end.
HELD = ("parameters", "gradients", "optimizer", "residual", "state", "batch")


def lower_bound(planned: PlannedStep) -> tuple[int, str]:
    """Return the bytes that a device holds at least, and what they are, in words.

    Of plans with the cuts and the schedule of this one, the bound of the device with the highest one.
    """
    return max((_stage_bound(planned, s) for s in planned.program.stage_numbers), key=lambda bound: bound[0])


def _stage_bound(planned: PlannedStep, s: StageNumber) -> tuple[int, str]:
    """Return the bound of a stage's device, and what it is.

    Gradients may be written after the largest operator has run, so these are not added up.
    """
    program, memory = planned.program, planned.plan.stage_memory[s]
    held = {name: memory[name] for name in HELD if name in memory}
    parts = [f"{name} {bytes_text(n)}" for name, n in held.items() if n]
    largest, operator_bytes, kernel_bytes = "", 0, 0
    if program.specs.submesh.size == 1:
        operator, operator_bytes = _largest_operator(program.stages[s].graph, s == len(program.stages) - 1)
        if operator_bytes:
            largest = f"; the largest operator, {operator}, needs {bytes_text(operator_bytes)}"
        if program.schedule.num_chunks == 1 and current().order == "joined":
            kernel, kernel_bytes = _kernel_written_twice(program.stages[s])
            if kernel_bytes:
                parts.append(f"{bytes_text(kernel_bytes)} for the kernel's gradient as {kernel} writes it")
    besides = sum(held.values()) - held.get("gradients", 0)
    size = max(sum(held.values()) + kernel_bytes, besides + operator_bytes)
    return size, f"{bytes_text(size)} ({', '.join(parts)}{largest})"


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
