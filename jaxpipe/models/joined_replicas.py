"""Replicas that compute a micro-batch together, so that collectives over a name of the user's mix them.

batch ──▶ replica r has its r-th part; micro-batch j is the j-th of every replica, side by side
function of a micro-batch ──▶ ``vmap`` of it over the replicas, with the name; XLA splits that over their devices
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe import _compat
from jaxpipe.array_types import Array


@dataclass(frozen=True)
class ReplicaAxis:
    """The name of an axis of collectives that has so many replicas."""

    name: str
    size: int


def run_replicas(
    axis: ReplicaAxis,
    function: Callable[[Array, Sequence[Array]], tuple[Sequence[Array], Sequence[Array]]],
    state: Sequence[Array],
    key: Array,
    batch: Sequence[Array],
) -> tuple[Sequence[Array], list[Array]]:
    """Run ``function(key, batch) -> (results, new state)`` for every replica.

    Replica r gets the r-th part of the examples and the key ``fold_in(key, r)``.

    Returns:
      The results with an axis of replicas in front; and the state, averaged over them as at the end of a step, but for
      integers (counts), which are the same on all.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(axis.size))
    parts = [x.reshape(axis.size, -1, *x.shape[1:]) if x.ndim else x for x in batch]
    kept: list[bool] = []

    def of_one(key: Array, part: Sequence[Array]) -> tuple[Sequence[Array], list[Array]]:
        with _compat.outside_scope():  # module paths do not name the vmap
            results, new = function(key, part)
        kept[:] = [x is old for x, old in zip(new, state, strict=True)]
        return results, [x for x, same in zip(new, kept, strict=True) if not same]

    inputs = 0, [0 if x.ndim else None for x in batch]
    results, changed = jax.vmap(of_one, inputs, axis_name=axis.name, axis_size=axis.size)(keys, parts)
    rest = iter(changed)
    return results, [old if same else _joined(next(rest)) for old, same in zip(state, kept, strict=True)]


def _joined(x: Array) -> Array:
    return x.mean(0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]


def total(x: Array, added: bool) -> Array:
    """Return the sum or the mean over replicas."""
    return x.sum(0, dtype=x.dtype) if added else x.mean(0)


def rows(x: Array) -> Array:
    """Return ``[replicas, rows, ...]`` as the rows of a micro-batch."""
    return x.reshape(-1, *x.shape[2:])
