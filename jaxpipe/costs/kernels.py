"""The kernels that XLA makes of a program, and the seconds of each.

A product, a loop, a sort is a kernel of its own. Everything else is fused: a kernel makes one or several *roots*, and
all cheap operators between what is in memory and the roots are inside it. Roots are results, operands of kernels that
fuse nothing, sums and other reductions, and what is cheaper to write once than to compute again in each kernel that
reads it. A kernel takes the larger of its arithmetic and the time to read what it needs and to write its roots, each
once.

    product ─▶ bias ─▶ gelu ─▶ product          two products, one kernel between them: reads one array, writes one
    x ─▶ max ─▶ exp(x - max) ─▶ sum ─▶ divide    three kernels: reads x three times, writes once
"""

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jax.lax import Precision

from jaxpipe import _compat
from jaxpipe.array_types import AnyJaxpr, Equation, TensorNumber
from jaxpipe.costs.device_rates import Rates
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, Tensor
from jaxpipe.graph.op_cost import REDUCTIONS, contraction, is_product, weight


#: Operators that draw random bits or derive a key.
RANDOM = frozenset(["random_bits", "random_fold_in", "random_seed", "random_split", "threefry2x32"])

#: Operations for each word of them: twenty rounds of Threefry, each an addition, a rotation (three) and an exclusive
#: or, with a key added after every fourth (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
RANDOM_WORK = 110

#: What several kernels read is written once if to compute it again reads more than this many times its own bytes.
COMPUTE_AGAIN = 1.5

#: A product's kernel adds what has at most this share of its bytes, a bias.
SMALL = 1 / 16

#: Kernels that read at most so many bytes are put into one with others of their kind.
TINY = 2**17


class Kind(enum.Enum):
    """Ways to run an operator: inside kernels, as the end of one, as a kernel by itself."""

    FUSED = "fused"
    REDUCTION = "reduction"
    ALONE = "alone"


@dataclass(frozen=True)
class Part:
    """One operator of a program: its operands and results as value numbers, and what it takes by itself.

    ``arithmetic`` and ``seconds`` are seconds: of computing alone, and what comes besides (all of a loop's body).
    ``moved`` is the bytes that it reads and writes if it is a kernel of its own. The last three say whether it draws
    random bits, is a matrix product or a convolution, or adds two arrays.
    """

    kind: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    owner: int
    arithmetic: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0
    random: bool = False
    product: bool = False
    joins: bool = False


