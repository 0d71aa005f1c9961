"""Another program over the same variables, cut so that each stays in its stage."""

import contextlib
from dataclasses import replace

from jaxpipe.errors import PartitionError
from jaxpipe.graph.operator_order import in_stage_order
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.executable_plan import ExecutablePlan
from jaxpipe.runtime.stages import Program, Stage, cut_stages
from jaxpipe.schedules.synchronous import forward_only


def forward_program(planned: ExecutablePlan, objective: MicrobatchProgram, name: str, num_microbatches: int) -> Program:
    """Return a program of forward passes alone, on the stages' devices, with so many micro-batches of each replica.

    What predictions leave in the state is thrown away, so that every micro-batch begins with that of the batch.
    """
    if name == "predict":
        objective = replace(objective, new_state=objective.state)
    objective, stages = followed_stages(planned, objective, name)
    program, before = planned.program, planned.program.schedule
    rounds = program.stage_replicas.rounds(num_microbatches)
    schedule = forward_only(before.num_devices, rounds, before.num_chunks, before.stage_of)
    return replace(program, objective=objective, stages=stages, schedule=schedule, num_microbatches=num_microbatches)


def followed_stages(
    planned: ExecutablePlan, objective: MicrobatchProgram, name: str
) -> tuple[MicrobatchProgram, tuple[Stage, ...]]:
    """Return a program and its stages; one that calls the layers several times is put in the order of the stages."""
    placement = planned.program.placement
    with contextlib.suppress(PartitionError):
        return objective, cut_stages(objective, _cuts(planned, objective, name), placement)
    objective = replace(objective, graph=in_stage_order(objective.graph, placement.home(objective)))
    return objective, cut_stages(objective, _cuts(planned, objective, name), placement)


def _cuts(planned: ExecutablePlan, objective: MicrobatchProgram, name: str) -> list[int]:
    """Return cuts by which each variable is used where it is placed; parameters that stages borrow, in later ones too.

    Raises ``PartitionError`` if the program uses another variable after one that is placed in a later stage.
    """
    program = planned.program
    num_stages, num_operators = program.schedule.total_stages, len(objective.graph.operators)
    home = program.placement.home(objective)
    borrowed = {t for stage in program.stages for t in stage.borrowed}
    pairs = zip(objective.parameters, program.objective.parameters, strict=True)
    shared = {t for t, before in pairs if before in borrowed}
    cuts, now = [0], 0
    for k, op in enumerate(objective.graph.operators):
        for t in op.inputs:
            if home.get(t, now) < now and t not in shared:
                raise PartitionError(
                    f"{name} uses {objective.names[t]}, which is placed in stage {home[t]}, after variables of stage "
                    f"{now}. It must call the layers in the order in which the loss calls them, and none on the "
                    "results of later ones."
                )
            while home.get(t, now) > now:
                now += 1
                cuts.append(k)
    return cuts + [num_operators] * (num_stages - now)
