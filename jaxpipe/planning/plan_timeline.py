"""A plan's own timeline: the table it was made with, walked through with the seconds it predicts."""

import functools
from collections.abc import Sequence

from jaxpipe.errors import ScheduleError
from jaxpipe.plan import Plan
from jaxpipe.planning.dispatch_timeline import Dispatching, dispatched_timeline
from jaxpipe.schedules import Schedule, StageReplicas, Timeline, simulate


def plan_timeline(
    plan: Plan, schedule: Schedule, speed: Sequence[float] = (), processes: Sequence[Sequence[int]] = ()
) -> Timeline:
    """Return who computes what when in one training step.

    Stage programs run as soon as they have what they need (``jaxpipe.planning.dispatch_timeline``), on the processes of
    each device's replicas, by device along the stage axis. In one program for all devices these walk through the table
    in step, and what the plan's step takes beyond the stages' work is shown as the exchange after each tick. Where
    stages have several devices, a row is one of them, and an action its work on a round
    (``jaxpipe.schedules.replicas``).
    """
    check_size(plan, schedule)
    speed = tuple(speed) or (1.0,) * len(plan.stages)
    stages = list(zip(plan.stages, speed, strict=True))
    work = {
        "forward": [stage.forward_seconds / s for stage, s in stages],
        "backward_input": [(stage.backward_seconds - stage.weight_seconds) / s for stage, s in stages],
        "backward_weight": [stage.weight_seconds / s for stage, s in stages],
    }
    if plan.runtime == "mpmd":
        devices = processes or [(0,) * len(stage.devices) for stage in plan.stages[: schedule.num_devices]]
        messages, stage_replicas = [stage.message_seconds for stage in plan.stages], plan.stage_replicas
        if schedule.num_chunks > 1:
            stage_replicas = StageReplicas(stage_replicas.per_stage[: schedule.num_devices])
        return dispatched_timeline(schedule, **work, dispatching=Dispatching(messages, devices, stage_replicas))
    walk = functools.partial(simulate, schedule, **work)
    return walk(communication=max(0.0, plan.step_seconds - walk().makespan) / len(schedule.ticks))


def check_size(plan: Plan, schedule: Schedule) -> None:
    """Raise ``ScheduleError`` unless a schedule has as many stages and micro-batches as a plan."""
    planned = len(plan.stages), plan.stage_replicas.rounds(plan.num_microbatches)
    if planned != (schedule.total_stages, schedule.num_microbatches):
        raise ScheduleError(
            f"The schedule {schedule.name} has {schedule.total_stages} stages and {schedule.num_microbatches} "
            f"micro-batches, the plan has {planned[0]} and {planned[1]}. Pass the schedule of this plan: "
            f"schedule({planned[0]}, {planned[1]})."
        )