class Body:
    """A program to be cut into kernels, of operators of one or several graphs. Mutable.

    ``sizes`` are the bytes of its values, ``base`` the values of which they are views: themselves, if of none. Those
    that no part makes are in memory.
    """

    def __init__(self, rates: Rates):
        self.rates = rates
        self.sizes: list[float] = []
        self.base: list[int] = []
        self.parts: list[Part] = []
        self._views: dict[int, tuple[float, int]] = {}  # by value: the bytes that the view is of, and its owner

    def value(self, size: float) -> int:
        """A new value's number."""
        self.sizes.append(size)
        self.base.append(len(self.base))
        return self.base[-1]

    def add(self, op: Operator, graph: Graph | GraphBuilder, number: dict[TensorNumber, int], owner: int) -> None:
        """Append an operator for an owner.

        ``number`` has values by tensor, and gets those of results and unknown operands.
        """
        tensors = graph.tensors
        inputs = tuple(self.known(t, tensors, number) for t in op.inputs)
        outputs = tuple(self.value(tensors[t].bytes) for t in op.outputs)
        number.update(zip(op.outputs, outputs, strict=True))
        elements = sum(tensors[t].size for t in op.outputs)
        cost, rate, whole = elementwise_work(op), self.rates.element_flops, self.size(inputs)
        if op.equation is None or (cost == 0 and len(inputs) == 1 and self.size(outputs) <= whole):
            sources = inputs if len(inputs) == len(outputs) else inputs[:1] * len(outputs)
            for v, source in zip(outputs, sources, strict=True):
                self.base[v], self._views[v] = self.base[source], (whole, owner)
        elif cost is not None:
            joins, random = op.name in ("add", "add_any") and len(inputs) == 2, op.name in RANDOM
            self.parts.append(
                Part(Kind.FUSED, inputs, outputs, owner, cost * elements / rate, random=random, joins=joins)
            )
        elif op.name in REDUCTIONS:
            seconds = sum(tensors[t].size for t in op.inputs) / rate
            self.parts.append(Part(Kind.REDUCTION, inputs, outputs, owner, seconds))
        else:
            self.parts.append(self._alone(op, tensors, inputs, outputs, owner))

    def convert(self, value: int, size: float, owner: int) -> int:
        """Append a change of form inside a kernel, such as packing a mask into bits; return the result."""
        result = self.value(size)
        self.parts.append(Part(Kind.FUSED, (value,), (result,), owner))
        return result

    def join(self, first: int, second: int, owner: int) -> int:
        """Append the sum of two values; return it."""
        result, seconds = self.value(self.sizes[first]), self.sizes[first] / 4 / self.rates.element_flops
        self.parts.append(Part(Kind.FUSED, (first, second), (result,), owner, seconds))
        return result

    def whole(self, v: int) -> int:
        """Return the value, or a copy of it if it is a part of another."""
        whole, owner = self._views.get(v, (0.0, 0))
        return v if self.sizes[v] >= whole else self.convert(v, self.sizes[v], owner)

    def known(self, t: TensorNumber, tensors: Sequence[Tensor], number: dict[TensorNumber, int]) -> int:
        """Return the value of a tensor, which is in memory if it has none yet."""
        if t not in number:
            number[t] = self.value(tensors[t].bytes)
        return number[t]

    def size(self, values: Iterable[int]) -> float:
        """Return the bytes of some values."""
        return sum(self.sizes[v] for v in values)

    def _alone(
        self, op: Operator, tensors: Sequence[Tensor], inputs: tuple[int, ...], outputs: tuple[int, ...], owner: int
    ) -> Part:
        """An operator that is a kernel, or a program with kernels in it."""
        if is_product(op):
            arithmetic = product_flops(op.equation) / product_rate(op, self.rates)
            turned = [v for k, v in enumerate(inputs) if _is_turned_around(op, k)]
            moved = self.size((*set(inputs), *outputs)) + 2 * self.size(turned)
            copies = len(turned) * self.rates.kernel_seconds
            return Part(Kind.ALONE, inputs, outputs, owner, arithmetic, moved, copies, product=True)
        inner = [] if op.has_effects else _compat.inner_programs(op.equation)
        if inner:
            seconds = [program_seconds(program, self.rates) for program in inner]
            total = max(seconds) if op.name == "cond" else sum(seconds)
            return Part(Kind.ALONE, inputs, outputs, owner, seconds=(op.params.get("length", 1) or 1) * total)
        arithmetic = sum(tensors[t].size for t in (*op.inputs, *op.outputs)) / self.rates.element_flops
        if op.name in ("dynamic_slice", "gather"):  # reads what it takes, not all that is there
            moved = 2 * self.size(outputs) + self.size(inputs[1:])
        elif op.name == "dynamic_update_slice" or op.name.startswith("scatter"):  # into its operand, where that is
            moved = 3 * self.size(inputs[1:])
        else:
            moved = self.size((*inputs, *outputs))
        return Part(Kind.ALONE, inputs, outputs, owner, min(arithmetic, moved / self.rates.element_flops), moved)


def elementwise_work(op: Operator) -> int | None:
    """Operations for each element that an operator writes; None if it is no cheap arithmetic."""
    return RANDOM_WORK if op.name in RANDOM else weight(op)


def _is_turned_around(op: Operator, operand: int) -> bool:
    """Tell whether an operand of a product is copied first, so that its several batch axes lead."""
    if op.name != "dot_general" or len(op.inputs) < 2:
        return False
    batch = op.params["dimension_numbers"][1][operand]
    return len(batch) > 1 and tuple(batch) != tuple(range(len(batch)))


def product_flops(equation: Equation) -> float:
    """Floating-point operations of a matrix product or a convolution, without those on zeros between pixels."""
    between = math.prod(equation.params.get("lhs_dilation") or ())
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * contraction(equation) / between


def product_rate(op: Operator, rates: Rates) -> float:
    """Operations in a second of a matrix product or a convolution, by its operands' type and its precision."""
    if all(atom.aval.dtype.itemsize <= 2 for atom in op.equation.invars):
        return rates.half_flops
    precision = op.params.get("precision")
    exact = Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,))
    return rates.element_flops if exact else rates.flops


def program_seconds(program: AnyJaxpr, rates: Rates) -> float:
    """Seconds of a traced program, as ``jax.make_jaxpr`` gives it."""
    jaxpr, _ = _compat.open_jaxpr(program)
    builder = GraphBuilder()
    results = builder.read(program, [builder.tensor(var.aval) for var in jaxpr.invars])
    return sum(graph_seconds(builder.build((), results), rates))


def graph_seconds(graph: Graph, rates: Rates) -> list[float]:
    """Seconds of each operator of a graph that runs as one program."""
    body, number = Body(rates), dict[TensorNumber, int]()
    for k, op in enumerate(graph.operators):
        body.add(op, graph, number, k)
    return owner_seconds(body, [body.known(t, graph.tensors, number) for t in graph.outputs], len(graph.operators))


