"""Steps whose devices a mesh in context, abstract shardings or kinds of memory name, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from tests.support.compare import assert_same_bits


WIDTH, ROWS = 32, 256


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def step_of(loss):
    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return weights, jnp.sin(jnp.arange(ROWS * WIDTH, dtype=jnp.float32)).reshape(ROWS, WIDTH)


def reserved(compiled):
    sizes = compiled.memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def test_shapes_that_name_axes_of_the_mesh_in_context():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def placed():
        weights, x = arrays()
        return jax.device_put(weights, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("data")))

    shapes, decorated = jax.eval_shape(placed), step_of(jaxpipe.memory_encoded(loss))
    with jax.set_mesh(mesh):
        plain = reserved(jax.jit(step_of(loss)).lower(*placed()).compile())
        assert jaxpipe.jit(decorated, memory="1GiB").lower(*shapes).plan.plain_bytes == plain
        explanation = jaxpipe.explain(step_of(loss), *shapes)
        assert (explanation.total_bytes, explanation.device) == (plain, "4 x cpu")
    for function in jaxpipe.jit(decorated, memory="1GiB").lower, lambda *args: jaxpipe.explain(step_of(loss), *args):
        with pytest.raises(jaxpipe.PartitionError, match=r"not on devices.* with jax.set_mesh"):
            function(*shapes)


def test_a_step_is_compiled_for_the_devices_of_the_mesh_in_context():
    def step(weights, x):
        return step_of(jaxpipe.memory_encoded(loss))(weights, jax.lax.with_sharding_constraint(x, P("data")))

    budgeted, args = jaxpipe.jit(step, memory="1GiB"), arrays()
    for devices in jax.devices()[:2], jax.devices()[2:4], jax.devices()[:2]:
        with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=devices, axis_types=(AxisType.Auto,))):
            compiled = budgeted.lower(*args).compile()
            assert compiled.output_shardings[1].device_set == set(devices)
            plain = jax.jit(step_of(loss))(*args)[1]
            np.testing.assert_allclose(budgeted(*args)[1], plain, rtol=1e-6)  # of a sum in two parts


def test_split_arguments_are_not_explained_for_one_device():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    weights, x = arrays()
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    for device in "cpu", "H100", jax.devices()[0]:
        with pytest.raises(jaxpipe.PartitionError, match=r"is one device, and arguments are split over several"):
            jaxpipe.explain(step_of(loss), weights, x, device=device)


def test_parameters_in_the_memory_of_the_host():
    def from_host(weights, x):
        return loss(jax.device_put(weights, jax.memory.Space.Device), x)

    weights, x = arrays()
    placed = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    args = jax.device_put(weights, placed), x
    expected = jax.jit(jax.value_and_grad(from_host))(*args)
    decorated = jax.value_and_grad(jaxpipe.memory_encoded(from_host))
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(decorated, memory="4kB").lower(*args)
    budgeted = jaxpipe.jit(decorated, memory=caught.value.smallest)
    assert reserved(budgeted.lower(*args).compile()) <= caught.value.smallest
    for a, b in zip(jax.tree.leaves(budgeted(*args)), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, b)
        assert a.sharding.memory_kind == b.sharding.memory_kind


@pytest.mark.parametrize("rows", ["data", None])
def test_logits_in_slices_on_explicit_axes(rows):
    """Rows in shards are not cut once more: a slice would be on some devices only."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    words = 2048

    def loss(weights, x):
        logits = jnp.matmul(jnp.tanh(x), weights, out_sharding=P(rows, "model"))
        return jax.nn.logsumexp(logits, axis=-1).mean()

    with jax.set_mesh(mesh):
        weights = jax.device_put(
            jnp.sin(jnp.arange(WIDTH * words, dtype=jnp.float32)).reshape(WIDTH, words), P(None, "model")
        )
        x = jax.device_put(arrays()[1], P(rows))
        step = step_of(jaxpipe.memory_encoded(loss))
        plain = jax.jit(step_of(loss))(weights, x)
        budget = jaxpipe.jit(step, memory="1GiB").lower(weights, x).plan.plain_bytes * 3 // 4
        if rows:
            with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
                jaxpipe.jit(step, memory=budget).lower(weights, x)
            budget = caught.value.smallest
        budgeted = jaxpipe.jit(step, memory=budget)
        assert reserved(budgeted.lower(weights, x).compile()) <= budget
        np.testing.assert_allclose(budgeted(weights, x)[0], plain[0], rtol=1e-5, atol=1e-7)  # sums over slices


def average_step(loss, tx):
    """A step whose state is parameters, their moments and their average, in one argument without names."""

    def step(state, x):
        weights, opt_state, average = state
        updates, opt_state = tx.update(jax.grad(loss)(weights, x), opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        return weights, opt_state, jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, average, weights)

    return step


def test_all_that_a_step_updates_is_sharded():
    tx = optax.sgd(0.1, momentum=0.9)
    step = average_step(lambda w, x: (jnp.tanh(x @ w["a"]) @ w["b"]).var(), tx)
    weights, x = {"a": jnp.ones((256, 512)), "b": jnp.ones((512, 256))}, jnp.ones((64, 256))
    state = weights, tx.init(weights), jax.tree.map(jnp.copy, weights)
    explanation = jaxpipe.explain(step, state, x)
    shard = next(m for m in explanation.measures if m.devices > 1)
    assert explanation.bytes_by_cause()["parameters"] == 4 * 2 * 256 * 512 * 2
    mesh = jax.make_mesh((shard.devices,), ("data",), axis_types=(AxisType.Auto,))

    def split(a):
        axis = a.shape.index(max(a.shape))
        return jax.device_put(a, NamedSharding(mesh, P(*[None] * axis, "data")))

    placed = jax.tree.map(split, state), jax.device_put(x, NamedSharding(mesh, P("data")))
    compiled = jax.jit(step, out_shardings=jax.tree.map(lambda a: a.sharding, placed[0])).lower(*placed).compile()
    sizes = compiled.memory_analysis()
    typed = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    assert abs(shard.bytes - (typed - sizes.alias_size_in_bytes)) <= 0.03 * typed
