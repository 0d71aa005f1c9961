"""The dimensions of a program's arrays over which it runs with one index, as over the examples of a batch."""

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Graph, Operator, bodies, read_graph
from jaxpipe.graph.kept_dimensions import kept_dimensions
from jaxpipe.graph.reverse_walk import closure
from jaxpipe.graph.split_scan import scan_operands


#: A dimension of a tensor, in a program or in one inside of it, which has a number.
Dimension: TypeAlias = tuple[int, TensorNumber, int]

#: Two dimensions of operands of one program; None for a literal.
Pair: TypeAlias = tuple[tuple[TensorNumber | None, int], tuple[TensorNumber | None, int]]


def paired_dimensions(graph: Graph, sources: Iterable[TensorNumber]) -> set[tuple[TensorNumber, int]]:
    """Return the dimensions that operators pair with the first one of some tensors, and those paired with them.

    An operator pairs dimensions of its operands and results that it runs over together: elementwise, in a batch of
    products, or in their contraction. The rows of a table are paired neither with what looks them up nor with what is
    compared to all of them.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxpipe.graph.graph import trace
      >>> graph = trace(lambda x, h, bank: jnp.tanh(x + h) @ bank.T, *3 * [jnp.ones((4, 2))])
      >>> x, h, bank = graph.inputs
      >>> paired = paired_dimensions(graph, [x])
      >>> (h, 0) in paired, (bank, 0) in paired
      (True, False)
    """
    pairs: dict[Dimension, list[Dimension]] = {}
    for a, b in _pairs(graph, 0, itertools.count(1)):
        pairs.setdefault(a, []).append(b)
        pairs.setdefault(b, []).append(a)
    reached = closure(((0, t, 0) for t in sources), lambda dimension: pairs.get(dimension, ()))
    return {(t, d) for program, t, d in reached if program == 0}


def _pairs(graph: Graph, program: int, numbers: Iterator[int]) -> Iterator[tuple[Dimension, Dimension]]:
    """Give the pairs of a program, and those of the programs in it, which get numbers."""
    for op in graph.operators:
        programs = [] if op.equation is None else bodies(op)
        for part in map(read_graph, programs):
            inside = next(numbers)
            last = zip(reversed(op.operands), reversed(part.inputs), strict=False)
            for t, i in [*((t, i) for t, i in last if t is not None), *zip(op.outputs, part.outputs, strict=True)]:
                outer, inner = len(graph.tensors[t].shape), len(part.tensors[i].shape)
                for d in range(-min(outer, inner), 0):  # a scan runs over a first dimension
                    yield (program, t, outer + d), (inside, i, inner + d)
            yield from _pairs(part, inside, numbers)
        for (a, d), (b, to) in _loop(op, graph) if programs else _dimensions(op, graph):
            if a is not None and b is not None:
                yield (program, a, d), (program, b, to)


def _loop(op: Operator, graph: Graph) -> Iterator[Pair]:
    """Give the pairs of what a loop carries, before and after it, and of what a scan runs over."""
    carried, scanned = op.operands[-len(op.outputs) :] if op.name == "while" else [], []
    if op.name == "scan":
        _, carried, scanned = scan_operands(op)
        scanned = [*scanned, *op.outputs[len(carried) :]]
    for before, after in zip(carried, op.outputs, strict=False):
        yield from (((before, d), (after, d)) for d in range(len(graph.tensors[after].shape)))
    yield from (((a, 0), (b, 0)) for a, b in itertools.pairwise(scanned))


def _dimensions(op: Operator, graph: Graph) -> Iterator[Pair]:
    """Give the pairs of an operator without a program in it."""
    if op.equation is None:
        for t, result in zip(op.inputs, op.outputs, strict=True):
            yield from (((t, d), (result, d)) for d in range(len(graph.tensors[t].shape)))
        return
    shapes = [atom.aval.shape for atom in op.equation.invars]
    for result in op.outputs:
        kept = kept_dimensions(op.name, op.params, shapes, graph.tensors[result].shape)
        for t, dimensions in zip(op.operands, kept, strict=False):
            yield from (((t, d), (result, to)) for d, to in dimensions.items())
    if op.name == "dot_general":
        contracted = zip(*op.params["dimension_numbers"][0], strict=True)
        yield from (((op.operands[0], d), (op.operands[1], to)) for d, to in contracted)
