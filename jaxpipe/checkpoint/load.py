"""Checkpoints without a pipeline."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx, traverse_util

from jaxpipe.array_types import Array, PyTree
from jaxpipe.checkpoint.contents import OPTIMIZER, VARIABLES, check, leaf_paths
from jaxpipe.checkpoint.orbax_files import Directory, Saved, open_checkpoint, read
from jaxpipe.errors import CheckpointError
from jaxpipe.models.variable_trees import plain_tree
from jaxpipe.runtime.uint32_words import typed


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint, for use without a pipeline. Arrays are on the host.

    Attributes:
      step: steps taken.
      key: the random key of the run.
      variables: the model's own.
      optimizer_state: what optax has for the whole tree of parameters.
      data: what was saved as ``data=``.
    """

    step: int
    key: Array
    variables: PyTree
    optimizer_state: PyTree
    data: Any


def load(
    directory: Directory, *, step: int | None = None, variables: PyTree = None, optimizer_state: PyTree = None
) -> Checkpoint:
    """Read a checkpoint into plain Flax and optax.

    Args:
      directory: that it was saved to.
      step: which; left out: the last.
      variables: a tree of the structure wanted, arrays or shapes: Linen variables, an NNX module or state, or what the
        model function takes. Left out: nested dictionaries, which is what Linen takes.
      optimizer_state: the same, for example ``jax.eval_shape(optimizer.init, parameters)``.

    Returns:
      The checkpoint. Random streams of an NNX module, and what it has sown, are not in it: pass its variables to
      ``nnx.update``.

    Raises:
      CheckpointError: if the checkpoint is missing, damaged, or has other arrays than ``variables`` or
        ``optimizer_state``.

    Example:
      >>> import jax.numpy as jnp, jaxpipe, optax, tempfile
      >>> model = jax.tree_util.Partial(lambda w, x: x @ w["out"], {"out": jnp.ones((3, 1))})
      >>> mesh, batch = jax.make_mesh((1,), ("stage",)), jnp.ones((4, 3))
      >>> pipeline = jaxpipe.partition(model, mesh, batch, loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.5))
      >>> folder = tempfile.mkdtemp()
      >>> pipeline.save(pipeline.init(jax.random.key(0)), folder)
      >>> load(folder, variables=model).variables.args[0]["out"].shape
      (3, 1)
    """
    saved = open_checkpoint(directory, step)
    variables = plain_tree(variables)
    if isinstance(variables, nnx.State):
        variables = nnx.filter_state(variables, nnx.Not(nnx.Any(nnx.RngState, nnx.Intermediate)))
    tree = _tree(saved, VARIABLES, variables, "variables")
    slots = _tree(saved, OPTIMIZER, optimizer_state, "optimizer_state")
    return Checkpoint(saved.about.step, saved.key, tree, slots, saved.about.data)


def _tree(saved: Saved, group: str, like: PyTree, name: str) -> PyTree:
    leaves, structure = jax.tree.flatten(like)
    paths = list(saved.leaves[group]) if like is None else leaf_paths(structure)
    if like is not None:
        if wrong := [x for x in leaves if not hasattr(x, "shape")]:
            raise CheckpointError(f"{name}= must be a tree of arrays or shapes; a {type(wrong[0]).__name__} is none.")
        check(saved.folder, saved.leaves[group], paths, leaves, name)
    arrays = read(saved, [(group, *path) for path in paths])
    if like is None:
        return arrays[0] if paths == [()] else traverse_util.unflatten_dict(dict(zip(paths, arrays, strict=True)))
    return jax.tree.unflatten(structure, [typed(x, leaf.dtype) for x, leaf in zip(arrays, leaves, strict=True)])
