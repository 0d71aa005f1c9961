"""The balance loop: what storage within a budget adds to a stage counts when the program is cut again.

cut ──▶ storage within the budget ──▶ seconds of each stage ──▶ balanced? ──yes──▶ done
 ▲                                                                │ no
 └────────── operators charged with what their stage adds ◀───────┘
"""

from collections.abc import Callable
from dataclasses import replace

from jaxpipe.costs.profile import Profile
from jaxpipe.errors import PartitionError
from jaxpipe.plan import BalanceRound
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.cuts.placed_stages import stage_speeds
from jaxpipe.text.progress import tell


#: Fastest over slowest stage at which no better cut is looked for.
BALANCED = 0.9

#: The share of a step by which storage must have made it longer, or no other cut can make it much shorter.
WORTH_A_CUT = 0.02

#: How often a program is cut again at most.
MOST_ROUNDS = 3


def balanced(first: PlannedStep, cut_again: Callable[[Profile], PlannedStep]) -> PlannedStep:
    """Return the plan with the shortest step of all that the loop comes by, with a record of the rounds.

    ``cut_again`` makes a plan for another profile.
    """
    best = now = first
    rounds = [round_of(first)]
    short_enough = (1 + WORTH_A_CUT) * first.candidate.seconds
    for _ in range(MOST_ROUNDS):
        if best.plan.step_seconds <= short_enough or rounds[-1].rate >= BALANCED:
            break
        if not any(stage.added_seconds for stage in now.plan.stages):
            break
        tell(f"Cutting again with that storage, round {len(rounds) + 1}")
        try:
            now = cut_again(_charged(now))
        except PartitionError:
            break
        latest = round_of(now)
        if any(latest.cuts == earlier.cuts for earlier in rounds):
            break
        rounds.append(latest)
        tell(f"Cut again at {latest.cuts}: fastest over slowest stage {latest.rate:.2f}")
        if now.plan.step_seconds < best.plan.step_seconds:
            best = now
    return replace(best, plan=replace(best.plan, rounds=tuple(rounds)))


def round_of(planned: PlannedStep) -> BalanceRound:
    """Return the record of a plan's cuts."""
    plan, speeds = planned.plan, stage_speeds(planned.partition)
    stages = zip(plan.stages, plan.stage_replicas.per_stage, speeds, strict=True)
    seconds = [(stage.forward_seconds + stage.backward_seconds) / (width * speed) for stage, width, speed in stages]
    return BalanceRound(tuple(stage.operators[1] for stage in plan.stages[:-1]), tuple(seconds), plan.step_seconds)


def _charged(planned: PlannedStep) -> Profile:
    """The profile with the seconds that each stage's storage adds, spread over the stage's operators."""
    backward = list(planned.profile.backward_seconds)
    for stage in planned.plan.stages:
        here = range(*stage.operators)
        stage_seconds = sum(backward[k] for k in here)
        for k in here:
            backward[k] += stage.added_seconds * (backward[k] / stage_seconds if stage_seconds else 1 / len(here))
    return replace(planned.profile, backward_seconds=tuple(backward))
