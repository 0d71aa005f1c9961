"""Updates during a step: what they need of a loss and of an optimizer."""

from jaxpipe.errors import PartitionError
from jaxpipe.runtime.optimizer_by_stage import PartitionedUpdate
from jaxpipe.runtime.stages import Program


def check_asynchronous(program: Program, by_stage: PartitionedUpdate, exchanged: bool, zero: int = 0) -> None:
    """Raise ``PartitionError`` if a schedule updates weights during a step, and the update cannot be made then."""
    schedule, objective = program.schedule, program.objective
    if schedule.versions is None:
        return
    name = f"schedule={schedule.name}: weights change while micro-batches are in flight"
    if by_stage.exchanged:
        sizes = sorted({str(by_stage.graph.tensors[t].shape) for ts in by_stage.exchanged for t in ts})
        raise PartitionError(
            f"{name}, a late stage before the gradient of an early one exists, but the optimizer combines values of "
            f"several stages (of shape {', '.join(sizes)}), as clipping by the global norm does. Clip each "
            "stage by its own norm, jaxpipe.gradients.per_stage(optax.clip_by_global_norm(...)), or use a schedule "
            "that updates at the end of a step."
        )
    if objective.weighted:
        raise PartitionError(
            f"{name}, so the total weight of a batch is not known when the first gradient of it is applied. Return "
            "a mean, (mean, metrics), instead of (sum, weight, metrics)."
        )
    if program.lent:
        raise PartitionError(
            f"{name}, but {len(program.lent)} parameter(s), the largest of "
            f"{max(a.size for a in program.avals([*program.lent]))} numbers, are used in several stages, each of which "
            "would update them at another time. Untie them, or use a schedule that updates at the end of a step."
        )
    if zero:
        raise PartitionError(
            f"PlanOptions(zero={zero}) with {name}; replicas that split the optimizer state add up gradients and "
            "gather parameters once, at the end of a step. Leave out zero, or use a schedule that updates then, as "
            "'1f1b' does."
        )
    if exchanged:
        raise PartitionError(
            f"{name}; gradient_exchange=block_sparse(...) exchanges once, at the end of a step. Use 'dense'."
        )
