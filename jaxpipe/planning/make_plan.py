"""The search for a plan, as one loop over candidates.

request, batch ──trace──▶ candidates by the price of their timelines ──▶ storage within the budget ──compile──▶ plan
"""

# More than 15 of our modules: requests, candidates, budgets and kept plans come together here.
from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.agreement import agree
from jaxpipe.array_types import PyTree
from jaxpipe.collect_later import collecting_later
from jaxpipe.planning.budget_search import BudgetSearch
from jaxpipe.planning.candidate import Candidate, PlannedStep
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.compare_requests import shape_parts
from jaxpipe.planning.given_plan import check_all_same, recipe_in
from jaxpipe.planning.kept_front import Point, add_point, better_point, front_path, read_front
from jaxpipe.planning.list_candidates import leanest, list_candidates, on_fewer_devices, price
from jaxpipe.planning.refuse_budget import check_budget, refusal
from jaxpipe.planning.run_plan import run_plan, with_recipe
from jaxpipe.planning.storage.fastest_choice import raised
from jaxpipe.planning.trace_request import Traced, trace_request
from jaxpipe.targets.building import building_for, current
from jaxpipe.text.progress import phase, progress, tell
from jaxpipe.text.units import bytes_text, seconds_text


@collecting_later()
@phase("all else")
@progress("Tracing the model")
def make_plan(request: Request, batch: PyTree, variables: PyTree = None) -> PlannedStep:
    """Plan a model for batches of the given shapes, and show how far that is; raises as ``partition``."""
    if request.plan is not None:
        check_all_same(recipe_in(request.plan).batch, shape_parts(batch))
    with building_for(request.mesh.devices.flat[0]):
        traced = trace_request(request, batch, variables)
        planned = search_plan(traced) if request.plan is None else run_plan(traced)
    agree("jaxpipe.partition", lambda: {"the plan": planned.plan.to_json()})
    return planned


def compiled_plan(planned: PlannedStep) -> PlannedStep:
    """Compile a plan; search again, with what XLA reserves, if that is more than the budget.

    Raises:
      MemoryBudgetError: if no plan keeps the budget.
    """
    with building_for(planned.mesh.devices.flat[0]):
        planned, traced = planned.with_step(), planned.candidate.traced
        if planned.plan.budget is None or planned.needed_bytes <= planned.plan.budget:
            return planned
        if traced.request.plan is not None:
            check_budget(planned)
        compiles = replace(traced.request.options, compile=True)
        return search_plan(replace(traced, request=replace(traced.request, options=compiles)))


def search_plan(traced: Traced) -> PlannedStep:
    """Return the plan with the shortest step, of those that keep the budget if there is one.

    Raises:
      MemoryBudgetError: if none does; it offers what the smallest plan that was found needs.
    """
    budget, log = traced.request.budget, list[str]()
    candidates = list_candidates(traced)
    candidates = sorted([*candidates, *on_fewer_devices(candidates)], key=price)
    log += [f"{_described(candidate)}, by default storage" for candidate in candidates]
    if budget is None:
        planned = _by_default(candidates)
    else:
        planned, budget = _within_budget(traced, BudgetSearch(candidates, log))
    log.append(f"chosen: {_described(planned.candidate)}")
    asked = None if budget == traced.request.budget else traced.request.budget
    plan = replace(planned.plan, budget=budget, raised_from=asked, search=tuple(log))
    candidate = replace(planned.candidate)  # without what the search has made of it
    return with_recipe(replace(planned, plan=plan, candidate=candidate))


def _described(candidate: Candidate) -> str:
    program, seconds = candidate.program, seconds_text(candidate.seconds)
    where = f"{len(program.stages)} stages on {candidate.traced.request.mesh.devices.size} devices"
    stashes = f"stashes of {bytes_text(candidate.waiting_bytes)}"
    cuts = ", ".join(str(stage.operators.stop) for stage in candidate.partition.stages[:-1])
    return f"{program.schedule.name}, {where}, cut at {cuts or 'no operator'}: step {seconds}, {stashes}"


def _by_default(candidates: Sequence[Candidate]) -> PlannedStep:
    """Return the plan without a budget, compiled where predictions are not exact, as stage programs."""
    planned = leanest(candidates).default  # on which no choice depends: bytes are predicted when somebody asks
    wanted = candidates[0].traced.request.options.compile
    compiles = not current().exact_predictions if wanted is None else wanted
    return planned.with_bytes().with_step() if compiles and planned.plan.runtime == "mpmd" else planned


def _within_budget(traced: Traced, search: BudgetSearch) -> tuple[PlannedStep, int]:
    """Return the plan with the shortest step that keeps the budget, and that, which may have been raised.

    A plan that was found for a smaller budget is taken where it is faster, or where no other keeps the budget.
    """
    budget = traced.request.budget
    assert budget is not None
    path = front_path(traced)
    front = read_front(path)
    best, sought = search.shortest(budget), budget
    point = better_point(front, budget, _point(best, sought))
    if point is not None:
        tell(f"A plan for {bytes_text(point.budget)} was {'faster' if best.needed_bytes <= budget else 'smaller'}")
        other = search.shortest(point.budget)
        if _point(other, point.budget).rank(budget) < _point(best, sought).rank(budget):
            best, sought = other, point.budget
        else:
            front.remove(point)
    if best.needed_bytes > budget and traced.request.options.allow_over_budget:
        budget = sought = raised(budget, best.needed_bytes)
        best = search.shortest(budget)
    if best.needed_bytes > budget:
        raise refusal(search, budget, best)
    add_point(path, front, _point(best, sought))
    return best, budget


def _point(planned: PlannedStep, budget: int) -> Point:
    return Point(planned.needed_bytes, planned.plan.step_seconds, budget)
