"""The dimensions of an operator's operands that its result has, too: what is split along one stays split."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxpipe.graph.primitives import ELEMENTWISE, POINTWISE, REDUCTIONS


Shape = Sequence[int]

#: By dimension of an operand, the dimension of the result that it becomes; others are gone, or changed.
Kept = dict[int, int]

#: Parameters that say the length of each dimension of a result.
LENGTHS = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}


def kept_dimensions(name: str, params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> Sequence[Kept]:
    """Return the dimensions that are kept, by operand; of operands that are left out, none.

    Args:
      name, params: of the primitive.
      operands, result: their shapes.

    Example:
      >>> kept_dimensions("transpose", {"permutation": (1, 0)}, [(2, 3)], (3, 2))
      [{1: 0, 0: 1}]
      >>> kept_dimensions("reshape", {}, [(2, 3, 4)], (6, 2, 2))
      [{0: 0, 2: 1}]
      >>> kept_dimensions("add", {}, [(2, 3), (2, 1)], (2, 3))
      [{0: 0, 1: 1}, {0: 0}]
      >>> kept_dimensions("stack", {"axis": 1}, [(3, 4), (3, 4)], (3, 2, 4))
      [{0: 0, 1: 2}, {0: 0, 1: 2}]
    """
    if name in RULES:
        return RULES[name](params, operands, result)
    whole = name not in ELEMENTWISE | POINTWISE  # who knows what else does
    alike = [len(shape) == len(result) and not (whole and tuple(shape) != tuple(result)) for shape in operands]
    return [_equal(shape, result) if is_alike else {} for shape, is_alike in zip(operands, alike, strict=True)]


def _equal(operand: Shape, result: Shape) -> Kept:
    return {d: d for d, (before, after) in enumerate(zip(operand, result, strict=True)) if before == after}


def _same_dimensions(params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> list[Kept]:
    """Dimensions of unchanged length: of slices, padding, concatenation, windows."""
    return [_equal(shape, result) if len(shape) == len(result) else {} for shape in operands]


def _others(operand: Shape, gone: Iterable[int]) -> list[Kept]:
    gone = set(gone)
    return [{d: to for to, d in enumerate(d for d in range(len(operand)) if d not in gone)}]


def _broadcast(params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> list[Kept]:
    return [{d: to for d, to in enumerate(params["broadcast_dimensions"]) if operands[0][d] == result[to]}]


def _reshape(params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> list[Kept]:
    """A dimension that is cut apart, or that several become, is kept in its outermost part."""
    starts, kept = [math.prod(result[:to]) for to in range(len(result))], Kept()
    for d, length in enumerate(operands[0]):
        places = [to for to, start in enumerate(starts) if start == math.prod(operands[0][:d])]
        outer = [to for to in places if result[to] == length] or [to for to in places if min(length, result[to]) > 1]
        if outer:
            kept[d] = outer[0]
    return [kept]


def _product(params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> list[Kept]:
    contracted, batch = params["dimension_numbers"]
    place = itertools.count(len(batch[0]))
    kept = [{d: to for to, d in enumerate(dimensions)} for dimensions in batch]
    for k, shape in enumerate(operands[:2]):
        free = [d for d in range(len(shape)) if d not in contracted[k] and d not in batch[k]]
        kept[k] |= {d: next(place) for d in free}
    return kept


def _convolution(params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> list[Kept]:
    """Images, and the kernels of the results."""
    images, kernels, results = params["dimension_numbers"]
    return [{images[0]: results[0]}, {kernels[0]: results[1]}]


def _gather(params: Mapping[str, Any], operands: Sequence[Shape], result: Shape) -> list[Kept]:
    """Rows by number: dimensions of the numbers, and those of the operand that are taken whole."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    rows = [to for to in range(len(result)) if to not in numbers.offset_dims]
    batch = numbers.operand_batching_dims
    kept = [d for d in range(len(sizes)) if d not in numbers.collapsed_slice_dims and d not in batch]
    pairs = zip(kept, numbers.offset_dims, strict=True)
    whole = {d: to for d, to in pairs if sizes[d] == operands[0][d] and d not in numbers.start_index_map}
    whole |= {d: rows[k] for d, k in zip(batch, numbers.start_indices_batching_dims, strict=True)}
    return [whole, dict(enumerate(rows))]


_Rule = Callable[[Mapping[str, Any], Sequence[Shape], Shape], Sequence[Kept]]

#: Of operators that are not elementwise.
RULES: dict[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolution,
    "dot_general": _product,
    "gather": _gather,
    "ragged_dot_general": lambda _, operands, result: [{0: 0}, {len(operands[1]) - 1: 1}] if len(result) == 2 else [],
    "reshape": _reshape,
    "split": _same_dimensions,
    "squeeze": lambda params, operands, _: _others(operands[0], params["dimensions"]),
    "stack": lambda params, operands, _: [{d: d + (d >= params["axis"]) for d in range(len(x))} for x in operands],
    "transpose": lambda params, *_: [{d: to for to, d in enumerate(params["permutation"])}],
    "unstack": lambda params, operands, _: _others(operands[0], [params["axis"]]),
    **dict.fromkeys(["concatenate", "cumsum", "dynamic_slice", "dynamic_update_slice", "pad"], _same_dimensions),
    **dict.fromkeys(["reduce_window", "reduce_window_max", "reduce_window_sum", "rev", "slice"], _same_dimensions),
    **dict.fromkeys(REDUCTIONS, lambda params, operands, _: _others(operands[0], params["axes"])),
}
