"""The public surface: documented, and cheap to import."""

import inspect
import subprocess
import sys

import jaxpipe


def test_every_public_name_is_documented():
    names = [name for name in vars(jaxpipe) if not name.startswith("_") and not inspect.ismodule(vars(jaxpipe)[name])]
    assert {"memory_encoded", "residual_report", "without_encoding"} <= set(names)
    assert [name for name in names if not inspect.getdoc(getattr(jaxpipe, name))] == []


def test_import_initialises_no_device():
    code = "import jaxpipe, jax; from jax._src import xla_bridge; assert not xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True)
