"""The call of a user's function: a loss, an evaluation or a prediction."""

import inspect
import zlib
from collections.abc import Callable

import jax
from flax import nnx

from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import JaxpipeError


#: Errors of code that needs the values of traced arrays.
_TRACED = (
    jax.errors.ConcretizationTypeError,  # of bool() and int() too
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

#: The name of a third argument, by which a function gets random streams of its own.
RNGS = "rngs"


def takes_rngs(function: Callable[..., PyTree]) -> bool:
    """Return whether a function takes a third argument called ``rngs``.

    Example:
      >>> takes_rngs(lambda model, batch, rngs: model(batch, rngs=rngs)), takes_rngs(lambda model, batch: model(batch))
      (True, False)
    """
    return any(parameter.name == RNGS for parameter in parameters_of(function))


def parameters_of(function: Callable[..., PyTree]) -> list[inspect.Parameter]:
    """Return a function's parameters; none of a built-in function that does not tell them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def call_function(function: Callable[..., PyTree], model: PyTree, batch: PyTree, key: Array) -> PyTree:
    """Call ``function(model, batch)``, or ``function(model, batch, rngs)`` with ``nnx.Rngs`` made from a key.

    Their key is ``fold_in(key, crc32("rngs"))``, so that it is none of those that the model gets.
    """
    streams = {}
    if takes_rngs(function):
        streams[RNGS] = nnx.Rngs(jax.random.fold_in(key, zlib.crc32(RNGS.encode())))
    try:
        return function(model, batch, **streams)
    except Exception as error:  # of the user's own code, which says nothing of us
        if not isinstance(error, JaxpipeError):
            error.add_note(_note(function, batch, error))
        raise


def _note(function: Callable[..., PyTree], batch: PyTree, error: Exception) -> str:
    """Say what was called when a user's function raised an error, and the rule if it took traced arrays for numbers."""
    named = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    arrays = ", ".join(
        f"batch{name} {x.dtype}{list(x.shape)}" + ("" if x.shape else " (no examples: the same in all micro-batches)")
        for name, x in named
    )
    name = getattr(function, "__name__", type(function).__name__)
    text = f"jaxpipe called {name}(model, batch) to trace it, with a micro-batch of {arrays}."
    if isinstance(error, _TRACED):
        text += (
            " A traced array has a shape, but no values yet: return it as it is, without float(), int() or numpy, and "
            "write jnp.where or jax.lax.cond in place of `if`."
        )
    return text
