"""The most memory that a program needs at once, from its operators alone."""

import graphlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpipe import _compat
from jaxpipe.array_types import TensorNumber
from jaxpipe.graph.buffer_packing import Buffer, alive_bytes, in_memory, reserved_bytes
from jaxpipe.graph.graph import Graph, Operator, read_graph
from jaxpipe.graph.op_cost import COMPUTE_AGAIN
from jaxpipe.graph.operator_vjp import writes_zeros
from jaxpipe.graph.primitives import ADDITIONS, ALIASES, COSTLY, ELEMENTWISE, MOVING, READ_BY_PRODUCTS, REDUCTIONS
from jaxpipe.graph.reverse_walk import closure
from jaxpipe.targets.building import current


#: Operators that XLA fuses with what they read, and those that it does on a GPU.
_FUSED = ELEMENTWISE | {"dynamic_slice"}
_FUSED_ON_GPU = _FUSED | {"gather"}

#: The dimensions of a matrix.
_MATRIX = 2

#: The dimensions of a batch of images: rows, height, width, channels.
_IMAGES = 4


def peak_bytes(function: Callable[..., Any], *avals: Any) -> int:
    """Bytes reserved while a function runs; its arguments are not counted, its results are.

    A model of what XLA does: elementwise operators are fused into their readers, so that only some tensors are ever
    written to memory: results of products, convolutions, reductions and control flow, what those read (reductions
    only if others read it too), what is returned, and what is costly and read more than once; on a GPU what several
    kernels read, if it is costly or computed from much more than its own bytes.
    A written tensor lives from its operator to the last written tensor that is computed from it. The branches of a
    conditional are programs of their own, whose tensors live only inside, but for what they return.
    """
    return reserved_bytes(lifetimes(read_graph(jax.make_jaxpr(function)(*avals))))


def temporary_bytes(graph: Graph, donated: Sequence[TensorNumber] = ()) -> int:
    """Return the bytes that a program needs while it runs, besides its arguments and its results.

    The same model as ``peak_bytes``; what a result is written over, element by element, is in the result's place.
    Elementwise results, sums of gradients say, are written as soon as they can be.

    Args:
      donated: arguments whose place such results take on a CPU, so that what is added to a sum has a place of its own.
        A GPU adds a product to the sum where it makes it.
    """
    alive = _Lifetimes()
    taken = donated if current().runs_early else ()
    written = [buffer for buffer in alive.run(graph, taken, results_early=True) if buffer is not None]
    results = closure(written, lambda buffer: alive.below.get(buffer, ()))
    temporaries = [buffer for buffer in alive.buffers if buffer not in results]
    return reserved_bytes(in_memory(temporaries, current().rates.on_chip))


def lifetimes(graph: Graph) -> list[Buffer]:
    """The buffers of a program whose operators run in order."""
    alive = _Lifetimes()
    alive.run_alone(graph)
    return alive.buffers


