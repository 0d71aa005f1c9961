"""Booleans in 1 bit."""

from dataclasses import dataclass

import numpy as np

from jaxpipe.graph.codec import SavedTensor
from jaxpipe.residuals.codecs.bits import PackedCodec


@dataclass(frozen=True)
class Mask(PackedCodec):
    """Stores booleans in 1 bit."""

    name = "mask"

    def allows(self, tensor: SavedTensor) -> bool:
        """Return whether elements are booleans."""
        return tensor.dtype == np.bool_
