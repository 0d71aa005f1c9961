"""The level of a candidate that keeps a budget, by predicted bytes first and then by those that XLA reserves."""

import math
from collections.abc import Callable, Sequence

from jaxpipe.planning.bracket_search import next_place
from jaxpipe.planning.candidate import Candidate, PlannedStep
from jaxpipe.planning.storage.stage_levels import StageLevels


#: How many levels of a candidate are predicted at most for one budget, and how many are compiled.
MOST_LEVELS = 4

#: The places of small levels: shares of the way from default storage to the lowest.
SMALL_LEVELS = (1.0, 0.9, 0.75, 0.5, 0.0)

#: By what share estimates and predictions may be wrong where they speak against a level.
INEXACT = 0.1

#: Gives a plan with the bytes that XLA reserves for it.
Compile = Callable[[PlannedStep], PlannedStep]


class LevelSearch:
    """The levels of a candidate, with what is predicted and compiled of them, whatever the budget."""

    def __init__(self, candidate: Candidate, levels: StageLevels, compiled: Compile | None):
        """Nothing is done yet; ``compiled`` compiles a plan, None leaves it at predictions."""
        self.candidate, self.levels, self._compiled = candidate, levels, compiled
        self._predicted_plans: dict[int, PlannedStep] = {}
        self._compiled_plans: dict[int, PlannedStep] = {}

    def fastest(self, budget: int) -> PlannedStep | None:
        """Return the fastest plan that is found within a budget; None if none is."""
        plans = self._search(self.levels.rooms, self._predicted_plans, self.predicted, budget)
        if self._compiled is not None:
            plans = self._search(self._corrected, self._compiled_plans, self.measured, budget)
        within = [plan for plan in plans.values() if plan.needed_bytes <= budget]
        return min(within, key=lambda plan: (plan.plan.step_seconds, plan.needed_bytes), default=None)

    def small(self, budget: int) -> PlannedStep:
        """Return the first small level within a budget, or else the one that needs least."""
        default, lowest = self.levels.default_place, self.levels.lowest_place
        plans: list[PlannedStep] = []
        for share in SMALL_LEVELS:
            place = default + round(share * (lowest - default))
            least = min((plan.needed_bytes for plan in plans), default=math.inf)
            if least <= budget:
                break
            if self.predicted(place).needed_bytes <= (1 + INEXACT) * least:
                plans.append(self.measured(place))
        return min(plans, key=lambda plan: plan.needed_bytes)

    def predicted(self, place: int) -> PlannedStep:
        """Return the plan of a level, with predicted bytes."""
        if place not in self._predicted_plans:
            self._predicted_plans[place] = self.candidate.described(*self.levels.program_at(place)).with_bytes()
        return self._predicted_plans[place]

    def measured(self, place: int) -> PlannedStep:
        """Return the plan of a level, compiled if plans are."""
        if self._compiled is None:
            return self.predicted(place)
        if place not in self._compiled_plans:
            self._compiled_plans[place] = self._compiled(self.predicted(place))
        return self._compiled_plans[place]

    @property
    def _corrected(self) -> list[float]:
        """The bytes of all levels, as far from estimates as the predicted ones of the next level that has some."""
        rooms, plans = self.levels.rooms, self._predicted_plans
        nearest = [min(plans, key=lambda place: abs(place - k)) for k in range(len(rooms))]
        return [room + plans[k].plan.predicted_bytes - rooms[k] for room, k in zip(rooms, nearest, strict=True)]

    def _search(
        self,
        estimates: Sequence[float],
        plans: dict[int, PlannedStep],
        measure: Callable[[int], PlannedStep],
        budget: int,
    ) -> dict[int, PlannedStep]:
        """Measure levels until no other can use a budget better; returns all that are known."""
        for _ in range(MOST_LEVELS):
            known = {k: plan.needed_bytes for k, plan in plans.items()}
            place = next_place(known, estimates.__getitem__, len(estimates), budget)
            if place is None:
                break
            measure(place)
        return plans
