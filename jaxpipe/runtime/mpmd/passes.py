"""The passes that make a step's graph one that runs: each a function from graph to graph."""

from collections.abc import Callable

from jaxpipe.runtime.mpmd.combine_sends import combine_sends
from jaxpipe.runtime.mpmd.stage_layout import StageLayout
from jaxpipe.runtime.mpmd.step_graph import StepGraph
from jaxpipe.runtime.mpmd.swap_stashes import swap_stashes
from jaxpipe.runtime.mpmd.value_liveness import drop_values, infer_donation, remove_unread


#: In this order.
PASSES: tuple[Callable[[StepGraph, StageLayout], StepGraph], ...] = (
    remove_unread,
    swap_stashes,
    combine_sends,
    infer_donation,
    drop_values,
)


def apply_passes(graph: StepGraph, layout: StageLayout) -> StepGraph:
    """Return the graph after all passes."""
    for apply in PASSES:
        graph = apply(graph, layout)
    return graph
