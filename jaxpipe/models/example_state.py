"""State with a row for each example of the batch: carries, caches.

    state of the batch ──rows of a micro-batch──▶ call ──▶ new rows ──▶ state of the batch

Such state is as large as for a whole batch, as plain code has it. Each micro-batch reads and writes its own rows. What
has them is read from a trace: a call pairs them with the examples of its batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxpipe.array_types import PyTree, Shaped
from jaxpipe.errors import ModelError
from jaxpipe.graph.graph import dependents
from jaxpipe.graph.paired_dimensions import paired_dimensions
from jaxpipe.models.bound_model import Axes, BoundModel, UserFunction
from jaxpipe.models.check_batch import batch_size
from jaxpipe.models.microbatch_program import MicrobatchProgram, trace_call, with_rows
from jaxpipe.text.value_text import listed


#: ``(rows, shapes of the state) -> one call``; raises what the model raises.
Call = Callable[[int, Sequence[jax.ShapeDtypeStruct]], MicrobatchProgram]


def changed_axes(names: Sequence[str], small: Sequence[Shaped], large: Sequence[Shaped], rows: tuple[int, int]) -> Axes:
    """Return the axes that grow with the batch, from the shapes of state made for two sizes of it.

    Raises:
      ModelError: if state grows that has not one row for each example.
    """
    axes: list[int | None] = []
    for name, a, b in zip(names, small, large, strict=True):
        changed = [k for k, pair in enumerate(zip(a.shape, b.shape, strict=True)) if pair[0] != pair[1]]
        if len(changed) > 1 or any((a.shape[k], b.shape[k]) != rows for k in changed):
            raise ModelError(_several_rows(name, a, rows[0]))
        axes.append(next(iter(changed), None))
    return tuple(axes)


def _several_rows(name: str, x: Shaped, examples: int) -> str:
    return (
        f"The state variable {name} of shape {list(x.shape)} for {examples} examples grows with their number, but has "
        "not one row for each of them along one axis, so that it cannot be divided among micro-batches. Give it an "
        "axis of examples, as [examples, rows of each, ...], or pass num_microbatches=1."
    )


def _own_rows(name: str, x: Shaped, rows: int, size: int) -> str:
    return (
        f"The state variable {name} of shape {list(x.shape)} has a row for each of the {rows} examples of a "
        "micro-batch, so that the next micro-batch would go on from the state of other examples. Make it for the "
        f"{size} examples of the batch: each micro-batch then reads and writes its own rows. Or pass "
        "num_microbatches=1."
    )


def _not_divided(names: Sequence[str], rows: int, size: int, error: Exception) -> str:
    return (
        f"The state variable(s) {listed(names)} have a row for each of the {size} examples of the batch, and the model "
        f"does not run on the rows of {rows} alone ({type(error).__name__}: {str(error)[:300]}). Pass "
        "num_microbatches=1, or give an axis of examples to all state that is used with them."
    )


def example_axes(bound: BoundModel, function: UserFunction, microbatch: PyTree, batch: PyTree) -> Axes:
    """Find the axes of examples of state that was given.

    Raises:
      ModelError: if state has a row for each example of a micro-batch, or several rows for each; or if the model does
        not run on some of the rows.
    """
    names, state = [v.name for v in bound.state], [v.aval for v in bound.state]
    rows, size = batch_size(microbatch), batch_size(batch)

    def call(rows: int, state: Sequence[jax.ShapeDtypeStruct]) -> MicrobatchProgram:
        variables = tuple(replace(v, aval=aval) for v, aval in zip(bound.state, state, strict=True))
        return trace_call(replace(bound, state=variables), function, with_rows(microbatch, rows))

    none: Axes = (None,) * len(state)
    if rows == size or not any(n and n % rows == 0 for x in state for n in x.shape):
        return none
    for examples in (size, rows):
        dimensions = _paired(call, examples, state)
        grown = [k for k, paired in enumerate(dimensions) if paired]
        for k in grown:
            if [state[k].shape[d] for d in dimensions[k]] != [examples]:
                raise ModelError(_several_rows(names[k], state[k], examples))
            if examples == rows:
                raise ModelError(_own_rows(names[k], state[k], rows, size))
        if grown:
            axes = tuple(next(iter(paired), None) for paired in dimensions)
            try:
                call(rows, _sized(state, axes, rows, size))
            except Exception as error:  # whatever a model raises whose state does not fit
                raise ModelError(_not_divided([names[k] for k in grown], rows, size, error)) from error
            return axes
    _check_grown(names, state, rows, size, call)
    return none


def _check_grown(names: Sequence[str], state: Sequence[jax.ShapeDtypeStruct], rows: int, size: int, call: Call) -> None:
    """Raise ``ModelError`` if the model runs on another number of examples only with state that has grown alike."""
    number = next(n for n in (2 * rows, 3 * rows) if n != size)

    def runs(axes: Axes, examples: int) -> bool:
        shapes = _sized(state, axes, number, examples)
        try:
            called = call(number, shapes)
        except Exception:  # see above
            return False
        return all(x.shape == called.graph.tensors[t].shape for x, t in zip(shapes, called.new_state, strict=True))

    if runs((None,) * len(state), rows):
        return
    for examples in (rows, size):
        axes = tuple(next((k for k, n in enumerate(x.shape) if n and n % examples == 0), None) for x in state)
        for choice in _choices(axes, state):
            if runs(choice, examples):
                k = next(k for k, axis in enumerate(choice) if axis is not None)
                raise ModelError(_several_rows(names[k], state[k], examples))


def _paired(call: Call, examples: int, state: Sequence[jax.ShapeDtypeStruct]) -> Sequence[Sequence[int]]:
    """Return by state variable the dimensions that a call pairs with examples, as it reads them and leaves them."""
    if not any(examples in x.shape for x in state):
        return ()
    try:
        called = call(examples, state)
    except Exception:  # the state is not one of so many
        return ()
    graph, read = called.graph, {t for op in called.graph.operators for t in op.inputs}
    paired = paired_dimensions(graph, [t for t in called.batch if graph.tensors[t].shape[:1] == (examples,)])
    return [
        [d for d in range(len(x.shape)) if (new, d) in paired and (old not in read or (old, d) in paired)]
        for x, old, new in zip(state, called.state, called.new_state, strict=True)
    ]


def check_counts(called: MicrobatchProgram) -> None:
    """Raise ``ModelError`` if rows follow from state that counts calls, or changes as such does."""
    tensors, operators = called.graph.tensors, called.graph.operators
    names = map(called.names.__getitem__, called.state)
    state = list(zip(names, called.state, called.new_state, called.model.examples, strict=True))
    rows = [(name, new) for name, _, new, axis in state if axis is not None]
    given = dependents(operators, [*called.batch, *(old for _, old, _, axis in state if axis is not None)])
    for name, old, new, axis in state:
        is_number = any(jax.dtypes.issubdtype(tensors[old].aval.dtype, kind) for kind in (np.inexact, np.signedinteger))
        counts = bool(rows) and axis is None and is_number and new != old and new not in given
        after = dependents(operators, [old]) if counts else ()
        for other in (other for other, row in rows if row in after):
            raise ModelError(
                f"The state variable {name} changes with each call, whatever the batch, and a step has a call for each "
                f"micro-batch. The rows of {other}, of which each micro-batch has its own, follow from it: in the "
                "second one they would be those of a later call. Pass num_microbatches=1."
            )


def _sized(state: Sequence[jax.ShapeDtypeStruct], axes: Axes, number: int, examples: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of state for a number of examples, of those for ``examples``."""
    resized = []
    for x, axis in zip(state, axes, strict=True):
        lengths = [n // examples * number if d == axis else n for d, n in enumerate(x.shape)]
        resized.append(jax.ShapeDtypeStruct(lengths, x.dtype))
    return resized


def _choices(axes: Axes, state: Sequence[Shaped]) -> list[Axes]:
    """Axes that may be those of examples: all of this size; of matrices only, as vectors may be features; one each."""
    matrices = tuple(axis if len(x.shape) > 1 else None for axis, x in zip(axes, state, strict=True))
    single = [tuple(axis if k == n else None for k, axis in enumerate(axes)) for n in range(len(axes))]
    return [choice for choice in dict.fromkeys((axes, matrices, *single)) if any(axis is not None for axis in choice)]
