"""The contents of a checkpoint, and their differences from a plan."""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from jaxpipe.array_types import Shaped
from jaxpipe.checkpoint.arrays_by_path import Path


#: Groups of arrays in a checkpoint.
VARIABLES, OPTIMIZER, RESIDUALS = "variables", "optimizer", "residuals"

#: How many leaves an error names.
_NAMED = 4


@dataclass(frozen=True)
class Contents:
    """A training state in the model's own layout, on the host."""

    step: int  # taken; ``skipped``: of these, those that changed nothing
    skipped: int
    key: np.ndarray
    key_impl: str
    arrays: dict[str, dict[Path, np.ndarray]]  # by group and path; random keys as data
    types: dict[tuple[str, Path], str]  # of random keys
    data: object


@dataclass(frozen=True)
class Leaf:
    """One array as a checkpoint describes it."""

    shape: tuple[int, ...]
    dtype: str
    crc32: int | None = None  # of its bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def describe(contents: Contents) -> dict[str, dict[Path, Leaf]]:
    """Every array with a checksum of its bytes."""

    def leaf(item: tuple[str, Path, np.ndarray]) -> Leaf:
        group, path, x = item
        return Leaf(x.shape, contents.types.get((group, path), x.dtype.name), checksum(x))

    items = [(group, path, x) for group, arrays in contents.arrays.items() for path, x in arrays.items()]
    with ThreadPoolExecutor() as pool:
        leaves = list(pool.map(leaf, items))
    described_leaves: dict[str, dict[Path, Leaf]] = {group: {} for group in contents.arrays}
    for (group, path, _), described in zip(items, leaves, strict=True):
        described_leaves[group][path] = described
    return described_leaves


def checksum(x: np.ndarray) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def expected(paths: Sequence[Path], avals: Sequence[Shaped]) -> dict[Path, Leaf]:
    """Return how arrays of some shapes would be described."""
    return {path: Leaf(*_stored(aval)) for path, aval in zip(paths, avals, strict=True)}


def _stored(aval: Shaped) -> tuple[tuple[int, ...], str]:
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, aval).shape, str(aval.dtype)
    return tuple(aval.shape), np.dtype(aval.dtype).name


def is_key(x: Shaped) -> bool:
    """Return whether an array holds typed random keys."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def differences(saved: Mapping[Path, Leaf], wanted: Mapping[Path, Leaf], owner: str) -> str | None:
    """Describe the first leaves in which a checkpoint differs from its reader's; return None if all agree.

    Example:
      >>> differences({("w",): Leaf((2,), "float32")}, {("w",): Leaf((3,), "float32")}, "the model")
      'w is float32[2] in the checkpoint, float32[3] in the model'
    """
    other, missing, extra = [], [], []
    for path in dict.fromkeys((*wanted, *saved)):
        name = "/".join(path) or "its only array"
        if path not in saved:
            missing.append(f"{name} ({wanted[path]}) is only in {owner}")
        elif path not in wanted:
            extra.append(f"{name} ({saved[path]}) is only in the checkpoint")
        elif str(saved[path]) != str(wanted[path]):
            other.append(f"{name} is {saved[path]} in the checkpoint, {wanted[path]} in {owner}")
    sentences = [
        text for texts in itertools.zip_longest(other, missing, extra) for text in texts if text
    ]  # some of each
    if not sentences:
        return None
    rest = len(sentences) - _NAMED
    return "; ".join(sentences[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
