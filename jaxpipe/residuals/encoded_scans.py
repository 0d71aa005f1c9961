"""Decorated programs with scans: what is before, in and after each ``scan`` is a program of its own.

    operators, scan, operators  ──▶  encoded(operators), scan(encoded(body)), encoded(operators)

JAX differentiates the scan, and stacks what its iterations store. A scan under a save policy stays one operator, as it
does under ``jax.checkpoint``, which computes again what is carried.
"""

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import Graph, Operator, read_graph
from jaxpipe.graph.split_scan import scan_operands
from jaxpipe.residuals.chosen_storage import whole_scans


#: Inputs of a graph that are kept alive anyway.
Held: TypeAlias = frozenset[TensorNumber]


#: Runs a graph on some values, in scans so often before its backward pass; None outside of scans.
Run: TypeAlias = Callable[[Graph, Held, Sequence[Array], int | None], Sequence[Array]]


def encoded_scans(graph: Graph, held: Held) -> frozenset[Operator]:
    """Return the scans of which each iteration stores by itself: all, or under ``whole_scans`` those over layers.

    What these scan over is a held input, as stacked parameters are, perhaps in another form.
    """
    scans = frozenset(filter(_is_scan, graph.operators))
    if not scans or not whole_scans.value:
        return scans
    known = set(held)
    for op in graph.operators:
        if len(op.inputs) == 1 and known.issuperset(op.inputs):
            known.update(op.outputs)
    return frozenset(op for op in scans if not known.isdisjoint(scan_operands(op).scanned))


def _is_scan(op: Operator) -> bool:
    return op.name == "scan" and (op.policy is None or op.policy.saves is None)


def module_paths(graph: Graph) -> Iterator[str]:
    """Give the module paths of a graph's operators, those in scans included."""
    for op in graph.operators:
        yield op.path
        if _is_scan(op):
            yield from module_paths(_body(op, graph))


def run_around_scans(
    graph: Graph,
    scans: Container[Operator],
    held: Held,
    values: Sequence[Array],
    iterations: int | None,
    run: Run,
) -> list[Array]:
    """Run a graph with scans, iterations of these and all else in it with ``run``."""
    env = dict(graph.constants) | dict(zip(graph.inputs, values, strict=True))
    places = itertools.groupby(range(len(graph.operators)), lambda k: k if graph.operators[k] in scans else -1)
    for scan, run_of in places:
        first, *rest = run_of
        part = graph.section(first, first + len(rest) + 1, passing=False)
        given = [env[t] for t in part.inputs]
        if scan < 0:
            results = run(part, held.intersection(part.inputs), given, iterations)
        else:
            op = _with_encoded_body(graph.operators[scan], graph, held, iterations, run)
            results, part = op.evaluate(*(env[t] for t in op.inputs)), replace(part, outputs=op.outputs)
        env.update(zip(part.outputs, results, strict=True))
    return [env[t] for t in graph.outputs]


def _with_encoded_body(op: Operator, graph: Graph, held: Held, iterations: int | None, run: Run) -> Operator:
    """Return a scan whose iterations run with ``run``; what it carries is not held, and follows from no parameter."""
    body = _body(op, graph)
    kept = frozenset(itertools.compress(body.inputs, _unchanged(op, {*held, None})))
    avals, count = (body.tensors[t].aval for t in body.inputs), (iterations or 1) * op.params["length"]
    closed = jax.make_jaxpr(lambda *values: run(body, kept, values, count))(*avals)
    return replace(op, equation=op.equation.replace(params={**op.params, "jaxpr": closed}))


def _body(op: Operator, graph: Graph) -> Graph:
    """Return one iteration of a scan as a graph."""
    body = read_graph(op.params["jaxpr"], policy=op.policy, path=op.path)
    return body.with_parameters(_unchanged(op, graph.parameters))


def _unchanged(op: Operator, tensors: Container[TensorNumber | None]) -> list[bool]:
    """Return of each operand of a scan whether it is one of some tensors, and is not carried."""
    constants, carried, scanned = scan_operands(op)
    return [*(t in tensors for t in constants), *(False for _ in carried), *(t in tensors for t in scanned)]
