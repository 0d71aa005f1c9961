"""Stages as they were cut and placed, with the seconds and bytes of the plan that was made of them."""

import itertools
from dataclasses import replace

from jaxpipe.plan import Plan
from jaxpipe.planning.cuts.placed_stages import Partition, stage_speeds


def as_planned(placed: Partition, plan: Plan) -> Partition:
    """Return a partition with a plan's numbers in place of those that cuts were compared by."""
    sent = [stage.message_seconds for stage in plan.stages]
    boundaries = [0.0, *(ahead[0] + behind[1] for ahead, behind in itertools.pairwise(sent)), 0.0]
    memory = [sum(parts.values()) for parts in plan.stage_memory] or [plan.predicted_bytes] * len(plan.stages)
    stages = [
        replace(
            cost,
            compute_seconds=(stage.forward_seconds + stage.backward_seconds) / (len(stage.devices) * speed),
            communication_seconds=max(around),
            sent_bytes=stage.sent_bytes,
            parameter_bytes=stage.parameter_bytes,
            residual_bytes=stage.stash_bytes,
            in_flight=stage.in_flight,
            memory_bytes=memory[k % len(memory)],  # of the device, where it has several stages
        )
        for k, (cost, stage, speed, around) in enumerate(
            zip(placed.stages, plan.stages, stage_speeds(placed), itertools.pairwise(boundaries), strict=True)
        )
    ]
    return replace(
        placed,
        stages=tuple(stages),
        bottleneck_seconds=plan.step_seconds,
        lower_bound_seconds=plan.lower_bound_seconds,
    )
