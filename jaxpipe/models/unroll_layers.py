"""Layers that are one ``scan`` as operators of their own, so that stages may be cut between them.

A scan over stacked parameters ``[layers, ...]`` is found in the traced loss, and the model's variables are cut into the
rows of each group of iterations (``jaxpipe.models.bound_model.unstack``). ``jaxpipe.graph.split_scan`` then makes the
programs over the pieces: of the loss, of evaluation and prediction, and of the optimizer.
"""

from jaxpipe.array_types import PyTree, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph.split_scan import MixedRowsError, scan_operands, split_rows
from jaxpipe.graph.stacked_layers import Stacks, groups_of_rows
from jaxpipe.models.bound_model import BoundModel, UserFunction, unstack
from jaxpipe.models.microbatch_program import MicrobatchProgram, trace_loss


def unroll(model: BoundModel, objective: MicrobatchProgram, rows: int) -> BoundModel:
    """Return the model with the variables of its scans cut into groups of ``rows`` layers."""
    graph = objective.graph
    variables = {t: k for k, t in enumerate((*objective.parameters, *objective.state))}
    lengths = scanned_variables(objective)
    names = [v.name for v in (*model.parameters, *model.state)]
    cut = {variables[t]: groups_of_rows(length, rows) for t, length in lengths.items()}
    why = ""
    while cut:
        bounds = [cut.get(k) for k in range(len(names))]
        split = len(model.parameters)
        parameters, state = Stacks(tuple(bounds[:split])), Stacks(tuple(bounds[split:]))
        inputs = {t: bounds[k] for t, k in variables.items()}
        outputs = dict(zip(objective.new_state, state.bounds, strict=True))
        try:
            split_rows(
                graph,
                Stacks(tuple(inputs.get(t) for t in graph.inputs)),
                Stacks(tuple(outputs.get(t) for t in graph.outputs)),
            )
            return unstack(model, parameters, state)
        except MixedRowsError as error:
            whole = [variables[graph.inputs[k]] for k in sorted(error.sources)]
            why = f" {', '.join(names[k] for k in whole)} is used as a whole, too ({error.where})."
            for k in whole:
                del cut[k]
    raise PartitionError(
        "unroll_scans: the loss has no scan over stacked parameters that could be cut between its iterations."
        + (why or " Layers that are no scan can be cut without it.")
    )


def trace_unrolled(
    model: BoundModel, loss: UserFunction, batch: PyTree, rows: int
) -> tuple[BoundModel, MicrobatchProgram]:
    """A model and its loss for one micro-batch, its scans cut into groups of ``rows`` iterations; 0: as they are."""
    objective = trace_loss(model, loss, batch)
    if not rows:
        return model, objective
    model = unroll(model, objective, rows)
    return model, trace_loss(model, loss, batch)


def scanned_variables(objective: MicrobatchProgram) -> dict[TensorNumber, int]:
    """The variables over whose first axis a scan runs, as they are or element by element made of them; its length."""
    graph = objective.graph
    origin = {t: t for t in (*objective.parameters, *objective.state)}
    lengths: dict[TensorNumber, int] = {}
    for op in graph.operators:
        if op.name == "scan":
            consts, carried, names = scan_operands(op)
            lengths.update(
                (origin[t], op.params["length"]) for t in names[consts + carried :] if t is not None and t in origin
            )
        elif op.equation is None:
            origin.update((new, origin[old]) for old, new in zip(op.inputs, op.outputs, strict=True) if old in origin)
        elif len(op.inputs) == len(op.outputs) == 1 and op.inputs[0] in origin:
            same = graph.tensors[op.inputs[0]].shape[:1] == graph.tensors[op.outputs[0]].shape[:1]
            if same:
                origin[op.outputs[0]] = origin[op.inputs[0]]
    return lengths


def check_unroll(rows: int, exchanged: bool) -> int:
    """Return the iterations that stay together when scans are unrolled; 0 if they are not."""
    if not isinstance(rows, int) or rows < 0:
        raise PartitionError(
            f"unroll_scans={rows!r}; it must be True, the number of iterations that stay together, or False."
        )
    if rows and exchanged:
        raise PartitionError(
            "unroll_scans: gradient_exchange=block_sparse(...) sends the best blocks of each whole parameter, and a "
            "stacked one would be in several stages. Use gradient_exchange='dense', or leave out unroll_scans."
        )
    return int(rows)
