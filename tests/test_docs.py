"""The documentation does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.slow  # 20 s, most of them compilation
def test_tutorial_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "tutorial.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 8
    (tmp_path / "tutorial.py").write_text("\n".join(blocks))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "tutorial.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "zero_bubble 27.0" in done.stdout  # (p, m) = (4, 8): m (F + I + W) + p - 1, by hand
    assert "2 stages x 1 replicas" in done.stdout and "smallest budget" in done.stdout
    assert {"report.html", "trace.json", "run"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_what_pages_point_to_is_there(page):
    text = (DOCS / page).read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [target for target in targets if not (DOCS / target).exists()] == []
    assert page == "index.md" or page in (ROOT / "mkdocs.yml").read_text()
