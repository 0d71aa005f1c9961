"""A stage's swaps: which tensors of its stash go where between forward and backward pass."""

from dataclasses import dataclass

from jaxpipe.array_types import TensorNumber
from jaxpipe.schedules.table import StageNumber


@dataclass(frozen=True)
class SwapTarget:
    """Memory that takes a part of each stash of a stage."""

    stage: StageNumber  # on whose device it is, in the same replica; or ``swap_points.HOST``: its own device's host
    share: float


@dataclass(frozen=True)
class StashSwap:
    """Swaps of a stage."""

    tensors: tuple[TensorNumber, ...]  # of its stash, by number in the objective's graph; sliced among the targets
    targets: tuple[SwapTarget, ...]
