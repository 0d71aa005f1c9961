"""Propagation of partition specs through a program, from its inputs and its sharding constraints.

    specs of inputs ──operator by operator, forward──▶ specs of all tensors, products that devices add up

XLA decides for itself. Plans need to know before anything is compiled what a device holds, what a product leaves for an
all-reduce, and how messages between stages shall be split. The rules are those of GSPMD (Xu et al., 2021) where they
are certain: dimensions that an operator hands on stay split, contracted ones leave partial sums.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.array_types import AnyJaxpr, Equation, TensorNumber
from jaxpipe.graph.graph import Graph, Operator, bodies, read_graph
from jaxpipe.graph.kept_dimensions import kept_dimensions
from jaxpipe.graph.primitives import SHARDS
from jaxpipe.sharding.mesh_axes import axes_by_dimension, spec_of


#: By dimension, the mesh axes that split it.
Split = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Propagated:
    """Partition specs of the arrays that are split; by position of an operator, the axes that divide its work."""

    specs: dict[TensorNumber, P]
    products: dict[int, tuple[str, ...]]


def propagate(graph: Graph, given: Mapping[TensorNumber, P], shape: Mapping[str, int]) -> Propagated:
    """Return how the tensors of a graph are split.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxpipe.graph.graph import trace
      >>> x, w = (jax.ShapeDtypeStruct((4, 4), jnp.float32) for _ in range(2))
      >>> graph = trace(lambda x, w: jax.nn.relu(x @ w).T, x, w)
      >>> propagate(graph, {graph.inputs[1]: P(None, "model")}, {"model": 2}).specs[graph.outputs[0]]
      P('model',)
    """
    if not shape:
        return Propagated({}, {})
    given_splits = [axes_by_dimension(given.get(t, P()), len(graph.tensors[t].shape)) for t in graph.inputs]
    splits, products = _splits(graph, given_splits, shape), {}
    for k, op in enumerate(graph.operators):
        inside = {axis for t in (*op.inputs, *op.outputs) for axes in splits[t] for axis in axes}
        if inside and op.equation is not None:
            products[k] = tuple(axis for axis in shape if axis in inside)
    return Propagated({t: spec_of(split) for t, split in splits.items() if any(split)}, products)


def of_one_device(graph: Graph, specs: Mapping[TensorNumber, P], shape: Mapping[str, int]) -> Graph:
    """Return a graph whose tensors are as large as their parts on one device; for counting bytes, not for running."""
    tensors = list(graph.tensors)
    for t, spec in specs.items():
        aval, sizes = tensors[t].aval, list(tensors[t].aval.shape)
        for d, axes in enumerate(axes_by_dimension(spec, len(sizes))):
            sizes[d] //= math.prod(shape[axis] for axis in axes)
        tensors[t] = replace(tensors[t], aval=jax.ShapeDtypeStruct(tuple(sizes), aval.dtype))
    return replace(graph, tensors=tuple(tensors))


def _splits(graph: Graph, given: Sequence[Split], shape: Mapping[str, int]) -> dict[TensorNumber, Split]:
    """Return the splits of all tensors of a graph, from those of its inputs."""
    splits = {t: _unsplit(graph.tensors[t].shape) for t in graph.constants}
    splits |= zip(graph.inputs, given, strict=True)
    for op in graph.operators:
        if op.equation is None:
            results: Sequence[Split] = [splits[t] for t in op.inputs]
        else:
            atoms = zip(op.equation.invars, op.operands, strict=True)
            results = _results(op, [_unsplit(a.aval.shape) if t is None else splits[t] for a, t in atoms], shape)
        splits |= zip(op.outputs, results, strict=True)
    return splits


def _results(op: Operator, operands: Sequence[Split], shape: Mapping[str, int]) -> list[Split]:
    """Return the splits of an operator's results."""
    shapes = [v.aval.shape for v in op.equation.outvars]
    if op.name in SHARDS or op.name == "sharding_constraint":
        results = _annotated(op.equation)
    elif op.name == "sort":
        results = list(operands)
    elif programs := bodies(op):
        results = _of_program(programs[0], operands, shape)
    else:
        results = [_kept(op.equation, operands, out) for out in shapes]
    stacked = [((),) * (len(out) - len(split)) + split for split, out in zip(results, shapes, strict=True)]
    return [_valid(split, out, shape) for split, out in zip(stacked, shapes, strict=True)]


def _of_program(program: AnyJaxpr, operands: Sequence[Split], shape: Mapping[str, int]) -> list[Split]:
    """Return the splits of the results of a program in an operator; a scan's are those of one row."""
    graph = read_graph(program)
    given = zip(operands[len(operands) - len(graph.inputs) :], graph.inputs, strict=True)
    rows = [split[len(split) - len(graph.tensors[t].shape) :] for split, t in given]
    splits = _splits(graph, rows, shape)
    return [splits[t] for t in graph.outputs]


def _kept(eqn: Equation, operands: Sequence[Split], result: tuple[int, ...]) -> Split:
    """The split of a result, by the dimensions of operands that it has."""
    split = dict[int, tuple[str, ...]]()
    kept = kept_dimensions(eqn.primitive.name, eqn.params, [atom.aval.shape for atom in eqn.invars], result)
    for axes_of, dimensions in zip(operands, kept, strict=False):
        for d, to in dimensions.items():
            split[to] = split.get(to) or axes_of[d]
    return tuple(split.get(d, ()) for d in range(len(result)))


def _valid(split: Split, result: tuple[int, ...], shape: Mapping[str, int]) -> Split:
    """Leave out axes that split another dimension already, or do not divide their dimension."""
    used: set[str] = set()
    valid = []
    for axes, size in zip(split, result, strict=True):
        fresh = tuple(axis for axis in axes if axis not in used and axis in shape)
        if size % math.prod(shape[axis] for axis in fresh):
            fresh = ()
        used.update(fresh)
        valid.append(fresh)
    return tuple(valid)


def _unsplit(shape: Sequence[int]) -> Split:
    return ((),) * len(shape)


def _annotated(eqn: Equation) -> list[Split]:
    """The specs that a sharding constraint or a ``shard_map`` has for its results."""
    specs = eqn.params["out_specs"] if "out_specs" in eqn.params else [eqn.params["sharding"].spec]
    return [axes_by_dimension(spec, len(v.aval.shape)) for spec, v in zip(specs, eqn.outvars, strict=True)]
