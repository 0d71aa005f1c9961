"""``plan_storage``: what one stage stores under a budget."""

from dataclasses import dataclass, replace

from jaxpipe.errors import MemoryBudgetError
from jaxpipe.graph.graph import Graph, is_differentiable
from jaxpipe.options import Solver
from jaxpipe.planning.storage.fastest_choice import Answer, check_solver, choose, lowest_peak, raised
from jaxpipe.planning.storage.prices import Prices
from jaxpipe.planning.storage.storage_items import Items, stage_items, storage_plan
from jaxpipe.planning.storage.storage_problem import NOT_STORED, SolverOptions, outcome_of
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import ResidualPlan
from jaxpipe.residuals.vjp_program import VJPProgram
from jaxpipe.targets.rates import OTHER, Rates
from jaxpipe.text.printed import PlainTable, Printed
from jaxpipe.text.units import bytes_text, parse_bytes, seconds_text


@dataclass(frozen=True)
class TensorChoice:
    """One tensor's row in a plan.

    Attributes:
      name: module path and operator.
      storage: ``"keep"``, ``"mask"``, ..., ``"recompute"``, or ``"unused"`` if nothing needs it then.
      bytes: that it takes between the passes.
      seconds: for the codec, or to compute it again.
    """

    name: str
    storage: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class StoragePlan(Printed):
    """The storage of a stage, and its costs.

    Attributes:
      tensors: the choice for each tensor that may be stored.
      choices: the same as a format for every tensor that the backward pass touches, for
        ``jaxpipe.residuals.vjp_program.assemble``.
      budget_bytes: the caller's; more, if it was raised.
      peak_bytes: the most that is in memory at once during the backward pass: stashes, what is computed again, and
        cotangents. Simulated, not what the solver says.
      stash_bytes: what one micro-batch stores.
      added_seconds: for a micro-batch, over the default plan.
      lower_bound_seconds: no choice within the budget adds less.
      status: ``"optimal"``, ``"gap"``, ``"time limit"``, ``"greedy"`` or ``"lowest peak"``.
      raised_from: the caller's budget, if no plan keeps it.
    """

    tensors: tuple[TensorChoice, ...]
    choices: ResidualPlan
    budget_bytes: int
    peak_bytes: int
    stash_bytes: int
    added_seconds: float
    lower_bound_seconds: float
    status: str
    raised_from: int | None = None

    def _printed(self) -> list[PlainTable | str]:
        table = PlainTable("tensor", "storage", title="storage of one stage")
        table.add_numbers("bytes", "time")
        for row in self.tensors:
            if row.storage != "unused":
                table.add_row(row.name, row.storage, bytes_text(row.bytes), seconds_text(row.seconds))
        raised = "" if self.raised_from is None else f" (raised from {bytes_text(self.raised_from)})"
        lines = (
            f"peak {bytes_text(self.peak_bytes)} of {bytes_text(self.budget_bytes)}{raised}, stash "
            f"{bytes_text(self.stash_bytes)}\n"
            f"{seconds_text(self.added_seconds)} more than by default, at least "
            f"{seconds_text(self.lower_bound_seconds)} ({self.status})"
        )
        return [table, lines]


def plan_storage(
    stage: VJPProgram | Graph,
    budget_bytes: int | str,
    *,
    in_flight: int = 1,
    rates: Rates = OTHER,
    solver: str | Solver = "HIGHS",
    time_limit: float = 10.0,
    gap: float = 0.0,
    allow_over_budget: bool = False,
) -> StoragePlan:
    """Choose for every tensor of a stage whether it is stored, in which format, or computed again.

    The time that this adds is as small as can be, while at no moment of the backward pass more bytes are in memory than
    the budget has. Arguments and parameters are not counted.

    Args:
      stage: a stage, or a traced program, of which all floating inputs are then differentiated.
      budget_bytes: an int, or a text such as ``"1GiB"``.
      in_flight: micro-batches whose stash is there at the same time.
      rates: of the device, for estimates of what operators take.
      solver: as ``PlanOptions`` takes it.
      time_limit: seconds for it.
      gap: how far from the best it may stop.
      allow_over_budget: raise the budget by a tenth at a time, until there is a plan.

    Raises:
      MemoryBudgetError: if no plan is found, with the smallest budget for which one is.
      PartitionError: if the solver is not installed.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.graph.graph import trace
      >>> graph = trace(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum(), jnp.ones((8, 8)), jnp.ones((64, 8)))
      >>> plan_storage(graph, "16KiB").status
      'optimal'
    """
    budget, options = int(parse_bytes(budget_bytes)), SolverOptions(check_solver(solver), time_limit, gap)
    if isinstance(stage, Graph):
        wrt = [t for t in stage.inputs if is_differentiable(stage.tensors[t].aval)]
        stage = vjp_program.build(stage, wrt, held=stage.inputs)
    items = stage_items(stage, Prices(rates), stage.graph.inputs)
    unlimited = replace(items.problem, held=in_flight - 1)
    default = outcome_of(unlimited, items.default)
    asked = budget
    answer = choose(replace(unlimited, capacity=budget), options)
    if answer is None:
        lowest = lowest_peak(unlimited, options)
        if not allow_over_budget:
            raise _too_small(items, budget, lowest)
        budget = raised(asked, lowest.outcome.peak_bytes)
        answer = choose(replace(unlimited, capacity=budget), options) or lowest
    before = 0.0 if default is None else default.seconds
    return StoragePlan(
        tensors=_rows(items, answer),
        choices=storage_plan(items, answer.choice),
        budget_bytes=budget,
        peak_bytes=answer.outcome.peak_bytes,
        stash_bytes=answer.outcome.stash_bytes,
        added_seconds=answer.outcome.seconds - before,
        lower_bound_seconds=answer.bound - before,
        status=answer.status,
        raised_from=asked if budget > asked else None,
    )


def _rows(items: Items, answer: Answer) -> tuple[TensorChoice, ...]:
    rows = []
    for k, (item, option) in enumerate(zip(items.problem.items, answer.choice, strict=True)):
        if option != NOT_STORED:
            chosen = item.options[option]
            rows.append(TensorChoice(item.name, chosen.name, chosen.bytes, chosen.seconds))
        elif answer.outcome.last[k] >= 0:
            rows.append(TensorChoice(item.name, "recompute", 0, item.seconds or 0.0))
        else:
            rows.append(TensorChoice(item.name, "unused", 0, 0.0))
    return tuple(rows)


def _too_small(items: Items, budget: int, lowest: Answer) -> MemoryBudgetError:
    cotangents = items.problem.base[lowest.outcome.bytes.argmax()]
    sizes = [(row.bytes, f"{row.name} ({bytes_text(row.bytes)}, {row.storage})") for row in _rows(items, lowest)]
    largest = ", ".join(text for size, text in sorted(sizes, reverse=True)[:3] if size)
    return MemoryBudgetError(
        f"budget_bytes={budget} ({bytes_text(budget)}): the smallest budget with a plan is {lowest.outcome.peak_bytes} "
        f"bytes ({bytes_text(lowest.outcome.peak_bytes)}), of which cotangents are {bytes_text(cotangents)}. What is "
        f"stored most even then: {largest or 'nothing'}. Smaller micro-batches or fewer in flight need less; or pass "
        "allow_over_budget=True.",
        lowest.outcome.peak_bytes,
    )
