"""Lines of JSON and events for TensorBoard, as another program reads them."""

import json
import math
import struct
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.metrics import JsonLines, TensorBoard


def test_lines_are_there_at_once_and_stay(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonLines(path) as lines:
        lines.write(step=0, loss=jnp.float32(2.5), name="run")
        assert json.loads(path.read_text()) == {"step": 0, "loss": 2.5, "name": "run"}
    with JsonLines(path) as lines:
        lines.write(step=1, nonfinite_stages=jnp.array([True, False]), inner={"rate": np.float64(0.5)})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["step"] == 0
    assert second == {"step": 1, "nonfinite_stages": [True, False], "inner": {"rate": 0.5}}


def test_what_is_not_finite_is_null(tmp_path):
    with JsonLines(tmp_path / "metrics.jsonl") as lines:
        lines.write(loss=jnp.nan, norms=jnp.array([1.0, jnp.inf]), half=jnp.bfloat16(1.5), low=-float("inf"))
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "loss": None,
        "norms": [1.0, None],
        "half": 1.5,
        "low": None,
    }


def test_what_json_cannot_hold_is_refused_and_leaves_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines, pytest.raises(TypeError, match="not JSON serializable"):
        lines.write(what={1, 2})
    assert path.read_text() == ""


def events(folder):
    """``{(name, step): value}`` of all files of events: records framed as TFRecord has them."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in folder.iterdir():
        content, start = path.read_bytes(), 0
        while start < len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            event = Event.FromString(content[start + 12 : start + 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            start += length + 16
    return found


def test_tensorboard_has_a_curve_for_every_number(tmp_path):
    with TensorBoard(tmp_path) as board:
        board.write(0, loss=jnp.float32(2.5), name="run", inner={"rate": np.float64(0.5)}, stopped=jnp.array(True))
        board.write(step=1, loss=jnp.inf, norms=jnp.array([1.0, 0.25]), half=jnp.bfloat16(1.5))
    assert events(tmp_path) == {
        ("loss", 0): 2.5,
        ("inner/rate", 0): 0.5,
        ("stopped", 0): 1.0,
        ("loss", 1): math.inf,
        ("norms/0", 1): 1.0,
        ("norms/1", 1): 0.25,
        ("half", 1): 1.5,
    }


def test_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxpipe\[tensorboard\]'"):
        TensorBoard(tmp_path)
