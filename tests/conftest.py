"""Eight simulated CPU devices for every test, and lines of 80 columns."""

import gc
import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
os.environ["COLUMNS"] = "80"
gc.set_threshold(100_000)  # a fifth of the time of tests is garbage collection otherwise, most of it JAX's own callback


@pytest.fixture(autouse=True, scope="session")
def cache_in_a_temporary_folder(tmp_path_factory):
    """Nothing is written into the user's cache folder; what one test has measured, another may use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folder_of_programs(tmp_path_factory):
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True, scope="module")
def equal_programs_are_compiled_once(request, folder_of_programs):
    """Tests compile many programs again that others have compiled; a file marked ``compiles`` is about compiling."""
    kept = request.node.get_closest_marker("compiles") is None
    jax.config.update("jax_compilation_cache_dir", folder_of_programs if kept else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX asks but once whether there is a folder


@pytest.fixture(autouse=True, scope="module")
def caches_of_jax_end_with_a_file():
    """Clear them: what other files have traced slows down garbage collection, and leak checks tenfold."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)
