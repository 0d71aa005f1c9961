"""Operators of equal work, which have equal seconds wherever in a program they are."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from jaxpipe.graph.graph import Graph, Operator
from jaxpipe.graph.program_form import is_hashable
from jaxpipe.residuals.backward_graph import BackwardGraph
from jaxpipe.text.stable_text import writer


def equal_operators(backward_graph: BackwardGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Return the operators of a program by kind: those of equal work in its forward pass, and in its backward pass.

    Equal are the primitive, its parameters, the shapes and types of its operands, and for the backward pass also which
    operands and results have a cotangent. Numbers in the program's text may differ, as do those that random keys are
    folded with.
    """
    graph = backward_graph.source
    text = _text_of_work(graph)
    differentiated = {t for step in backward_graph.steps for t in (*step.cotangents_in, *step.cotangents_out)}
    forward, backward = defaultdict[str, list[int]](list), defaultdict[Hashable, list[int]](list)
    for k, op in enumerate(graph.operators):
        key = text(op)
        forward[key].append(k)
        backward[key, *(t in differentiated for t in (*op.inputs, *op.outputs))].append(k)
    return list(forward.values()), list(backward.values())


def averaged(seconds: np.ndarray, kinds: Iterable[list[int]]) -> np.ndarray:
    """Return seconds ``[..., operators]`` with the mean of its kind for each operator."""
    result = seconds.copy()
    for kind in kinds:
        if len(kind) > 1:
            result[..., kind] = seconds[..., kind].mean(axis=-1, keepdims=True)
    return result


def _text_of_work(graph: Graph) -> Callable[[Operator], str]:
    """Return a function that writes an operator's work as text, once for operators that are equal at first sight."""
    write, known = writer(values=False), dict[Hashable, str]()

    def text(op: Operator) -> str:
        atoms = op.inputs if op.equation is None else op.equation.invars
        operands = tuple(graph.tensors[a].aval if isinstance(a, int) else a.aval for a in atoms)
        sight: Hashable = op.name, tuple(op.params.items()), operands
        if not is_hashable(sight):  # a parameter of it is not
            sight = op
        if sight not in known:
            known[sight] = f"{op.name} {write(op.params)} {write(operands)}"
        return known[sight]

    return text