def owner_seconds(body: Body, results: Iterable[int], count: int) -> list[float]:
    """Seconds of a program for each of ``count`` owners of its parts.

    Of a kernel, who reads an array first and who makes what is written have the seconds of these bytes; or, if its
    arithmetic takes longer, everyone has those of his own.
    """
    total = [0.0] * count
    results = [body.whole(v) for v in results]
    for kernel in _Cutter(body, results).kernels():
        for owner, seconds in kernel.shares(body).items():
            total[owner] += seconds
    return total


@dataclass(frozen=True)
class Kernel:
    """Parts that run together; its ``ends`` write the roots, ``reads`` are bytes from memory by value."""

    parts: tuple[Part, ...]
    ends: tuple[Part, ...]
    reads: Mapping[int, float]
    roots: tuple[int, ...]

    def shares(self, body: Body) -> dict[int, float]:
        """Seconds, by owner."""
        rates, last, total = body.rates, self.parts[-1], defaultdict[int, float](float)
        total[last.owner] = rates.kernel_seconds + last.seconds
        moved = sum(self.reads.values()) + sum(body.sizes[v] for v in self.roots)
        if last.kind is Kind.ALONE:
            total[last.owner] += max(last.arithmetic, last.moved / rates.bytes)
        elif sum(part.arithmetic for part in self.parts) > moved / rates.bytes:
            for part in self.parts:
                total[part.owner] += part.arithmetic
        else:
            unread, roots = dict(self.reads), set(self.roots)
            for part in self.parts:
                read = sum(unread.pop(v, 0.0) for v in part.inputs)
                total[part.owner] += (read + sum(body.sizes[v] for v in roots & {*part.outputs})) / rates.bytes
        return total


