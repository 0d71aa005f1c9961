"""The refusal of a budget that no plan keeps: what the smallest plan needs, for what, and what would help."""

import jax

from jaxpipe.costs.profile import Profile
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.planning.budget_search import BudgetSearch
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.residuals.choose_formats import KEPT_BY_POLICIES, kept_by_policies
from jaxpipe.residuals.stored_formats import stored_bytes
from jaxpipe.runtime.stages import Stage
from jaxpipe.schedules.table import StageNumber
from jaxpipe.targets.building import current
from jaxpipe.text.units import asked_bytes, bytes_text, seconds_text


#: How many tensors an error names.
MOST_NAMED = 3

#: Components of a device's memory that are there at the end of a step, or from its beginning to its end.
HELD = ("parameters", "gradients", "optimizer", "residual", "state", "batch")


def refusal(search: BudgetSearch, budget: int, smallest: PlannedStep) -> MemoryBudgetError:
    """Return the error for a budget that no plan keeps, which offers what the smallest plan that was found needs.

    Args:
      smallest: the plan; compiled if XLA's bytes count, else its predicted bytes do.
    """
    predicted, needed = smallest.plan.predicted_bytes, smallest.needed_bytes
    default = search.candidates[0].default.with_bytes().plan.memory
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in default.items())
    source = (
        "as predicted; XLA may reserve more, which PlanOptions(compile=True) finds out"
        if smallest.compiled is None
        else f"which XLA reserves for its compiled step ({bytes_text(predicted)} predicted)"
    )
    largest = largest_stored(smallest)
    stored = f" Largest tensors stored at that budget: {', '.join(largest)}." if largest else ""
    stored += KEPT_BY_POLICIES if kept_by_policies(smallest.program.objective.graph) else ""
    least, bound = lower_bound(smallest)
    over = ", which alone is over this budget" if least > budget else ""
    more = None if over else search.more_microbatches(budget)
    lines, also, fewer = [f"memory={needed}"], "", "more micro-batches or more stages need less."
    if more is not None:
        count, seconds = more.batching.num_microbatches, seconds_text(more.plan.step_seconds)
        lines.append(f"num_microbatches={count}")
        also = f", or num_microbatches={count} with this budget: {bytes_text(more.plan.predicted_bytes)}"
        given = isinstance(more.candidate.traced.request.profile, Profile)  # of other micro-batches
        also += ", as predicted" if given else f" and {seconds} a step, both as predicted"
        fewer = "more stages need less."
    return MemoryBudgetError(
        f"{asked_bytes(smallest.candidate.traced.request.memory, budget)}: "
        f"by default each device needs {bytes_text(sum(default.values()))} ({parts}), as "
        f"predicted. The smallest budget that was found to be met, for this number of stages and micro-batches, is "
        f"{needed} bytes ({bytes_text(needed)}), {source}.{stored} With these stages no plan needs less than {bound}"
        f"{over}. Pass memory={needed} or more{also}; {fewer}" + "".join(f"\n    {line}" for line in lines),
        needed,
    )


def check_budget(planned: PlannedStep) -> None:
    """Raise ``MemoryBudgetError`` if XLA reserves more than the budget for a compiled plan."""
    budget, reserved = planned.plan.budget, planned.needed_bytes
    if budget is not None and reserved > budget:
        request = planned.candidate.traced.request
        if request.plan is not None:
            raise MemoryBudgetError(
                f"{asked_bytes(request.memory, budget)}: XLA reserves {reserved} bytes ({bytes_text(reserved)}) for "
                f"plan= here, and {bytes_text(request.plan.compiled_bytes or request.plan.predicted_bytes)} where that "
                "was made. Leave out plan= for one that keeps the budget.",
                reserved,
            )
        raise MemoryBudgetError(
            f"{asked_bytes(request.memory, budget)}: XLA reserves {reserved} bytes "
            f"({bytes_text(reserved)}) for this plan, which was made without compiling it "
            f"({bytes_text(planned.plan.predicted_bytes)} predicted). Call pipeline.compile() before pipeline.init, or "
            "leave out PlanOptions(compile=False), for a plan that keeps it once it is compiled.",
            reserved,
        )


def largest_stored(planned: PlannedStep) -> list[str]:
    """Return the largest tensors that a plan stores between the passes: module path, operator, shape and bytes."""
    objective = planned.program.objective
    leaves = jax.tree_util.tree_flatten_with_path(planned.batch)[0]
    inputs = {t: f"batch{jax.tree_util.keystr(path)}" for t, (path, _) in zip(objective.batch, leaves, strict=True)}
    producers = {t: op for op in objective.graph.operators for t in op.outputs}
    stored: dict[str, int] = {}
    for stage in planned.program.stages:
        graph, codecs = stage.programs.graph, stage.programs.plan.codecs
        producers_here = {**producers, **{t: op for op in graph.operators for t in op.outputs}}
        for t in stage.stashed:
            text = tensor_text(graph.tensors[t], producers_here.get(t), inputs.get(t, "an input"))
            stored[text] = max(stored.get(text, 0), stored_bytes(graph.tensors[t], codecs[t]))
    ranked = sorted(stored.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST_NAMED]
    return [f"{text} ({bytes_text(size)})" for text, size in ranked if size]


def lower_bound(planned: PlannedStep) -> tuple[int, str]:
    """Return the bytes that a device holds at least, and what they are, in words.

    No storage can pass it. Of plans with the cuts and the schedule of this one, it is that of the device with the
    highest one.
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
    graph = stage.graph
    size = {t: graph.tensors[t].bytes for t in stage.parameters if t in stage.programs.backward_graph.wrt}
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
