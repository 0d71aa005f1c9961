"""State with a row for each example of the batch: carries, caches.

    state of the batch ──rows of a micro-batch──▶ call ──▶ new rows ──▶ state of the batch

Such state is as large as for a whole batch, as plain code has it. Each micro-batch reads and writes its own rows.
"""

from collections.abc import Callable, Sequence

import jax
from jax import lax

from jaxpipe.array_types import Array, Shaped
from jaxpipe.errors import ModelError


#: By state variable, the axis of examples, if it has one.
Axes = tuple[int | None, ...]

#: ``(rows, shapes of the state) -> shapes of the new state``: one call; raises what the model raises.
Call = Callable[[int, Sequence[jax.ShapeDtypeStruct]], Sequence[Shaped]]


def rows_of(state: Sequence[Array], axes: Axes, rows: int, index: Array) -> list[Array]:
    """Return the state of a micro-batch, by its number in the batch."""
    pairs = zip(state, axes, strict=True)
    return [x if axis is None else lax.dynamic_slice_in_dim(x, index * rows, rows, axis) for x, axis in pairs]


def with_rows_of(state: Sequence[Array], new: Sequence[Array], axes: Axes, rows: int, index: Array) -> list[Array]:
    """Return the state of a batch after a micro-batch has left new rows."""
    return [
        after if axis is None else lax.dynamic_update_slice_in_dim(before, after, index * rows, axis)
        for before, after, axis in zip(state, new, axes, strict=True)
    ]


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


def example_axes(names: Sequence[str], state: Sequence[jax.ShapeDtypeStruct], rows: int, size: int, call: Call) -> Axes:
    """Find the axes of examples of state that was given, by calls of other numbers of examples.

    Where the model runs for any number of examples on its state as it is, the state has no such axis.

    Args:
      rows, size: examples of a micro-batch and of the batch.

    Raises:
      ModelError: if state has a row for each example of a micro-batch, or several rows for each.
    """
    none: Axes = (None,) * len(state)
    if rows == size or not any(n and n % rows == 0 for x in state for n in x.shape):
        return none
    other = next(n for n in (2 * rows, 3 * rows) if n != size)

    def runs(axes: Axes, examples: int) -> bool:
        shapes = [_resized(x, axis, other, examples) for x, axis in zip(state, axes, strict=True)]
        try:
            new = call(other, shapes)
        except Exception:  # whatever a model raises whose state does not fit
            return False
        return all(a.shape == b.shape for a, b in zip(shapes, new, strict=True))

    def fitting(examples: int, several: bool) -> Axes:
        """Return the first choice of axes with a row, or with several, for each example, for which the model runs."""
        fits = (lambda n: n % examples == 0) if several else (lambda n: n == examples)
        axes = tuple(next((k for k, n in enumerate(x.shape) if n and fits(n)), None) for x in state)
        return next((choice for choice in _choices(axes, state) if runs(choice, examples)), none)

    if runs(none, rows):
        return none
    if (axes := fitting(size, several=False)) != none:
        return axes
    for examples, several in ((rows, False), (rows, True), (size, True)):
        k = next((k for k, axis in enumerate(fitting(examples, several)) if axis is not None), None)
        if k is not None:
            text = _several_rows(names[k], state[k], examples) if several else _own_rows(names[k], state[k], rows, size)
            raise ModelError(text)
    return none


def _resized(x: jax.ShapeDtypeStruct, axis: int | None, size: int, examples: int) -> jax.ShapeDtypeStruct:
    """Return the shape of state for so many examples, of that for ``examples``."""
    if axis is None:
        return x
    rows = x.shape[axis] // examples * size
    return jax.ShapeDtypeStruct((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)


def _choices(axes: Axes, state: Sequence[Shaped]) -> list[Axes]:
    """Axes that may be those of examples: all of this size; of matrices only, as vectors may be features; one each."""
    matrices = tuple(axis if len(x.shape) > 1 else None for axis, x in zip(axes, state, strict=True))
    single = [tuple(axis if k == n else None for k, axis in enumerate(axes)) for n in range(len(axes))]
    return [choice for choice in dict.fromkeys((axes, matrices, *single)) if any(axis is not None for axis in choice)]
