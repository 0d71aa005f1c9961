"""The public surface: documented, and cheap to import."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpipe


#: Packages whose every name is public, and modules of which those that are made in them are.
PUBLIC = ("jaxpipe", "jaxpipe.checkpoint", "jaxpipe.gradients", "jaxpipe.planning", "jaxpipe.schedules")
MODULES = ("jaxpipe.metrics", "jaxpipe.partition_pictures", "jaxpipe.topology", "jaxpipe.traces")


def public_names(module):
    """Where each public name of a module is defined, with what it stands for."""
    found = importlib.import_module(module)
    for name, value in vars(found).items():
        if name.startswith("_") or not callable(value) or not str(value.__module__).startswith("jaxpipe"):
            continue
        if module in PUBLIC or value.__module__ == module:
            yield f"{value.__module__}.{value.__qualname__}", value


@pytest.mark.parametrize("module", (*PUBLIC, *MODULES))
def test_every_public_name_is_in_the_reference(module):
    reference = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    names = dict(public_names(module))
    assert names
    assert [name for name in names if f"::: {name}" not in reference] == []
    assert [name for name, value in names.items() if not inspect.getdoc(value)] == []


def test_the_reference_names_nothing_else():
    reference = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    listed = [line.removeprefix("::: ") for line in reference if line.startswith("::: ")]
    assert len(listed) == len(set(listed))
    for name in listed:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


def test_every_public_name_is_documented():
    names = [name for name in vars(jaxpipe) if not name.startswith("_") and not inspect.ismodule(vars(jaxpipe)[name])]
    assert {"memory_encoded", "residual_report", "without_encoding"} <= set(names)
    assert [name for name in names if not inspect.getdoc(getattr(jaxpipe, name))] == []


def test_import_initialises_no_device():
    code = "import jaxpipe, jax; from jax._src import xla_bridge; assert not xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True)
