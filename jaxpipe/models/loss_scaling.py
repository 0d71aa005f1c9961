"""Losses and metrics of a batch that are not the mean of those of its micro-batches, found in the traced program.

    mean of the examples' losses     ──▶ the mean of the micro-batches' is the batch's
    sum of them                      ──▶ 1 / number of micro-batches of the batch's
    sum / sum of the batch's weights ──▶ a mean of means; ``(sum, weight, metrics)`` is the batch's
    mean of normalized values        ──▶ of values that each micro-batch normalizes for itself

The program is traced for twice as many examples: what sums over them adds to the *degree* of a value in their number,
and numbers in the program that double or halve do, too. A mean has degree 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import jax
import numpy as np

from jaxpipe.array_types import Array, TensorNumber
from jaxpipe.errors import LossWarning, warn
from jaxpipe.graph.graph import Operator
from jaxpipe.graph.primitives import LINEAR, POINTWISE, PRODUCTS, REDUCTIONS, SCALINGS
from jaxpipe.models.batch_statistics import Axes, adds_examples, find_statistics, grown_axes, likely_statistics
from jaxpipe.models.check_batch import batch_size
from jaxpipe.models.combine_metrics import returned_metric
from jaxpipe.models.microbatch_program import MicrobatchProgram


#: Operators that bend a sum over examples.
_BENDS = (POINTWISE | PRODUCTS | REDUCTIONS) - LINEAR

#: A loss, among metrics by their paths.
_LOSS = "loss"

_NOTE = "the loss is no mean over examples ({}): that of a batch is the mean of those of micro-batches"


_NORMALIZED = (
    "depends on values of examples which are normalized, or weighted, by sums over all of a micro-batch that depend on "
    "no parameters (advantages, frequencies of classes), and {cut}: each has sums of its own. Compute them before, for "
    "the whole batch, and pass them in it."
)


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


def check_means(
    objective: MicrobatchProgram, size: int, replicas: int, num_microbatches: int, name: str = "loss"
) -> tuple[str, ...]:
    """Return a note on a loss that is no mean over examples, cut into several micro-batches.

    There is a ``LossWarning`` where it or a metric is a sum, has weights inside, or is a mean beside a weight.

    Args:
      name: of the function that returned it.
    """
    parts = replicas * num_microbatches
    if parts == 1:
        return ()
    suspects = _suspects(objective)
    values = _values(objective) if suspects else [None] * len(objective.results)
    weight = values[1] if objective.weighted else None
    problems = {what: _problem(values[k], weight, what == _LOSS, parts) for what, k in suspects.items()}
    statistics = likely_statistics(objective)
    if statistics.outside or "" in statistics.modules:
        statistics = find_statistics(objective)
    if statistics.outside and not problems.get(_LOSS):
        problems[_LOSS] = _NORMALIZED
    cut = f"a batch of {size} is cut into num_microbatches={num_microbatches} on each of {replicas} replica(s)"
    for what, problem in problems.items():
        subject = f"{name} returned a scalar" if what == _LOSS else returned_metric(name, what)
        if problem:
            warn(f"{subject} that {problem.format(cut=cut)}", LossWarning)
    loss = values[0] if _LOSS in suspects else None
    bent = "normalization in the loss" if "" in statistics.modules else "" if loss is None else loss.bent
    return (_NOTE.format(bent),) if bent else ()


def _suspects(objective: MicrobatchProgram) -> dict[str, int]:
    """Return positions of results, by name, that may be no means, nor sums beside a weight."""
    paths = jax.tree_util.tree_leaves_with_path(objective.tree.unflatten(range(objective.tree.num_leaves)))
    results = {jax.tree_util.keystr(path): 2 + k for path, k in paths if not objective.summed[k]}
    results |= {} if objective.metrics_only else {_LOSS: 0}
    degrees, expected = _guessed_degrees(objective), {float(objective.weighted)}
    guessed = {what: degrees.get(objective.results[k], set()) - expected for what, k in results.items()}
    return {what: k for what, k in results.items() if guessed[what] - (set() if what == _LOSS else {math.inf})}


def _problem(value: _Value | None, weight: _Value | None, is_loss: bool, parts: int) -> str:
    """Return what a sentence says of a value that is not that of the whole batch, with room for how this is cut."""
    if value is None:
        return ""
    if value.weighted:
        return (
            "is divided by a sum over examples which depends on no parameters (of weights, of a mask, a count of "
            "tokens), and {cut}: that of each is divided by its own sum, and together they are a mean of means. "
            "Return sums and their weight, (sum, weight, metrics), for the result of the whole batch."
        )
    if value.bent:
        return ""
    if weight is not None and value.degree < weight.degree:
        return (
            "is a mean over examples, beside a weight that is a sum, and {cut}: what these add up to is divided by the "
            "sum of all weights. Return the sum of what each example has, times its weight."
        )
    if weight is not None or value.degree <= 0:
        return ""
    averaged = f"is a sum over examples, and {{cut}}, which are averaged: it is 1/{parts} of that of the whole batch"
    if not is_loss:
        return f"{averaged}. Return jaxpipe.Sum(value) to add it up, or a mean."
    return (
        f"{averaged}, as are gradients. Return a mean, or (sum, weight, metrics) with the number of examples as the "
        f"weight; (sum, 1 / {parts}, {{{{}}}}) keeps the sum."
    )


def _guessed_degrees(objective: MicrobatchProgram) -> dict[TensorNumber, set[float]]:
    """Return the degrees of the terms of values, as most losses and metrics end.

    It is nan where it is not plain to see, and infinite of a value that is one of its examples, as the largest is.
    """
    graph = objective.graph
    degrees: dict[TensorNumber, set[float]] = {t: {math.nan} for t in objective.batch}

    def adds_rows(op: Operator | None) -> TypeGuard[Operator]:
        return op is not None and op.name == "reduce_sum" and 0 in op.params["axes"]

    for op in graph.operators:
        read = [degrees[t] for t in op.inputs if t in degrees]
        if not read:
            continue
        last, here = graph.producers.get(op.inputs[0]), {math.nan}
        if adds_rows(op):
            here = {math.nan if adds_rows(last) else 1.0}
        elif op.name in LINEAR:
            here = set[float]().union(*read)
        elif op.name in REDUCTIONS and read == [{math.nan}]:
            here = {math.inf}
        elif op.name in SCALINGS and len(op.inputs) == 1:
            here = read[0]
            if here == {1.0} and adds_rows(last):
                count = math.prod(graph.tensors[last.inputs[0]].shape[axis] for axis in last.params["axes"])
                number = float(abs(op.literals[0])) ** (1 if op.name == "div" else -1)
                here = {0.0 if math.isclose(count, number, rel_tol=1e-2) else 1.0}  # numbers in half precision
        degrees.update(dict.fromkeys(op.outputs, here))
    return degrees


def _values(objective: MicrobatchProgram) -> list[_Value | None]:
    """Return what is known of a program's results, from the same for twice as many examples; None if nothing is."""
    rows = batch_size(objective.microbatch)
    small, large = objective if rows > 1 else objective.with_examples(2), objective.with_examples(2 * max(rows, 2))
    axes = None if small is None or large is None else grown_axes(small.graph, large.graph)
    if small is None or large is None or axes is None:
        return [None] * len(objective.results)
    values: dict[TensorNumber, _Value | None] = {t: _Value(trained=True) for t in small.parameters}
    values |= {t: _Value(given=True) for t in small.batch if axes(t)}
    constants = large.graph.constants
    values |= {t: _Value(_degree(x, constants[t])) for t, x in small.graph.constants.items() if t in constants}
    for op, twin in zip(small.graph.operators, large.graph.operators, strict=True):
        literals = iter([_Value(_degree(a, b)) for a, b in zip(op.literals, twin.literals, strict=True)])
        read = [next(literals) if t is None else values.get(t, _Value()) for t in op.operands]
        values.update(dict.fromkeys(op.outputs, _value(op, read, axes)))
    return [values.get(t, _Value()) for t in small.results]


def _degree(small: Array, large: Array) -> float:
    """Return the degree of a number from those of two programs, the second of twice as many examples."""
    ratio = float(abs(large / small)) if np.ndim(small) == 0 and np.isfinite(small) and small else 1.0
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
