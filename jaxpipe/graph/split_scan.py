"""A program over stacked arrays as one over their pieces: no operator touches more than one piece, where that can be.

    scan over [L, ...]        ──▶ its iterations one after the other, each with its own rows
    arithmetic on [L, ...]    ──▶ the same on each piece
    sum, maximum over axis 0  ──▶ those of the pieces, combined

The pieces of an array are tensors of their own, so that stages may be cut between them.
"""

import functools
import itertools
import posixpath
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax import core, lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree, TensorNumber
from jaxpipe.errors import PartitionError
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


class ScanOperands(NamedTuple):
    """The tensors that a scan reads, in this order; a literal is None."""

    constants: list[TensorNumber | None]
    carried: list[TensorNumber | None]
    scanned: list[TensorNumber | None]  # of which the body sees one axis less


def scan_operands(op: Operator) -> ScanOperands:
    """Return the tensors that a scan reads, by what it does with them."""
    body, _ = _compat.open_jaxpr(op.params["jaxpr"])
    outside, inside = ([len(v.aval.shape) for v in variables] for variables in (op.equation.invars, body.invars))
    fixed = sum(a == b for a, b in zip(outside, inside, strict=True))
    results = zip(op.equation.outvars, body.outvars, strict=True)
    count = sum(len(v.aval.shape) == len(inner.aval.shape) for v, inner in results)
    return ScanOperands(op.operands[: fixed - count], op.operands[fixed - count : fixed], op.operands[fixed:])


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
            over = frozenset(origin[t] for t in scan_operands(op).scanned if t is not None and t in origin)
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


@dataclass(frozen=True)
class _Pieces:
    """A tensor in pieces.

    Attributes:
      numbers: of the pieces.
      cuts: the rows at which they begin, and the number of rows.
      sources: the inputs whose rows they are; none if a scan stacked them: they may be joined.
    """

    numbers: Sequence[TensorNumber]
    cuts: tuple[int, ...]
    sources: frozenset[int] = frozenset()

    def rows(self) -> Iterator[tuple[int, int]]:
        """Give the first row of each piece, and the one behind its last."""
        return itertools.pairwise(self.cuts)


