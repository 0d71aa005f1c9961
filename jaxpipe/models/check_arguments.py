"""Arguments of ``partition`` and ``Pipeline``, checked by type before anything is traced."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe import _compat
from jaxpipe.array_types import Array, PyTree
from jaxpipe.errors import BatchError, PartitionError
from jaxpipe.graph.sharding_annotations import outside_mesh
from jaxpipe.models.call_function import RNGS, takes_rngs
from jaxpipe.text.value_text import shown


_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Forms of the result of a loss.
_FORMS = "a scalar, (scalar, metrics), or (loss_sum, weight, metrics)"


def check_optimizer(optimizer: object) -> None:
    """Raise ``PartitionError`` unless an optimizer is an optax transformation."""
    if isinstance(optimizer, nnx.Optimizer):
        raise PartitionError(
            f"optimizer= is an nnx.{type(optimizer).__name__}, which keeps optimizer state for a whole model; "
            "Pipeline.init makes this state itself, stage by stage. Pass the optax transformation alone: optimizer=tx, "
            "where nnx.Optimizer(model, tx, ...) was written."
        )
    methods = [getattr(optimizer, name, None) for name in ("init", "update")]
    if inspect.isclass(optimizer) or not all(map(callable, methods)):
        called = f" Call it: optimizer={optimizer.__name__}(...)." if inspect.isfunction(optimizer) else ""
        raise PartitionError(
            f"optimizer= is {shown(optimizer)}; it must be an optax.GradientTransformation, such as "
            f"optimizer=optax.adam(1e-3).{called}"
        )


def check_function(function: object, name: str, arguments: tuple[str, str] = ("model", "batch")) -> None:
    """Raise ``PartitionError`` unless a function can be called with two arguments, those of these names.

    One of a model may take random streams as a third, ``rngs``.
    """
    example = f"{name}=lambda {', '.join(arguments)}: ..."
    if not callable(function):
        raise PartitionError(f"{name}= is {shown(function)}; it must be a function, {example}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(None, None, **({RNGS: None} if arguments[0] == "model" and takes_rngs(function) else {}))
    except TypeError:
        raise PartitionError(
            f"{name}= takes the arguments {signature}, but is called with two, as {name}({', '.join(arguments)}). Pass "
            f"{example}, with functools.partial for settings."
        ) from None


def check_seconds(value: Any, name: str) -> None:
    """Raise ``PartitionError`` unless a value is a number of seconds, 0 or more."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not float(value) >= 0 or math.isinf(value):
        raise PartitionError(f"{name}={value!r}; it must be a number of seconds, 0 or more, such as {name}=10.0.")


def check_flag(value: object, name: str) -> None:
    """Raise ``PartitionError`` unless a value is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise PartitionError(f"{name}={value!r}; it must be True or False.")


def random_key(key: Any) -> Array:
    """Return a random key as a typed one (``jax.random.key``); one of ``jax.random.PRNGKey`` is wrapped.

    Raises:
      PartitionError: if it is no single key.
    """
    is_array = isinstance(key, jax.Array | np.ndarray)
    dtype, shape = (key.dtype, key.shape) if is_array else (None, None)
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    if (dtype, shape) == (data.dtype, data.shape):
        return jax.random.wrap_key_data(jnp.asarray(key))
    if isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) and shape == ():
        return key
    if isinstance(key, numbers.Integral):
        fix = f"Pass jax.random.key({int(key)})."
    elif isinstance(key, nnx.Rngs):
        fix = "Pass the key that they were made from, such as jax.random.key(0)."
    elif isinstance(key, Mapping):
        fix = "Pass a single key, such as jax.random.key(0); every random stream is made from it."
    else:
        fix = "Pass jax.random.key(0), for example."
    text = f"an array {key.dtype}{list(key.shape)}" if is_array else shown(key)
    raise PartitionError(f"key= is {text}; init needs one random key. {fix}")


def check_outside_jit(name: str) -> None:
    """Raise ``PartitionError`` if a method of ``Pipeline`` is traced by ``jax.jit``, ``jax.grad`` or ``jax.vmap``."""
    if _compat.inside_transformation():
        raise PartitionError(
            f"pipeline.{name} was called inside jax.jit, jax.grad or another JAX transformation. It runs compiled "
            "programs of its own, which cannot be transformed: call it outside, without jax.jit. Gradients come from "
            "pipeline.value_and_grad(state, batch)."
        )


def outside_jit(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a method of ``Pipeline`` refuse to be traced, and run without the mesh of ``jax.set_mesh``."""

    @functools.wraps(method)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        check_outside_jit(method.__name__)
        with outside_mesh():
            return method(*args, **kwargs)

    return checked


