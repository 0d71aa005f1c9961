"""Lines of JSON, as another program reads them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.metrics import JsonLines


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
