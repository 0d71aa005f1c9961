"""Seconds of operators by themselves, and of programs in which XLA fuses them.

An operator takes the larger of its arithmetic and the time to move its bytes. In a program a product, a loop, a sort is
a kernel of its own. All else is fused: a kernel writes one or several *roots*, computes what leads to them from what is
in memory, and moves the bytes of what it reads and of its roots, each once. Roots are results, operands of kernels that
fuse nothing, sums and other reductions, and what several operators read that is cheaper to write than to compute again.

    product ─▶ bias ─▶ gelu ─▶ product          two products, one kernel between them: reads one array, writes one
    x ─▶ max ─▶ exp(x - max) ─▶ sum ─▶ divide    three kernels: reads x three times, writes once
"""

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jax.lax import Precision

from jaxpipe import _compat
from jaxpipe.array_types import Equation, TensorNumber
from jaxpipe.graph.graph import Graph, Operator, Tensor, read_graph
from jaxpipe.graph.op_cost import COLLECTIVE, COMPUTE_AGAIN, contraction, is_product, weight
from jaxpipe.graph.primitives import ADDITIONS, LOOKUPS, PRODUCTS, RANDOM, REDUCTIONS
from jaxpipe.targets.rates import Rates


#: Operations for each word of random bits: twenty rounds of Threefry, each an addition, a rotation (three) and an
#: exclusive or, with a key added after every fourth (J. Salmon et al., "Parallel random numbers: as
#: easy as 1, 2, 3", 2011).
RANDOM_WORK = 110

#: A product's kernel adds what has at most this share of its bytes, a bias. What is made of at most this share of its
#: bytes is made by the first kernel that reads it.
SMALL = 1 / 16

#: Kernels that read at most so many bytes are put into one with others of their kind.
TINY = 2**17

#: What leads to the ends of more than one kernel.
SEVERAL = -1


class KernelKind(enum.Enum):
    """Ways to run an operator: inside kernels, as the end of one, as a kernel by itself."""

    FUSED = "fused"
    REDUCTION = "reduction"
    ALONE = "alone"


class KernelWork(NamedTuple):
    """Work of an operator: how it runs, its operations and how many run in a second, bytes, and seconds.

    ``moved`` are the bytes that it reads and writes by itself, ``other`` are the seconds of all else: a loop's body.
    """

    kind: KernelKind
    flops: float = 0.0
    rate: float = math.inf
    moved: float = 0.0
    other: float = 0.0

    @property
    def arithmetic(self) -> float:
        """Seconds of the operations."""
        return self.flops / self.rate


def operator_seconds(op: Operator, tensors: Sequence[Tensor], rates: Rates) -> float:
    """Seconds of an operator that runs by itself: of cheap arithmetic, its operands are just there; views take none."""
    if weight(op) == 0:
        return 0.0
    work = operator_work(op, tensors, rates)
    return max(work.arithmetic, work.moved / rates.bytes) + work.other


def operator_work(op: Operator, tensors: Sequence[Tensor], rates: Rates) -> KernelWork:
    """Return the work of an operator."""
    inputs, outputs = [tensors[t] for t in dict.fromkeys(op.inputs)], [tensors[t] for t in op.outputs]
    read, written = _bytes(inputs), _bytes(outputs)
    cost = RANDOM_WORK if op.name in RANDOM else weight(op)
    if cost is not None:
        return KernelWork(KernelKind.FUSED, cost * float(sum(t.size for t in outputs)), rates.element_flops, written)
    if op.name in REDUCTIONS:
        return KernelWork(KernelKind.REDUCTION, float(sum(t.size for t in inputs)), rates.element_flops, read + written)
    if is_product(op):
        turned = [tensors[t].bytes for k, t in enumerate(op.inputs) if _is_turned_around(op, k)]
        moved, copies = read + written + 2 * sum(turned), len(turned) * rates.kernel_seconds
        return KernelWork(KernelKind.ALONE, product_flops(op.equation), product_rate(op, rates), moved, copies)
    if programs := [] if op.has_effects else _compat.inner_programs(op.equation):
        runs = [program_cost(read_graph(program), rates) for program in programs]
        flops, seconds = map(max if op.name == "cond" else sum, zip(*runs, strict=True))
        times = op.params.get("length", 1) or 1
        return KernelWork(KernelKind.ALONE, times * flops, other=times * seconds)
    rest = _bytes(tensors[t] for t in op.inputs[1:])
    if op.name in LOOKUPS:  # reads what it takes, not all that is there
        moved = 2 * written + rest
    elif op.name == "dynamic_update_slice" or op.name.startswith("scatter"):  # into its operand, where that is
        moved = 3 * rest
    else:
        moved = (read + written) * (COLLECTIVE if op.is_collective else 1)
    elements = sum(t.size for t in (*inputs, *outputs))
    return KernelWork(KernelKind.ALONE, min(elements, moved), rates.element_flops, moved)


