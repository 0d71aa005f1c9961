"""The package as it is built, in an environment of its own; the citation of its version."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxpipe


ROOT = Path(__file__).parents[1]


@pytest.mark.slow  # a minute, and it asks the package registry for the tools that build
def test_wheel_of_the_sdist_imports_from_an_empty_environment(tmp_path):
    """Both are built; of the wheel's dependencies those that are installed here are used."""

    def run(*command, **variables):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "empty")
    python = str(tmp_path / "empty" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", "build", PYTHONPATH="")
    run(python, "-m", "build", "--outdir", "dist", str(ROOT), PYTHONPATH="")
    (sdist,), (wheel,) = (sorted((tmp_path / "dist").glob(kind)) for kind in ("*.tar.gz", "*.whl"))
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {
        "tests/conftest.py",
        "examples/train_digits.py",
        "scripts/test",
        "README.md",
        "LICENSE",
        "CITATION.cff",
    } <= names
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    assert {"jaxpipe/__init__.pyi", "jaxpipe/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"jaxpipe", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel), PYTHONPATH="")
    code = "import jaxpipe; print(jaxpipe.__file__, jaxpipe.partition.__name__)"
    words = run(python, "-c", code, PYTHONPATH=sysconfig.get_paths()["purelib"]).split()
    assert Path(words[0]).is_relative_to(tmp_path / "empty") and words[1] == "partition"
    assert "convert-profile" in run(
        str(tmp_path / "empty" / "bin" / "jaxpipe"), "--help", PYTHONPATH=sysconfig.get_paths()["purelib"]
    )


@pytest.mark.core
def test_the_citation_is_of_this_version():
    """The keys that CFF 1.2.0 requires are there; version and license are the package's."""
    text = (ROOT / "CITATION.cff").read_text()
    fields = {key: value.strip('"') for key, value in re.findall(r"^([\w-]+): *(.*)$", text, re.MULTILINE)}
    assert {"cff-version", "message", "title", "authors"} <= set(fields)
    assert re.search(r'^authors:\n  - name: ".+"$', text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fields["cff-version"] == "1.2.0"
    assert (fields["version"], fields["license"]) == (jaxpipe.__version__, project["license"])