class _Rows:
    """The new program while it is made: tensors of the old one, by their numbers there, are ``whole`` or in ``pieces``.

    Those in pieces that are needed as a whole are joined, and then both.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.builder = GraphBuilder()
        self.whole = {t: self.builder.constant(value) for t, value in graph.constants.items()}
        self.pieces: dict[TensorNumber, _Pieces] = {}

    def enter(self, t: TensorNumber, cuts: tuple[int, ...] | None, position: int) -> Sequence[TensorNumber]:
        """Number an input."""
        tensor = self.graph.tensors[t]
        if cuts is None:
            self.whole[t] = self.builder.tensor(tensor.aval, tensor.bits)
            return [self.whole[t]]
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        numbers = [self.builder.tensor(tensor.aval.update(shape=(n, *tensor.shape[1:])), tensor.bits) for n in sizes]
        self.pieces[t] = _Pieces(numbers, cuts, frozenset([position]))
        return numbers

    def leave(self, t: TensorNumber, cuts: tuple[int, ...] | None) -> Sequence[TensorNumber]:
        """An output's numbers."""
        if cuts is None:
            return [self._joined(t, None)]
        return [self._piece(t, k, rows, None) for k, rows in enumerate(itertools.pairwise(cuts))]

    def add(self, op: Operator) -> None:
        """Append an operator, as often as it takes."""
        split = [self.pieces[t] for t in op.inputs if t in self.pieces]
        if not split:
            self._copy(op)
        elif op.equation is None:
            self._boundary(op)
        elif op.name == "scan":
            self._scan(op)
        elif op.name in _REDUCTIONS and len(op.inputs) == 1:
            self._reduce(op, split[0])
        elif (params := self._row_by_row(op)) is not None:
            self._by_piece(op, split, params)
        else:
            self._copy(op)

    def _copy(self, op: Operator) -> None:
        """The operator as it is, over whole tensors."""
        results = self.builder.emit(op.equation, [self._joined(t, op) for t in op.inputs], op.path, op.policy)
        self.whole.update(zip(op.outputs, results, strict=True))

    def _boundary(self, op: Operator) -> None:
        """A call boundary, around each piece."""
        groups = [self.pieces[t].numbers if t in self.pieces else [self.whole[t]] for t in op.inputs]
        emitted = iter(self.builder.emit(None, [*itertools.chain(*groups)], op.path, op.policy))
        for t, out, group in zip(op.inputs, op.outputs, groups, strict=True):
            numbers = [next(emitted) for _ in group]
            if t in self.pieces:
                self.pieces[out] = replace(self.pieces[t], numbers=numbers)
            else:
                (self.whole[out],) = numbers

    def _by_piece(self, op: Operator, split: Sequence[_Pieces], params: Callable[[int], dict[str, Any]]) -> None:
        """The operator on each piece, with some parameters changed for its number of rows."""
        numbers = []
        for k, rows in enumerate(split[0].rows()):
            start, stop = rows
            numbers += self._again(op, [self._piece(t, k, rows, op) for t in op.inputs], params(stop - start))
        sources = frozenset().union(*(operand.sources for operand in split))
        self.pieces[op.outputs[0]] = _Pieces(numbers, split[0].cuts, sources)

    def _reduce(self, op: Operator, operand: _Pieces) -> None:
        parts = [self._again(op, [piece], {})[0] for piece in operand.numbers]
        if 0 not in op.params["axes"]:
            self.pieces[op.outputs[0]] = replace(operand, numbers=parts)
            return
        combine = _REDUCTIONS[op.name]
        self.whole[op.outputs[0]] = functools.reduce(lambda x, y: self._call(combine, [x, y], op)[0], parts)

    def _scan(self, op: Operator) -> None:
        """The iterations that share a piece, as a scan of their own; or the body itself, if that is one iteration."""
        constants, carried, scanned = scan_operands(op)
        split = [self.pieces[t] for t in scanned if t is not None and t in self.pieces]
        if not split:
            self._copy(op)
            return
        atoms = op.equation.invars
        literals = {n: self.builder.constant(atoms[n].val) for n, t in enumerate(op.operands) if t is None}
        held = [literals[n] if t is None else self._joined(t, op) for n, t in enumerate((*constants, *carried))]
        fixed, carry, stacked = held[: len(constants)], held[len(constants) :], list[Sequence[TensorNumber]]()
        over = list(enumerate(scanned, len(held)))
        in_order = slice(None, None, -1 if op.params["reverse"] else 1)
        for k, rows in list(enumerate(split[0].rows()))[in_order]:
            start, stop = rows
            part = replace(op, path=f"{op.path or op.name}[{start}:{stop}]")
            pieces = (self._cut(literals[n], rows, op) if t is None else self._piece(t, k, rows, op) for n, t in over)
            operands = [*fixed, *carry, *pieces]
            if stop - start == 1:
                results = self._iteration(op, part, operands)
            else:
                variables = [_compat.variable(self.builder.tensors[n].aval) for n in operands]
                part = replace(part, equation=op.equation.replace(invars=variables))
                results = self._again(part, operands, {"length": stop - start})
            carry = results[: len(carried)]
            stacked.append(results[len(carried) :])
        self.whole.update(zip(op.outputs, carry, strict=False))
        for t, numbers in zip(op.outputs[len(carried) :], zip(*stacked[in_order], strict=True), strict=True):
            self.pieces[t] = _Pieces(numbers, split[0].cuts)

    def _iteration(self, op: Operator, part: Operator, operands: Sequence[TensorNumber]) -> list[TensorNumber]:
        """One iteration of a scan, its body, under the path of the ``part``."""
        constants, carried, scanned = scan_operands(op)
        fixed, count = len(constants) + len(carried), len(carried)
        rows = [
            self._call(lambda x: lax.squeeze(x, (0,)), [n], part if t in self.pieces else op)[0]
            for t, n in zip(scanned, operands[fixed:], strict=True)
        ]
        operators, before = self.builder.operators, len(self.builder.operators)
        results = self.builder.read_call(op.params["jaxpr"], [*operands[:fixed], *rows], path="", policy=op.policy)
        for k, inner in enumerate(operators[before:], before):
            rest = inside(op.path, inner.path).removeprefix(op.path).strip("/") if inner.path else ""
            operators[k] = replace(inner, path=join_paths(part.path, rest))
        return results[:count] + [self._call(lambda x: lax.expand_dims(x, (0,)), [n], part)[0] for n in results[count:]]

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
        """A tensor in one piece, which an operator reads, or which is a result."""
        if t not in self.whole:
            pieces = self.pieces[t]
            if pieces.sources:
                raise MixedRowsError("a result" if op is None else op.label, pieces.sources)
            (self.whole[t],) = self._call(lambda *xs: lax.concatenate(xs, 0), pieces.numbers, op)
        return self.whole[t]

    def _piece(self, t: TensorNumber, k: int, rows: tuple[int, int], op: Operator | None) -> TensorNumber:
        """The piece of a tensor at a position; of one that is whole, some rows; a scalar."""
        if t in self.pieces:
            return self.pieces[t].numbers[k]
        return self._cut(self.whole[t], rows, op) if self.graph.tensors[t].shape else self.whole[t]

    def _cut(self, number: TensorNumber, rows: tuple[int, int], op: Operator | None) -> TensorNumber:
        """Some rows of a new tensor, at the place of an operator; to cut is no part of a decorated program."""
        place = None if op is None else replace(op, policy=None)
        return self._call(lambda x: lax.slice_in_dim(x, *rows), [number], place)[0]

    def _again(self, op: Operator, operands: Sequence[TensorNumber], params: dict[str, Any]) -> list[TensorNumber]:
        """The operator over operands of other shapes."""
        program = _compat.isolate(_compat.without_scope(op.equation.replace(params={**op.params, **params})))
        return self._call(lambda *xs: core.eval_jaxpr(program, (), *xs), operands, op)

    def _call(
        self, function: Callable[..., PyTree], operands: Sequence[TensorNumber], op: Operator | None
    ) -> list[TensorNumber]:
        """The results of a function, as operators at the place of another one."""
        closed = _compat.trace_without_scope(function, *(self.builder.tensors[n].aval for n in operands))
        path, policy = ("", None) if op is None else (op.path, op.policy)
        return self.builder.read(closed, operands, path=path, policy=policy)
