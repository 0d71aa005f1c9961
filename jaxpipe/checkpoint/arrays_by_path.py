"""Trees as arrays by path: what a model's or an optimizer's own structure looks like on disk."""

from collections.abc import Mapping, Sequence

import jax

from jaxpipe.array_types import PyTree, PyTreeDef
from jaxpipe.models.variable_trees import Path, by_path


def leaf_paths(structure: PyTreeDef) -> list[Path]:
    """The path of every leaf of a tree, in the order of its leaves.

    An ``nnx.State`` counts as the dictionary that it stands for, and boxes around arrays are no part of a path.

    Example:
      >>> leaf_paths(jax.tree.structure({"dense": (0, 0), "scale": 0}))
      [('dense', '0'), ('dense', '1'), ('scale',)]
    """
    return list(by_path(jax.tree.unflatten(structure, range(structure.num_leaves))))


def nest(leaves: Mapping[Path, object]) -> PyTree:
    """Leaves by path as nested dictionaries.

    Example:
      >>> nest({("dense", "0"): 1, ("scale",): 2})
      {'dense': {'0': 1}, 'scale': 2}
    """
    if set(leaves) == {()}:
        return leaves[()]
    tree: dict[str, PyTree] = {}
    for path, leaf in leaves.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = leaf
    return tree


def pick(tree: PyTree, paths: Sequence[Path]) -> list[PyTree]:
    """The leaves of nested dictionaries at some paths."""
    leaves = []
    for path in paths:
        inner = tree
        for key in path:
            inner = inner[key]
        leaves.append(inner)
    return leaves