def _bytes(tensors: Iterable[Tensor]) -> float:
    return sum([tensor.bytes for tensor in tensors])


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


def program_cost(graph: Graph, rates: Rates) -> tuple[float, float]:
    """Floating-point operations and seconds of a graph that runs as one program."""
    body, number = Body(rates), dict[TensorNumber, int]()
    for op in graph.operators:
        body.add(op, graph.tensors, number, 0)
    results = [body.known(t, graph.tensors, number) for t in graph.outputs]
    return sum(part.work.flops for part in body.parts), sum(owner_seconds(body, results, 1))


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One operator of a program: its operands and results as value numbers, its work, and whose seconds it takes.

    ``name`` is the primitive; empty if it is none of the program's.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    work: KernelWork
    owner: int
    name: str = ""


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

    def value(self, size: float) -> int:
        """A new value's number."""
        self.sizes.append(size)
        self.base.append(len(self.base))
        return self.base[-1]

    def add(self, op: Operator, tensors: Sequence[Tensor], number: dict[TensorNumber, int], owner: int) -> None:
        """Append an operator for an owner.

        ``number`` has values by tensor, and gets those of results and unknown operands.
        """
        inputs = tuple(self.known(t, tensors, number) for t in op.inputs)
        outputs = tuple(self.value(tensors[t].bytes) for t in op.outputs)
        number.update(zip(op.outputs, outputs, strict=True))
        work = operator_work(op, tensors, self.rates)
        is_free = work.kind is KernelKind.FUSED and not work.flops
        if op.equation is None or (is_free and len(inputs) == 1 and work.moved <= self.sizes[inputs[0]]):
            sources = inputs if len(inputs) == len(outputs) else inputs[:1] * len(outputs)
            for v, source in zip(outputs, sources, strict=True):
                self.base[v] = self.base[source]
        else:
            self.parts.append(Part(inputs, outputs, work, owner, op.name))

    def fuse(self, values: Sequence[int], size: float, owner: int) -> int:
        """Append what a kernel does besides, such as packing a mask into bits or a sum of cotangents; return it."""
        result = self.value(size)
        self.parts.append(Part(tuple(values), (result,), KernelWork(KernelKind.FUSED), owner))
        return result

    def known(self, t: TensorNumber, tensors: Sequence[Tensor], number: dict[TensorNumber, int]) -> int:
        """Return the value of a tensor, which is in memory if it has none yet."""
        if t not in number:
            number[t] = self.value(tensors[t].bytes)
        return number[t]

    def size(self, values: Iterable[int]) -> float:
        """Return the bytes of some values."""
        return sum(self.sizes[v] for v in values)


@dataclass(eq=False, slots=True)
class _Kernel:
    """Parts that run together, by their place in the program, the bytes that they read by value, and their roots.

    ``needs`` has a bit for each kernel that has to run before, by its number; ``draws`` tells whether it draws random
    bits.
    """

    parts: set[int]
    reads: dict[int, float] = field(default_factory=dict)
    roots: set[int] = field(default_factory=set)
    draws: bool = False
    number: int = 0
    needs: int = 0

    def include(self, other: "_Kernel") -> None:
        """Compute all that another one computes, too."""
        self.parts |= other.parts
        self.roots |= other.roots
        self.draws |= other.draws
        self.needs |= other.needs
        for v, size in other.reads.items():
            self.reads[v] = max(size, self.reads.get(v, 0.0))


