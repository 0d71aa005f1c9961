"""A program over stacked arrays as one over their pieces: no operator touches more than one piece, where that can be.

    scan over [L, ...]        ──▶ its iterations one after the other, each with its own rows
    arithmetic on [L, ...]    ──▶ the same on each piece
    sum, maximum over axis 0  ──▶ those of the pieces, combined

The pieces of an array are tensors of their own, so that stages may be cut between them.
"""

import functools
import itertools
import posixpath
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import core, lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree, TensorNumber
from jaxpipe.errors import PartitionError
from jaxpipe.graph.allowed_codecs import Policy
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, inside, join_paths
from jaxpipe.graph.kept_dimensions import LENGTHS, kept_dimensions
from jaxpipe.graph.primitives import POINTWISE, REARRANGES
from jaxpipe.graph.stacked_layers import Stacks


#: Reductions, and how results for some rows make one for all.
_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


def scan_operands(op: Operator) -> tuple[int, int, list[TensorNumber | None]]:
    """Return how many constants a scan has, how many values it carries, and the tensors of all its operands.

    Constants come first, then what is carried, then what is scanned over, of which the body sees one axis less. A
    literal is None.
    """
    body, _ = _compat.open_jaxpr(op.params["jaxpr"])
    outside, inside = ([len(v.aval.shape) for v in variables] for variables in (op.equation.invars, body.invars))
    fixed = sum(a == b for a, b in zip(outside, inside, strict=True))
    results = zip(op.equation.outvars, body.outvars, strict=True)
    carried = sum(len(v.aval.shape) == len(inner.aval.shape) for v, inner in results)
    return fixed - carried, carried, op.operands


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
        module = posixpath.commonpath([posixpath.dirname(names[t]) for t in scan.inputs])
        operators[scan.operator] = replace(op, path=inside(op.path, module))
    return replace(graph, operators=tuple(operators))


class MixedRowsError(Exception):
    """``where``, an operator or a result that is whole, needs several rows at once of the inputs ``sources``."""

    def __init__(self, where: str, sources: frozenset[int]):
        super().__init__(where)
        self.where = where
        self.sources = sources


