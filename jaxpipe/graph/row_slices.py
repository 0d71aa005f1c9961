"""The largest tensor of a program in slices: what is row-wise around it runs in a loop over some rows at a time.

    hidden [tokens, d] ──product──▶ logits [tokens, words] ──softmax, pick──▶ losses [tokens]

becomes a ``scan`` over slices of ``hidden``, whose body is ``jax.checkpoint``: neither pass holds more of the logits
than one slice, and the backward pass computes each slice again. Rows do not meet in the loop, so its results are those
of the whole product, as far as a product's rounding does not depend on its number of rows; the gradient of what all
rows share is added up over the slices. After E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
ICLR 2025, which fuses the same slices into one kernel.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe import _compat
from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.graph.graph import Graph, GraphBuilder, Operator, all_operands, live
from jaxpipe.graph.kept_dimensions import LENGTHS, Kept, kept_dimensions
from jaxpipe.graph.primitives import POINTWISE, REARRANGES, REDUCTIONS
from jaxpipe.graph.rules import pick


#: How many times smaller than the sliced tensor all results of the loop together must be.
SHRINKS = 8


@dataclass(frozen=True)
class _Step:
    """An operator of the loop.

    Attributes:
      axis: of its result, along which it is sliced; None if every slice needs it whole.
      sliced: axes of its operands; None for those that every slice needs whole.
      length: the parameter that says how many rows there are, and the place in it.
    """

    axis: int | None
    sliced: tuple[int | None, ...]
    length: tuple[str, int] | None = None


@dataclass(frozen=True, eq=False)
class Sliced:
    """A program with a loop over ``count`` slices, and the operators of the first program that run in it."""

    graph: Graph
    operators: tuple[Operator, ...]
    count: int


def slice_rows(graph: Graph, most_bytes: int) -> Sliced | None:
    """Return the same program with its largest product in slices of at most ``most_bytes``, if possible.

    None if the product is not larger than that, or what follows it is not row-wise.

    Example:
      >>> from jaxpipe.graph.graph import trace
      >>> def losses(hidden, words):
      ...     return jax.nn.logsumexp(hidden @ words, axis=-1)
      >>> arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 8), (8, 1000))]
      >>> sliced = slice_rows(trace(losses, *arrays), most_bytes=16 * 1000 * 4)
      >>> sliced.count, sliced.operators[0].name
      (4, 'dot_general')
    """
    products = [op for op in graph.operators if op.name == "dot_general"]
    if not products:
        return None
    product = max(products, key=lambda op: graph.tensors[op.outputs[0]].bytes)
    size = graph.tensors[product.outputs[0]].bytes
    regions = [_grown(graph, product, axis) for axis in range(len(graph.tensors[product.outputs[0]].shape))]
    largest = size / SHRINKS
    smaller = [r for r in regions if r and sum(graph.tensors[t].bytes for t in _results(graph, r)) <= largest]
    divisors = [(n, region) for region in smaller for n in _divisors(graph, region)]
    if size <= most_bytes or not divisors:
        return None
    count, region = min(divisors, key=lambda way: (size > way[0] * most_bytes, abs(size - way[0] * most_bytes)))
    return Sliced(_with_loop(graph, region, count), tuple(region), count)


def _grown(graph: Graph, product: Operator, axis: int) -> dict[Operator, _Step] | None:
    """Return the operators that treat the rows along an axis of a product each by itself, starting with the product."""
    axes: dict[TensorNumber, int] = {}
    after: set[TensorNumber] = set()  # what the loop's results lead to outside it
    steps: dict[Operator, _Step] = {}
    for op in graph.operators:
        if op is product:
            step = _product_backwards(graph, op, axis)
            if step is None:
                return None
        elif axes.keys().isdisjoint(op.inputs):
            after.update(op.outputs if not after.isdisjoint(op.inputs) else ())
            continue
        else:
            step = None if not after.isdisjoint(op.inputs) or op.has_effects else _step(graph, op, axes)
        if step is None:
            after.update(op.outputs)
            continue
        steps[op] = step
        assert step.axis is not None
        axes.update((t, step.axis) for t in op.outputs)
    return _with_operands(graph, steps)


def _with_operands(graph: Graph, steps: dict[Operator, _Step]) -> dict[Operator, _Step]:
    """Add the operators that make operands for nothing else: one-hot labels; transposes, which products take in."""
    readers: dict[TensorNumber, list[Operator]] = {}
    for op in graph.operators:
        for t in op.inputs:
            readers.setdefault(t, []).append(op)
    largest = max(graph.tensors[t].bytes for op in steps for t in op.outputs)
    pairs = list(_operands(steps))
    counts = Counter(t for t, _ in pairs)
    wanted = {t: axis if counts[t] == 1 else None for t, axis in pairs}
    for op in reversed([op for op in graph.operators if len(op.outputs) == 1]):
        t = op.outputs[0]
        if t not in wanted or t in graph.outputs or not steps.keys() >= set(readers[t]):
            continue
        axis = wanted[t]
        if op.name == "transpose" and axis is None and counts[t] == 1:
            steps[op] = _Step(None, (None,))
        if axis is None or graph.tensors[t].bytes * SHRINKS < largest:
            continue
        inputs = [(u, d) for u in op.inputs for d in range(len(graph.tensors[u].shape))]
        ways = [_step(graph, op, {u: d}) for u, d in inputs]
        step = next((way for way in ways if way is not None and way.axis == axis), None)
        if step is not None and not op.has_effects:
            steps[op] = step
            for u, d in zip(op.inputs, step.sliced, strict=True):
                wanted[u] = d if wanted.get(u, d) == d else None
    return {op: steps[op] for op in graph.operators if op in steps}


def _product_backwards(graph: Graph, op: Operator, axis: int) -> _Step | None:
    """Return how a product is sliced so that its result is along an axis: one of the free axes of one operand."""
    sliced = _kept_as(_kept(graph, op), axis)
    return _Step(axis, sliced) if len(op.inputs) == 2 and None in sliced else None


def _step(graph: Graph, op: Operator, axes: Mapping[TensorNumber, int]) -> _Step | None:
    """Return how an operator that reads slices is sliced; None if it needs several slices at once."""
    given = [axes.get(t) for t in op.inputs]
    first, before = next((k, axis) for k, axis in enumerate(given) if axis is not None)
    rearranges = len(op.inputs) == 1 and op.name in REDUCTIONS | REARRANGES | {"slice"}
    looks_up = op.name == "gather" and len(op.inputs) == 2 and first == 0
    if not (op.name in POINTWISE or rearranges or looks_up):
        return None
    kept = _kept(graph, op, first)
    axis = kept[first].get(before)
    if axis is None:
        return None
    sliced = _kept_as(kept, axis)
    lengths = {graph.tensors[t].shape[axis : axis + 1] for t in op.outputs}
    if len(lengths) > 1 or any(d not in (None, wanted) for d, wanted in zip(given, sliced, strict=True)):
        return None
    if looks_up and before not in op.params["dimension_numbers"].operand_batching_dims:
        return _Step(axis, sliced, ("slice_sizes", before))
    return _Step(axis, sliced, (LENGTHS[op.name], axis) if op.name in LENGTHS else None)


def _kept(graph: Graph, op: Operator, position: int = 0) -> Sequence[Kept]:
    """Return the dimensions of the operands that the result has, that of a position where there are several."""
    result = graph.tensors[op.outputs[min(position, len(op.outputs) - 1)]].shape
    return kept_dimensions(op.name, op.params, [graph.tensors[t].shape for t in op.inputs], result)


def _kept_as(kept: Sequence[Kept], axis: int) -> tuple[int | None, ...]:
    """Return the dimension of each operand that an axis of the result was."""
    return tuple(next((d for d, to in dimensions.items() if to == axis), None) for dimensions in kept)


def _results(graph: Graph, steps: Mapping[Operator, _Step]) -> list[TensorNumber]:
    """Return the tensors of the loop that are needed outside it."""
    read = {t for op in graph.operators if op not in steps for t in op.inputs} | set(graph.outputs)
    return [t for op in steps for t in op.outputs if t in read]


def _operands(steps: Mapping[Operator, _Step]) -> dict[tuple[TensorNumber, int | None], None]:
    """Return the tensors that the loop reads, each with the axis along which it is sliced, in order."""
    inner = {t for op in steps for t in op.outputs}
    pairs = [(t, axis) for op, step in steps.items() for t, axis in zip(op.inputs, step.sliced, strict=True)]
    return dict.fromkeys((t, axis) for t, axis in pairs if t not in inner)


def _divisors(graph: Graph, steps: Mapping[Operator, _Step]) -> list[int]:
    """Return all numbers of slices into which the rows of every tensor can be cut; none of rows in shards of a mesh."""
    inner = [(t, step.axis) for op, step in steps.items() for t in op.outputs]
    sliced = [(graph.tensors[t].aval, axis) for t, axis in (*_operands(steps), *inner) if axis is not None]
    if any(_compat.split_dimensions(aval)[axis] for aval, axis in sliced):
        return []
    common = math.gcd(*(aval.shape[axis] for aval, axis in sliced))
    return [n for n in range(2, common + 1) if common % n == 0]


def _with_loop(graph: Graph, steps: Mapping[Operator, _Step], count: int) -> Graph:
    """Return the graph with one loop in the place of some operators."""
    operands, results = list(_operands(steps)), _results(graph, steps)
    axes = {t: step.axis for op, step in steps.items() for t in op.outputs if step.axis is not None}

    def loop(*values: Array) -> list[Array]:
        given = dict(zip(operands, values, strict=True))
        rows = {(t, axis): _cut(value, axis, count) for (t, axis), value in given.items() if axis is not None}

        @jax.checkpoint
        def body(_: None, pieces: Sequence[Array]) -> tuple[None, list[Array]]:
            env = given | dict(zip(rows, pieces, strict=True))
            inner: dict[TensorNumber, Array] = {}
            for op, step in steps.items():
                keys = zip(op.inputs, step.sliced, strict=True)
                read = [inner[t] if t in inner else env[t, axis] for t, axis in keys]
                inner.update(zip(op.outputs, _run(op, step, read, count), strict=True))
            return None, [inner[t] for t in results]

        _, stacked = lax.scan(body, None, list(rows.values()))
        return [_joined(value, axes[t]) for t, value in zip(results, stacked, strict=True)]

    builder = GraphBuilder(graph.tensors, graph.constants)
    inputs = [t for t, _ in operands]
    stacked = builder.read(jax.make_jaxpr(loop)(*(graph.tensors[t].aval for t in inputs)), inputs)
    name = dict(zip(stacked, results, strict=True))
    added = [replace(op, inputs=_named(op.inputs, name), outputs=_named(op.outputs, name)) for op in builder.operators]
    after: set[TensorNumber] = set(results)
    early: list[Operator] = []
    late: list[Operator] = []
    last = max(k for k, op in enumerate(graph.operators) if op in steps)
    for op in graph.operators[: last + 1]:
        if op not in steps:
            (early if after.isdisjoint(op.inputs) else late).append(op)
            after.update(() if after.isdisjoint(op.inputs) else op.outputs)
    operators = live((*early, *added, *late, *graph.operators[last + 1 :]), graph.outputs)
    return replace(graph, tensors=tuple(builder.tensors), constants=builder.constants, operators=operators)


def _named(tensors: Sequence[TensorNumber], names: Mapping[TensorNumber, TensorNumber]) -> tuple[TensorNumber, ...]:
    return tuple(names.get(t, t) for t in tensors)


def _run(op: Operator, step: _Step, values: Sequence[Array], count: int) -> Sequence[Array]:
    if pick.applies(op):
        return [pick.run(op, *values)]
    if step.length is None:
        return op.evaluate(*values)
    (name, place), equation = step.length, op.equation
    lengths = list(op.params[name])
    lengths[place] //= count
    result = equation.primitive.bind(*all_operands(equation, values), **{**op.params, name: tuple(lengths)})
    return result if equation.primitive.multiple_results else [result]


def _cut(value: Array, axis: int, count: int) -> Array:
    """Return an array's slices along an axis, stacked."""
    shape = value.shape
    return jnp.moveaxis(value.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :]), axis, 0)


def _joined(stacked: Array, axis: int) -> Array:
    """Return the array whose slices along an axis are stacked."""
    return lax.collapse(jnp.moveaxis(stacked, 0, axis), axis, axis + 2)
