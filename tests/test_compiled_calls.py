"""Compiled programs that are called without comparing operands, and loaded on other devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jaxpipe import _compat
from tests.support.compare import assert_same_bits


pytestmark = [pytest.mark.versions, pytest.mark.compiles]


def compiled_on(device, function, *avals):
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
    return jax.jit(function, keep_unused=True, donate_argnums=0).lower(*shapes).compile()


def layer(total, x, w):
    y = jax.nn.gelu(x @ w)
    return total + y.sum(0), y


def operands(device):
    draw = np.random.default_rng(0).standard_normal
    arrays = [np.float32(draw(shape)) for shape in ((8,), (4, 16), (16, 8))]
    return [jax.device_put(x, device) for x in arrays]


def test_a_program_runs_on_other_devices_with_the_same_bits():
    first, *others = jax.devices()[:3]
    program = compiled_on(first, layer, *operands(first))
    expected = jax.tree.map(np.asarray, jax.jit(layer)(*operands(first)))
    calls = [_compat.direct_call(program), *_compat.loaded_on(program, others)]
    for device, call in zip((first, *others), calls, strict=True):
        given = operands(device)
        results = call(*given)
        assert all(x.devices() == {device} for x in results)
        assert_same_bits(tuple(map(np.asarray, results)), expected)
        assert given[0].is_deleted() and not given[1].is_deleted()


def test_operands_on_another_device_are_refused():
    first, second = jax.devices()[:2]
    call = _compat.direct_call(compiled_on(first, layer, *operands(first)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="device"):
        call(*operands(second))


def test_a_program_with_effects_is_called_as_it_is_and_not_loaded_elsewhere(capfd):
    def shown(x):
        jax.debug.print("seen {}", x.sum())
        return (x + 1,)

    first, second = jax.devices()[:2]
    x = jax.device_put(jnp.ones(3), first)
    program = compiled_on(first, shown, x)
    assert _compat.direct_call(program) is program
    assert _compat.loaded_on(program, [second]) is None
    assert_same_bits(np.asarray(program(x)[0]), np.full(3, 2, np.float32))
    jax.effects_barrier()
    assert "seen 3.0" in capfd.readouterr().out


def test_programs_of_random_keys_are_called_as_they_are():
    first, second = jax.devices()[:2]
    key = jax.device_put(jax.random.key(3), first)
    program = jax.jit(lambda key: (jax.random.uniform(key, (4,)),), keep_unused=True).lower(key).compile()
    assert _compat.loaded_on(program, [second]) is None
    (drawn,) = _compat.direct_call(program)(key)
    assert_same_bits(np.asarray(drawn), np.asarray(jax.random.uniform(jax.random.key(3), (4,))))


def test_programs_that_look_for_nan_are_called_as_they_are():
    device = jax.devices()[0]
    program = compiled_on(device, layer, *operands(device))
    with jax.debug_nans(True):
        assert _compat.direct_call(program) is program


def test_an_array_in_another_layout_is_copied():
    x = jnp.arange(12.0).reshape(3, 4)
    other = jax.device_put(x, Format(Layout((1, 0)), x.sharding))
    assert _compat.in_default_layout(x) is x
    assert _compat.in_default_layout(other).format.layout.major_to_minor == (0, 1)
    assert_same_bits(np.asarray(_compat.in_default_layout(other)), np.asarray(x))
    assert _compat.in_default_layout(np.ones(3)).shape == (3,)


def test_programs_of_a_persistent_cache_run_on_all_devices(tmp_path):
    """XLA:CPU does not write out again what it has read in from the cache."""
    script = tmp_path / "step.py"
    script.write_text(
        "import jax, jax.numpy as jnp, optax, jaxpipe\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "model = jax.tree_util.Partial(lambda w, x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]), [jnp.eye(8)] * 2)\n"
        "mesh = jax.make_mesh((2, 2), ('stage', 'data'))\n"
        "options = {'loss': lambda f, x: f(x).mean(), 'optimizer': optax.sgd(0.1), 'num_microbatches': 2}\n"
        "batch = jnp.ones((8, 8))\n"
        "pipeline = jaxpipe.partition(model, mesh, batch, profile='analytic', runtime='mpmd', **options)\n"
        "state, metrics = pipeline.step(pipeline.init(jax.random.key(0)), batch)\n"
        "print(float(metrics['loss']), float(metrics['gradient_norm']))\n"
    )
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    runs = [
        subprocess.run([sys.executable, script], env=os.environ | cache, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[1].stderr[-2000:]
    assert runs[0].stdout == runs[1].stdout != ""
    assert any((tmp_path / "cache").iterdir())
