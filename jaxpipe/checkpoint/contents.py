"""The contents of a checkpoint: arrays by path, a description of each, and its differences from what a plan expects.

Trees are kept by path: what a model's or an optimizer's own structure looks like on disk.
"""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import msgspec
import numpy as np

from jaxpipe._version import __version__
from jaxpipe.array_types import Array, ArrayLike, PyTreeDef, Shaped, is_key
from jaxpipe.errors import CheckpointError
from jaxpipe.models.variable_trees import Path, by_path


#: Groups of arrays in a checkpoint.
VARIABLES, OPTIMIZER, RESIDUALS = "variables", "optimizer", "residuals"

#: Of an outer loop: its own, what each replica has of its own, and by what its parameters are to be moved.
OUTER, REPLICAS, PENDING = "outer", "replicas", "pending"

#: Number of the format that is written; higher ones are not read.
FORMAT = 1

#: How many leaves an error names.
_NAMED = 4


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One array as a checkpoint describes it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    crc32: int | None = None  # of its bytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def stored_dtype(self) -> np.dtype:
        """The dtype on disk, where random keys are words."""
        return np.dtype(np.uint32 if self.dtype.startswith("key<") else self.dtype)


class About(msgspec.Struct, frozen=True):
    """All of a checkpoint but its arrays, as its JSON has it."""

    format: int
    jaxpipe: str
    step: int  # taken; ``skipped``: of these, those that changed nothing
    skipped: int
    key: tuple[int, ...]
    key_impl: str
    data: Any
    leaves: dict[str, tuple[Leaf, ...]]


@dataclass(frozen=True)
class Contents:
    """A training state in the model's own layout, on the host."""

    about: About
    arrays: dict[Path, np.ndarray]  # by group and path; random keys as words


def contents(
    groups: Mapping[str, Mapping[Path, ArrayLike]], step: int, skipped: int, key: Array, data: object
) -> Contents:
    """Return arrays by group and path as what a checkpoint holds, with a checksum of the bytes of each."""
    arrays = {(group, *path): x for group, by_path in groups.items() for path, x in by_path.items()}
    words = {path: np.array(jax.random.key_data(x)) if is_key(x) else np.asarray(x) for path, x in arrays.items()}
    with ThreadPoolExecutor() as pool:
        checksums = dict(zip(words, pool.map(checksum, words.values()), strict=True))
    leaves = {
        group: tuple(Leaf(path, *_stored(x), checksums[group, *path]) for path, x in by_path.items())
        for group, by_path in groups.items()
    }
    numbers, kind = np.asarray(jax.random.key_data(key)).tolist(), str(jax.random.key_impl(key))
    return Contents(About(FORMAT, __version__, step, skipped, tuple(numbers), kind, data, leaves), words)


def checksum(x: np.ndarray) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)


def _stored(x: Shaped) -> tuple[tuple[int, ...], str]:
    """Return the shape that an array has on disk, and its dtype."""
    if is_key(x):
        return jax.eval_shape(jax.random.key_data, x).shape, str(x.dtype)
    return tuple(x.shape), np.dtype(x.dtype).name


def leaf_paths(structure: PyTreeDef) -> list[Path]:
    """The path of every leaf of a tree, in the order of its leaves.

    An ``nnx.State`` counts as the dictionary that it stands for, and boxes around arrays are no part of a path.

    Example:
      >>> leaf_paths(jax.tree.structure({"dense": (0, 0), "scale": 0}))
      [('dense', '0'), ('dense', '1'), ('scale',)]
    """
    return list(by_path(jax.tree.unflatten(structure, range(structure.num_leaves))))


def check(
    folder: object, saved: Mapping[Path, Leaf], paths: Sequence[Path], avals: Sequence[Shaped], owner: str
) -> None:
    """Raise ``CheckpointError`` unless a checkpoint has the arrays that its reader expects."""
    wanted = {path: Leaf(path, *_stored(aval)) for path, aval in zip(paths, avals, strict=True)}
    what = differences(saved, wanted, owner)
    if what is not None:
        raise CheckpointError(
            f"The checkpoint {folder} does not fit {owner}: {what}. Restore it with {owner} that it was saved "
            "with; jaxpipe.checkpoint.load(directory) gives what is in it."
        )


def differences(saved: Mapping[Path, Leaf], wanted: Mapping[Path, Leaf], owner: str) -> str | None:
    """Describe the first leaves in which a checkpoint differs from its reader's; return None if all agree.

    Example:
      >>> differences({("w",): Leaf(("w",), (2,), "float32")}, {("w",): Leaf(("w",), (3,), "float32")}, "the model")
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
    # Some of each.
    sentences = [text for texts in itertools.zip_longest(other, missing, extra) for text in texts if text]
    if not sentences:
        return None
    rest = len(sentences) - _NAMED
    return "; ".join(sentences[:_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
