"""Encodings of stored tensors: encode, decode, bytes, nothing else. All are lossless.

bits        fewer bits for each element: a boolean mask (1), a pooling position (1, 2 or 4)
bitmap      for maps with many zeros: a bit for each element, and the values that are not zero
csr         for maps of nearly all zeros: values, column numbers, row offsets
compaction  moves what is not zero to the front, for both
"""

from jaxpipe.residuals.codecs import bitmap as bitmap
from jaxpipe.residuals.codecs import bits as bits
from jaxpipe.residuals.codecs import csr as csr
