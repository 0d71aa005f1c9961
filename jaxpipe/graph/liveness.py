"""The most memory that a program needs at once, from its operators alone."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpipe import _compat
from jaxpipe.graph.buffer_packing import Buffer, alive_bytes, reserved_bytes
from jaxpipe.graph.graph import Graph, Operator, read_graph
from jaxpipe.graph.op_cost import COSTLY, ELEMENTWISE, VIEWS


#: Operators that give another name to the same bytes.
_ALIASES = frozenset(["bitcast_convert_type", "expand_dims", "name", "optimization_barrier", "reshape", "squeeze"])

#: Operators that XLA fuses with what they read, unless others read that too.
_REDUCTIONS = frozenset(["argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"])

#: Elementwise operators whose result has its elements in another order than an operand.
_MOVING = (VIEWS - _ALIASES) | {"concatenate", "dynamic_slice", "gather", "pad", "stack"}

#: Operators that XLA fuses with what they read, and those that it does on a GPU.
_FUSED = ELEMENTWISE | {"dynamic_slice"}
_FUSED_ON_GPU = _FUSED | {"gather"}

#: An elementwise result that several read is computed again by each on a GPU if it follows from no more bytes than so
#: many times its own; else it is written.
_MOST_READ_AGAIN = 4

#: A concatenation of more arrays than this does not take in what others read too; XLA's limit is a matter of size.
_FUSED_PIECES = 4


def peak_bytes(function: Callable[..., Any], *avals: Any, donated: Any = ()) -> int:
    """Bytes reserved while a function runs; its arguments are not counted, its results are.

    A model of what XLA does: elementwise operators are fused into their readers, so that only some tensors are ever
    written to memory: results of products, convolutions, reductions and control flow, what those read (reductions
    and long concatenations only if others read it too), what is returned, and what is costly and read more than once.
    A written tensor lives from its operator to the last written tensor that is computed from it. The branches of a
    conditional are programs of their own, whose tensors live only inside, but for what they return.

    Args:
      function: is traced, not run.
      avals: shapes of its arguments.
      donated: shapes of its last argument, if it may write over it results that are computed from it element by
        element (sums, say); such results are not counted, and happen as soon as they can.
    """
    leaves = jax.tree.leaves(donated)
    graph = read_graph(jax.make_jaxpr(function)(*avals, *([donated] if leaves else [])))
    return reserved_bytes(lifetimes(graph, graph.inputs[len(graph.inputs) - len(leaves) :]))


def temporary_bytes(graph: Graph) -> int:
    """Return the bytes that a program needs while it runs, besides its arguments and its results.

    The same model as ``peak_bytes``; what a result is written over, element by element, is in the result's place.
    Results that nothing else is computed from, sums of gradients say, are written as soon as they can be.
    """
    found = _Lifetimes()
    pending = [buffer for buffer in found.run(replace(graph, operators=_results_early(graph))) if buffer is not None]
    results: set[int] = set()
    while pending:
        buffer = pending.pop()
        if id(buffer) not in results:
            results.add(id(buffer))
            pending += found.below.get(id(buffer), [])
    return reserved_bytes([buffer for buffer in found.buffers if id(buffer) not in results])


def _results_early(graph: Graph) -> tuple[Operator, ...]:
    """The operators in an order in which elementwise results come right behind the last of what they read."""
    read = {t for op in graph.operators for t in op.inputs}
    results = set(graph.outputs) - read
    makers = {t: k for k, op in enumerate(graph.operators) for t in op.outputs}
    place: list[tuple[int, int]] = []
    for k, op in enumerate(graph.operators):
        early = op.name in ELEMENTWISE and results.issuperset(op.outputs)
        last = max((makers[t] for t in op.inputs if t in makers), default=0) if early else k
        place.append((last, k))
    return tuple(graph.operators[k] for _, k in sorted(place))


def lifetimes(graph: Graph, donated: Sequence[int] = ()) -> list[Buffer]:
    """The buffers of a program whose operators run in order; none for what is written over donated inputs."""
    found = _Lifetimes()
    for buffer in found.run(graph, donated):
        if buffer is not None:
            buffer.end = found.clock
    return found.buffers


class _Lifetimes:
    """The buffers of a program, and how many moments it takes."""

    def __init__(self) -> None:
        self.clock = 0
        self.buffers: list[Buffer] = []
        self.below: dict[int, list[Buffer]] = {}  # by buffer, that in whose place it is written

    def run(self, graph: Graph, donated: Sequence[int] = ()) -> list[Buffer | None]:
        """Add a program; returns the buffers of its results, for the caller to end, and None for arguments."""
        written = _Written(graph, donated)
        outputs = [written.resolve(t) for t in graph.outputs]
        operators = written.sequence(graph)
        begins: list[int] = []
        made: dict[int, Buffer] = {}
        last: dict[int, int] = {}
        for k, op in enumerate(operators):
            begins.append(self.clock)
            inside = self._inside(op, graph)
            for n, t in enumerate(op.outputs):
                if t not in written.tensors or written.resolve(t) != t:
                    continue
                last.update((source, k) for source in written.sources[t])
                given = written.in_place[t].intersection(donated) if t in outputs else ()
                if not any(graph.tensors[u].bytes == graph.tensors[t].bytes for u in given):
                    made[t] = self._new(graph.tensors[t].bytes) if inside is None else inside[n]
            if op.name == "select_and_scatter_add":
                self._new(_positions(op, graph))
            self.clock += 1
        ends = [begin - 1 for begin in (*begins[1:], self.clock)]
        for t, k in last.items():
            if t in made:
                made[t].end = max(made[t].end, ends[k])
        for k, op in enumerate(operators):
            for t in op.outputs:
                over = [source for source in written.in_place.get(t, ()) if source in made] if t in made else []
                over = [source for source in over if last.get(source) == k and source not in outputs]
                same = [source for source in over if made[source].bytes == made[t].bytes]
                if same:  # it is written where what nobody else reads any more was
                    made[same[0]].end = begins[k] - 1
                    self.below.setdefault(id(made[t]), []).append(made[same[0]])
        return [made.get(t) for t in outputs]

    def _new(self, size: int) -> Buffer:
        self.buffers.append(Buffer(self.clock, self.clock, size))
        return self.buffers[-1]

    def _inside(self, op: Operator, graph: Graph) -> list[Buffer] | None:
        """Add the programs inside an operator; returns the buffers of its results if they are made there."""
        if op.equation is None or op.name in _FUSED:
            return None
        inner = []
        for program in _compat.inner_programs(op.equation):
            own = _Lifetimes()
            results = own.run(read_graph(program))
            for buffer in results:
                if buffer is not None:
                    buffer.end = own.clock
            inner.append((alive_bytes(own.buffers), own, results))
        if not inner:
            return None
        needed, own, results = max(inner, key=lambda found: found[0])
        if op.name != "cond":
            # What a loop carries is its result; what it stacks is made apart, and copied into a result.
            pairs = zip(op.outputs, results, strict=False)
            carried = [b.bytes for t, b in pairs if b is not None and b.bytes == graph.tensors[t].bytes]
            self._new(max(0, needed - sum(carried)))
            return None
        # Other branches stand before this one in XLA's sequence, and write the same results.
        other = self.clock
        self.clock += 1
        for buffer in own.buffers:
            buffer.start += self.clock
            buffer.end += self.clock
            buffer.before += self.clock if buffer.before >= 0 else 0
        self.buffers += own.buffers
        self.clock += own.clock
        found: list[Buffer] = []
        for t, buffer in zip(op.outputs, results, strict=True):
            fresh = buffer is not None and all(buffer is not other for other in found)
            found.append(buffer if buffer is not None and fresh else self._new(graph.tensors[t].bytes))
            found[-1].end = self.clock
            found[-1].before = other
        return found


class _Written:
    """The tensors of a program that are written to memory.

    Attributes:
      tensors: these tensors.
      sources: for each of them, the written tensors that it is computed from without another written one between.
      in_place: those of its sources that are read element by element in its own order.
    """

    def __init__(self, graph: Graph, donated: Sequence[int] = ()):
        self._root: dict[int, int] = {}
        fused = _fused()
        turned = frozenset() if _compat.runs_breadth_first() else _turned_products(graph)
        for op in graph.operators:
            if op in turned:
                self._root[op.outputs[0]] = op.inputs[0]
            if op.equation is None or op.name in _ALIASES:
                sources = [t for t in op.inputs if graph.tensors[t].size == graph.tensors[op.outputs[0]].size]
                pairs = zip(op.outputs, sources, strict=False)
                if op.equation is None:
                    pairs = zip(op.outputs, op.inputs, strict=True)
                elif op.name == "optimization_barrier":  # some of its operands may be numbers
                    operands = iter(op.inputs)
                    pairs = [
                        (out, next(operands))
                        for out, atom in zip(op.outputs, op.equation.invars, strict=True)
                        if not _compat.is_literal(atom)
                    ]
                self._root.update((out, self._root.get(source, source)) for out, source in pairs)
        readers: dict[int, list[Operator]] = {}
        self.tensors = {self.resolve(t) for t in (*graph.outputs, *donated)}
        operators = [op for op in graph.operators if self._root.keys().isdisjoint(op.outputs)]
        for op in operators:
            for t in {self.resolve(t) for t in op.inputs}:
                readers.setdefault(t, []).append(op)
            if op.name not in fused | _REDUCTIONS:
                self.tensors.update(self.resolve(t) for t in op.inputs)
        if not _compat.runs_breadth_first():
            self._add_barriers(graph, readers)
        for op in operators:
            for t in op.outputs:
                several = len(readers.get(t, ())) > 1
                stopped = any(_takes_values(reader) for reader in readers.get(t, ()))
                if op.name not in fused - {"concatenate"} or (several and (op.name in COSTLY or stopped)):
                    self.tensors.add(t)
        shared = frozenset(t for t, ops in readers.items() if len(ops) > 1)
        self._follow(graph, frozenset() if _compat.runs_breadth_first() else shared)

    def _add_barriers(self, graph: Graph, readers: Mapping[int, Sequence[Operator]]) -> None:
        """Add what a GPU writes besides: before barriers, and of reductions; matrix products read turned operands."""
        written = set(graph.outputs)
        for op in graph.operators:
            if op.name == "optimization_barrier":
                written.update(self.resolve(t) for t in op.inputs)
            elif op.name in _REDUCTIONS:
                written.update(op.outputs)
            elif op.name == "transpose" and all(
                reader.name == "dot_general" for reader in readers.get(op.outputs[0], ())
            ):
                self.tensors -= set(op.outputs) - written
        self.tensors |= written - set(graph.inputs)

    def resolve(self, t: int) -> int:
        """The tensor that a tensor is another name of."""
        return self._root.get(t, t)

    def sequence(self, graph: Graph) -> list[Operator]:
        """The operators whose results are written, in the order in which they run."""
        operators = [
            op for op in graph.operators if any(self.resolve(t) == t and t in self.tensors for t in op.outputs)
        ]
        if not _compat.runs_breadth_first():
            return operators
        makers = {t: k for k, op in enumerate(operators) for t in op.outputs}
        readers: list[list[int]] = [[] for _ in operators]
        missing = []
        for k, op in enumerate(operators):
            before = {makers[u] for t in op.outputs for u in self.sources.get(t, ()) if u in makers} - {k}
            missing.append(len(before))
            for other in before:
                readers[other].append(k)
        queue = deque(k for k, count in enumerate(missing) if not count)
        found = []
        while queue:
            found.append(k := queue.popleft())
            for other in readers[k]:
                missing[other] -= 1
                if not missing[other]:
                    queue.append(other)
        return [operators[k] for k in found]

    def _follow(self, graph: Graph, shared: frozenset[int]) -> None:
        """Find what each tensor is computed from; of ``shared`` ones, those from too much are written."""
        self.sources: dict[int, frozenset[int]] = {}
        self.in_place: dict[int, frozenset[int]] = {}
        nothing: frozenset[int] = frozenset()
        for op in graph.operators:
            here, still, moved = set(), set(), set()
            # What of a barrier is no other name of an operand is a number.
            for t in map(self.resolve, () if op.name == "optimization_barrier" else op.inputs):
                if t in self.tensors:
                    here.add(t)
                    still.add(t)
                else:
                    here |= self.sources.get(t, nothing)
                    still |= self.in_place.get(t, nothing)
                    moved |= self.sources.get(t, nothing) - self.in_place.get(t, nothing)
            if op.name not in _fused() or op.name in _MOVING:
                still = set()
            for t in op.outputs:
                if self.resolve(t) == t:
                    read = sum(graph.tensors[u].bytes for u in here)
                    if t in shared and read > _MOST_READ_AGAIN * graph.tensors[t].bytes:
                        self.tensors.add(t)
                    self.sources[t], self.in_place[t] = frozenset(here), frozenset(still - moved)


def _fused() -> frozenset[str]:
    """Return the operators that XLA fuses with what they read, on the platform that is built for."""
    return _FUSED if _compat.runs_breadth_first() else _FUSED_ON_GPU


def _turned_products(graph: Graph) -> frozenset[Operator]:
    """Return the transposes of matrix products that nothing else reads: a GPU writes these in the other order."""
    producers = {t: op for op in graph.operators for t in op.outputs}
    reads = Counter(t for op in graph.operators for t in op.inputs) + Counter(graph.outputs)

    def is_one(op: Operator) -> bool:
        source = producers.get(op.inputs[0]) if op.name == "transpose" else None
        return source is not None and source.name == "dot_general" and reads[op.inputs[0]] == 1

    return frozenset(filter(is_one, graph.operators))


def _positions(op: Operator, graph: Graph) -> int:
    """Bytes for the positions of maxima, which XLA writes for the gradient of a pooling layer in every dimension.

    Those of all elements, and of the one that each window has found, with its value.
    """
    source, operand = (graph.tensors[t] for t in op.inputs)
    indices = 4 * len(operand.shape)
    return indices * (operand.size + source.size) + source.bytes


def _takes_values(reader: Operator) -> bool:
    """Return whether an operator reads from memory what others read too, rather than to compute it again for itself."""
    return reader.name in _REDUCTIONS or (reader.name == "concatenate" and len(reader.inputs) > _FUSED_PIECES)
