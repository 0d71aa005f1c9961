"""State of a stage whose devices share the micro-batches: running statistics, counts.

    each micro-batch:  what it adds to the state (a mean, a variance)
    end of the step:   these of all devices ──▶ folded, in the order of the micro-batches

So every device of the stage ends with the state that one device would have. It can be done where nothing but the new
state follows from the old one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpipe.array_types import TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import live, ordered
from jaxpipe.models.bound_model import BoundModel
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.stages import Fold, Stage
from jaxpipe.schedules.replicas import StageReplicas


def shared_stages(
    objective: MicrobatchProgram, model: BoundModel, stages: Sequence[Stage], stage_replicas: StageReplicas
) -> tuple[Stage, ...]:
    """Return the stages; those on several devices get a fold for their state."""
    if stage_replicas.is_single:
        return tuple(stages)
    names = dict(zip(objective.state, (v.name for v in model.state), strict=True))
    return tuple(
        stage if width == 1 else separate(objective, stage, width, names)
        for stage, width in zip(stages, stage_replicas.per_stage, strict=True)
    )


def separate(objective: MicrobatchProgram, stage: Stage, width: int, names: Mapping[TensorNumber, str]) -> Stage:
    """Return the stage without the operators that follow from its state, which become its fold.

    Raises ``PartitionError`` if something else follows from state that changes.
    """
    changing = [(t, new) for t, new in zip(stage.state, stage.new_state, strict=True) if t != new]
    if not changing:
        return stage
    old, new = zip(*changing, strict=True)
    graph, source = stage.graph, {t: t for t in old}
    behind = []
    for op in graph.operators:
        read = [source[t] for t in op.inputs if t in source]
        if read:
            behind.append(op)
            source.update(dict.fromkeys(op.outputs, read[0]))
    kept = [*stage.leaving, *(objective.results[k] for k in stage.results)]
    for t in kept:
        if t in source:
            op = next((op for op in behind if t in op.outputs), None)
            where = f" in {op.path}" if op is not None and op.path else ""
            what = "what the loss returns" if op is None else f"the output of {op.label}{where}"
            raise PartitionError(
                f"A stage on {width} devices would share its micro-batches among them, but {what} depends on "
                f"{names[source[t]]}, which every micro-batch changes: it would need what "
                "the micro-batch before it has left on another device. Only the new state may depend on the old one, "
                "as with running statistics. Give this stage one device (devices_per_stage=)."
            )
    behind = live(behind, new)
    written = {t for op in behind for t in op.outputs}
    read = [*(t for op in behind for t in op.inputs), *new]
    statistics = tuple(t for t in ordered(read) if t not in written and t not in old and t not in graph.constants)
    fold = Fold(replace(graph, operators=behind, inputs=(*old, *statistics), outputs=new), old, statistics)
    rest = tuple(op for op in graph.operators if source.keys().isdisjoint(op.outputs))
    outputs = tuple(ordered((*kept, *stage.state, *statistics)))
    return replace(stage, graph=replace(graph, operators=rest, outputs=outputs), new_state=stage.state, fold=fold)
