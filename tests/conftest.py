"""Eight simulated CPU devices for every test, and lines of 80 columns."""

import os

import jax
import pytest


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
os.environ["COLUMNS"] = "80"


@pytest.fixture(autouse=True, scope="session")
def cache_in_a_temporary_folder(tmp_path_factory):
    """Nothing is written into the user's cache folder; what one test has measured, another may use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def caches_of_jax_end_with_a_file():
    """Clear them: what other files have traced slows down garbage collection, and leak checks tenfold."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)