class _Lifetimes:
    """The buffers of a program, and how many moments it takes."""

    def __init__(self) -> None:
        self.clock = 0
        self.buffers: list[Buffer] = []
        self.below: dict[Buffer, list[Buffer]] = {}  # by buffer, that in whose place it is written

    def run(
        self, graph: Graph, donated: Sequence[TensorNumber] = (), results_early: bool = False
    ) -> list[Buffer | None]:
        """Add a program; returns the buffers of its results, for the caller to end, and None for arguments."""
        written = _Written(graph, donated)
        outputs = [written.resolve(t) for t in graph.outputs]
        operators = written.sequence(graph, results_early)
        begins: list[int] = []
        buffers: dict[TensorNumber, Buffer] = {}
        for op in operators:
            begins.append(self.clock)
            inside = self._inside(op, graph)
            for n, t in enumerate(op.outputs):
                given = written.in_place[t].intersection(donated) if t in outputs else ()
                if written.writes(t) and not any(graph.tensors[u].bytes == graph.tensors[t].bytes for u in given):
                    buffers[t] = self._new(graph.tensors[t].bytes) if inside is None else inside[n]
            if op.name == "select_and_scatter_add":
                self._new(_positions(op, graph))
            self.clock += 1
        last = {
            u: k for k, op in enumerate(operators) for t in op.outputs if written.writes(t) for u in written.sources[t]
        }
        ends = [begin - 1 for begin in (*begins[1:], self.clock)]
        for t in last.keys() & buffers.keys():
            buffers[t].end = max(buffers[t].end, ends[last[t]])
        for k, op in enumerate(operators):
            for t in filter(buffers.__contains__, op.outputs):
                over = [u for u in written.in_place[t] if u in buffers and last.get(u) == k and u not in outputs]
                same = [u for u in over if buffers[u].bytes == buffers[t].bytes]
                if same:  # it is written where what nobody else reads any more was
                    buffers[same[0]].end = begins[k] - 1
                    self.below.setdefault(buffers[t], []).append(buffers[same[0]])
        return [buffers.get(t) for t in outputs]

    def run_alone(self, graph: Graph) -> list[Buffer | None]:
        """Add a program whose results stay to its end; returns their buffers."""
        results = self.run(graph)
        for buffer in filter(None, results):
            buffer.end = self.clock
        return results

    def _new(self, size: int) -> Buffer:
        self.buffers.append(Buffer(self.clock, self.clock, size))
        return self.buffers[-1]

    def _inside(self, op: Operator, graph: Graph) -> list[Buffer] | None:
        """Add the programs inside an operator; returns the buffers of its results if they are made there."""
        if op.equation is None or op.name in _FUSED:
            return None
        inner = []
        for program in _compat.inner_programs(op.equation):
            part = _Lifetimes()
            results = part.run_alone(read_graph(program))
            inner.append((alive_bytes(part.buffers), part, results))
        if not inner:
            return None
        needed, part, results = max(inner, key=lambda program: program[0])
        if op.name != "cond":
            # What a loop carries is its result; what it stacks is made apart, and copied into a result.
            pairs = zip(op.outputs, results, strict=False)
            carried = [b.bytes for t, b in pairs if b is not None and b.bytes == graph.tensors[t].bytes]
            self._new(max(0, needed - sum(carried)))
            return None
        # Other branches stand before this one in XLA's sequence, and write the same results.
        other = self.clock
        self.clock += 1
        for buffer in part.buffers:
            buffer.start += self.clock
            buffer.end += self.clock
            buffer.before += self.clock if buffer.before >= 0 else 0
        self.buffers += part.buffers
        self.clock += part.clock
        returned: list[Buffer] = []
        for t, buffer in zip(op.outputs, results, strict=True):
            fresh = buffer is not None and all(buffer is not other for other in returned)
            returned.append(buffer if buffer is not None and fresh else self._new(graph.tensors[t].bytes))
            returned[-1].end = self.clock
            returned[-1].before = other
        return returned