class _Cutter:
    """Cuts a program into kernels. Those that read the same array are one, unless one needs the other's roots."""

    def __init__(self, body: Body, results: Iterable[int]):
        self._body, base = body, body.base
        self._readers = Counter(v for part in body.parts for v in {base[v] for v in part.inputs})
        whole = (v for part in body.parts if part.work.kind is KernelKind.ALONE for v in part.inputs)
        self._needed = {base[v] for v in (*results, *whole)}
        self._ends = self._find_ends()
        self._kernels: list[_Kernel] = []
        self._made: dict[int, _Kernel] = {}
        self._inside: dict[int, _Kernel] = {}  # what leads to a value that is never in memory
        self._drawn: dict[int, _Kernel] = {}  # what leads to a root that is made where it is first read
        self._last: dict[int, _Kernel] = {}  # to read most of its bytes from an array; with the key -1: next to none

    def _find_ends(self) -> dict[int, int]:
        """The part that ends the kernel to which each value leads, or ``SEVERAL``."""
        ends: dict[int, int] = {}
        for k, part in reversed([*enumerate(self._body.parts)]):
            below = {ends[v] for v in part.outputs if v in ends}
            fused = part.work.kind is KernelKind.FUSED and self._needed.isdisjoint(part.outputs)
            end = k if not fused else min(below) if len(below) == 1 else SEVERAL
            for v in {self._body.base[v] for v in part.inputs}:
                ends[v] = end if ends.get(v, end) == end else SEVERAL
        return ends

    def kernels(self) -> list[_Kernel]:
        """The kernels of the program."""
        for k, part in enumerate(self._body.parts):
            kernel, kind = self._leading_to(k, part), part.work.kind
            if kind is KernelKind.FUSED and self._is_added_by_a_product(part, kernel):
                continue
            if kind is KernelKind.FUSED and not self._is_written(part, kernel):
                self._inside.update(dict.fromkeys(part.outputs, kernel))
                continue
            kernel.roots.update(part.outputs)
            if kind is KernelKind.FUSED and sum(kernel.reads.values()) <= SMALL * self._body.size(kernel.roots):
                self._drawn.update(dict.fromkeys(kernel.roots, kernel))
                continue
            self._place(kernel, joins=kind is not KernelKind.ALONE)
        return [*dict.fromkeys(self._drawn.values()), *self._kernels]

    def _leading_to(self, k: int, part: Part) -> _Kernel:
        """A kernel of what leads to the results of a part."""
        kernel, sizes = _Kernel({k}, draws=part.name in RANDOM), self._body.sizes
        for v in part.inputs:
            source = self._body.base[v]
            if source in self._inside:
                kernel.include(self._inside[source])
            else:
                kernel.reads[source] = min(sizes[source], kernel.reads.get(source, 0.0) + sizes[v])
        return kernel

    def _is_added_by_a_product(self, part: Part, kernel: _Kernel) -> bool:
        """Tell whether a part is the sum of a bias and a product that nothing else reads, which the product writes."""
        if part.name not in ADDITIONS:
            return False
        sizes = self._body.sizes
        for source in (self._body.base[v] for v in part.inputs):
            maker, bias = self._made.get(source), sum(kernel.reads.values()) - sizes[source]
            is_product = maker is not None and self._body.parts[min(maker.parts)].name in PRODUCTS
            alone = self._readers[source] == 1 and sizes[source] == sizes[part.outputs[0]]
            if maker is not None and is_product and alone and bias <= SMALL * sizes[source]:
                self._made[part.outputs[0]] = maker
                return True
        return False

    def _is_written(self, part: Part, kernel: _Kernel) -> bool:
        """Tell whether the results of cheap arithmetic are roots."""
        if not self._needed.isdisjoint(part.outputs):
            return True
        costly = kernel.draws or sum(kernel.reads.values()) > COMPUTE_AGAIN * self._body.size(part.outputs)
        return costly and any(self._readers[v] > 1 and self._ends[v] == SEVERAL for v in part.outputs)

    def _place(self, kernel: _Kernel, joins: bool) -> None:
        """Append a kernel, or put it into the last one that reads the same array, unless it needs that."""
        if joins:
            for drawn in dict.fromkeys(self._drawn.pop(v) for v in kernel.reads.keys() & self._drawn.keys()):
                kernel.include(drawn)
                for v in drawn.roots:
                    kernel.reads.pop(v, None)
        for v in kernel.reads:
            if v in self._made:
                kernel.needs |= self._made[v].needs | 1 << self._made[v].number
        large = self._large(kernel) if joins else []
        mates = [self._last[v] for v in large if v in self._last and not kernel.needs >> self._last[v].number & 1]
        if mates:
            mate = mates[0]
            mate.include(kernel)
            for other in self._kernels:
                if other.needs >> mate.number & 1:
                    other.needs |= kernel.needs
        else:
            mate, kernel.number = kernel, len(self._kernels)
            self._kernels.append(kernel)
        self._made.update(dict.fromkeys(kernel.roots, mate))
        self._last.update(dict.fromkeys(large, mate))

    def _large(self, kernel: _Kernel) -> list[int]:
        """The arrays that are most of what a kernel reads; -1 if it reads next to nothing."""
        if sum(kernel.reads.values()) <= TINY:
            return [-1]
        return [v for v, size in kernel.reads.items() if 2 * size >= max(kernel.reads.values())]


