"""Propagation of partition specs through a program, from its inputs and its sharding constraints.

    specs of inputs ──operator by operator, forward──▶ specs of all tensors, products that devices add up

XLA decides for itself. Plans need to know before anything is compiled what a device holds, what a product leaves for an
all-reduce, and how messages between stages shall be split. The rules are those of GSPMD (Xu et al., 2021) where they
are certain: dimensions that an operator hands on stay split, contracted ones leave partial sums.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Atom, Equation, TensorNumber
from jaxpipe.graph.graph import Graph
from jaxpipe.graph.kept_dimensions import RULES as KEPT_BY_RULE
from jaxpipe.graph.kept_dimensions import kept_dimensions
from jaxpipe.graph.primitives import CONTROL
from jaxpipe.sharding.submesh import axes_by_dimension, spec_of


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
    rules = _Rules(shape)
    splits = {t: axes_by_dimension(given.get(t, P()), len(graph.tensors[t].shape)) for t in graph.inputs}
    splits |= {t: _unsplit(graph.tensors[t].shape) for t in graph.constants}
    products = {}
    for k, op in enumerate(graph.operators):
        operands = [splits[t] for t in op.inputs]
        if op.equation is None:
            results: Sequence[Split] = operands
        else:
            read = iter(operands)
            atoms = op.equation.invars
            whole = [_unsplit(a.aval.shape) if _compat.is_literal(a) else next(read) for a in atoms]
            results = rules.equation(op.equation, whole)
            inside = {axis for split in (*operands, *results) for axes in split for axis in axes}
            if inside:
                products[k] = tuple(axis for axis in shape if axis in inside)
        splits.update(zip(op.outputs, results, strict=True))
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


@dataclass(frozen=True)
class _Rules:
    """Propagation rules, by primitive, for mesh axes of some sizes."""

    shape: Mapping[str, int]

    def equation(self, eqn: Equation, operands: Sequence[Split]) -> list[Split]:
        """Return the splits of an equation's results."""
        name = eqn.primitive.name
        shapes = [v.aval.shape for v in eqn.outvars]
        inner = () if name in KEPT_BY_RULE else _compat.inner_programs(eqn)
        if name in _RULES:
            results = _RULES[name](eqn, operands)
        elif name in CONTROL:
            results = self._control(eqn, operands)
        elif len(inner) >= 1 and len(_compat.open_jaxpr(inner[0])[0].invars) == len(operands):
            results = self.program(inner[0], operands)
        else:
            results = [self._kept(eqn, operands, out) for out in shapes]
        return [self._valid(split, out) for split, out in zip(results, shapes, strict=True)]

    def program(self, program: AnyJaxpr, operands: Sequence[Split]) -> list[Split]:
        """Return the splits of the results of a program in an equation."""
        jaxpr, _ = _compat.open_jaxpr(program)
        splits: dict[Atom, Split] = {v: _unsplit(v.aval.shape) for v in jaxpr.constvars}
        splits |= zip(jaxpr.invars, operands, strict=True)

        def read(atom: Atom) -> Split:
            return _unsplit(atom.aval.shape) if _compat.is_literal(atom) else splits[atom]

        for eqn in jaxpr.eqns:
            splits |= zip(eqn.outvars, self.equation(eqn, list(map(read, eqn.invars))), strict=True)
        return list(map(read, jaxpr.outvars))

    def _control(self, eqn: Equation, operands: Sequence[Split]) -> list[Split]:
        params, name = eqn.params, eqn.primitive.name
        if name == "cond":
            return self.program(params["branches"][0], operands[1:])
        if name == "while":
            first = params["cond_nconsts"]
            return self.program(params["body_jaxpr"], operands[first:])
        body = _compat.open_jaxpr(params["jaxpr"])[0]
        rows = [split[len(split) - len(v.aval.shape) :] for split, v in zip(operands, body.invars, strict=True)]
        results = self.program(params["jaxpr"], rows)
        stacked = [len(v.aval.shape) for v in eqn.outvars]
        return [((),) * (n - len(split)) + split for n, split in zip(stacked, results, strict=True)]

    def _kept(self, eqn: Equation, operands: Sequence[Split], shape: tuple[int, ...]) -> Split:
        """The split of a result, by the dimensions of operands that it has."""
        shapes = [atom.aval.shape for atom in eqn.invars]
        kept = kept_dimensions(eqn.primitive.name, eqn.params, shapes, shape)
        split = dict[int, tuple[str, ...]]()
        for axes_of, dimensions in zip(operands, kept, strict=False):
            for d, to in dimensions.items():
                split[to] = split.get(to) or axes_of[d]
        return tuple(split.get(d, ()) for d in range(len(shape)))

    def _valid(self, split: Split, shape: tuple[int, ...]) -> Split:
        """Leave out axes that split another dimension already, or do not divide their dimension."""
        used: set[str] = set()
        valid = []
        for axes, size in zip(split, shape, strict=True):
            fresh = tuple(axis for axis in axes if axis not in used and axis in self.shape)
            if size % math.prod(self.shape[axis] for axis in fresh):
                fresh = ()
            used.update(fresh)
            valid.append(fresh)
        return tuple(valid)


def _unsplit(shape: Sequence[int]) -> Split:
    return ((),) * len(shape)


def _annotated(eqn: Equation, _: Sequence[Split]) -> list[Split]:
    """The specs that a sharding constraint or a ``shard_map`` has for its results."""
    specs = eqn.params["out_specs"] if "out_specs" in eqn.params else [eqn.params["sharding"].spec]
    return [axes_by_dimension(spec, len(v.aval.shape)) for spec, v in zip(specs, eqn.outvars, strict=True)]


def _ragged_dot(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    shape = eqn.outvars[0].aval.shape
    return [(operands[0][0], operands[1][-1]) if len(shape) == 2 else _unsplit(shape)]


_Rule = Callable[[Equation, Sequence[Split]], list[Split]]

_RULES: dict[str, _Rule] = {
    "dynamic_update_slice": lambda _, operands: [operands[0]],
    "ragged_dot_general": _ragged_dot,
    "shard_map": _annotated,
    "sharding_constraint": _annotated,
    "sort": lambda _, operands: list(operands),
}
