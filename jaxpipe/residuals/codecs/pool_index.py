"""Positions of maxima in their pooling windows, in 1, 2 or 4 bits."""

from dataclasses import dataclass

from jaxpipe.graph.codec import SavedTensor
from jaxpipe.residuals.codecs.bits import PackedCodec


@dataclass(frozen=True)
class PoolIndex(PackedCodec):
    """Stores positions in small windows."""

    name = "pool index"

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are such positions."""
        return tensor.demand == "window index" and tensor.bits < 8