class _Written:
    """The ``tensors`` of a program that are written to memory.

    Each has ``sources``, the written ones from which it is computed without another between; of these it reads those
    ``in_place`` element by element in its own order.
    """

    def __init__(self, graph: Graph, donated: Sequence[TensorNumber] = ()):
        fused = _fused()
        self._root: dict[TensorNumber, TensorNumber] = {}
        turned, within = _turned_products(graph), dict[Operator, TensorNumber]()
        if not current().runs_early:
            within = _biased_products(graph) | _scattered_into(graph)
        for op in graph.operators:
            pairs = [(op.outputs[0], op.inputs[0])] if op in turned else _renamed(graph, op)
            if op in within:
                pairs = [(op.outputs[0], within[op])]
            self._root.update((out, self.resolve(source)) for out, source in pairs)
        readers: dict[TensorNumber, list[Operator]] = {}
        self.tensors = {self.resolve(t) for t in (*graph.outputs, *donated)}
        operators = [op for op in graph.operators if self._root.keys().isdisjoint(op.outputs)]
        for op in operators:
            for t in {self.resolve(t) for t in op.inputs}:
                readers.setdefault(t, []).append(op)
            if op.name not in fused | REDUCTIONS:
                self.tensors.update(self.resolve(t) for t in op.inputs)
        if not current().runs_early:
            self._add_barriers(graph, readers)
        shared = self._add_shared(operators, readers)
        self._follow(graph, frozenset() if current().runs_early else shared)

    def _add_shared(
        self, operators: Sequence[Operator], readers: Mapping[TensorNumber, Sequence[Operator]]
    ) -> frozenset[TensorNumber]:
        """Add what is not fused, or costly and read by several; returns what several read, on a GPU several kernels."""
        kernels: dict[TensorNumber, set[TensorNumber]] = {}  # by tensor, what is written from it
        shared: set[TensorNumber] = set()
        fused = _fused() - {"concatenate"}
        for op in reversed(operators):
            for t in op.outputs:
                reading = readers.get(t, ())
                results = [u for reader in reading for u in reader.outputs]
                kernels[t] = set().union(*({u} if u in self.tensors else kernels.get(u, ()) for u in results))
                if len(reading) > 1 and (current().runs_early or len(kernels[t]) > 1):
                    shared.add(t)
                is_costly = op.name in COSTLY or any(reader.name in REDUCTIONS for reader in reading)
                if op.name not in fused or (t in shared and is_costly):
                    self.tensors.add(t)
        return frozenset(shared)

    def _add_barriers(self, graph: Graph, readers: Mapping[TensorNumber, Sequence[Operator]]) -> None:
        """Add what a GPU writes besides: before barriers, and of reductions. Products turn and cut operands."""
        written = set(graph.outputs)
        for op in graph.operators:
            if op.name == "optimization_barrier":
                written.update(self.resolve(t) for t in op.inputs)
            elif op.name in REDUCTIONS:
                written.update(op.outputs)
            elif op.name in READ_BY_PRODUCTS and all(
                reader.name == "dot_general" for reader in readers.get(op.outputs[0], ())
            ):
                self.tensors -= set(op.outputs) - written
        self.tensors |= written - set(graph.inputs)

    def resolve(self, t: TensorNumber) -> TensorNumber:
        """The tensor that a tensor is another name of."""
        return self._root.get(t, t)

    def writes(self, t: TensorNumber) -> bool:
        """Return whether a tensor is written, under this name."""
        return t in self.tensors and self.resolve(t) == t

    def sequence(self, graph: Graph, results_early: bool = False) -> list[Operator]:
        """The operators whose results are written, in the order in which they run.

        Args:
          results_early: sums, and elementwise operators of which the program's results are, run as soon as they can.
        """
        operators = [op for op in graph.operators if any(map(self.writes, op.outputs))]
        if current().runs_early:
            makers = {t: k for k, op in enumerate(operators) for t in op.outputs}
            before = {
                k: {makers[u] for t in op.outputs for u in self.sources.get(t, ()) if u in makers} - {k}
                for k, op in enumerate(operators)
            }
            operators = [operators[k] for k in graphlib.TopologicalSorter(before).static_order()]
        return self._results_early(graph, operators) if results_early else operators

    def _results_early(self, graph: Graph, operators: Sequence[Operator]) -> list[Operator]:
        results = set(map(self.resolve, graph.outputs))
        place: dict[TensorNumber, int] = {}
        places: list[tuple[int, int]] = []
        for k, op in enumerate(operators):
            early = op.name in REDUCTIONS or (op.name in ELEMENTWISE and results.issuperset(op.outputs))
            at = max((place[u] for t in op.outputs for u in self.sources.get(t, ()) if u in place), default=0)
            places.append((at if early else k, k))
            place.update(dict.fromkeys(op.outputs, places[-1][0]))
        return [operators[k] for _, k in sorted(places)]

    def _follow(self, graph: Graph, shared: frozenset[TensorNumber]) -> None:
        """Find what each tensor is computed from; of ``shared`` ones, those from too much are written."""
        self.sources: dict[TensorNumber, frozenset[TensorNumber]] = {}
        self.in_place: dict[TensorNumber, frozenset[TensorNumber]] = {}
        nothing: frozenset[TensorNumber] = frozenset()
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
            if op.name not in _fused() or op.name in MOVING:
                still = set()
            for t in op.outputs:
                if self.resolve(t) == t:
                    read = sum(graph.tensors[u].bytes for u in here)
                    if t in shared and read > COMPUTE_AGAIN * graph.tensors[t].bytes:
                        self.tensors.add(t)
                    self.sources[t], self.in_place[t] = frozenset(here), frozenset(still - moved)
        if not current().runs_early:
            for t in self.in_place.keys() & _summed_over_images(graph, self.resolve):
                self.in_place[t] = nothing


def _fused() -> frozenset[str]:
    """Return the operators that XLA fuses with what they read, on the platform that is built for."""
    return _FUSED if current().runs_early else _FUSED_ON_GPU


def _renamed(graph: Graph, op: Operator) -> list[tuple[TensorNumber, TensorNumber]]:
    """Return the results of an operator that are other names of operands, each with the operand."""
    if op.equation is None:
        return list(zip(op.outputs, op.inputs, strict=True))
    if op.name == "optimization_barrier":
        atoms = zip(op.outputs, op.equation.invars, strict=True)
        arrays = [out for out, atom in atoms if not _compat.is_literal(atom)]
        return list(zip(arrays, op.inputs, strict=True))
    if op.name in ALIASES:
        sources = [t for t in op.inputs if graph.tensors[t].size == graph.tensors[op.outputs[0]].size]
        return list(zip(op.outputs, sources, strict=False))
    return []


