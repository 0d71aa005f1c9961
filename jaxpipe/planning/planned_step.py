"""``PlannedStep``: an executable plan, and why it was chosen."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpipe.costs.profile import Profile
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.runtime.executable_plan import ExecutablePlan


@dataclass(frozen=True, eq=False)
class Budget:
    """Other plans, for a plan that must keep a budget.

    Attributes:
      refit: makes the plan for another number of predicted bytes with the same cuts; the smallest with these cuts, if
        that needs more.
      smallest: makes the smallest plan, whatever its cuts and schedule; it is the same for every budget.
      default: predicted bytes of the fastest plan with default storage, by component.
      may_raise: whether the budget may be raised if no plan keeps it.
    """

    refit: Callable[[int], "PlannedStep"]
    smallest: Callable[[], "PlannedStep"]
    default: dict[str, int]
    may_raise: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep(ExecutablePlan):
    """An executable plan, and why it was chosen.

    Attributes:
      profile: the costs that its seconds were summed from.
      partition: the cuts and devices in it, with all that they were chosen from.
      budget: other plans within the budget; None if there is no budget.
    """

    profile: Profile
    partition: Partition
    budget: Budget | None = None
