"""Positions along an axis, in 8 or 16 bits."""

from dataclasses import dataclass

from jaxpipe.graph.codec import SavedTensor
from jaxpipe.residuals.codecs.bits import PackedCodec


@dataclass(frozen=True)
class Index(PackedCodec):
    """Stores positions along an axis of at most ``2**bits`` elements."""

    name = "index"

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are such positions."""
        return tensor.demand == "index" and tensor.bits in (8, 16)
