"""Encodings of stored tensors: encode, decode, bytes, nothing else. All are lossless.

bits    fewer bits for each element: a boolean mask (1), a pooling position (1, 2 or 4)
"""

from jaxpipe.codecs import bits as bits
