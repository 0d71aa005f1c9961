"""Decorated programs with scans: what is before, in and after each ``scan`` is a program of its own.

    operators, scan, operators  ──▶  encoded(operators), scan(encoded(body)), encoded(operators)

JAX differentiates the scan, and stacks what its iterations store. A scan under a save policy stays one operator, as it
does under ``jax.checkpoint``, which computes again what is carried.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import Graph, Operator, read_graph
from jaxpipe.graph.split_scan import scan_operands
from jaxpipe.residuals.equal_blocks import modules_by_family


#: Inputs of a graph that are kept alive anyway.
Held: TypeAlias = frozenset[TensorNumber]


#: Runs a graph on some values, in scans so often before its backward pass; None outside of scans.
Run: TypeAlias = Callable[[Graph, Held, Sequence[Array], int | None], Sequence[Array]]


def has_scans(graph: Graph) -> bool:
    """Return whether there is a scan among the operators of a graph that no save policy is for."""
    return any(map(_is_scan, graph.operators))


def blocks_have_scans(graph: Graph) -> bool:
    """Return whether several modules of a family have a scan each."""
    operators = graph.operators
    for modules in modules_by_family(op.path for op in operators).values():
        if sum(any(_is_scan(operators[k]) for k in places) for places in modules.values()) > 1:
            return True
    return False


def _is_scan(op: Operator) -> bool:
    return op.name == "scan" and (op.policy is None or op.policy.saves is None)


def module_paths(graph: Graph) -> Iterator[str]:
    """Give the module paths of a graph's operators, those in scans included."""
    for op in graph.operators:
        yield op.path
        if _is_scan(op):
            yield from module_paths(_body(op, graph))


def run_around_scans(
    graph: Graph, held: Held, values: Sequence[Array], iterations: int | None, run: Run
) -> list[Array]:
    """Run a graph with scans, all else in it with ``run``."""
    env = dict(graph.constants) | dict(zip(graph.inputs, values, strict=True))
    places = itertools.groupby(range(len(graph.operators)), lambda k: k if _is_scan(graph.operators[k]) else -1)
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
    consts, carried, operands = scan_operands(op)
    fixed = [k for k in range(len(operands)) if not consts <= k < consts + carried]
    kept = frozenset(body.inputs[k] for k in fixed if operands[k] is None or operands[k] in held)
    avals, count = (body.tensors[t].aval for t in body.inputs), (iterations or 1) * op.params["length"]
    closed = jax.make_jaxpr(lambda *values: run(body, kept, values, count))(*avals)
    return replace(op, equation=op.equation.replace(params={**op.params, "jaxpr": closed}))


def _body(op: Operator, graph: Graph) -> Graph:
    """Return one iteration of a scan as a graph."""
    consts, carried, operands = scan_operands(op)
    body = read_graph(op.params["jaxpr"], policy=op.policy, path=op.path)
    fixed = (not consts <= k < consts + carried for k in range(len(operands)))
    return body.with_parameters([flag and t in graph.parameters for flag, t in zip(fixed, operands, strict=True)])
