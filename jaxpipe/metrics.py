"""Metrics of a training run, for other tools to read while it goes on: lines of JSON, TensorBoard's events."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np


class JsonLines:
    """Appends one JSON object for each call to a file; use as a context manager, or call ``close``.

    Each line is handed to the operating system at once, so that others can read it. A run that goes on appends to what
    is there. To write an array waits until it is computed.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> with JsonLines(path) as lines:
      ...     lines.write(step=1, loss=jax.numpy.float32(0.5))
      >>> path.read_text()
      '{"step": 1, "loss": 0.5}\\n'
    """

    def __init__(self, path: str | os.PathLike[str]):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **metrics: Any) -> None:
        """Write a line.

        Args:
          **metrics: numbers, texts, arrays, and lists and dictionaries of these. What is not finite becomes null,
            for JSON has no word for it.
        """
        values = {name: _plain(jax.device_get(value)) for name, value in metrics.items()}
        self._file.write(json.dumps(values, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class TensorBoard:
    """Writes metrics for TensorBoard into a folder; use as a context manager, or call ``close``.

    Needs ``pip install 'jaxpipe[tensorboard]'`` (tensorboardX). To write an array waits until it is computed.

    Raises:
      ImportError: if tensorboardX is not installed.

    Example:
      >>> import tempfile
      >>> with TensorBoard(tempfile.mkdtemp()) as board:
      ...     board.write(step=1, loss=jax.numpy.float32(0.5))
    """

    def __init__(self, directory: str | os.PathLike[str]):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "jaxpipe.metrics.TensorBoard needs tensorboardX: pip install 'jaxpipe[tensorboard]'."
            ) from error
        self._writer = SummaryWriter(os.fspath(directory), flush_secs=10)

    def write(self, step: int, **metrics: Any) -> None:
        """Write the metrics of a step.

        Args:
          step: its number.
          **metrics: numbers and arrays, also in lists and dictionaries; an element of an array gets a curve of its
            own, ``name/0``, ``name/1``, ... Texts are left out.
        """
        for name, value in _scalars("", _plain(jax.device_get(metrics), keep=True)):
            self._writer.add_scalar(name, value, int(step))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _scalars(f"{name}/{key}" if name else str(key), one)
    elif isinstance(value, int | float):
        yield name, float(value)


def _plain(value: Any, keep: bool = False) -> Any:
    """A value as JSON has it; ``keep`` what is not finite, for which JSON has no word."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist() if value.dtype.kind in "biuf" else value.astype(np.float32).tolist()  # bfloat16
    if isinstance(value, dict):
        return {str(name): _plain(one, keep) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, keep) for one in value]
    return None if isinstance(value, float) and not keep and not math.isfinite(value) else value
