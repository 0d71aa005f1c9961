"""Trees as arrays by path: what a model's or an optimizer's own structure looks like on disk."""

from collections.abc import Mapping, Sequence

import jax
from flax import nnx

from jaxpipe.array_types import PyTree, PyTreeDef


#: Keys, indices and field names from the root of a tree to a leaf.
Path = tuple[str, ...]


def leaf_paths(structure: PyTreeDef) -> list[Path]:
    """The path of every leaf of a tree, in the order of its leaves.

    An ``nnx.State`` counts as the dictionary that it stands for.

    Example:
      >>> leaf_paths(jax.tree.structure({"dense": (0, 0), "scale": 0}))
      [('dense', '0'), ('dense', '1'), ('scale',)]
    """
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths: list[Path] = [()] * structure.num_leaves
    for path, k in jax.tree_util.tree_flatten_with_path(_pure(numbered))[0]:
        paths[k] = tuple(str(getattr(p, "key", getattr(p, "idx", getattr(p, "name", p)))) for p in path)
    return paths


def _pure(tree: PyTree) -> PyTree:
    def is_state(x: object) -> bool:
        return isinstance(x, nnx.State)

    return jax.tree.map(lambda x: nnx.to_pure_dict(x) if is_state(x) else x, tree, is_leaf=is_state)


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
