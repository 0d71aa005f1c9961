"""Metrics of a training run as lines of JSON, which any tool reads while the run goes on."""

import json
import math
import os
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


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist() if value.dtype.kind in "biuf" else value.astype(np.float32).tolist()  # bfloat16
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