def returned_parts(returned: PyTree, name: str) -> tuple[PyTree, PyTree, PyTree]:
    """Return loss, weight and metrics of what a loss, or an evaluation, returned; None for a loss or weight left out.

    Raises:
      PartitionError: if it is none of the forms that it may return.
    """
    alone = name != "loss" and isinstance(returned, Mapping)
    rule = f"it must return {_FORMS}{'' if name == 'loss' else ', or a dictionary of metrics'}."
    if returned is None:
        raise PartitionError(f"{name} returned None; {rule} Does it end without `return`?")
    if isinstance(returned, Mapping) and not alone:
        keys = ", ".join(map(str, returned))
        raise PartitionError(f"loss returned a dictionary ({keys}); {rule} Return (loss, metrics).")
    if isinstance(returned, list) or (isinstance(returned, tuple) and len(returned) not in (2, 3)):
        kind = type(returned).__name__
        raise PartitionError(f"{name} returned a {kind} of length {len(returned)}; {rule} Return a tuple of 2 or 3.")
    *scalars, metrics = returned if isinstance(returned, tuple) else (returned,) if alone else (returned, {})
    named: dict[str, Any] = dict(zip(("loss", "weight"), scalars, strict=False))
    for what, value in named.items():
        if not _is_number(value):
            raise PartitionError(f"{name} returned {shown(value)} as its {what}; {rule}")
    for path, value in jax.tree_util.tree_leaves_with_path(metrics):
        if not _is_number(value):
            raise PartitionError(
                f"{name} returned {shown(value)} as the metric {jax.tree_util.keystr(path)}; metrics are numbers or "
                "arrays of numbers. Leave it out."
            )
    for what, value in named.items():
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or (what == "loss" and not jnp.issubdtype(dtype, jnp.floating)):
            raise PartitionError(
                f"{name} returned a {what} of shape {shape} and dtype {dtype}; it must be one floating-point number. "
                "Return a scalar, (scalar, metrics), or (loss_sum, weight, metrics): take the mean, or the sum, over "
                "the examples."
            )
    return named.get("loss"), named.get("weight"), metrics


def check_predicted(returned: PyTree, name: str) -> None:
    """Raise ``PartitionError`` unless what a prediction returned holds arrays, and nothing else."""
    leaves = jax.tree_util.tree_leaves_with_path(returned)
    if not leaves:
        raise PartitionError(
            f"{name} returned {shown(returned)}; it must return arrays [examples, ...]. Does it end without `return`?"
        )
    for path, value in leaves:
        if not _is_array(value):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise PartitionError(f"{name} returned {shown(value)}{where}; it must return arrays [examples, ...].")


def check_arrays(batch: PyTree) -> None:
    """Raise ``BatchError`` unless every leaf of a batch is an array that JAX can hold."""
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            listed = isinstance(x, numbers.Number) and path and isinstance(path[-1], jax.tree_util.SequenceKey)
            first = "Make an array of a list with numpy.asarray, or put" if listed else "Put"
            raise BatchError(
                f"{name} is {shown(x)}; a batch holds arrays only. {first} settings into the loss, with "
                "functools.partial."
            )
        if not _is_held(x.dtype):
            raise BatchError(
                f"{name} is a {type(x).__name__} of dtype {x.dtype}; a batch holds JAX or NumPy arrays of numbers, "
                "booleans or keys. Convert it, or leave it out of the batch."
            )


def _is_held(dtype: jax.typing.DTypeLike) -> bool:
    """Return whether JAX has arrays of a dtype."""
    try:
        return jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind not in "OSUMm"
    except TypeError:
        return False


def _is_number(value: PyTree) -> bool:
    """Return whether a value, or each element of it, is a number and no random key."""
    return _is_array(value) and not jax.dtypes.issubdtype(getattr(value, "dtype", float), jax.dtypes.extended)


def _is_array(value: PyTree) -> bool:
    if hasattr(value, "dtype"):
        return _is_held(value.dtype)
    return isinstance(value, numbers.Number) or hasattr(value, "__jax_array__")
