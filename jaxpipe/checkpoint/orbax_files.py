"""Checkpoints on disk, by orbax: written whole or not at all, and read only if every byte is the one written.

    directory/<step>/arrays    every array, in nested dictionaries as the model and optax name them (orbax's own format)
    directory/<step>/about     JSON: step, random key, position in the data; shape, dtype and checksum of every array

A step is written under another name, which says that it is temporary, and renamed when complete; one that is no longer
kept is renamed before it is deleted. So a folder named after a step is a complete checkpoint whenever the process dies.
(What a machine that loses power keeps of files just written is up to its file system.)
"""

import contextlib
import json
import math
import os
import re
import shutil
import threading
import weakref
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import traverse_util

from jaxpipe import multihost
from jaxpipe._version import __version__
from jaxpipe.array_types import Array
from jaxpipe.checkpoint.contents import FORMAT, OPTIMIZER, RESIDUALS, VARIABLES, About, Contents, Leaf, checksum
from jaxpipe.errors import CheckpointError
from jaxpipe.models.variable_trees import Path
from jaxpipe.text.value_text import listed


if TYPE_CHECKING:
    import orbax.checkpoint as ocp

#: A folder of checkpoints.
Directory: TypeAlias = str | os.PathLike[str]


_ARRAYS, _ABOUT = "arrays", "about"
_DELETED = ".deleted"


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, of which no array has been read yet."""

    folder: FilePath
    about: About
    key: Array
    leaves: dict[str, dict[Path, Leaf]]  # by group and path


def steps(directory: Directory) -> list[int]:
    """Steps of which a directory has a checkpoint, in order."""
    folder = check_directory(directory)
    with _told_of(folder):
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def check_directory(directory: Directory) -> FilePath:
    """Return the absolute path of a folder of checkpoints; raises ``CheckpointError`` if it cannot be one."""
    name = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"directory={directory!r}; it must be the path of a folder, as text.")
    if re.match(r"[a-z][a-z0-9+.-]+:/", name):  # a Path of gs://bucket is gs:/bucket
        raise CheckpointError(
            f"directory={name!r} is the address of a remote store; checkpoints are written to file systems. Mount it "
            "as a folder, or save to a local folder and copy the checkpoint when it is complete."
        )
    return FilePath(name).absolute()


@contextlib.contextmanager
def _told_of(folder: FilePath) -> Iterator[None]:
    """Raise errors of the file system or of orbax about a folder as ``CheckpointError``."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"directory={str(folder)!r} cannot be used ({type(error).__name__}: {str(error)[:300]}). Choose a folder "
            "that this process may write to and list."
        ) from error


#: Writers of this process that are open, with what writes for them, by folder.
_OPEN: dict[FilePath, tuple["weakref.ref[Writer]", "ocp.CheckpointManager"]] = {}
_OPENING = threading.Lock()


