"""Batches of other shapes than those planned for, with the same cuts and the same training state.

A smaller last batch keeps the examples of a micro-batch and has fewer of these, if they divide it. Another length of
sequences is traced anew; where the operators are the same, so are the cuts.
"""

import contextlib
from dataclasses import replace

from jaxpipe.array_types import PyTree
from jaxpipe.errors import BatchError, ScheduleError
from jaxpipe.models import check_batch
from jaxpipe.models.microbatch_program import MicrobatchProgram, checked_loss, with_rows
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import refitted
from jaxpipe.runtime.executable_plan import Batching, ExecutablePlan
from jaxpipe.runtime.followed_program import followed_stages
from jaxpipe.runtime.stages import Stage, cut_stages, shared_stages, with_backward
from jaxpipe.schedules import Schedule, schedule_makers
from jaxpipe.schedules.table import without_backward


def check_shapes(given: PyTree, planned: PyTree) -> None:
    """Raise ``BatchError`` unless shapes differ from those planned for only in their sizes."""
    for name, x, y in check_batch.paired_leaves(given, planned):
        if (len(x.shape), x.dtype) != (len(y.shape), y.dtype):
            raise BatchError(
                f"{name} is {x.dtype}{list(x.shape)}, the plan was made for {y.dtype}{list(y.shape)}. Other sizes are "
                "fine, another dtype or number of axes is not: cast or reshape it, or make another pipeline."
            )


def shaped_for(planned: ExecutablePlan, batch: PyTree) -> ExecutablePlan:
    """Return the plan for batches of other shapes; raises ``BatchError`` or ``ScheduleError`` if it has none."""
    replicas, before = planned.batching.replicas, planned.program
    size = check_batch.batch_size(batch)
    planned.model.check_batch_size(size)
    if not check_batch.has_examples(batch):
        check_batch.check_microbatches(batch, replicas, planned.batching.num_microbatches)
    # A batch that was planned as one micro-batch without examples stays that, whatever its sizes are by chance.
    m = 1 if all(planned.batching.shared) else _microbatches(batch, size, replicas, planned)
    batching = Batching(planned.batching.shared, replicas, m)
    objective = checked_loss(before.objective.retrace(with_rows(batch, size // (replicas * m))))
    objective = objective.training(planned.update.by_stage.trained)
    schedule = without_backward(_schedule(planned, before.stage_replicas.rounds(m)), before.schedule.frozen)
    if _same_operators(objective, before.objective):
        cuts = (0, *(stage.operators[1] for stage in planned.plan.stages))
        cut = cut_stages(objective, cuts, before.placement)
    else:
        objective, cut = followed_stages(planned, objective, "the loss")
    stages = with_backward(objective, shared_stages(objective, cut, before.stage_replicas), planned.policy)
    if _same_operators(objective, before.objective):
        stages = tuple(map(_stored_alike, stages, before.stages))
    program = replace(before, objective=objective, stages=stages, schedule=schedule, num_microbatches=m)
    return replace(planned, batch=batch, batching=batching, program=program, traces={})


def _microbatches(batch: PyTree, size: int, replicas: int, planned: ExecutablePlan) -> int:
    """The number of micro-batches of a replica: of as many examples as planned, or else of as few numbers as that."""
    rows = check_batch.batch_size(planned.program.objective.microbatch)
    if size % (rows * replicas) == 0:
        return size // (rows * replicas)
    most, parts = planned.batching.num_microbatches, replicas * planned.model.joined
    counts = [m for m in range(1, most + 1) if size % (parts * m) == 0 and size // (replicas * m) <= rows]
    counts = counts or [m for m in range(1, size + 1) if size % (parts * m) == 0]
    if not counts:
        check_batch.check_microbatches(batch, parts, 1)
    return counts[0]


def _schedule(planned: ExecutablePlan, m: int) -> Schedule:
    """Return the table for another number of micro-batches or rounds, of the planned kind if it has this size.

    Synchronous schedules stand for each other, as they train alike.
    """
    before = planned.program.schedule
    if m == before.num_microbatches:
        return before
    tables = []
    for maker in (*planned.schedules, *schedule_makers.AUTO):
        with contextlib.suppress(ScheduleError):
            tables.append(schedule_makers.check_schedule(maker(before.num_devices, m), before.num_devices, m))
    kind = before.stage_of, before.versions is None
    fitting = [table for table in tables if (table.stage_of, table.versions is None) == kind]
    if fitting:  # another kind only if this one has none
        return min(fitting, key=lambda table: table.name != before.name)
    raise ScheduleError(
        f"The schedule {before.name} has no table of {m} micro-batches on {before.num_devices} devices, which a batch "
        f"of this size makes; the plan has {before.num_microbatches}. Pass batches of a size that does, or plan with "
        'schedule="1f1b".'
    )


def _same_operators(first: MicrobatchProgram, other: MicrobatchProgram) -> bool:
    return [op.name for op in first.graph.operators] == [op.name for op in other.graph.operators]


def _stored_alike(stage: Stage, planned: Stage) -> Stage:
    """The stage with the storage that was planned, where that does not depend on sizes."""
    if stage.vjp is None or planned.vjp is None or planned.vjp.plan.uncertain:
        return stage
    try:
        vjp = vjp_program.assemble(stage.vjp.backward_graph, refitted(planned.vjp.plan, stage.vjp.graph))
    except (ValueError, KeyError, IndexError):  # its backward pass needs other tensors, or codecs allow others
        return stage
    return replace(stage, vjp=vjp)
