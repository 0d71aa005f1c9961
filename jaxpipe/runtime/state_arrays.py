"""A training state in parts that do not depend on the runtime that holds it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class StageArrays:
    """Arrays of one stage, on the host or on the stage's first device.

    Attributes:
      parameters, variables: its variables, in the order of the plan's placement.
      optimizer: its leaves of the optimizer state.
      residuals: of each parameter what the replicas have not sent of its gradient, ``[replicas, ...]``; none if
        gradients are exchanged whole or nothing is left yet.
    """

    parameters: Sequence[Any]
    variables: Sequence[Any]
    optimizer: Sequence[Any]
    residuals: Sequence[Any] = ()


@dataclass(frozen=True, eq=False)
class CommonArrays:
    """Values that every stage has.

    Attributes:
      shared: optimizer state that belongs to no parameter.
      key: the random key of the run.
      step, skipped: steps taken, and how many of them changed nothing.
    """

    shared: Sequence[Any]
    key: Any
    step: Any = 0
    skipped: Any = 0


@dataclass(frozen=True, eq=False)
class HostArrays:
    """All arrays of a training state as host arrays in memory of their own.

    Attributes:
      parameters, variables: by piece of the model's variables.
      optimizer: by piece of the optimizer state, shared ones included.
      residuals: by parameter, ``[replicas, ...]``; none if gradients are exchanged whole.
    """

    parameters: list[Any]
    variables: list[Any]
    optimizer: list[Any]
    residuals: list[Any]
