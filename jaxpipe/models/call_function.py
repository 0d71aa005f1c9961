"""The call of a user's function: a loss, an evaluation or a prediction."""

import inspect
import zlib
from collections.abc import Callable

import jax
from flax import nnx

from jaxpipe.array_types import Array, PyTree


#: The name of a third argument, by which a function gets random streams of its own.
RNGS = "rngs"


def takes_rngs(function: Callable[..., PyTree]) -> bool:
    """Return whether a function takes a third argument called ``rngs``.

    Example:
      >>> takes_rngs(lambda model, batch, rngs: model(batch, rngs=rngs)), takes_rngs(lambda model, batch: model(batch))
      (True, False)
    """
    try:
        return RNGS in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return False


def call_function(function: Callable[..., PyTree], model: PyTree, batch: PyTree, key: Array) -> PyTree:
    """Call ``function(model, batch)``, or ``function(model, batch, rngs)`` with ``nnx.Rngs`` made from a key.

    Their key is ``fold_in(key, crc32("rngs"))``, so that it is none of those that the model gets.
    """
    if not takes_rngs(function):
        return function(model, batch)
    return function(model, batch, rngs=nnx.Rngs(jax.random.fold_in(key, zlib.crc32(RNGS.encode()))))
