"""Decorated programs with scans and shard_maps: what is before, in and after each of these is a program of its own.

    operators, scan, operators  ──▶  encoded(operators), scan(encoded(body)), encoded(operators)

JAX differentiates the ``scan``, and stacks what its iterations store; or the ``shard_map``, whose shards store parts.
Under a save policy both stay one operator, as under ``jax.checkpoint``, which computes again what a scan carries.
"""

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import Graph, Operator, all_operands, read_graph
from jaxpipe.graph.primitives import SHARDS
from jaxpipe.graph.split_scan import scan_operands
from jaxpipe.residuals.chosen_storage import whole_scans


#: Inputs of a graph that are kept alive anyway.
Held: TypeAlias = frozenset[TensorNumber]


#: Runs a graph on some values, in scans so often before its backward pass; None outside of scans.
Run: TypeAlias = Callable[[Graph, Held, Sequence[Array], int | None], Sequence[Array]]


def encoded_bodies(graph: Graph, held: Held) -> frozenset[Operator]:
    """Return the operators whose bodies store by themselves: shard_maps, and scans, of which each iteration does.

    Under ``whole_scans`` only scans over layers: over a held input, as stacked parameters are, perhaps in another form;
    and those with side effects, which never run again.
    """
    storing = frozenset(filter(_stores_inside, graph.operators))
    if not storing or not whole_scans.value:
        return storing
    known = set(held)
    for op in graph.operators:
        if len(op.inputs) == 1 and known.issuperset(op.inputs):
            known.update(op.outputs)
    inside = frozenset(op for op in storing if op.name in SHARDS or op.has_effects)
    return inside | {op for op in storing - inside if not known.isdisjoint(scan_operands(op).scanned)}


def _stores_inside(op: Operator) -> bool:
    return op.name in {"scan", *SHARDS} and (op.policy is None or op.policy.saves is None)


def module_paths(graph: Graph) -> Iterator[str]:
    """Give the module paths of a graph's operators, those in bodies included."""
    for op in graph.operators:
        yield op.path
        if _stores_inside(op):
            yield from module_paths(_body(op, graph))


def run_around(
    operators: Container[Operator], graph: Graph, held: Held, values: Sequence[Array], iterations: int | None, run: Run
) -> list[Array]:
    """Run a graph, the bodies of some of its operators and all else in it with ``run``."""
    env = dict(graph.constants) | dict(zip(graph.inputs, values, strict=True))
    places = itertools.groupby(range(len(graph.operators)), lambda k: k if graph.operators[k] in operators else -1)
    for place, run_of in places:
        first, *rest = run_of
        part = graph.section(first, first + len(rest) + 1, passing=False)
        if place < 0:
            results = run(part, held.intersection(part.inputs), [env[t] for t in part.inputs], iterations)
        else:
            op = graph.operators[place]
            evaluate = _with_encoded_body(op, graph, held, iterations, run)
            results, part = evaluate(*(env[t] for t in op.inputs)), replace(part, outputs=op.outputs)
        env.update(zip(part.outputs, results, strict=True))
    return [env[t] for t in graph.outputs]


def _with_encoded_body(
    op: Operator, graph: Graph, held: Held, iterations: int | None, run: Run
) -> Callable[..., Sequence[Array]]:
    """Return what an operator computes of its inputs, its body run with ``run``.

    What a scan carries is not held, and follows from no parameter.
    """
    body, params = _body(op, graph), op.params
    kept = frozenset(itertools.compress(body.inputs, _unchanged(op, {*held, None})))
    if op.name in SHARDS:
        same = {name: params[name] for name in ("mesh", "in_specs", "check_vma")}
        names, specs = set(params["newly_manual_axes"]), list(params["out_specs"])
        encoded = jax.shard_map(lambda *x: run(body, kept, x, iterations), axis_names=names, out_specs=specs, **same)
        return lambda *values: encoded(*all_operands(op.equation, values))
    avals, count = (body.tensors[t].aval for t in body.inputs), (iterations or 1) * params["length"]
    closed = jax.make_jaxpr(lambda *values: run(body, kept, values, count))(*avals)
    return replace(op, equation=op.equation.replace(params={**params, "jaxpr": closed})).evaluate


def _body(op: Operator, graph: Graph) -> Graph:
    """Return one iteration of a scan, or what each shard of a shard_map computes, as a graph."""
    body = read_graph(op.params["jaxpr"], policy=op.policy, path=op.path)
    return body.with_parameters(_unchanged(op, graph.parameters))


def _unchanged(op: Operator, tensors: Container[TensorNumber | None]) -> list[bool]:
    """Return of each operand of an operator whether it is one of some tensors, and no scan carries it."""
    if op.name in SHARDS:
        return [t in tensors for t in op.operands]
    constants, carried, scanned = scan_operands(op)
    return [*(t in tensors for t in constants), *(False for _ in carried), *(t in tensors for t in scanned)]
