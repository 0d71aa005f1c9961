"""A run-length code for arrays that are mostly zero: for transport between hosts, and to count its bytes.

    0 0 0 7 3 0 0 9  ->  runs (3, 2) (2, 1), values 7 3 9

A run is a number of zeros and the number of other elements after them. In the compiled exchange, whose arrays have
fixed shapes, block numbers take the place of the runs.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from jaxpipe.errors import PartitionError


@dataclass(frozen=True)
class RunLength:
    """An encoded array."""

    shape: tuple[int, ...]
    runs: np.ndarray  # ``uint32[runs, 2]``: zeros, then other elements
    values: np.ndarray

    @property
    def bytes(self) -> int:
        """Bytes of runs and values."""
        return self.runs.nbytes + self.values.nbytes


def encode(x: ArrayLike) -> RunLength:
    """The code of an array of fewer than 2**32 elements; every bit is kept, -0.0 and NaN included.

    Example:
      >>> code = encode(np.array([0, 0, 0, 7, 3, 0, 0, 9], np.float32))
      >>> code.runs.tolist(), code.values.tolist(), code.bytes
      ([[3, 2], [2, 1]], [7.0, 3.0, 9.0], 28)
    """
    x = np.asarray(x)
    flat = np.ascontiguousarray(x).reshape(-1)
    occupied = flat.view(f"u{flat.itemsize}") != 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], occupied, [False]])))
    starts, stops = edges[::2], edges[1::2]
    zeros = starts - np.concatenate([[0], stops[:-1]])[: starts.size]
    runs = np.stack([zeros, stops - starts], axis=1).astype(np.uint32)
    return RunLength(x.shape, runs, flat[occupied])


def decode(code: RunLength) -> np.ndarray:
    """The array of a code.

    Example:
      >>> decode(encode(np.eye(2))).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    runs, size = code.runs.astype(np.int64), math.prod(code.shape)
    covered = int(runs.sum())
    if runs.ndim != 2 or runs.shape[1:] != (2,) or covered > size or int(runs[:, 1].sum()) != code.values.size:
        raise PartitionError(
            f"run-length code: {len(runs)} runs that cover {covered} elements with {code.values.size} values do not "
            f"fit an array of shape {code.shape}, {size} elements."
        )
    flat = np.zeros(size, code.values.dtype)
    flags = np.repeat(np.tile([False, True], len(runs)), runs.reshape(-1))
    flat[: flags.size][flags] = code.values
    return flat.reshape(code.shape)
