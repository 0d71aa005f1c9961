"""Codecs of jaxpipe's own, and how each encodes. All are lossless.

keep    a tensor as it is
bits    masks in 1 bit an element, positions in pooling windows in 1, 2 or 4, positions along an axis in 8 or 16
sparse  for maps with many zeros: a bit for each element, and the values that are not zero; for maps of nearly all
        zeros: values, column numbers, row offsets
"""

from collections.abc import Iterable

from jaxpipe.graph.codec import Codec
from jaxpipe.residuals.codecs.bits import Index, Mask, PoolIndex
from jaxpipe.residuals.codecs.keep import KEEP
from jaxpipe.residuals.codecs.sparse import CSR, Bitmap
from jaxpipe.residuals.codecs.sparse import SparseCodec as SparseCodec


#: Codecs by the name that allows them; of two with equal bytes the first is used.
BUILT_IN: dict[str, tuple[Codec, ...]] = {
    "mask": (Mask(),),
    "keep": (KEEP,),
    "index": (PoolIndex(), Index()),
    "bitmap": (Bitmap(),),
    "csr": (CSR(),),
}


def allowed(codecs: Iterable[str | Codec]) -> list[Codec]:
    """Return the codecs that a set of names and objects allows, in an order that all processes share."""
    given = frozenset(codecs) | {"keep"}
    objects = sorted((codec for codec in given if isinstance(codec, Codec)), key=lambda codec: codec.name)
    return [*(codec for name, group in BUILT_IN.items() if name in given for codec in group), *objects]
