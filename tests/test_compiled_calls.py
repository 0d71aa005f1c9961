"""Compiled programs that are called without comparing operands, and loaded on other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same_bits
from jax.experimental.layout import Format, Layout

from jaxpipe import _compat


pytestmark = pytest.mark.core


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
