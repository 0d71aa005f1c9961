"""Layers that are one ``scan`` as operators of their own, so that stages may be cut between them.

A scan over stacked parameters ``[layers, ...]`` is found in the traced loss, and the model's variables are cut into the
rows of each group of iterations (``jaxpipe.models.bound_model.unstack``). ``jaxpipe.graph.split_scan`` then makes the
programs over the pieces: of the loss, of evaluation and prediction, and of the optimizer.
"""

from collections.abc import Sequence
from typing import Literal

from jaxpipe.errors import PartitionError
from jaxpipe.graph.split_scan import MixedRowsError, StackedScan, WholeStackError, split_rows, stacked_scans
from jaxpipe.graph.stacked_layers import Stacks, groups_of_rows
from jaxpipe.models.bound_model import BoundModel, unstack
from jaxpipe.models.microbatch_program import MicrobatchProgram


#: Where scans are cut: for each of their lengths, the first iterations of groups, and the length.
Groups = tuple[tuple[int, ...], ...]

#: How many iterations stay together, 0 for all; or the groups.
Unrolling = int | Groups


def unroll(objective: MicrobatchProgram, groups: Groups, partly: bool = True) -> BoundModel:
    """Return the model of a loss with the variables of its scans cut into groups of layers.

    Raises:
      WholeStackError: if none of them can be, or not all and they may not be cut ``partly``.
    """
    graph, names = objective.graph, list(objective.names.values())
    variables = {t: k for k, t in enumerate(objective.names)}
    by_length = {bounds[-1]: bounds for bounds in groups}
    scans = [scan for scan in scans_over_variables(objective) if scan.length in by_length]
    cut = {variables[t]: by_length[scan.length] for scan in scans for t in scan.inputs}
    why = ""
    while cut:
        bounds = [cut.get(k) for k in range(len(names))]
        split = len(objective.parameters)
        parameters, state = Stacks(tuple(bounds[:split])), Stacks(tuple(bounds[split:]))
        inputs = {t: bounds[k] for t, k in variables.items()}
        outputs = dict(zip(objective.new_state, state.bounds, strict=True))
        try:
            split_rows(
                graph,
                Stacks(tuple(inputs.get(t) for t in graph.inputs)),
                Stacks(tuple(outputs.get(t) for t in graph.outputs)),
            )
            return unstack(objective.model, parameters, state)
        except MixedRowsError as error:
            whole = [variables[graph.inputs[k]] for k in sorted(error.sources)]
            why = f"{', '.join(names[k] for k in whole)} is used as a whole, too ({error.where})"
            for k in whole if partly else list(cut):
                del cut[k]
    raise WholeStackError(
        "unroll_scans: the loss has no scan over stacked parameters that could be cut between its iterations. "
        + (f"{why}." if why else "Layers that are no scan can be cut without it."),
        why,
    )


def groups_of(objective: MicrobatchProgram, unrolling: Unrolling) -> Groups:
    """Return the groups of iterations of a loss's scans over stacked variables."""
    if not isinstance(unrolling, int):
        return unrolling
    lengths = sorted({scan.length for scan in scans_over_variables(objective)})
    return tuple(groups_of_rows(length, unrolling) for length in lengths)


def scans_over_variables(objective: MicrobatchProgram) -> list[StackedScan]:
    """Return the scans over the layers of stacked variables."""
    return stacked_scans(objective.graph, objective.names)


def check_groups(unrolling: object) -> Unrolling:
    """Return how many iterations of scans stay together, or the groups."""
    if isinstance(unrolling, Sequence) and not isinstance(unrolling, str):
        return tuple(map(tuple, unrolling))
    if not isinstance(unrolling, int) or unrolling < 0:
        raise PartitionError(
            f"unroll_scans={unrolling!r}; it must be True, the number of iterations that stay together, or False."
        )
    return int(unrolling)


def check_unroll(unrolling: object, exchanged: bool) -> Unrolling | Literal["auto"]:
    """Return how scans are unrolled; ``exchanged``: gradients are, by blocks."""
    if unrolling == "auto":
        return "auto"
    groups = check_groups(unrolling)
    if groups and exchanged:
        raise PartitionError(
            "unroll_scans: gradient_exchange=block_sparse(...) sends the best blocks of each whole parameter, and a "
            "stacked one would be in several stages. Use gradient_exchange='dense', or leave out unroll_scans."
        )
    return groups
