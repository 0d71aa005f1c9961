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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from jaxpipe.errors import MemoryBudgetError
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.stage_lists import with_compiled_bytes
from jaxpipe.runtime.executable_plan import Compiled
from jaxpipe.runtime.mpmd import device_bytes
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.text.progress import phase, tell
from jaxpipe.text.units import asked_bytes, bytes_text


#: How many plans with the same cuts are compiled at most for one that keeps the budget and leaves little of it.
MOST_COMPILATIONS = 4

#: The share of a budget that may be left where a step could be shorter with it.
LEFT = 0.03

#: Small plans besides the smallest: parts of the predicted bytes by which default storage needs more than that.
SMALL_PLANS = (0.1, 0.25, 0.5)

#: How many times the bytes that XLA reserves for the smallest plan another may be predicted to need and be compiled:
#: predictions on GPUs may be a tenth too high.
OVERRATED = 1.1


@phase("compile")
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
    budget, reserved = planned.plan.budget, planned.needed_bytes
    if budget is not None and reserved > budget:
        raise MemoryBudgetError(
            f"{asked_bytes(planned.candidate.traced.request.memory, budget)}: XLA reserves {reserved} bytes "
            f"({bytes_text(reserved)}) for this plan, which was made without compiling it "
            f"({bytes_text(planned.plan.predicted_bytes)} predicted). Call pipeline.compile() before pipeline.init, or "
            "leave out PlanOptions(compile=False), for a plan that keeps it once it is compiled.",
            reserved,
        )


def adjusted(
    tried: Sequence[PlannedStep],
    budget: int,
    refit: Callable[[int], PlannedStep],
    compiled: Callable[[PlannedStep], PlannedStep],
) -> PlannedStep:
    """Compile plans for other predicted bytes; return the fastest within the budget, or the last if none is.

    Args:
      tried: a compiled plan.
      refit: gives the fastest plan with the same cuts within predicted bytes; the smallest, if that needs more.
      compiled: compiles a plan.
    """
    tried = list(tried)
    while True:
        within = [plan for plan in tried if plan.needed_bytes <= budget]
        fastest = min(within, key=lambda plan: plan.plan.step_seconds, default=None)
        target = _next_target(tried, fastest, budget) if len(tried) < MOST_COMPILATIONS else None
        if target is None:
            return fastest or tried[-1]
        other = refit(target)
        if fastest is not None and other.plan.step_seconds >= fastest.plan.step_seconds:
            return fastest
        if fastest is None and other.plan.predicted_bytes >= tried[-1].plan.predicted_bytes:
            return tried[-1]
        tried.append(compiled(other))


def _next_target(tried: Sequence[PlannedStep], fastest: PlannedStep | None, budget: int) -> int | None:
    """Return the predicted bytes of a plan that may use a budget better than those compiled; None for none.

    XLA's bytes are taken to differ from the predicted ones by as much as for the nearest plan, and between two plans
    to follow a straight line.
    """
    points = sorted((plan.plan.predicted_bytes, plan.needed_bytes) for plan in tried)
    if fastest is None:
        return points[0][0] - (points[0][1] - budget)
    predicted, reserved = fastest.plan.predicted_bytes, fastest.needed_bytes
    left = budget - reserved
    if left <= LEFT * budget:
        return None
    above = [point for point in points if point[0] > predicted and point[1] > budget]
    if not above:
        return predicted + left
    return predicted + left * (above[0][0] - predicted) // (above[0][1] - reserved)


def smallest_compiled(
    small_plans: Iterable[PlannedStep], budget: int, compiled: Callable[[PlannedStep], PlannedStep]
) -> PlannedStep:
    """Return the first of the small plans within a budget, or else the one for which XLA reserves least.

    A plan is compiled only where it is predicted to need little more than XLA reserves for the smallest.
    """
    best: PlannedStep | None = None
    for small in small_plans:
        if best is not None and small.plan.predicted_bytes > OVERRATED * best.needed_bytes:
            continue
        other = compiled(small)
        best = other if best is None else min(best, other, key=lambda plan: plan.needed_bytes)
        if best.needed_bytes <= budget:
            break
    assert best is not None
    return best
