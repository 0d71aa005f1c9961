"""Checks of a batch: its examples, its micro-batches, and its structure beside that of another batch."""

from collections.abc import Hashable

import jax

from jaxpipe.array_types import ArrayLike, PyTree, Shaped
from jaxpipe.errors import BatchError
from jaxpipe.models.check_arguments import check_arrays
from jaxpipe.text.value_text import structure_difference


def batch_shapes(batch: PyTree) -> PyTree:
    """A batch as shapes, in the dtypes that JAX gives its arrays: 32 bits for NumPy's 64, unless x64 is enabled.

    Raises:
      BatchError: if it holds anything that is not an array.
    """
    check_arrays(batch)
    return jax.tree.map(shape_of, batch)


def shape_of(x: Shaped) -> jax.ShapeDtypeStruct:
    """Return the shape of an array in the dtype that JAX gives it."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))


def listed_batches(batch: PyTree) -> list[PyTree]:
    """Return the batches of a list: several elements of one structure, none an array by itself; or the one batch."""
    if not isinstance(batch, list) or len(batch) < 2 or any(jax.tree_util.all_leaves([x]) for x in batch):
        return [batch]
    return list(batch) if len({jax.tree.structure(x) for x in batch}) == 1 else [batch]


def batch_size(batch: PyTree) -> int:
    """The number of examples: the first axis of every array that has one.

    Where these differ, as those of the nodes and the edges of a graph do, the batch is one example.

    Raises:
      BatchError: if there is no example.
    """
    sizes = _first_axes(batch)
    if not sizes:
        raise BatchError("In the batch no array has an axis; a batch is a tree of arrays [examples, ...].")
    if not any(sizes.values()):
        raise BatchError(f"The first axis of {', '.join(sizes)} is 0: the batch has no example. Pass one at least.")
    return next(iter(sizes.values())) if has_examples(batch) else 1


def has_examples(batch: PyTree) -> bool:
    """Return whether the arrays of a batch share their first axis, its examples, so that they can be cut along it."""
    return len(set(_first_axes(batch).values())) == 1


def shared_leaves(batch: PyTree) -> tuple[bool, ...]:
    """By array of a batch, whether every micro-batch gets it whole: it has no axis of examples."""
    return tuple(not (x.shape and has_examples(batch)) for x in jax.tree.leaves(batch))


def ragged_text(batch: PyTree) -> str:
    """The first axes of the arrays of a batch without an axis of examples, and how to cut it all the same."""
    listed = ", ".join(f"{name}: {n}" for name, n in _first_axes(batch).items())
    return (
        f"The first axes of the arrays of the batch differ in size ({listed}), so it has no axis of examples to be cut "
        "along: it is one micro-batch on one replica. What all examples share, such as a table of positions, has a row "
        "for each of them, or is no part of it: the loss closes over it. Else pad smaller batches (graphs, sets of "
        "graphs) to equal sizes and stack them, as with jax.tree.map(lambda *x: np.stack(x), *batches), one for each "
        "micro-batch, and let the loss take the only one of its micro-batch: jax.tree.map(lambda x: x[0], batch)."
    )


def _first_axes(batch: PyTree) -> dict[str, int]:
    paths = jax.tree_util.tree_flatten_with_path(batch)[0]
    return {f"batch{jax.tree_util.keystr(path)}": x.shape[0] for path, x in paths if x.shape}


def check_microbatches(batch: PyTree, replicas: int, num_microbatches: int, what: str = "batch") -> None:
    """Raise ``BatchError`` unless a batch can be cut into equal micro-batches."""
    if num_microbatches < 1:
        raise BatchError(f"num_microbatches={num_microbatches}; it must be at least 1.")
    size = batch_size(batch)
    if replicas * num_microbatches > 1 and not has_examples(batch):
        raise BatchError(
            f"num_microbatches={num_microbatches} on each of {replicas} replica(s) for a {what} that cannot be cut. "
            f"{ragged_text(batch)}"
        )
    if size % (replicas * num_microbatches):
        fits = [m for m in range(1, size + 1) if size % (replicas * m) == 0]
        near = sorted(sorted(fits, key=lambda m: abs(m - num_microbatches))[:2])
        counts = f"num_microbatches={' or '.join(map(str, near))}" if near else f"a multiple of {replicas} examples"
        unit = replicas * num_microbatches
        below, above = size // unit * unit, (size // unit + 1) * unit
        sizes = " or ".join(str(n) for n in (below, above) if n)
        raise BatchError(
            f"A {what} of {size} examples cannot be cut into num_microbatches={num_microbatches} equal micro-batches "
            f"on each of {replicas} replica(s). Use {counts}, or a {what} of {sizes} examples."
        )


def paired_leaves(given: PyTree, planned: PyTree) -> list[tuple[str, ArrayLike, jax.ShapeDtypeStruct]]:
    """Return the name of each leaf of a batch, the leaf, and the one that was planned for.

    Raises:
      BatchError: if the structures differ.
    """
    if difference := structure_difference(given, planned):
        raise BatchError(
            f"The batch has another structure than the plan was made for: {difference}. Pass batches of one "
            "structure, or make another pipeline."
        )
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (given, planned)), strict=True)
    return [(f"batch{jax.tree_util.keystr(path)}", x, y) for (path, x), (_, y) in pairs]


def check_same_structure(given: PyTree, planned: PyTree) -> None:
    """Raise ``BatchError`` unless a batch has the structure, shapes and dtypes that were planned for."""
    for name, x, y in paired_leaves(given, planned):
        if (tuple(x.shape), x.dtype) != (tuple(y.shape), y.dtype):
            raise BatchError(
                f"{name} is {x.dtype}{list(x.shape)}, the plan was made for {y.dtype}{list(y.shape)}. {_fit(x, y)}"
            )


def _fit(given: Shaped, planned: Shaped) -> str:
    """The way to make an array of a batch fit the plan."""
    if given.dtype != planned.dtype:
        return f"Cast it, array.astype({str(planned.dtype)!r}), or plan with a batch of dtype {given.dtype}."
    if given.shape[1:] != planned.shape[1:] or not given.shape or not planned.shape:
        return (
            "The axes behind the examples are planned for as well: pad or cut them to these sizes, or make a pipeline "
            'with runtime="mpmd", which takes any; evaluate and predict take any sizes.'
        )
    return (
        f"Pad or drop the last examples of an epoch, so that every batch has {planned.shape[0]}, or make a pipeline "
        'with runtime="mpmd", which takes any number; evaluate and predict take any number of examples.'
    )


def shape_key(shapes: PyTree) -> Hashable:
    """Return the structure, shapes and dtypes of a batch, as a key."""
    leaves, tree = jax.tree.flatten(shapes)
    return tree, tuple((tuple(x.shape), x.dtype) for x in leaves)
