"""A plan whose compiled training step keeps its budget.

    plan ──compile──▶ bytes that XLA reserves ──within the budget──▶ done
     ▲                          │ over
     └──── less is predicted ◀──┘           at last: the smallest plan, and if not even that is within, an error

What the error offers are the bytes that XLA reserves for the smallest plan. That plan does not depend on the budget,
and it is tried before any budget is refused, so that whoever asks for what was offered gets a plan that runs.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from jaxpipe import multihost
from jaxpipe.errors import MemoryBudgetError
from jaxpipe.plan import Plan
from jaxpipe.planning.planned_step import PlannedStep
from jaxpipe.planning.storage.choose_storage import raised
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.residuals.stored_formats import stored_bytes
from jaxpipe.runtime.executable_plan import Compiled
from jaxpipe.runtime.mpmd import device_bytes
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.target import building_for
from jaxpipe.text.progress import tell
from jaxpipe.text.units import bytes_text


#: How many plans with the same cuts are compiled at most until one keeps the budget.
MOST_COMPILATIONS = 3

#: The share of a budget from which on predicted bytes are compared with XLA's while a plan is made.
NEAR = 0.75

#: How many tensors an error names.
MOST_NAMED = 3


def is_near_budget(plan: Plan) -> bool:
    """Return whether so much of a budget is predicted to be used that XLA may need more than it has."""
    return plan.budget is not None and plan.predicted_bytes > NEAR * plan.budget


def with_step(planned: PlannedStep) -> PlannedStep:
    """Compile the stage programs of a plan, in all processes at once; nothing if they have been compiled.

    What counts is the fullest device of any process.
    """
    if planned.compiled is not None:
        return planned
    multihost.agree("The plan", planned.plan.to_json())
    tell(f"Compiling the training step, {bytes_text(planned.plan.predicted_bytes)} predicted")
    runtime = MpmdRuntime(planned)
    step = runtime.build()
    size = max(peak.total for peak in device_bytes.peak_bytes(step, runtime.devices).values())
    tell(f"XLA reserves {bytes_text(size)} on the fullest device")
    return replace(planned, compiled=Compiled(step, size))


def within_budget(planned: PlannedStep, *, any_cuts: bool = False) -> PlannedStep:
    """Compile the training step of a plan, and of smaller ones until one keeps the budget.

    Args:
      any_cuts: whether the plan may be replaced by one with other cuts, as long as there is no training state.

    Raises:
      MemoryBudgetError: if none does, and the budget must not be raised.
    """
    with building_for(planned.mesh.devices.flat[0].platform):
        return _within_budget(planned, any_cuts)


def _within_budget(planned: PlannedStep, any_cuts: bool) -> PlannedStep:
    tried = [with_step(planned)]
    budget, others = planned.plan.budget, planned.budget
    if budget is None or others is None:
        return tried[0]
    target = budget
    while (over := _reserved(tried[-1]) - budget) > 0 and len(tried) < MOST_COMPILATIONS:
        target = min(target, tried[-1].plan.predicted_bytes) - over
        smaller = others.refit(target)
        if smaller.plan.predicted_bytes >= tried[-1].plan.predicted_bytes:
            break
        tried.append(with_step(_for_budget(smaller, planned)))
    smallest = None
    if _reserved(tried[-1]) > budget:
        smallest = _smallest(planned, tried)
        if any_cuts or smallest.plan.identity == planned.plan.identity:
            tried.append(smallest)
    best = min(reversed(tried), key=_reserved) if _reserved(tried[-1]) > budget else tried[-1]
    if _reserved(best) <= budget:
        return best
    if others.may_raise:
        higher = {"budget": raised(budget, _reserved(best)), "raised_from": best.plan.raised_from or budget}
        return replace(best, plan=replace(best.plan, **higher))
    assert smallest is not None
    raise refusal(budget, smallest, others.default)


def _smallest(planned: PlannedStep, tried: Sequence[PlannedStep]) -> PlannedStep:
    """The smallest plan, compiled; one of those that were tried if it is among them."""
    assert planned.budget is not None
    smallest = _for_budget(planned.budget.smallest(), planned)
    return next((other for other in tried if other.program is smallest.program), None) or with_step(smallest)


def _for_budget(planned: PlannedStep, first: PlannedStep) -> PlannedStep:
    """A plan as one for the budget of the first plan."""
    kept = {name: getattr(first.plan, name) for name in ("budget", "rounds", "raised_from")}
    return replace(planned, plan=replace(planned.plan, **kept), budget=first.budget)


def _reserved(planned: PlannedStep) -> int:
    assert planned.compiled is not None
    return planned.compiled.reserved_bytes


def refusal(budget: int, smallest: PlannedStep, default: dict[str, int]) -> MemoryBudgetError:
    """Return the error for a budget that no plan keeps, which offers what the smallest plan needs.

    Args:
      smallest: the plan; compiled if XLA's bytes count, else its predicted bytes do.
      default: predicted bytes with default storage, by component.
    """
    predicted = smallest.plan.predicted_bytes
    needed = predicted if smallest.compiled is None else smallest.compiled.reserved_bytes
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in default.items())
    source = (
        "as predicted; XLA may reserve more, which PlanOptions(compile=True) finds out"
        if smallest.compiled is None
        else f"which XLA reserves for its compiled step ({bytes_text(predicted)} predicted)"
    )
    largest = largest_stored(smallest)
    stored = f" Largest tensors stored at that budget: {', '.join(largest)}." if largest else ""
    return MemoryBudgetError(
        f"memory={bytes_text(budget)}: by default each device needs {bytes_text(sum(default.values()))} ({parts}), as "
        f"predicted. The smallest budget that was found to be met, for this number of stages and micro-batches, is "
        f"{needed} bytes ({bytes_text(needed)}), {source}.{stored} Pass memory={needed} or more; more micro-batches or "
        "more stages need less.",
        needed,
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
        graph, formats = stage.vjp.graph, stage.vjp.plan.formats
        producers_here = {**producers, **{t: op for op in graph.operators for t in op.outputs}}
        for t in stage.stashed:
            text = tensor_text(graph.tensors[t], producers_here.get(t), inputs.get(t, "an input"))
            stored[text] = max(stored.get(text, 0), stored_bytes(graph.tensors[t], formats[t]))
    ranked = sorted(stored.items(), key=lambda entry: (-entry[1], entry[0]))[:MOST_NAMED]
    return [f"{text} ({bytes_text(size)})" for text, size in ranked if size]
