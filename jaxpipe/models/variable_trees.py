"""Trees of a model's variables, matched with the model's own by path."""

from collections.abc import Collection, Mapping, Sequence

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import meta

from jaxpipe.array_types import ArrayLike, PyTree, Shaped
from jaxpipe.errors import ModelError


#: Keys from the root of a tree to an array, each as text: ``0`` and ``"0"`` are one key.
Path = tuple[str, ...]

#: How many paths an error lists of each kind.
_LISTED = 5


def plain_tree(variables: PyTree) -> PyTree:
    """The variables as a tree: those of an NNX module, or of a Linen module with variables (``module.bind``)."""
    if isinstance(variables, nnx.Module):
        return nnx.state(variables)
    if isinstance(variables, nn.Module) and variables.scope is not None:
        return variables.variables
    return variables


def by_path(tree: PyTree) -> dict[Path, PyTree]:
    """The arrays of a tree by path, in the order of ``jax.tree.leaves``.

    Boxes around arrays (``nnx.Variable``, ``nn.Partitioned``) are no part of a path.
    """
    arrays: dict[Path, PyTree] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(plain_tree(tree), is_leaf=_is_box)[0]:
        keys = tuple(map(key_name, path))
        if _is_box(leaf):
            arrays.update((keys + inner, x) for inner, x in by_path(_unboxed(leaf)).items())
        else:
            arrays[keys] = leaf
    return arrays


def random_paths(tree: PyTree) -> set[Path]:
    """The paths of the random streams of NNX in a tree."""
    flat = jax.tree_util.tree_flatten_with_path(plain_tree(tree), is_leaf=_is_box)[0]
    return {tuple(map(key_name, path)) for path, leaf in flat if isinstance(leaf, nnx.RngState)}


def key_name(key: object) -> str:
    """One key of a path of ``jax.tree_util``."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def common_level(paths: Collection[Path]) -> Path:
    """The keys that all paths start with."""
    shared = []
    for keys in zip(*paths, strict=False):
        if len(set(keys)) > 1:
            break
        shared.append(keys[0])
    return tuple(shared)


def select(
    variables: PyTree, expected: Mapping[Path, Shaped], levels: Sequence[Path] = (), ignored: Collection[Path] = ()
) -> list[ArrayLike]:
    """Return the arrays of a tree that are a model's variables, in the model's order.

    Args:
      expected: by path, the shape and dtype of each variable.
      levels: the outermost keys, any of which the tree may lack.

    Raises:
      ModelError: if a variable is missing, unexpected, or of another shape or dtype; it lists their paths.
    """
    arrays = by_path(variables)
    ways = [arrays, *({level + path: x for path, x in arrays.items()} for level in levels)]
    given = max(ways, key=lambda way: len(way.keys() & expected.keys()))  # of equal ones the first
    missing = [f"{path_text(path)} ({_text(aval)})" for path, aval in expected.items() if path not in given]
    extra = given.keys() - expected.keys() - set(ignored)
    unexpected = [f"{path_text(path)} ({_text(x)})" for path, x in given.items() if path in extra]
    wrong = [
        f"{path_text(path)} is {_text(given[path])}, the model's is {_text(aval)}"
        for path, aval in expected.items()
        if path in given and _text(given[path]) != _text(aval)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape or dtype": wrong}
    if any(kinds.values()):
        listed = ". ".join(f"{kind.capitalize()}: {_list(items)}" for kind, items in kinds.items() if items)
        raise ModelError(
            f"variables= does not fit the model's {len(expected)} variables. {listed}. Pass a tree with these paths, "
            "as Pipeline.parameters, Module.init and nnx.state give it."
        )
    return [given[path] for path in expected]


def _is_box(x: object) -> bool:
    return isinstance(x, (nnx.Variable, meta.AxisMetadata))


def _unboxed(box: nnx.Variable | meta.AxisMetadata) -> PyTree:
    """The value in a box; that of a Linen box is taken as it is, on whatever devices it may be wanted later."""
    return box.get_value() if isinstance(box, nnx.Variable) else jax.tree.leaves(box)[0]


def path_text(path: Path) -> str:
    """A path as errors name it."""
    return "/".join(path) or "the tree itself"


def merged(new: PyTree, old: PyTree) -> PyTree:
    """Return nested dictionaries with the entries of both, the old ones where both have one."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    return {**new, **{k: merged(new[k], v) if k in new else v for k, v in old.items()}}


def _text(x: PyTree) -> str:
    """Dtype and shape, with the dtype that JAX gives the array."""
    if not hasattr(x, "dtype"):
        return f"{x!r} ({type(x).__name__}), which is no array"
    return f"{jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)}{list(np.shape(x))}"


def _list(items: Sequence[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more
