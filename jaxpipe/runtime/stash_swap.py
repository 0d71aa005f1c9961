"""A stage's swaps: which tensors of its stash go where between forward and backward pass."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SwapTarget:
    """Memory that takes a part of each stash of a stage.

    Attributes:
      stage: on whose device it is, that of the same replica; or ``swap_points.HOST``, the host's of its own device.
      share: of the bytes, that of its link's bandwidth.
    """

    stage: int
    share: float


@dataclass(frozen=True)
class StashSwap:
    """Swaps of a stage.

    Attributes:
      tensors: of its stash, by number in the objective's graph.
      targets: they are sliced among these.
    """

    tensors: tuple[int, ...]
    targets: tuple[SwapTarget, ...]
