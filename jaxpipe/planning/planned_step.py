"""``PlannedStep``: an executable plan, and why it was chosen."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpipe.costs.profile import Profile
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.runtime.executable_plan import ExecutablePlan


@dataclass(frozen=True, eq=False)
class Budget:
    """Plans for other budgets.

    ``refit`` makes one of other predicted bytes with the same cuts, or else the smallest; ``smallest`` makes the
    smallest of any cuts and schedule, ``default`` the fastest with default storage. ``most_smaller`` finds how many
    bytes less than the smallest another choice without swaps may take, as the solver counts them.
    """

    refit: Callable[[int], "PlannedStep"]
    smallest: Callable[[], "PlannedStep"]
    default: Callable[[], "PlannedStep"]
    most_smaller: Callable[[], int]
    may_raise: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep(ExecutablePlan):
    """An executable plan, the profile its seconds are sums of, and its partition with what it was chosen from."""

    profile: Profile
    partition: Partition
    budget: Budget | None = None
