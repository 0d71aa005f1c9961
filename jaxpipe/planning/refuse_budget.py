"""The refusal of a budget that no plan keeps: what the smallest plan needs, for what, and what would help."""

import jax

from jaxpipe.costs.profile import Profile
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.planning.budget_search import BudgetSearch
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.lower_bound import lower_bound
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.residuals.choose_formats import KEPT_BY_POLICIES, kept_by_policies
from jaxpipe.residuals.stored_formats import stored_bytes
from jaxpipe.text.units import asked_bytes, bytes_text, seconds_text


#: How many tensors an error names.
MOST_NAMED = 3


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
        assert stage.vjp is not None
        graph, codecs = stage.vjp.graph, stage.vjp.plan.codecs
        producers_here = {**producers, **{t: op for op in graph.operators for t in op.outputs}}
        for t in stage.stashed:
            text = tensor_text(graph.tensors[t], producers_here.get(t), inputs.get(t, "an input"))
            stored[text] = max(stored.get(text, 0), stored_bytes(graph.tensors[t], codecs[t]))
    ranked = sorted(stored.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST_NAMED]
    return [f"{text} ({bytes_text(size)})" for text, size in ranked if size]
