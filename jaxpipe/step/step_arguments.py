"""Arguments of a step without their values."""

from typing import Any

import jax
from flax import nnx

from jaxpipe.array_types import PyTree
from jaxpipe.models.purify_nnx import is_module


def without_values(arguments: PyTree) -> PyTree:
    """Return arguments with shapes in place of arrays, those of NNX modules included."""
    leaves, treedef = jax.tree.flatten(arguments, is_leaf=is_module)
    graphdef, state = nnx.split(tuple(filter(is_module, leaves)))
    modules = iter(nnx.merge(graphdef, jax.tree.map(_without_value, state)))
    return treedef.unflatten([next(modules) if is_module(leaf) else _without_value(leaf) for leaf in leaves])


def _without_value(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.aval.weak_type)