def _turned_products(graph: Graph) -> frozenset[Operator]:
    """Return the transposes of matrix products that nothing else reads, which XLA writes in the other order.

    On a CPU only those without batch dimensions.
    """
    reads = Counter(t for op in graph.operators for t in op.inputs) + Counter(graph.outputs)
    turned, products = set[Operator](), set[TensorNumber]()
    for op in graph.operators:
        if op.name == "transpose" and op.inputs[0] in products and reads[op.inputs[0]] == 1:
            turned.add(op)
        if op.name == "dot_general" or op in turned:
            batched = current().runs_early and len(graph.tensors[op.outputs[0]].shape) > _MATRIX
            products.update(() if batched else op.outputs)
    return frozenset(turned)


def _biased_products(graph: Graph) -> dict[Operator, TensorNumber]:
    """Return the sums of a matrix product and a bias, each with the product: the kernel adds the bias as it writes.

    A product that others read as well is left out, unless these compute the same sum again.
    """
    producers = graph.producers
    names: dict[TensorNumber, TensorNumber] = {}
    readers: dict[TensorNumber, list[Operator]] = {}
    for op in graph.operators:
        names.update((t, names.get(source, source)) for t, source in _renamed(graph, op))
        for t in op.inputs if op.equation is not None and op.name not in ALIASES else ():
            readers.setdefault(names.get(t, t), []).append(op)
    sums: dict[TensorNumber, list[Operator]] = {}
    for op in graph.operators:
        for t, other in (op.inputs, op.inputs[::-1]) if op.name == "add" and len(op.inputs) == 2 else ():
            product, bias = producers.get(names.get(t, t)), producers.get(other)
            is_broadcast = bias is not None and bias.name == "broadcast_in_dim" and bool(bias.inputs)
            if product is not None and product.name == "dot_general" and is_broadcast:
                sums.setdefault(names.get(t, t), []).append(op)
    results = {names.get(t, t) for t in graph.outputs}
    return {op: t for t, ops in sums.items() if ops == readers[t] and t not in results for op in ops}


def _scattered_into(graph: Graph) -> dict[Operator, TensorNumber]:
    """Return the sums of rows in zeros that are added to an earlier array, each with that: a GPU adds the rows to it.

    They are gradients of lookups in a table that a product reads as well.
    """
    producers = {t: (k, op) for k, op in enumerate(graph.operators) for t in op.outputs}
    reads = Counter(t for op in graph.operators for t in op.inputs) + Counter(graph.outputs)
    into: dict[Operator, TensorNumber] = {}
    for op in graph.operators:
        for t, other in (op.inputs, op.inputs[::-1]) if op.name in ADDITIONS and len(op.inputs) == 2 else ():
            place, rows = producers.get(t, (0, op))
            _, zeros = producers.get(rows.inputs[0], (0, op)) if rows.name == "scatter-add" else (0, op)
            if writes_zeros(zeros) and reads[t] == 1 and producers.get(other, (-1, op))[0] < place:
                into[rows] = other
    return into


def _summed_over_images(graph: Graph, resolve: Callable[[TensorNumber], TensorNumber]) -> set[TensorNumber]:
    """Return the feature maps that are added up over all dimensions but the last, for biases and normalizations.

    A GPU writes such a map in the kernel of the sum, which writes over no operand. Sums over tokens, measured on
    transformers, are kernels of their own.
    """
    summed = set()
    for op in graph.operators:
        if op.name == "reduce_sum" and op.equation is not None:
            rank = op.equation.invars[0].aval.ndim
            if rank >= _IMAGES and tuple(op.equation.params["axes"]) == tuple(range(rank - 1)):
                summed.add(resolve(op.inputs[0]))
    return summed


def _positions(op: Operator, graph: Graph) -> int:
    """Bytes for the positions of maxima, which XLA writes for the gradient of a pooling layer in every dimension.

    Those of all elements, and of the one that each window has found, with its value.
    """
    source, operand = (graph.tensors[t] for t in op.inputs)
    return 4 * len(operand.shape) * (operand.size + source.size) + source.bytes