def owner_seconds(body: Body, results: Iterable[int], count: int) -> list[float]:
    """Seconds of a program for each of ``count`` owners of its parts.

    Of a kernel, who reads an array first and who makes what is written have the seconds of these bytes; or, if its
    arithmetic takes longer, everyone has those of his own. What stays on the chip takes none.
    """
    total, results = [0.0] * count, [*results]
    kernels = _Cutter(body, results).kernels()
    loads, written = _memory_traffic(kernels, body, {body.base[v] for v in results})
    for kernel, unread in zip(kernels, loads, strict=True):
        parts = [body.parts[k] for k in sorted(kernel.parts)]
        last, rate, stores = parts[-1], body.rates.bytes, kernel.roots & written
        total[last.owner] += body.rates.kernel_seconds + last.work.other
        moved = sum(unread.values()) + body.size(stores)
        if last.work.kind is KernelKind.ALONE:
            stays = sum(kernel.reads.values()) + body.size(kernel.roots) - moved
            total[last.owner] += max(last.work.arithmetic, (last.work.moved - min(stays, last.work.moved)) / rate)
            continue
        if sum(part.work.arithmetic for part in parts) > moved / rate:
            for part in parts:
                total[part.owner] += part.work.arithmetic
            continue
        for part in parts:
            read = sum(unread.pop(body.base[v], 0.0) for v in part.inputs)
            total[part.owner] += (read + body.size(stores & {*part.outputs})) / rate
    return total


def _memory_traffic(
    kernels: Sequence[_Kernel], body: Body, results: Collection[int]
) -> tuple[list[dict[int, float]], set[int]]:
    """The bytes that each kernel reads from memory, by value, and the values that are written there.

    What a kernel reads or makes stays on the chip until newer values have taken its place, the least recently used
    first. A value that loses its place before its last reader has it is written, and so are results.
    """
    room = body.rates.on_chip
    if not room:
        return [kernel.reads.copy() for kernel in kernels], {v for kernel in kernels for v in kernel.roots}
    last = {v: k for k, kernel in enumerate(kernels) for v in kernel.reads}
    held, taken = dict[int, float](), 0.0  # the most recently used at the end
    loads, written = list[dict[int, float]](), set(results)
    for k, kernel in enumerate(kernels):
        loads.append({v: size for v, size in kernel.reads.items() if v not in held})
        for v in (*kernel.reads, *kernel.roots):
            taken -= held.pop(v, 0.0)
            if last.get(v, -1) > k:
                held[v] = body.sizes[v]
                taken += held[v]
        while taken > room:
            v = next(iter(held))
            taken -= held.pop(v)
            written.add(v)
    return loads, written
