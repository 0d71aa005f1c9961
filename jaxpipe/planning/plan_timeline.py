"""A plan's own timeline: the table it was made with, walked through with the seconds it predicts."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.plan import Plan, StagePlan
from jaxpipe.planning.dispatch_timeline import Dispatching, dispatched_timeline
from jaxpipe.schedules import Schedule, StageReplicas, Timeline


@dataclass(frozen=True)
class StageSeconds:
    """The work of a stage on one micro-batch, on a device of the profiled kind, as ``StagePlan`` has it."""

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float


def seconds_on_devices(
    stages: Sequence[StageSeconds | StagePlan], speeds: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of each stage on its own devices: forward, backward for inputs, and for weights."""
    pairs = list(zip(stages, speeds, strict=True))
    return (
        [stage.forward_seconds / s for stage, s in pairs],
        [(stage.backward_seconds - stage.weight_seconds) / s for stage, s in pairs],
        [stage.weight_seconds / s for stage, s in pairs],
    )


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
    work = seconds_on_devices(plan.stages, tuple(speed) or (1.0,) * len(plan.stages))
    if plan.runtime == "mpmd":
        devices = processes or [(0,) * len(plan.stages[row[0]].devices) for row in schedule.stage_of]
        stage_replicas = StageReplicas(plan.stage_replicas.per_stage[: schedule.num_devices])
        messages = [stage.message_seconds for stage in plan.stages]
        return dispatched_timeline(schedule, work, Dispatching(messages, devices, stage_replicas))
    parts = dict(zip(("forward", "backward_input", "backward_weight"), work, strict=True))
    walk = functools.partial(schedule.simulate, **parts, lockstep=True)
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
