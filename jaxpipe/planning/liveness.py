"""The most memory that a program needs at once, from its operators alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe.graph import Graph, Operator, itemsize, read_graph
from jaxpipe.work import ARITHMETIC, TRANSCENDENTAL, VIEWS


#: Operators that give another name to the same bytes.
_ALIASES = frozenset(["bitcast_convert_type", "expand_dims", "name", "optimization_barrier", "reshape", "squeeze"])

#: Cheap to look at, but XLA does not compute them again for each reader.
_COSTLY = TRANSCENDENTAL | {"div", "integer_pow", "rem", "rsqrt", "sqrt"}

#: Operators that XLA fuses with what they read, unless others read that too.
_REDUCTIONS = frozenset(["argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"])

#: A concatenation of more arrays than this does not take in what others read too; XLA's limit is a matter of size.
_FUSED_PIECES = 4

#: Operators that XLA fuses with what they read.
_ELEMENTWISE = ARITHMETIC | TRANSCENDENTAL | VIEWS | {"dynamic_slice"}


def peak_bytes(function: Callable[..., Any], *avals: Any) -> int:
    """Bytes alive at the worst moment while a function runs; its arguments are not counted, its results are.

    A model of what XLA does: elementwise operators are fused into their readers, so that only some tensors are ever
    written to memory: results of products, convolutions, reductions and control flow, what those read (reductions
    and long concatenations only if others read it too), what is returned, and what is costly and read more than once.
    A written tensor lives from its operator to the last written tensor that is computed from it.
    """
    return _peak(read_graph(jax.make_jaxpr(function)(*avals)))


def _peak(graph: Graph) -> int:
    root: dict[int, int] = {}
    for op in graph.operators:
        if op.equation is None or op.name in _ALIASES:
            sources = [t for t in op.inputs if graph.tensors[t].size == graph.tensors[op.outputs[0]].size]
            for out, source in zip(
                op.outputs, op.inputs if len(op.outputs) == len(op.inputs) else sources, strict=False
            ):
                root[out] = root.get(source, source)

    def resolve(t: int) -> int:
        return root.get(t, t)

    readers: dict[int, list[Operator]] = {}
    written = {resolve(t) for t in graph.outputs}
    operators = [op for op in graph.operators if op.outputs[0] not in root]
    for op in operators:
        for t in {resolve(t) for t in op.inputs}:
            readers.setdefault(t, []).append(op)
        if op.name not in _ELEMENTWISE | _REDUCTIONS:
            written.update(resolve(t) for t in op.inputs)
    for op in operators:
        for t in op.outputs:
            several = len(readers.get(t, ())) > 1
            stopped = any(_takes_values(reader) for reader in readers.get(t, ()))
            if op.name not in _ELEMENTWISE or (several and (op.name in _COSTLY or stopped)):
                written.add(t)
    made = {t: k for k, op in enumerate(graph.operators) for t in op.outputs if t not in root}
    sources = _written_sources(graph.operators, written, resolve)
    last: dict[int, int] = {}
    for k, op in enumerate(graph.operators):
        for t in op.outputs:
            if t in written and t in made:
                for source in sources[t]:
                    last[source] = max(last.get(source, 0), k)
    end = len(graph.operators)
    last.update({resolve(t): end for t in graph.outputs})

    change = np.zeros(end + 2, np.int64)
    for t, k in made.items():
        if t in written:
            size = graph.tensors[t].size * itemsize(graph.tensors[t].dtype)
            change[k] += size
            change[max(last.get(t, k), k) + 1] -= size
    return int(np.cumsum(change).max(initial=0))


def _takes_values(reader: Operator) -> bool:
    """Whether an operator reads from memory what others read too, rather than to compute it again for itself."""
    return reader.name in _REDUCTIONS or (reader.name == "concatenate" and len(reader.inputs) > _FUSED_PIECES)


def _written_sources(
    operators: Sequence[Operator], written: set[int], resolve: Callable[[int], int]
) -> dict[int, frozenset[int]]:
    """For each tensor, the written tensors that it is computed from without another written one between."""
    found: dict[int, frozenset[int]] = {}
    for op in operators:
        here = frozenset(
            source for t in map(resolve, op.inputs) for source in ((t,) if t in written else found.get(t, ()))
        )
        for t in op.outputs:
            if resolve(t) == t:
                found[t] = here
    return found
