"""A training state in parts that do not depend on the runtime that holds it."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jaxpipe.array_types import Array, ArrayLike, Shaped
from jaxpipe.errors import PartitionError
from jaxpipe.runtime.train_state import TrainState


@dataclass(frozen=True, eq=False)
class StageArrays:
    """Arrays of one stage, on the host or on the stage's first device; or of all stages, shared optimizer state too.

    Attributes:
      residuals: ``[replicas, ...]`` by parameter; empty if nothing is left to send.
      outer: in an outer loop by parameter the outer one, and the state of its optimizer; empty: the first.
      replicas: in an outer loop what each replica has of its own; empty: the same as the others.
    """

    parameters: Sequence[ArrayLike]
    variables: Sequence[ArrayLike]
    optimizer: Sequence[ArrayLike]
    residuals: Sequence[ArrayLike] = ()
    outer: Sequence[Sequence[ArrayLike]] = ()
    replicas: Sequence["StageArrays"] = ()


def mean_of_replicas(rows: Sequence[ArrayLike]) -> ArrayLike:
    """Return the mean of what each replica has; counts and random keys are the same on all of them."""
    return np.mean(rows, 0, rows[0].dtype) if jnp.issubdtype(rows[0].dtype, jnp.inexact) else rows[0]


def of_replicas(residual: np.ndarray, count: int) -> np.ndarray:
    """Return residuals of so many replicas, whose mean is that of the given ones."""
    if len(residual) == count:
        return residual
    return np.broadcast_to(residual.mean(axis=0, dtype=residual.dtype), (count, *residual.shape[1:]))


def off_mesh(x: Array) -> Array:
    """Return a value that all devices hold as an array of no mesh, which goes with arrays on any device.

    A traced value, and one on the host, is returned as it is.
    """
    if isinstance(x, core.Tracer) or not isinstance(x, jax.Array):
        return x
    with jax.ensure_compile_time_eval():  # under jit too, where the state is a constant
        local = x.addressable_data(0)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = np.asarray(jax.random.key_data(local))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(local))


def check_key(key: Array, traced: Shaped) -> None:
    """Raise ``PartitionError`` unless a run's key is of the implementation that steps are traced for."""
    given, planned = (str(jax.random.key_impl(jnp.empty((), x.dtype))) for x in (key, traced))
    if given != planned:
        raise PartitionError(
            f"The random key is of the implementation {given!r}; the steps of this pipeline are traced for {planned!r},"
            f" JAX's default where partition was called. Use such a key, jax.random.key(0, impl={planned!r}), or change"
            f" the default before partition: jax.config.update('jax_default_prng_impl', {given!r})."
        )


def microbatch_key(state: TrainState, j: int | Array) -> Array:
    """Return the random key of a micro-batch, counted over the replicas, of no mesh."""
    return jax.random.fold_in(jax.random.fold_in(off_mesh(state.key), off_mesh(state.step)), j)


def on_host(x: Array) -> ArrayLike:
    """Copy an array to the host, of several processes one that each has whole; a random key to the default device.

    A step donates its state, and must not take what a caller has got of it.
    """
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return off_mesh(x)
    return np.array(x if x.is_fully_addressable else x.addressable_data(0))