class _Cutter:
    """Finds roots, and the parts that lead to each."""

    def __init__(self, body: Body, results: Iterable[int]):
        self._body, self._base = body, body.base.copy()
        self._order = {id(part): k for k, part in enumerate(body.parts)}
        self._maker = {v: part for part in body.parts if part.kind is Kind.FUSED for v in part.outputs}
        self._products = {v for part in body.parts if part.product for v in part.outputs}
        whole = [v for part in body.parts if part.kind is Kind.ALONE for v in part.inputs]
        self._roots = {self._base[v] for v in (*results, *whole)} & self._maker.keys()
        self._reads: dict[int, dict[int, float]] = {}
        self._write_what_is_costly_to_compute_again()

    def _inside(self, v: int) -> bool:
        """Tell whether a value is only ever inside kernels."""
        return v in self._maker and v not in self._roots

    def _write_what_is_costly_to_compute_again(self) -> None:
        sinks, readers = self._sinks(), self._readers()
        random: set[int] = set()
        for part in self._body.parts:
            if part.kind is not Kind.FUSED:
                continue
            if (product := self._product_before(part, readers)) is not None:
                self._roots -= {*part.outputs}
                for v in part.outputs:
                    self._base[v] = product
                continue
            reads = self._read_by(part)
            drawn = part.random or any(self._base[v] in random for v in part.inputs)
            for v in part.outputs:
                if v in self._roots:
                    continue
                heavy = drawn or sum(reads.values()) > COMPUTE_AGAIN * self._body.sizes[v]
                if heavy and len(sinks.get(v, ())) > 1 and not self._is_handed_on(v, readers):
                    self._roots.add(v)
                    continue
                self._reads[v] = reads
                if drawn:
                    random.add(v)

    def _readers(self) -> dict[int, list[Part]]:
        """The parts that read each value."""
        readers: dict[int, list[Part]] = {}
        for part in self._body.parts:
            for v in {self._base[v] for v in part.inputs}:
                readers.setdefault(v, []).append(part)
        return readers

    def _is_handed_on(self, v: int, readers: Mapping[int, Sequence[Part]]) -> bool:
        """Tell whether a value is read once, for another that is no larger and may be written instead."""
        reader, *others = readers[v]
        sizes = self._body.sizes
        return not others and reader.kind is Kind.FUSED and sum(sizes[o] for o in reader.outputs) <= sizes[v]

    def _product_before(self, part: Part, readers: Mapping[int, Sequence[Part]]) -> int | None:
        """The product, read by nothing else, that a part adds a bias to; its kernel does that before it writes."""
        if not part.joins:
            return None
        sizes = self._body.sizes
        for left, right in (part.inputs, part.inputs[::-1]):
            source, bias = self._base[left], self._base[right]
            if source in self._products and len(readers[source]) == 1 and sizes[source] == sizes[part.outputs[0]]:
                small = self._reads.get(bias, {}) if self._inside(bias) else {right: sizes[right]}
                if sum(small.values()) <= sizes[source] * SMALL:
                    return source
        return None

    def _sinks(self) -> dict[int, frozenset[int]]:
        """The roots and reductions that each value leads to inside kernels, two of them at most."""
        sinks: dict[int, frozenset[int]] = {}
        for part in reversed(self._body.parts):
            if part.kind is Kind.REDUCTION:
                ends = frozenset(part.outputs[:1])
            elif part.kind is Kind.FUSED:
                ends = frozenset().union(
                    *(frozenset([v]) if v in self._roots else sinks.get(v, ()) for v in part.outputs)
                )
            else:
                continue
            for v in part.inputs:
                merged = sinks.get(self._base[v], frozenset()) | ends
                sinks[self._base[v]] = frozenset(sorted(merged)[:2])
        return sinks

    def _read_by(self, part: Part) -> dict[int, float]:
        """Return the bytes of each value that a kernel which ends with a part reads from memory."""
        reads: dict[int, float] = {}
        for v in part.inputs:
            source = self._base[v]
            if self._inside(source):
                reads.update(self._reads.get(source, {}))
            else:
                reads[v] = min(self._body.sizes[v], self._body.sizes[source])
        return reads

    def kernels(self) -> list[Kernel]:
        """The kernels; of those that read the same array, one is made unless one needs the other's results."""
        ends: list[list[Part]] = []
        before: list[int] = []  # for each kernel those that it needs, one bit for each
        made_by: dict[int, int] = {}
        last_to_read: dict[int, int] = {}
        drawn: list[Part] = []
        for part in self._body.parts:
            if part.kind is Kind.FUSED and self._roots.isdisjoint(part.outputs):
                continue
            alone = part.kind is Kind.ALONE
            reads = dict.fromkeys(part.inputs, 0.0) if alone else self._read_by(part)
            if part.kind is Kind.FUSED and sum(reads.values()) <= SMALL * self._body.size(part.outputs):
                drawn.append(part)
                continue
            needed = 0
            for k in {made_by[self._base[v]] for v in reads if self._base[v] in made_by}:
                needed |= before[k] | 1 << k
            shared = [] if alone else self._large(reads)
            mates = [last_to_read[v] for v in shared if v in last_to_read and not needed >> last_to_read[v] & 1]
            mate = mates[0] if mates else len(ends)
            if mates:
                ends[mate].append(part)
                before[mate] |= needed
                before = [bits | needed if bits >> mate & 1 else bits for bits in before]
            else:
                ends.append([part])
                before.append(needed)
            last_to_read.update(dict.fromkeys(shared, mate))
            made_by.update(dict.fromkeys(part.outputs, mate))
        return self._with_drawn([self._kernel(group) for group in ends], drawn)

    def _large(self, reads: Mapping[int, float]) -> list[int]:
        """The arrays that are most of what a kernel reads; -1 if it reads next to nothing."""
        if sum(reads.values()) <= TINY:
            return [-1]
        return [self._base[v] for v, size in reads.items() if 2 * size >= max(reads.values())]

    def _with_drawn(self, kernels: Sequence[Kernel], drawn: Iterable[Part]) -> list[Kernel]:
        """Values that are made from next to nothing (random masks) are written by the first kernel that uses them.

        Not by one that only brings them into another form.
        """
        ends: dict[int, list[Part]] = {}
        for part in drawn:
            user = next((k for k, kernel in enumerate(kernels) if self._uses(kernel, part)), -1)
            ends.setdefault(user, []).append(part)
        alone = [self._kernel([part]) for part in ends.pop(-1, [])]
        joined = (self._kernel([*ends[k], *kernel.ends]) if k in ends else kernel for k, kernel in enumerate(kernels))
        return [*alone, *joined]

    def _uses(self, kernel: Kernel, part: Part) -> bool:
        """Tell whether a kernel that fuses reads what a part makes, and more of something else."""
        shared = [v for v in kernel.reads if self._base[v] in part.outputs]
        return bool(shared) and sum(kernel.reads.values()) > 2 * sum(kernel.reads[v] for v in shared)

    def _kernel(self, ends: Sequence[Part]) -> Kernel:
        """The kernel that ends with some parts."""
        if ends[0].kind is Kind.ALONE:
            return Kernel((ends[0],), tuple(ends), {}, ends[0].outputs)
        reads: dict[int, float] = {}
        inside: dict[int, Part] = {}
        pending = list(ends)
        while pending:
            part = pending.pop()
            if id(part) in inside:
                continue
            inside[id(part)] = part
            for v in part.inputs:
                source = self._base[v]
                if self._inside(source):
                    pending.append(self._maker[source])
                else:
                    reads[v] = min(self._body.sizes[v], self._body.sizes[source])
        roots = [v for part in ends for v in part.outputs if part.kind is Kind.REDUCTION or v in self._roots]
        parts = sorted(inside.values(), key=lambda part: self._order[id(part)])
        reads = {v: size for v, size in reads.items() if self._base[v] not in roots}
        return Kernel(tuple(parts), tuple(ends), reads, tuple(roots))
