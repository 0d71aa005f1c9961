"""The passes of a decorated program of which no budget says what it stores."""

import jax

from jaxpipe.graph.graph import Graph
from jaxpipe.graph.rules import differs_from_jax
from jaxpipe.residuals.checkpointed_passes import CheckpointedPasses
from jaxpipe.residuals.chosen_storage import DecoratedProgram, Passes
from jaxpipe.residuals.stored_passes import StoredPasses
from jaxpipe.targets.building import current


def default_passes(program: DecoratedProgram) -> Passes:
    """Return passes with default storage, or JAX's own where XLA keeps all that these save beside the memory."""
    by_jax = not any(map(differs_from_jax, program.graph.operators))
    if by_jax and plain_bytes(program) <= current().rates.on_chip:
        return CheckpointedPasses(program, (), jax.checkpoint_policies.everything_saveable)
    return StoredPasses(program.default, labelled=True)


def plain_bytes(program: DecoratedProgram) -> int:
    """Return about the bytes that JAX saves of a program: all that its backward pass reads, as it is."""
    graph: Graph = program.backward_graph.graph
    available = graph.derived_from_parameters | program.held
    return sum(graph.tensors[t].bytes for t in program.backward_graph.needs if t not in available)
