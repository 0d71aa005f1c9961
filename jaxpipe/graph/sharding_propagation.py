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
from jaxpipe.graph.primitives import CONTROL, ELEMENTWISE, REDUCTIONS
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
        inner = _compat.inner_programs(eqn)
        if name in _RULES:
            results = _RULES[name](eqn, operands)
        elif name in CONTROL:
            results = self._control(eqn, operands)
        elif len(inner) >= 1 and len(_compat.open_jaxpr(inner[0])[0].invars) == len(operands):
            results = self.program(inner[0], operands)
        else:
            results = [self._like_operands(eqn, operands, out) for out in shapes]
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

    def _like_operands(self, eqn: Equation, operands: Sequence[Split], shape: tuple[int, ...]) -> Split:
        """The split of operands whose dimensions are the result's; of others than elementwise ones, of all of them."""
        shapes = [atom.aval.shape for atom in eqn.invars]
        pairs = [(split, other) for split, other in zip(operands, shapes, strict=True) if len(other) == len(shape)]
        if eqn.primitive.name not in ELEMENTWISE:
            pairs = [(split, other) for split, other in pairs if other == shape]
        return tuple(
            next((split[d] for split, other in pairs if split[d] and other[d] == size), ())
            for d, size in enumerate(shape)
        )

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


def _dot(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    a, b = operands[:2]
    batch = [x or y for x, y in zip((a[d] for d in left_batch), (b[d] for d in right_batch), strict=True)]
    free = [a[d] for d in range(len(a)) if d not in (*left, *left_batch)]
    free += [b[d] for d in range(len(b)) if d not in (*right, *right_batch)]
    return [(*batch, *free)]


def _convolution(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    numbers = eqn.params["dimension_numbers"]
    result: list[tuple[str, ...]] = [()] * len(operands[0])
    result[numbers.out_spec[0]] = operands[0][numbers.lhs_spec[0]]
    result[numbers.out_spec[1]] = operands[1][numbers.rhs_spec[0]]
    return [tuple(result)]


def _broadcast(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    shape, source = eqn.params["shape"], eqn.invars[0].aval.shape
    result: list[tuple[str, ...]] = [()] * len(shape)
    for d, to in enumerate(eqn.params["broadcast_dimensions"]):
        if source[d] == shape[to]:
            result[to] = operands[0][d]
    return [tuple(result)]


def _reshape(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    """A dimension that is cut apart, or that several become, is split as its outermost part is."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    result: list[tuple[str, ...]] = [()] * len(after)
    for old, new in _groups(before, after):
        outer = next((d for d in old if before[d] > 1), None)
        target = next((d for d in new if after[d] > 1), None)
        if outer is not None and target is not None:
            result[target] = operands[0][outer]
    return [tuple(result)]


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return dimensions of two shapes that have as many elements, in the smallest groups."""
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        old, new = [i], [j]
        x, y = before[i], after[j]
        i, j = i + 1, j + 1
        while x != y and (i < len(before) or j < len(after)):
            if x < y and i < len(before):
                x, i = x * before[i], i + 1
                old.append(i - 1)
            elif j < len(after):
                y, j = y * after[j], j + 1
                new.append(j - 1)
            else:
                break
        groups.append((old, new))
    return groups


def _without(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    """The dimensions that are neither reduced nor squeezed."""
    gone = eqn.params["dimensions" if eqn.primitive.name == "squeeze" else "axes"]
    return [tuple(axes for d, axes in enumerate(operands[0]) if d not in gone)] * len(eqn.outvars)


def _same_dimensions(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    """Dimensions of unchanged length stay split: of slices, padding, concatenation, windows."""
    source = eqn.invars[0].aval.shape
    return [
        tuple(axes if size == n else () for axes, size, n in zip(operands[0], source, v.aval.shape, strict=True))
        for v in eqn.outvars
    ]


def _gather(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    """Rows by number: split as the numbers are, and as dimensions that are taken whole."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    source, ndim = eqn.invars[0].aval.shape, len(eqn.outvars[0].aval.shape)
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = [d for d in range(len(source)) if d not in gone]
    others = [d for d in range(ndim) if d not in numbers.offset_dims]
    splits = dict(zip(others, operands[1], strict=False))
    pairs = zip(numbers.offset_dims, kept, strict=True)
    splits |= {to: operands[0][d] for to, d in pairs if sizes[d] == source[d]}
    return [tuple(splits.get(d, ()) for d in range(ndim))]


def _annotated(eqn: Equation, _: Sequence[Split]) -> list[Split]:
    """The specs that a sharding constraint or a ``shard_map`` has for its results."""
    specs = eqn.params["out_specs"] if "out_specs" in eqn.params else [eqn.params["sharding"].spec]
    return [axes_by_dimension(spec, len(v.aval.shape)) for spec, v in zip(specs, eqn.outvars, strict=True)]


def _ragged_dot(eqn: Equation, operands: Sequence[Split]) -> list[Split]:
    shape = eqn.outvars[0].aval.shape
    return [(operands[0][0], operands[1][-1]) if len(shape) == 2 else _unsplit(shape)]


_Rule = Callable[[Equation, Sequence[Split]], list[Split]]

_RULES: dict[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _same_dimensions,
    "conv_general_dilated": _convolution,
    "cumsum": _same_dimensions,
    "dot_general": _dot,
    "dynamic_slice": _same_dimensions,
    "dynamic_update_slice": lambda _, operands: [operands[0]],
    "gather": _gather,
    "pad": _same_dimensions,
    "ragged_dot_general": _ragged_dot,
    "reshape": _reshape,
    "rev": _same_dimensions,
    "shard_map": _annotated,
    "sharding_constraint": _annotated,
    "slice": _same_dimensions,
    "sort": lambda _, operands: list(operands),
    "squeeze": _without,
    "split": _same_dimensions,
    "transpose": lambda eqn, operands: [tuple(operands[0][d] for d in eqn.params["permutation"])],
    **dict.fromkeys(["reduce_window", "reduce_window_max", "reduce_window_sum"], _same_dimensions),
    **dict.fromkeys(REDUCTIONS, _without),
}