class Writer:
    """Writes checkpoints into a directory, one at a time, in the background.

    Of several processes the first one writes; all call the methods, and what fails there fails in all.
    """

    def __init__(self, directory: Directory, keep: int | None = None):
        self.directory = check_directory(directory)
        self._manager: Any = None
        self._begun: int | None = None
        self._closed = False
        multihost.from_first(lambda: self._open(keep))

    def _open(self, keep: int | None) -> None:
        with _told_of(self.directory), _OPENING:
            self.directory.mkdir(parents=True, exist_ok=True)
            before = _OPEN.get(self.directory.resolve())
            if before is not None and before[0]() is not None:
                raise CheckpointError(
                    f"directory={str(self.directory)!r} is open in another Checkpointer of this process, and one run "
                    "has one directory. Save with that one, call its close() first, or choose another directory."
                )
            if before is not None:  # nobody has closed it, and it may be writing
                del _OPEN[self.directory.resolve()]
                with contextlib.suppress(Exception):
                    before[1].close()
            self._manager = self._make_manager(keep)
            _OPEN[self.directory.resolve()] = weakref.ref(self), self._manager

    def _make_manager(self, keep: int | None) -> "ocp.CheckpointManager":
        import orbax.checkpoint as ocp  # takes a second to import, and most programs never need it

        alone = _alone()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            todelete_subdir=_DELETED,
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=alone,
        )
        handlers = {
            _ARRAYS: ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
            _ABOUT: ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        }
        self._args = ocp.args
        return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def write(self, contents: Contents | None) -> CheckpointError | None:
        """Begin to write a checkpoint; waits for the one before, and returns its error if it has failed."""
        return multihost.from_first(lambda: self._write(contents))

    def _write(self, contents: Contents | None) -> CheckpointError | None:
        assert contents is not None
        if self._closed:
            raise CheckpointError(
                f"directory={str(self.directory)!r} was closed, or a save was interrupted; make another "
                "Checkpointer to save."
            )
        failure = None
        try:
            self._wait()
        except CheckpointError as error:
            failure = error
        last = max(steps(self.directory), default=-1)
        step = contents.about.step
        if step <= last:
            raise CheckpointError(
                f"directory={str(self.directory)!r} has a checkpoint of step {last}, so that step {step} "
                "cannot be saved: checkpoints of one run follow each other. Save into another directory, or remove the "
                f"steps from {step} on if they are not wanted."
            )
        names = _names_on_disk([path for path, x in contents.arrays.items() if x.size])
        arrays = traverse_util.unflatten_dict({name: contents.arrays[path] for path, name in names.items()})
        about = msgspec.to_builtins(contents.about)
        # orbax is given one array at least.
        items = {
            _ARRAYS: self._args.PyTreeSave({**arrays, "step": np.asarray(step)}),
            _ABOUT: self._args.JsonSave({"about": about, "crc32": _crc_of_json(about)}),
        }
        self._begun = step
        try:
            with self._told_as_checkpoint_error():
                self._manager.save(step, args=self._args.Composite(**items), force=True)
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C: orbax would wait for minutes for what it has not begun
                self._forget()
            raise
        return failure

    def wait(self) -> None:
        """Wait until what was begun is complete."""
        multihost.from_first(self._wait)

    def check(self) -> None:
        """Raise ``CheckpointError`` if what was begun has failed by now. In the first process; does not wait."""
        if self._begun is not None and not self._manager.is_saving_in_progress():
            self._wait()

    def _wait(self) -> None:
        with self._told_as_checkpoint_error():
            self._manager.wait_until_finished()
        self._begun = None
        shutil.rmtree(self.directory / _DELETED, ignore_errors=True)

    @contextlib.contextmanager
    def _told_as_checkpoint_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever orbax and tensorstore say of a disk
            step, self._begun = self._begun, None
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to directory={str(self.directory)!r} "
                f"({_reason(error)}). Complete are those of: {_listed(steps(self.directory)) or 'none'}. Training can "
                "go on: make room, or save somewhere else."
            ) from error

    def close(self) -> None:
        """Wait, and end; the other processes do not, as this one may be at its end by itself."""
        if self._closed or self._manager is None:
            return
        try:
            self._wait()
        finally:
            self._forget()
            with contextlib.suppress(Exception):  # raised above
                self._manager.close()

    def _forget(self) -> None:
        self._closed = True
        _OPEN.pop(self.directory.resolve(), None)


def open_checkpoint(directory: Directory, step: int | None = None) -> Saved:
    """Find a checkpoint, and read what is in it.

    Args:
      step: which; left out: the last.

    Raises:
      CheckpointError: if the checkpoint is missing, damaged, or not one of jaxpipe's.
    """
    saved_steps = steps(directory)
    if not saved_steps:
        raise CheckpointError(f"directory={str(directory)!r} has no checkpoint; it must be one that was saved to.")
    if step is not None and step not in saved_steps:
        raise CheckpointError(
            f"directory={str(directory)!r} has no checkpoint of step={step}, only of {_listed(saved_steps)}."
        )
    folder = FilePath(directory).absolute() / str(saved_steps[-1] if step is None else step)
    try:
        sealed = json.loads((folder / _ABOUT / "metadata").read_text())
        about = sealed["about"]
        if _crc_of_json(about) != sealed["crc32"]:
            raise ValueError("its checksum is another")
        if about["format"] > FORMAT:
            raise CheckpointError(
                f"The checkpoint {folder} has the format {about['format']}, written by jaxpipe {about['jaxpipe']}; "
                f"this is jaxpipe {__version__}, which reads formats up to {FORMAT}. Install a newer one."
            )
        about = msgspec.convert(about, About)
        leaves = {group: _by_path(about.leaves[group]) for group in {VARIABLES, OPTIMIZER, RESIDUALS, *about.leaves}}
        key = jax.random.wrap_key_data(jnp.array(about.key, jnp.uint32), impl=about.key_impl)
        if about.step != int(folder.name):
            raise damaged(folder, f"it holds step {about.step}, so it was copied or renamed")
        if not 0 <= about.skipped <= about.step < 2**31:
            raise ValueError(f"{about.skipped} of {about.step} steps were skipped")
        return Saved(folder, about, key, leaves)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint of jaxpipe, or files of it were removed: {error.filename} is missing."
            f"{_others(folder)}"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise damaged(folder, f"{_ABOUT}/metadata cannot be read ({type(error).__name__}: {error})") from error


