"""Eight simulated CPU devices for every test, and lines of 80 columns."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


QUICKLY = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # 0 compiles all programs as users do
os.environ.setdefault(QUICKLY, "1")
jax.config.update(QUICKLY.lower(), os.environ[QUICKLY] != "0")  # what modules compile that are imported, too
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
os.environ["COLUMNS"] = "80"


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
def programs_are_compiled_quickly(request, folder_of_programs):
    """Most of the time of tests is compiling: equal programs are compiled once, but in files marked ``compiles``, which
    are about that itself, and little optimized, but in files marked ``optimized``; also in processes that tests start.
    """
    compiles, optimized = (request.node.get_closest_marker(name) is not None for name in ("compiles", "optimized"))
    jax.config.update("jax_compilation_cache_dir", None if compiles else folder_of_programs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX asks but once whether there is a folder
    with pytest.MonkeyPatch.context() as patch:
        if optimized:
            patch.setenv(QUICKLY, "0")
        jax.config.update(QUICKLY.lower(), os.environ[QUICKLY] != "0")
        yield


@pytest.fixture(autouse=True, scope="module")
def caches_of_jax_end_with_a_file():
    """Clear them: what other files have traced slows down garbage collection, and leak checks tenfold."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)
