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
    structures = {jax.tree.structure(x) for x in batch}
    return list(batch) if len(structures) == 1 else [batch]


def batch_size(batch: PyTree) -> int:
    """The number of examples: the first axis of every array that has one.

    Raises:
      BatchError: if arrays disagree, or there is no example.
    """
    sizes = {
        jax.tree_util.keystr(path): x.shape[0] for path, x in jax.tree_util.tree_flatten_with_path(batch)[0] if x.shape
    }
    if not sizes:
        raise BatchError("In the batch no array has an axis; a batch is a tree of arrays [examples, ...].")
    if 0 in sizes.values():
        names = ", ".join(f"batch{name}" for name, n in sizes.items() if not n)
        raise BatchError(f"The first axis of {names} is 0: the batch has no example. Pass one at least.")
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"batch{name}: {n}" for name, n in sizes.items())
        raise BatchError(
            f"The first axis of every array of a batch is its examples, but they differ in size ({listed})."
        )
    return next(iter(sizes.values()))


def check_microbatches(size: int, replicas: int, num_microbatches: int, what: str = "batch") -> None:
    """Raise ``BatchError`` unless a batch can be cut into equal micro-batches."""
    if num_microbatches < 1:
        raise BatchError(f"num_microbatches={num_microbatches}; it must be at least 1.")
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