def read(saved: Saved, paths: Sequence[Path]) -> list[np.ndarray]:
    """Some arrays of a checkpoint, by group and path."""
    import orbax.checkpoint as ocp  # see Writer

    leaves = {path: saved.leaves[path[0]][path[1:]] for path in paths}
    every = [(group, *path) for group, rows in saved.leaves.items() for path, x in rows.items() if 0 not in x.shape]
    names = {path: name for path, name in _names_on_disk(every).items() if path in leaves}
    # What has no bytes is not on disk.
    arrays = {path: np.zeros(leaf.shape, leaf.stored_dtype) for path, leaf in leaves.items() if 0 in leaf.shape}
    if names:
        tree = traverse_util.unflatten_dict(dict.fromkeys(names.values(), 0))
        asked = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.PyTreeRestore(item=tree, restore_args=asked, partial_restore=True)
        try:
            alone = _alone()
            handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
            with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
                restored = traverse_util.flatten_dict(reader.restore(saved.folder / _ARRAYS, args=args))
            arrays |= {path: np.asarray(restored[name]) for path, name in names.items()}
        except Exception as error:  # whatever orbax and tensorstore say of files that are not theirs
            raise damaged(saved.folder, f"its arrays cannot be read ({_reason(error)})") from error
    if wrong := [path for path, x in arrays.items() if not _is_written(x, leaves[path])]:
        raise damaged(saved.folder, f"{listed(list(map('/'.join, wrong)))} do not have the values that were saved")
    return [arrays[path] for path in paths]


def _names_on_disk(paths: Collection[Path]) -> dict[Path, Path]:
    """Return what orbax is given for each path: it joins keys with dots, so those in keys are escaped if paths collide.

    Example:
      >>> _names_on_disk([("a.b",), ("c",)]), _names_on_disk([("a.b",), ("a", "b")])
      ({('a.b',): ('a.b',), ('c',): ('c',)}, {('a.b',): ('a%2Eb',), ('a', 'b'): ('a', 'b')})
    """
    collide = len(set(map(".".join, paths))) < len(paths)
    return {p: tuple(k.replace("%", "%25").replace(".", "%2E") for k in p) if collide else p for p in paths}


def _alone() -> "ocp.options.MultiprocessingOptions":
    """Return orbax's options for a process that writes or reads without the others."""
    import orbax.checkpoint as ocp  # see Writer

    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )


def _is_written(x: np.ndarray, leaf: Leaf) -> bool:
    return (x.shape, x.dtype) == (leaf.shape, leaf.stored_dtype) and checksum(x) == leaf.crc32


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"


def damaged(folder: FilePath, what: str) -> CheckpointError:
    """The error for a checkpoint that is not what was written."""
    return CheckpointError(f"The checkpoint {folder} is damaged: {what}.{_others(folder)}")


def _crc_of_json(about: object) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _by_path(rows: Sequence[Leaf]) -> dict[Path, Leaf]:
    """Return the arrays by path; raise ``ValueError`` if they cannot form a tree."""
    leaves = {leaf.path: leaf for leaf in rows}
    inner = {path[:k] for path in leaves for k in range(len(path))}
    if len(leaves) < len(rows) or not inner.isdisjoint(leaves):
        raise ValueError("two arrays have one path, or one is inside another")
    for path, leaf in leaves.items():
        dtype = leaf.stored_dtype
        is_number = jax.dtypes.issubdtype(dtype, np.number) or dtype == np.bool_
        if not is_number or min(leaf.shape, default=0) < 0 or dtype.itemsize * math.prod(leaf.shape) >= 2**63:
            raise ValueError(f"{'/'.join(path)[:80]} is {leaf}")
    return leaves


def _others(folder: FilePath) -> str:
    others = [s for s in steps(folder.parent) if str(s) != folder.name]
    return f" There are others, of step {_listed(others)}: pass step= to restore one." if others else ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
