"""Losses of a batch that are not the mean of those of its micro-batches, found in the traced program.

    mean of the examples' losses     ──▶ the mean of the micro-batches' is the batch's
    sum of them                      ──▶ 1 / number of micro-batches of the batch's
    sum / sum of the batch's weights ──▶ a mean of means; ``(sum, weight, metrics)`` is the batch's

The program is traced for twice as many examples: what sums over them adds to the *degree* of a value in their number,
and numbers in the program that double or halve do, too. A mean has degree 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.errors import LossWarning, warn
from jaxpipe.graph.graph import Operator, dependents
from jaxpipe.graph.primitives import LINEAR, POINTWISE, PRODUCTS, REDUCTIONS, SCALINGS
from jaxpipe.models.batch_statistics import Axes, adds_examples, grown_axes
from jaxpipe.models.check_batch import batch_size
from jaxpipe.models.microbatch_program import MicrobatchProgram


#: Operators that bend a sum over examples.
_BENDS = (POINTWISE | PRODUCTS | REDUCTIONS) - LINEAR


@dataclass(frozen=True)
class _Value:
    """Properties of a value.

    Attributes:
      degree: in the number of examples; of values of single examples, that of a factor.
      given: whether it depends on the examples.
      trained: whether it depends on parameters.
      weighted: whether it was divided by what sums over examples.
      bent: an operator that is not linear in a sum over examples, or in what it takes of them.
    """

    degree: float = 0.0
    given: bool = False
    trained: bool = False
    weighted: bool = False
    bent: str = ""


def check_mean(objective: MicrobatchProgram, size: int, replicas: int, num_microbatches: int) -> tuple[str, ...]:
    """Return notes on a loss that is no mean over examples, cut into several micro-batches.

    There is a ``LossWarning`` where it is a sum, or has weights inside.
    """
    parts = replicas * num_microbatches
    if parts == 1 or objective.weighted or objective.metrics_only or _is_plainly_mean(objective):
        return ()
    rows = batch_size(objective.microbatch)
    small, large = objective if rows > 1 else objective.with_examples(2), objective.with_examples(2 * max(rows, 2))
    loss = None if small is None or large is None else _loss(small, large)
    cut = f"a batch of {size} is cut into num_microbatches={num_microbatches} on each of {replicas} replica(s), whose "
    if loss is not None and loss.weighted:
        warn(
            "The loss divides by a sum over examples that does not depend on parameters (of weights, of a mask, a "
            f"count of tokens), and {cut}losses are averaged: each micro-batch is divided by its own sum, which is a "
            "mean of means. Return both, (sum, weight, metrics), for loss and gradients of the whole batch.",
            LossWarning,
        )
    elif loss is not None and loss.degree > 0:
        warn(
            f"The loss is a sum over examples, and {cut}losses are averaged: loss and gradients are 1/{parts} of those "
            "of the whole batch. Return a mean, or (sum, weight, metrics) with the number of examples as the weight; "
            f"(sum, 1 / {parts}, {{}}) keeps the sum.",
            LossWarning,
        )
    if loss is None or not loss.bent:
        return ()
    return (f"the loss is no mean over examples ({loss.bent}): that of a batch is the mean of those of micro-batches",)


def _is_plainly_mean(objective: MicrobatchProgram) -> bool:
    """Return whether a loss is a mean, and what does not depend on the batch, as most end."""
    graph, given = objective.graph, dependents(objective.graph.operators, objective.batch)

    def adds_rows(op: Operator | None) -> TypeGuard[Operator]:
        return op is not None and op.name == "reduce_sum" and 0 in op.params["axes"]

    def is_mean(t: TensorNumber) -> bool:
        op = graph.producers.get(t)
        if t not in given or op is None:
            return t not in given
        if op.name in LINEAR:
            return all(map(is_mean, op.inputs))
        if op.name not in SCALINGS or len(op.inputs) != 1:
            return False
        summed = graph.producers.get(op.inputs[0])
        if not adds_rows(summed) or adds_rows(graph.producers.get(summed.inputs[0])):
            return is_mean(op.inputs[0])
        count = math.prod(graph.tensors[summed.inputs[0]].shape[axis] for axis in summed.params["axes"])
        return math.isclose(count, float(op.literals[0]) ** (1 if op.name == "div" else -1), rel_tol=1e-2)

    return is_mean(objective.results[0])


def _loss(small: MicrobatchProgram, large: MicrobatchProgram) -> _Value | None:
    """Return what is known of a loss, from the same program for twice as many examples; None if that is nothing."""
    axes = grown_axes(small.graph, large.graph)
    if axes is None:
        return None
    values: dict[TensorNumber, _Value | None] = {t: _Value(trained=True) for t in small.parameters}
    values |= {t: _Value(given=True) for t in small.batch if axes(t)}
    for op, twin in zip(small.graph.operators, large.graph.operators, strict=True):
        literals = iter([_Value(_degree(a, b)) for a, b in zip(op.literals, twin.literals, strict=True)])
        read = [next(literals) if t is None else values.get(t, _Value()) for t in op.operands]
        values.update(dict.fromkeys(op.outputs, _value(op, read, axes)))
    return values.get(small.results[0])


def _degree(small: Array, large: Array) -> float:
    """Return the degree of a number from those of two programs, the second of twice as many examples."""
    ratio = float(large / small) if np.ndim(small) == 0 and np.isfinite(small) and small else 1.0
    return math.log2(ratio) if ratio > 0 else 0.0


def _value(op: Operator, read: Sequence[_Value | None], axes: Axes) -> _Value | None:
    """Return what is known of the results of an operator; None where that is nothing."""
    known, of_examples = [x for x in read if x is not None], any(map(axes, op.outputs))
    given, trained = any(x.given for x in known), any(x.trained for x in known)
    if of_examples and (len(known) < len(read) or op.name not in LINEAR | SCALINGS):
        return _Value(given=True, trained=trained)
    if len(known) < len(read):
        return None
    both = _Value(0.0, given, trained, any(x.weighted for x in known), next((x.bent for x in known if x.bent), ""))
    degrees = [x.degree for x in known[op.name == "select_n" :]]  # but of what selects
    if adds_examples(op, axes):
        return replace(both, degree=sum(degrees) + 1)
    if op.name in LINEAR:
        return replace(both, degree=max(degrees))
    if op.name in PRODUCTS | {"mul"} and (of_examples or not all(x.given for x in known)):
        return replace(both, degree=sum(degrees))
    if op.name == "div" and (of_examples or not (known[1].given and known[1].trained)):
        by_sum = known[1].given and not any(map(axes, op.inputs[-1:]))
        return replace(both, degree=degrees[0] - degrees[1], weighted=both.weighted or by_sum)
    if not (given and trained):
        return replace(both, degree=max(degrees, default=0.0))
    return replace(both, bent=op.place) if op.name in _BENDS else None
