"""A training state in parts that do not depend on the runtime that holds it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.array_types import Array, ArrayLike


@dataclass(frozen=True, eq=False)
class StageArrays:
    """Arrays of one stage, on the host or on the stage's first device."""

    parameters: Sequence[ArrayLike]
    variables: Sequence[ArrayLike]
    optimizer: Sequence[ArrayLike]
    residuals: Sequence[ArrayLike] = ()  # ``[replicas, ...]`` by parameter; empty if nothing is left to send


@dataclass(frozen=True, eq=False)
class CommonArrays:
    """Values that every stage has."""

    shared: Sequence[ArrayLike]  # optimizer state that belongs to no parameter
    key: Array
    step: int = 0  # taken; ``skipped``: of these, those that changed nothing
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class HostArrays:
    """All arrays of a training state as host arrays in memory of their own."""

    parameters: Sequence[ArrayLike]
    variables: Sequence[ArrayLike]
    optimizer: Sequence[ArrayLike]  # shared state included
    residuals: Sequence[np.ndarray]  # ``[replicas, ...]`` by parameter; empty if gradients are exchanged whole


def of_replicas(residual: np.ndarray, count: int) -> np.ndarray:
    """Return residuals of so many replicas, whose mean is that of the given ones."""
    if len(residual) == count:
        return residual
    return np.broadcast_to(residual.mean(axis=0, dtype=residual.dtype), (count, *residual.shape[1:]))
