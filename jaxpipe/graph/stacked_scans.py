"""Scans over stacked inputs ``[layers, ...]`` of a program: where they are, and the module whose layers they run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.graph import Graph, inside
from jaxpipe.graph.split_scan import scan_operands


@dataclass(frozen=True)
class StackedScan:
    """The scan at a position among the operators of a program, its iterations, and the inputs that it runs over."""

    operator: int
    length: int
    inputs: frozenset[TensorNumber]


def stacked_scans(graph: Graph, inputs: Collection[TensorNumber]) -> list[StackedScan]:
    """Return the scans over the first axis of some inputs, as they are or element by element made of them."""
    origin = {t: t for t in inputs}
    scans: list[StackedScan] = []
    for k, op in enumerate(graph.operators):
        if op.name == "scan":
            consts, carried, names = scan_operands(op)
            over = frozenset(origin[t] for t in names[consts + carried :] if t is not None and t in origin)
            scans += [StackedScan(k, op.params["length"], over)] if over else []
        elif op.equation is None:
            origin.update((new, origin[old]) for old, new in zip(op.inputs, op.outputs, strict=True) if old in origin)
        elif len(op.inputs) == len(op.outputs) == 1 and op.inputs[0] in origin:
            same = graph.tensors[op.inputs[0]].shape[:1] == graph.tensors[op.outputs[0]].shape[:1]
            if same:
                origin[op.outputs[0]] = origin[op.inputs[0]]
    return scans


def with_layer_paths(graph: Graph, names: Mapping[TensorNumber, str]) -> Graph:
    """Return a program whose scans over named inputs have the path of the module that holds all of these.

    JAX knows the module that calls a scan, not the layers that it runs.
    """
    operators = list(graph.operators)
    for scan in stacked_scans(graph, names):
        op = operators[scan.operator]
        module = _shared([names[t].split("/")[:-1] for t in scan.inputs])
        operators[scan.operator] = replace(op, path=inside(op.path, "/".join(module)))
    return replace(graph, operators=tuple(operators))


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the first parts that all paths have in common."""
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return shared
