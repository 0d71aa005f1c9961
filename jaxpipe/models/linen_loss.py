"""A loss of a Linen module, called outside of a pipeline as a pipeline calls it."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import unfreeze

from jaxpipe.array_types import Array, PyTree
from jaxpipe.models.call_function import RNGS, call_function, takes_rngs
from jaxpipe.models.linen_facade import LinenModel, handed_on
from jaxpipe.models.variable_trees import plain_tree


def is_unbound(value: object) -> bool:
    """Return whether a value is a Linen module without variables."""
    return isinstance(value, nn.Module) and value.scope is None


def with_linen_model(
    function: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Callable[..., PyTree], tuple[PyTree, ...]]:
    """Return a loss as a function of variables and a key, if its arguments are a Linen module, variables and a batch.

    ``loss(model, batch)`` then gets the model that it gets in a pipeline. Another function, such as one of ``(module,
    variables, batch)``, is returned as it is.
    """
    if len(args) < 2 or not is_unbound(args[0]) or not _takes(function, (args[0], *args[2:]), kwargs):
        return function, tuple(args)
    module, variables, *rest = args
    tree = unfreeze(plain_tree(variables))
    if isinstance(tree, dict) and "params" not in tree:
        tree = {"params": tree}

    def loss(variables: PyTree, key: Array, *rest: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
        @functools.wraps(function)  # whose signature may have rngs
        def call(model: LinenModel, batch: tuple[PyTree, ...], **streams: PyTree) -> PyTree:
            return function(model, *batch, **named, **streams)

        model = LinenModel(module, variables, key)
        with handed_on():
            result = call_function(call, model, rest, key)
        return result, model.state

    return loss, (tree, jax.random.key(0), *rest)


def _takes(function: Callable[..., PyTree], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function takes these arguments, and not any number of them."""
    try:
        signature = inspect.signature(function)
        signature.bind(*args, **kwargs, **({RNGS: None} if takes_rngs(function) and RNGS not in kwargs else {}))
    except (TypeError, ValueError):
        return False
    return all(parameter.kind is not parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
