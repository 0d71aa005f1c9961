"""Eight simulated CPU devices for every test."""

import jax
import pytest


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def key():
    return jax.random.key(0)
