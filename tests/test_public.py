"""The public surface: documented, and cheap to import."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpipe
import jaxpipe.errors


#: Packages whose every name is public, and modules of which those that are made in them are.
PUBLIC = (
    "jaxpipe",
    "jaxpipe.checkpoint",
    "jaxpipe.gradients",
    "jaxpipe.graph",
    "jaxpipe.planning",
    "jaxpipe.schedules",
)
MODULES = ("jaxpipe.costs.topology", "jaxpipe.testing", "jaxpipe.visualize.traces")


def public_names(module):
    """Yield the full name and the value of each public name of a module, by its definition."""
    imported = importlib.import_module(module)
    for name in dir(imported):
        value = getattr(imported, name)
        if name.startswith("_") or not callable(value) or not str(value.__module__).startswith("jaxpipe"):
            continue
        if module in PUBLIC or value.__module__ == module:
            yield f"{value.__module__}.{value.__qualname__}", value


@pytest.mark.core
@pytest.mark.parametrize("module", (*PUBLIC, *MODULES))
def test_every_public_name_is_in_the_reference(module):
    reference = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    names = dict(public_names(module))
    assert names
    assert [name for name in names if f"::: {name}" not in reference] == []
    assert [name for name, value in names.items() if not inspect.getdoc(value)] == []


@pytest.mark.core
def test_the_reference_names_nothing_else():
    reference = (Path(__file__).parents[1] / "docs" / "reference.md").read_text().splitlines()
    listed = [line.removeprefix("::: ") for line in reference if line.startswith("::: ")]
    assert len(listed) == len(set(listed))
    for name in listed:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.core
def test_every_public_name_is_documented():
    assert {"memory_encoded", "residual_report", "without_encoding"} <= set(jaxpipe.__all__)
    assert [name for name in jaxpipe.__all__ if not inspect.getdoc(getattr(jaxpipe, name))] == []


def test_the_public_face_is_small():
    assert len(inspect.signature(jaxpipe.partition).parameters) <= 18
    assert len([name for name in vars(jaxpipe.errors) if name.endswith("Error")]) <= 9
    with pytest.raises(TypeError, match="unexpected keyword argument 'unroll_scans'"):
        jaxpipe.partition(None, None, loss=None, optimizer=None, unroll_scans=True)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.core
def test_import_loads_next_to_nothing():
    """Names are loaded when they are used; then without what only some programs need."""
    code = "import jax, sys; before = set(sys.modules); import jaxpipe; print(*set(sys.modules) - before)"
    assert {name for name in run(code) if not name.startswith(("jaxpipe", "lazy_loader"))} <= {"ast", "_ast"}
    code = "import jaxpipe, sys; [getattr(jaxpipe, name) for name in jaxpipe.__all__]; print(*sys.modules)"
    assert {"cvxpy", "matplotlib", "orbax.checkpoint", "scipy.stats"}.isdisjoint(run(code))


@pytest.mark.core
def test_import_initializes_no_device():
    code = (
        "import jaxpipe; [getattr(jaxpipe, name) for name in jaxpipe.__all__]; "
        "from jax._src import xla_bridge; assert not xla_bridge._backends"
    )
    run(code)


def test_names_are_functions_whatever_is_imported_first():
    """``partition`` is a function, and the module that it is in."""
    assert run("import jaxpipe.partition; print(type(jaxpipe.partition).__name__)") == ["function"]
    assert run("from jaxpipe import partition; import jaxpipe.partition as p; print(callable(partition))") == ["True"]
