"""Parameter trees that do not keep a model's function, nor the arrays that it captures."""

import types
import weakref

import jax

from jaxpipe.array_types import PyTree


class _WeakFunction:
    """Equal to a function, without keeping it."""

    def __init__(self, function: types.FunctionType):
        self._function = weakref.ref(function)
        self._hash = hash(function)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        function = self._function()
        given = other._function() if isinstance(other, _WeakFunction) else other
        return self is other or (function is not None and function is given)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        function = self._function()
        assert function is not None, "the model is gone"
        return function(*args, **kwargs)


def without_captures(tree: PyTree) -> PyTree:
    """Return an equal tree whose ``Partial`` does not keep its function.

    optax compiles functions of whole trees, and JAX keeps the structure of what compiled functions get and return.

    Example:
      >>> model = jax.tree_util.Partial(lambda w, x: w * x, 2.0)
      >>> jax.tree.structure(without_captures(model)) == jax.tree.structure(model)
      True
    """
    if not isinstance(tree, jax.tree_util.Partial) or not isinstance(tree.func, types.FunctionType):
        return tree
    return jax.tree_util.Partial(_WeakFunction(tree.func), *tree.args, **tree.keywords)
