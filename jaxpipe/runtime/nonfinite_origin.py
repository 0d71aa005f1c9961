"""The search for the operator at which a loss that is not finite began."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.array_types import ArrayLike, PyTree, TensorNumber
from jaxpipe.errors import NonFiniteError
from jaxpipe.graph.graph import Graph
from jaxpipe.models.check_batch import batch_shapes
from jaxpipe.models.microbatch_program import MicrobatchProgram
from jaxpipe.runtime.executable_plan import Batching, StepResults
from jaxpipe.runtime.select_runtime import Runtime
from jaxpipe.runtime.stages import Program
from jaxpipe.runtime.train_state import TrainState, microbatch_key
from jaxpipe.runtime.zero_weight import MEANING
from jaxpipe.schedules.table import StageNumber
from jaxpipe.sharding.mesh_axes import stage_devices


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The place at which a value first was not finite.

    Attributes:
      stage: of the pipeline.
      microbatch: counted over the replicas; None: every micro-batch is finite, but not what follows from all of them.
      what: the operator, variable or array of the batch.
    """

    stage: StageNumber
    microbatch: int | None
    what: str

    def __str__(self) -> str:
        microbatch = "all micro-batches" if self.microbatch is None else f"micro-batch {self.microbatch}"
        return f"stage {self.stage}, {microbatch}, {self.what}"


def error(
    runtime: Runtime, state: TrainState, batch: PyTree, results: StepResults, stages: Sequence[int]
) -> NonFiniteError:
    """Return the error for a step that was stopped: where it began, as far as that can be told."""
    loss, norm = float(results.loss), float(results.counters["gradient_norm"])
    begin = f"The loss of step {int(state.step)} is {loss}, the norm of its gradient {norm}"
    kept = "The state was left as it was before the step, and is the error's state=."
    if runtime.planned.program.objective.weighted and not results.metrics[-1].addressable_data(0):
        rest = 'Leave such batches out, here or with PlanOptions(on_nonfinite="skip").'
        return NonFiniteError(f"{begin}: {MEANING}. {kept} {rest}", state)
    origin = find(runtime, state, batch) if jax.process_count() == 1 else None
    # A forward pass that is finite: cotangents went wrong in the last of the stages, and all before got them.
    stage = origin.stage if origin is not None else max(stages, default=runtime.planned.program.num_devices - 1)
    where = f"in the backward pass of stage {stage}" if origin is None else f"in {origin}"
    if jax.process_count() > 1:
        stage, where = None, f"in an operator that can be found in one process; gradients of stages {stages} have it"
    return NonFiniteError(
        f"{begin}; it began {where}. {kept} Lower the learning rate, scale the loss, look at the batch, or leave such "
        'steps out with PlanOptions(on_nonfinite="skip").',
        state,
        stage,
    )


def find(runtime: Runtime, state: TrainState, batch: PyTree) -> NonFiniteOrigin | None:
    """Run the loss operator by operator until it is not finite; the operator behind it whose operands are finite.

    The process must have all stages, whose operators run on their own devices. An infinity that does no harm (an
    attention mask) is passed by. None if the loss is finite for every micro-batch, and for all together.
    """
    planned = runtime.planned_for(batch_shapes(batch))
    program, m = planned.program, planned.batching.num_microbatches
    objective, graph = program.objective, program.objective.graph
    devices = [stage_devices(planned.mesh, program.stage_replicas, s)[0] for s in range(program.num_devices)]
    homes, names = _stages(program), _names(objective)
    arrays = runtime.to_host(state)
    parameters = dict(zip(objective.parameters, arrays.parameters, strict=True))
    first = dict(zip(objective.state, arrays.variables, strict=True))
    given = jax.tree.leaves(batch)
    leaves = [x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x) for x in given]
    now, totals = first, list[np.ndarray]()
    for j in range(planned.batching.replicas * m):
        now = first if j % m == 0 else now
        rows = zip(objective.batch, _rows(leaves, planned.batching, objective.model.joined, j), strict=True)
        env = {**graph.constants, **parameters, **now, **dict(rows), objective.key: microbatch_key(state, j)}
        env |= {} if objective.index is None else {objective.index: np.int32(j)}
        for op, s in zip(graph.operators, homes, strict=True):
            device = devices[program.device(s)]
            values = op.evaluate(*(jax.device_put(env[t], device) for t in op.inputs))
            env.update(zip(op.outputs, values, strict=True))
        origin = _origin(graph, env, objective.results[:2])
        if origin is not None:
            index, what = origin
            op = graph.operators[index]
            operator = f"operator {op.label}" + (f" of {op.path}" if op.path else "")
            return NonFiniteOrigin(homes[index], j, names.get(what, operator))
        now = {t: env[new] for t, new in zip(objective.state, objective.new_state, strict=True)}
        row = [np.asarray(env[t]) for t in objective.results[:2]]
        with np.errstate(over="ignore"):
            totals = [a + b for a, b in zip(totals, row, strict=True)] if totals else row
    loss, weight = totals
    if not weight or not np.isfinite(loss):
        home = next(s for op, s in zip(graph.operators, homes, strict=True) if objective.results[0] in op.outputs)
        what = "the sum of the losses" if weight else f"no weight: {MEANING}"
        return NonFiniteOrigin(home, None, what)
    return None


def _stages(program: Program) -> list[StageNumber]:
    """Return the stage of each operator of the loss; one that its stage replaced by others goes with the one before."""
    # Of a stage whose state is folded or whose largest product is in slices, some operators are others.
    within = {t: s for s in program.stage_numbers for op in program.stages[s].graph.operators for t in op.outputs}
    homes = [StageNumber(0)]
    for op in program.objective.graph.operators:
        homes.append(next((within[t] for t in op.outputs if t in within), homes[-1]))
    return homes[1:]


def _names(objective: MicrobatchProgram) -> dict[TensorNumber, str]:
    """Name the inputs of the loss."""
    paths = jax.tree_util.tree_flatten_with_path(objective.microbatch)[0]
    names = {t: f"batch{jax.tree_util.keystr(path)}" for t, (path, _) in zip(objective.batch, paths, strict=True)}
    kinds = {**dict.fromkeys(objective.parameters, "parameter"), **dict.fromkeys(objective.state, "variable")}
    return names | {t: f"{kinds[t]} {name}" for t, name in objective.names.items()}


def _rows(leaves: Sequence[Any], batching: Batching, joined: int, j: int) -> list[Any]:
    """Return the leaves of a micro-batch, counted over the replicas."""
    m = batching.num_microbatches
    cut = (batching.replicas, joined, m, -1)
    return [
        x if shared else x.reshape(*cut, *x.shape[1:])[j // m, :, j % m].reshape(-1, *x.shape[1:])
        for x, shared in zip(leaves, batching.shared, strict=True)
    ]


def _origin(
    graph: Graph, env: dict[TensorNumber, ArrayLike], results: Sequence[TensorNumber]
) -> tuple[int, TensorNumber] | None:
    """Behind results that are not finite: the first operator, and the operand or else the output that is not."""
    written = {t for op in graph.operators for t in op.outputs}
    bad, origin = {t for t in results if not _is_finite(env[t])}, None
    for k, op in reversed([*enumerate(graph.operators)]):
        outputs = bad.intersection(op.outputs)
        if outputs:
            operands = {t for t in op.inputs if not _is_finite(env[t])}
            bad |= operands
            begins = operands - written if operands else outputs
            origin = (k, min(begins)) if begins else origin
    return origin


def _is_finite(x: ArrayLike) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(jnp.all(jnp.isfinite(x)))
