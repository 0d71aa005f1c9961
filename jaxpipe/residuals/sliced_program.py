"""The programs of a graph whose largest product runs in slices, logits as a rule, which are then never whole."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.allowed_codecs import FAST, Policy
from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.row_slices import slice_rows
from jaxpipe.residuals import vjp_program
from jaxpipe.residuals.choose_formats import kept_by_policies
from jaxpipe.residuals.vjp_program import VJPProgram


#: Slices of a product at most, whatever else a program holds.
MOST_SLICES = 32


@dataclass(frozen=True, eq=False)
class SlicedProgram:
    """The programs, the operators of the first graph that run in the loop over slices, and the number of slices."""

    vjp: VJPProgram
    operators: tuple[Operator, ...]
    count: int


def in_slices(
    graph: Graph,
    wrt: Iterable[TensorNumber],
    *,
    policy: Policy = FAST,
    held: Iterable[TensorNumber] = (),
    seeds: Iterable[TensorNumber] | None = None,
) -> SlicedProgram | None:
    """Return the programs of a graph with its largest product in slices; None if what follows that is not row-wise.

    None as well if a save policy keeps something of it: slices are computed again.

    A slice is no larger than the largest of the tensors that are less than half of the product, or than a 32nd of it.
    Arguments as ``vjp_program.build`` has them.
    """
    sizes = [graph.tensors[t].bytes for op in graph.operators for t in op.outputs]
    largest = max((graph.tensors[op.outputs[0]].bytes for op in graph.operators if op.name == "dot_general"), default=0)
    others = max((size for size in sizes if 2 * size < largest), default=0)
    sliced = slice_rows(graph, max(others, largest // MOST_SLICES))
    if sliced is None or not kept_by_policies(graph).isdisjoint(sliced.operators):
        return None
    built = vjp_program.build(sliced.graph, wrt, policy=policy, held=held, seeds=seeds)
    return SlicedProgram(built, sliced.operators, sliced.count)