class WholeStackError(PartitionError):
    """A program needs a stacked array as a whole, for a ``reason``, whose layers are to be cut apart."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


def split_rows(graph: Graph, inputs: Stacks, outputs: Stacks) -> Graph:
    """Return the same program, whose inputs and outputs are pieces; inputs with as many rows are cut alike."""
    rows = _Rows(graph)
    entered = [rows.enter(t, cuts, k) for k, (t, cuts) in enumerate(zip(graph.inputs, inputs.bounds, strict=True))]
    for op in graph.operators:
        rows.add(op)
    left = [rows.leave(t, cuts) for t, cuts in zip(graph.outputs, outputs.bounds, strict=True)]
    return rows.builder.build([*itertools.chain(*entered)], [*itertools.chain(*left)])


class _Rows:
    """The new program while it is made; tensors are named by their numbers in the old one.

    Those that are not ``whole`` have pieces that begin at some rows, the ``cuts``; their ``sources`` are the inputs
    whose rows they are, none if a scan stacked them: they may be joined.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.builder = GraphBuilder()
        self.whole = {t: self.builder.constant(value) for t, value in graph.constants.items()}
        self.pieces: dict[TensorNumber, list[TensorNumber]] = {}
        self.cuts: dict[TensorNumber, tuple[int, ...]] = {}
        self.sources: dict[TensorNumber, frozenset[int]] = {}

    def enter(self, t: TensorNumber, cuts: tuple[int, ...] | None, position: int) -> list[TensorNumber]:
        """Number an input."""
        tensor = self.graph.tensors[t]
        if cuts is None:
            self.whole[t] = self.builder.tensor(tensor.aval, tensor.bits)
            return [self.whole[t]]
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        numbers = [self.builder.tensor(tensor.aval.update(shape=(n, *tensor.shape[1:])), tensor.bits) for n in sizes]
        self._made(t, numbers, cuts, frozenset([position]))
        return numbers

    def leave(self, t: TensorNumber, cuts: tuple[int, ...] | None) -> list[TensorNumber]:
        """An output's numbers."""
        if cuts is None:
            return [self._joined(t, None)]
        if t in self.pieces:
            return self.pieces[t]
        return [self._rows(self.whole[t], a, b, "") for a, b in itertools.pairwise(cuts)]

    def add(self, op: Operator) -> None:
        """Append an operator, as often as it takes."""
        split = [t for t in op.inputs if t in self.pieces]
        if not split:
            self._copy(op)
        elif op.equation is None:
            self._boundary(op)
        elif op.name == "scan":
            self._scan(op)
        elif op.name in _REDUCTIONS and len(op.inputs) == 1:
            self._reduce(op)
        elif (params := self._row_by_row(op)) is not None:
            self._by_piece(op, split, params)
        else:
            self._copy(op)

    def _copy(self, op: Operator) -> None:
        """The operator as it is, over whole tensors."""
        inputs = [self._joined(t, op) for t in op.inputs]
        results = self.builder.emit(op.equation, inputs, op.path, op.policy)
        self.whole.update(zip(op.outputs, results, strict=True))

    def _boundary(self, op: Operator) -> None:
        """A call boundary, around each piece."""
        groups = [self.pieces.get(t) or [self.whole[t]] for t in op.inputs]
        flat = [*itertools.chain(*groups)]
        emitted = iter(self.builder.emit(None, flat, op.path, op.policy))
        for t, out, group in zip(op.inputs, op.outputs, groups, strict=True):
            pieces = [next(emitted) for _ in group]
            if t in self.pieces:
                self._made(out, pieces, self.cuts[t], self.sources[t])
            else:
                (self.whole[out],) = pieces

    def _by_piece(self, op: Operator, split: Sequence[TensorNumber], params: Callable[[int], dict[str, Any]]) -> None:
        """The operator on each piece, with some parameters changed for its number of rows."""
        cuts = self.cuts[split[0]]

        def rows(t: TensorNumber, k: int, start: int, stop: int) -> TensorNumber:
            if t in self.pieces:
                return self.pieces[t][k]
            scalar = self.graph.tensors[t].shape == ()
            return self.whole[t] if scalar else self._rows(self.whole[t], start, stop, op.path)

        pieces = [
            self._again(op, [rows(t, k, a, b) for t in op.inputs], params(b - a))[0]
            for k, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
        self._made(op.outputs[0], pieces, cuts, frozenset().union(*(self.sources[t] for t in split)))

    def _reduce(self, op: Operator) -> None:
        (t,) = op.inputs
        parts = [self._again(op, [piece], {})[0] for piece in self.pieces[t]]
        if 0 not in op.params["axes"]:
            self._made(op.outputs[0], parts, self.cuts[t], self.sources[t])
            return
        combine = _REDUCTIONS[op.name]
        self.whole[op.outputs[0]] = functools.reduce(lambda x, y: self._call(combine, [x, y], op)[0], parts)

    def _scan(self, op: Operator) -> None:
        """The iterations that share a piece, as a scan of their own; or the body itself, if that is one iteration."""
        body, reverse = op.params["jaxpr"], op.params["reverse"]
        consts, count, names = scan_operands(op)
        atoms, fixed = op.equation.invars, consts + count
        split = [t for t in names[fixed:] if t is not None and t in self.pieces]
        if not split:
            self._copy(op)
            return
        cuts = self.cuts[split[0]]

        def held(k: int) -> TensorNumber:
            t = names[k]
            return self.builder.constant(atoms[k].val) if t is None else self._joined(t, op)

        shared, carry = [held(k) for k in range(consts)], [held(k) for k in range(consts, fixed)]
        stacked: list[list[TensorNumber]] = []
        pieces = list(enumerate(itertools.pairwise(cuts)))
        for k, (a, b) in reversed(pieces) if reverse else pieces:
            part = replace(op, path=f"{op.path or op.name}[{a}:{b}]")
            rows = [
                self.pieces[t][k] if t is not None and t in self.pieces else self._rows(held(fixed + n), a, b, op.path)
                for n, t in enumerate(names[fixed:])
            ]
            if b - a == 1:
                rows = [
                    self._call(lambda x: lax.squeeze(x, (0,)), [n], part if t in self.pieces else op)[0]
                    for n, t in zip(rows, names[fixed:], strict=True)
                ]
                first = len(self.builder.operators)
                results = self.builder.read_call(body, [*shared, *carry, *rows], path="", policy=op.policy)
                self._move_inside(part, op, first)
                results[count:] = [
                    self._call(lambda x: lax.expand_dims(x, (0,)), [n], part)[0] for n in results[count:]
                ]
            else:
                operands = [*shared, *carry, *rows]
                variables = [_compat.variable(self.builder.tensors[n].aval) for n in operands]
                part = replace(part, equation=op.equation.replace(invars=variables))
                results = self._again(part, operands, {"length": b - a})
            carry = results[:count]
            stacked.append(results[count:])
        if reverse:
            stacked.reverse()
        self.whole.update(zip(op.outputs, carry, strict=False))
        for t, stacked_pieces in zip(op.outputs[count:], zip(*stacked, strict=True), strict=True):
            self._made(t, stacked_pieces, cuts, frozenset())

    def _move_inside(self, part: Operator, op: Operator, first: int) -> None:
        """Give the operators from ``first`` on, of the body of a scan, the path of their iteration."""
        operators = self.builder.operators
        for k, inner in enumerate(operators[first:], first):
            rest = inside(op.path, inner.path).removeprefix(op.path).strip("/") if inner.path else ""
            operators[k] = replace(inner, path=join_paths(part.path, rest))

    def _row_by_row(self, op: Operator) -> Callable[[int], dict[str, Any]] | None:
        """For an operator that makes each row of the same row of its operands, its parameters for a number of rows."""
        if op.name not in POINTWISE | REARRANGES or len(op.outputs) != 1:
            return None
        shapes, (result,) = ([self.graph.tensors[t].shape for t in tensors] for tensors in (op.inputs, op.outputs))
        kept = kept_dimensions(op.name, op.params, shapes, result)
        if any(shape and (d.get(0) != 0 or shape[0] != result[0]) for shape, d in zip(shapes, kept, strict=True)):
            return None
        name = LENGTHS.get(op.name)
        return lambda rows: {} if name is None else {name: (rows, *op.params[name][1:])}

    def _joined(self, t: TensorNumber, op: Operator | None) -> TensorNumber:
        """A tensor in one piece."""
        if t not in self.whole:
            if self.sources[t]:
                raise MixedRowsError("a result" if op is None else op.label, self.sources[t])
            (self.whole[t],) = self._call(lambda *xs: lax.concatenate(xs, 0), self.pieces[t], op)
        return self.whole[t]

    def _rows(self, number: TensorNumber, start: int, stop: int, path: str) -> TensorNumber:
        """Some rows of a new tensor."""
        return self._traced(lambda x: lax.slice_in_dim(x, start, stop), [number], path, None)[0]

    def _made(
        self, t: TensorNumber, pieces: Sequence[TensorNumber], cuts: tuple[int, ...], sources: frozenset[int]
    ) -> None:
        self.pieces[t], self.cuts[t], self.sources[t] = list(pieces), cuts, sources

    def _again(self, op: Operator, operands: Sequence[TensorNumber], params: dict[str, Any]) -> list[TensorNumber]:
        """The operator over operands of other shapes."""
        program = _compat.isolate(_compat.without_scope(op.equation.replace(params={**op.params, **params})))
        return self._call(lambda *xs: core.eval_jaxpr(program, (), *xs), operands, op)

    def _call(
        self, function: Callable[..., PyTree], operands: Sequence[TensorNumber], op: Operator | None
    ) -> list[TensorNumber]:
        return self._traced(function, operands, "" if op is None else op.path, None if op is None else op.policy)

    def _traced(
        self, function: Callable[..., PyTree], operands: Sequence[TensorNumber], path: str, policy: Policy | None
    ) -> list[TensorNumber]:
        closed = _compat.trace_without_scope(function, *(self.builder.tensors[n].aval for n in operands))
        return self.builder.read(closed, operands, path=path, policy=policy)
