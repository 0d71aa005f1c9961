"""``PlannedStep``: an executable plan, and why it was chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jaxpipe.costs.profile import Profile
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.runtime.executable_plan import ExecutablePlan


@dataclass(frozen=True)
class MoreMicrobatches:
    """A number of micro-batches with which a budget is kept.

    Attributes:
      num_microbatches: of each replica.
      predicted_bytes: of the fullest device.
      step_seconds: predicted; None where the caller's profile is one of other micro-batches.
    """

    num_microbatches: int
    predicted_bytes: int
    step_seconds: float | None


class OtherPlans(Protocol):
    """Plans of the same request for other budgets."""

    @property
    def memory(self) -> int | str | None:
        """The budget as the caller wrote it."""
        ...

    @property
    def may_raise(self) -> bool:
        """True if a budget that no plan keeps is raised."""
        ...

    def refit(self, predicted_bytes: int) -> "PlannedStep":
        """Return the fastest plan within predicted bytes with the same cuts; the smallest, if that needs more."""
        ...

    def smallest(self) -> "PlannedStep":
        """Return the plan with the least predicted bytes."""
        ...

    def default(self) -> "PlannedStep":
        """Return the fastest plan with default storage."""
        ...

    def most_smaller(self) -> int:
        """Return how many bytes less than the smallest plan another one without swaps may take, as solvers count."""
        ...

    def more_microbatches(self, budget: int) -> MoreMicrobatches | None:
        """Return the fewest of twice, four and eight times as many micro-batches that keep a budget, as predicted."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep(ExecutablePlan):
    """An executable plan, the profile its seconds are sums of, and its partition with what it was chosen from.

    A plan for a budget knows others. ``predict_bytes`` adds the bytes of each device to a plan that lacks them: without a
    budget nothing depends on them, and to trace the programs of all stages takes longer than all else.
    """

    profile: Profile
    partition: Partition
    others: OtherPlans | None = None
    predict_bytes: "Callable[[PlannedStep], PlannedStep] | None" = None
