"""A plan whose compiled training step keeps its budget.

    plan ──compile──▶ bytes that XLA reserves ──within the budget, little of it left──▶ done
     ▲                          │ over it                │ much of it left
     ├──── less is predicted ◀──┘                        │
     └──── more is predicted, for a shorter step ◀───────┘
                                            at last: small plans, and if not even one of these is within, an error

What the error offers are the bytes that XLA reserves for the least of a few small plans: the smallest by prediction,
some between it and default storage, and default storage, as predictions may be wrong. None depends on the budget, and
they are tried before a budget is refused: whoever asks for what was offered gets a plan that runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from jaxpipe.errors import MemoryBudgetError
from jaxpipe.planning.lower_bound import lower_bound
from jaxpipe.planning.planned_step import PlannedStep
from jaxpipe.planning.stage_lists import with_compiled_bytes
from jaxpipe.planning.storage.fastest_choice import raised
from jaxpipe.planning.storage.storage_items import tensor_text
from jaxpipe.residuals.stored_formats import stored_bytes
from jaxpipe.runtime.executable_plan import Compiled
from jaxpipe.runtime.mpmd import device_bytes
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.target import building_for
from jaxpipe.text.progress import tell
from jaxpipe.text.units import asked_bytes, bytes_text, seconds_text


#: How many plans with the same cuts are compiled at most for one that keeps the budget and leaves little of it.
MOST_COMPILATIONS = 4

#: The share of a budget that may be left where a step could be shorter with it.
LEFT = 0.03

#: Small plans besides the smallest: parts of the predicted bytes by which default storage needs more than that.
SMALL_PLANS = (0.1, 0.25, 0.5)

#: How many times the bytes that XLA reserves for the smallest plan another may be predicted to need and be compiled:
#: predictions on GPUs may be a tenth too high.
OVERRATED = 1.1

#: How many tensors an error names.
MOST_NAMED = 3


def with_step(planned: PlannedStep) -> PlannedStep:
    """Compile the stage programs of a plan, in all processes at once; nothing if they have been compiled.

    What counts is the fullest device of any process.
    """
    if planned.compiled is not None:
        return planned
    tell(f"Compiling the training step, {bytes_text(planned.plan.predicted_bytes)} predicted")
    runtime = MpmdRuntime(planned)
    step = runtime.build()
    peaks = device_bytes.peak_bytes(step, runtime.devices)
    size = max(peak.total for peak in peaks.values())
    tell(f"XLA reserves {bytes_text(size)} on the fullest device")
    return replace(planned, plan=with_compiled_bytes(planned.plan, runtime, peaks), compiled=Compiled(step, size))


def check_budget(planned: PlannedStep) -> None:
    """Raise ``MemoryBudgetError`` if XLA reserves more than the budget for a compiled plan."""
    budget, reserved = planned.plan.budget, _reserved(planned)
    if budget is not None and reserved > budget:
        asked = asked_bytes(budget if planned.others is None else planned.others.memory, budget)
        raise MemoryBudgetError(
            f"{asked}: XLA reserves {reserved} bytes ({bytes_text(reserved)}) for this plan, which was made "
            f"without compiling it ({bytes_text(planned.plan.predicted_bytes)} predicted). Call "
            "pipeline.compile() before pipeline.init, or leave out PlanOptions(compile=False), for a plan that keeps "
            "it once it is compiled.",
            reserved,
        )


def within_budget(planned: PlannedStep) -> PlannedStep:
    """Compile the training step of a plan, and of smaller ones until one keeps the budget.

    Raises:
      MemoryBudgetError: if none does, and the budget must not be raised.
    """
    with building_for(planned.mesh.devices.flat[0].platform):
        return _within_budget(planned)


def _within_budget(planned: PlannedStep) -> PlannedStep:
    tried = [with_step(planned)]
    budget, others = planned.plan.budget, planned.others
    if budget is None or others is None:
        return tried[0]
    best = _adjusted(planned, tried)
    if _reserved(best) > budget:
        best = _smallest_compiled(planned, tried)
    if _reserved(best) <= budget:
        return best
    if others.may_raise:
        higher = {"budget": raised(budget, _reserved(best)), "raised_from": best.plan.raised_from or budget}
        return replace(best, plan=replace(best.plan, **higher))
    raise refusal(budget, best)


def _adjusted(planned: PlannedStep, tried: list[PlannedStep]) -> PlannedStep:
    """Compile plans for other predicted bytes; returns the fastest within the budget, or the last if none is.

    Args:
      planned: the plan for the budget.
      tried: what has been compiled for it, in order; others are appended.
    """
    budget = planned.plan.budget
    assert budget is not None and planned.others is not None
    while len(tried) < MOST_COMPILATIONS:
        target = _next_target(tried, budget)
        if target is None:
            break
        other = planned.others.refit(target)
        within = [plan for plan in tried if _reserved(plan) <= budget]
        if within and other.plan.step_seconds >= min(plan.plan.step_seconds for plan in within):
            break
        if not within and other.plan.predicted_bytes >= tried[-1].plan.predicted_bytes:
            break
        tried.append(with_step(_for_budget(other, planned)))
    within = [plan for plan in tried if _reserved(plan) <= budget]
    return min(within, key=lambda plan: plan.plan.step_seconds) if within else tried[-1]


def _next_target(tried: Sequence[PlannedStep], budget: int) -> int | None:
    """Return the predicted bytes of a plan that may use a budget better than those compiled; None for none.

    XLA's bytes are taken to differ from the predicted ones by as much as for the nearest plan, and between two plans
    to follow a straight line.
    """
    points = sorted((plan.plan.predicted_bytes, _reserved(plan)) for plan in tried)
    below = [point for point in points if point[1] <= budget]
    if not below:
        return points[0][0] - (points[0][1] - budget)
    fastest = min((plan for plan in tried if _reserved(plan) <= budget), key=lambda plan: plan.plan.step_seconds)
    predicted, reserved = fastest.plan.predicted_bytes, _reserved(fastest)
    left = budget - reserved
    if left <= LEFT * budget:
        return None
    above = [point for point in points if point[0] > predicted and point[1] > budget]
    if not above:
        return predicted + left
    return predicted + left * (above[0][0] - predicted) // (above[0][1] - reserved)


def smallest_compiled(planned: PlannedStep) -> PlannedStep:
    """Return a plan for a budget that no plan keeps by prediction, compiled: the fastest that is found within it.

    If none is, the smallest: that by prediction, or another one that needs less once it is compiled, which is found
    out where it is predicted to need little more than XLA reserves for the smallest.
    """
    with building_for(planned.mesh.devices.flat[0].platform):
        smallest = _smallest_compiled(planned, [])
        budget = planned.plan.budget
        if budget is None or _reserved(smallest) > budget:
            return smallest
        return _adjusted(planned, [smallest])


def _smallest_compiled(planned: PlannedStep, tried: Sequence[PlannedStep]) -> PlannedStep:
    """Return the first of the small plans within the budget or else the smallest, where some plans were compiled."""
    budget, tried = planned.plan.budget, list(tried)
    best: PlannedStep | None = None
    for small in _small_plans(planned):
        if best is not None and small.plan.predicted_bytes > OVERRATED * _reserved(best):
            continue
        tried.append(_compiled(_for_budget(small, planned), tried))
        best = tried[-1] if best is None else min(best, tried[-1], key=_reserved)
        if budget is not None and _reserved(best) <= budget:
            break
    assert best is not None
    return best


def _small_plans(planned: PlannedStep) -> Iterator[PlannedStep]:
    """Yield small plans, which do not depend on the budget: the smallest first and that with default storage last."""
    assert planned.others is not None
    smallest, default = planned.others.smallest(), planned.others.default()
    yield smallest
    assert smallest.others is not None
    least, most = smallest.plan.predicted_bytes, default.plan.predicted_bytes
    for part in SMALL_PLANS if least < most else ():
        yield smallest.others.refit(int(least + part * (most - least)))
    yield default


def _compiled(planned: PlannedStep, tried: Sequence[PlannedStep]) -> PlannedStep:
    return next((other for other in tried if other.program is planned.program), None) or with_step(planned)


def _for_budget(planned: PlannedStep, first: PlannedStep) -> PlannedStep:
    """A plan as one for the budget of the first plan."""
    kept = {name: getattr(first.plan, name) for name in ("budget", "rounds", "raised_from")}
    return replace(planned, plan=replace(planned.plan, **kept), others=first.others)


def _reserved(planned: PlannedStep) -> int:
    assert planned.compiled is not None
    return planned.compiled.reserved_bytes


def refusal(budget: int, smallest: PlannedStep) -> MemoryBudgetError:
    """Return the error for a budget that no plan keeps, which offers what the smallest plan needs.

    Args:
      smallest: the plan; compiled if XLA's bytes count, else its predicted bytes do.
    """
    assert smallest.others is not None
    predicted, default = smallest.plan.predicted_bytes, smallest.others.default().plan.memory
    needed = predicted if smallest.compiled is None else smallest.compiled.reserved_bytes
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in default.items())
    source = (
        "as predicted; XLA may reserve more, which PlanOptions(compile=True) finds out"
        if smallest.compiled is None
        else f"which XLA reserves for its compiled step ({bytes_text(predicted)} predicted)"
    )
    largest = largest_stored(smallest)
    stored = f" Largest tensors stored at that budget: {', '.join(largest)}." if largest else ""
    bound = lower_bound(smallest)
    over = ", which alone is over this budget" if bound.bytes > budget else ""
    proven = ""
    # The solver's bound is beside the plan that is predicted to be the smallest; XLA may reserve less for another.
    compared = not over and predicted == smallest.others.smallest().plan.predicted_bytes
    if compared and needed - (saved := smallest.others.most_smaller()) > bound.bytes:
        proven = (
            " As the solver counts bytes, no other choice without swaps for these stages and this schedule takes over "
            f"{bytes_text(saved)} less than that plan."
        )
    more = None if over else smallest.others.more_microbatches(budget)
    lines, also = [f"memory={needed}"], ""
    if more is not None:
        lines.append(f"num_microbatches={more.num_microbatches}")
        also = f", or num_microbatches={more.num_microbatches} with this budget: {bytes_text(more.predicted_bytes)}"
        seconds = more.step_seconds
        also += ", as predicted" if seconds is None else f" and {seconds_text(seconds)} a step, both as predicted"
    fewer = "more stages need less." if more is not None else "more micro-batches or more stages need less."
    return MemoryBudgetError(
        f"{asked_bytes(smallest.others.memory, budget)}: "
        f"by default each device needs {bytes_text(sum(default.values()))} ({parts}), as "
        f"predicted. The smallest budget that was found to be met, for this number of stages and micro-batches, is "
        f"{needed} bytes ({bytes_text(needed)}), {source}.{stored} With these stages no plan needs less than {bound}"
        f"{over}.{proven} Pass memory={needed} or more{also}; {fewer}" + "".join(f"\n    {line}" for line in lines),
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
