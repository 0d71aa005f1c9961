"""Random keys as arrays of a batch: one for each example or one for all, of every implementation, in every place."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import relative_l2
from tests.support.meshes import mesh_of


ROWS, WIDTH = 8, 6
RUNTIMES = ["mpmd", "spmd"]

#: XLA fuses a stage's products otherwise than the whole network's: last bits of float32.
FUSED = 1e-6


def noise(k, key):
    return jax.random.normal(jax.random.fold_in(key, k), (WIDTH,))


class Noisy(nn.Module):
    """Draws noise for each example in every layer, so that late stages use the keys, too."""

    @nn.compact
    def __call__(self, x, keys):
        for k in range(4):
            x = nn.tanh(nn.Dense(WIDTH)(x))
            x = x + 0.3 * jax.vmap(functools.partial(noise, k))(keys)
        return x


class HandsKeysOn(nn.Module):
    """Makes new keys in its first layer, which later ones use: keys are sent from stage to stage."""

    @nn.compact
    def __call__(self, x, keys):
        x = nn.tanh(nn.Dense(WIDTH)(x))
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.argmax(jax.lax.stop_gradient(x), -1))
        for k in range(3):
            x = nn.tanh(nn.Dense(WIDTH)(x) + jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys))
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys, k)
        return x


def loss(model, batch):
    return jnp.square(model(batch["x"], batch["key"]) - batch["x"]).mean()


def batch_of(impl=None):
    x = jax.random.normal(jax.random.key(3), (ROWS, WIDTH))
    return {"x": x, "key": jax.random.split(jax.random.key(9, impl=impl), ROWS)}


def pipeline_of(model, batch, *, function=loss, stages=2, replicas=None, m=2, **options):
    arguments = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic"} | options
    return jaxpipe.partition(model, mesh_of(stages, replicas), batch, loss=function, **arguments)


def plain_gradient(model, variables, batch, count, function=loss):
    """The mean over micro-batches of ``jax.grad``."""

    @jax.jit
    def of(variables, part):
        return jax.grad(lambda v: function(lambda *args: model.apply(v, *args), part))(variables)

    def cut(j):
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:])[j] if x.ndim else x, batch)

    return jax.tree.map(lambda *x: sum(x) / count, *[of(variables, cut(j)) for j in range(count)])


@pytest.mark.core
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("model", [Noisy(), HandsKeysOn()], ids=lambda model: type(model).__name__)
def test_a_key_for_each_example(model, runtime):
    batch = batch_of()
    variables = model.init(jax.random.key(1), batch["x"], batch["key"])
    pipeline = pipeline_of(model, batch, runtime=runtime)
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0), variables=variables), batch)
    assert relative_l2(gradients, plain_gradient(model, variables, batch, 2)) < FUSED


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_implementations(impl, runtime):
    model, batch = HandsKeysOn(), batch_of(impl)
    variables = model.init(jax.random.key(1), batch["x"], batch["key"])
    pipeline = pipeline_of(model, batch, runtime=runtime)
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0), variables=variables), batch)
    assert relative_l2(gradients, plain_gradient(model, variables, batch, 2)) < FUSED


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("replicas", [None, 2])
def test_one_key_for_all_examples(runtime, replicas):
    def shared(model, batch):
        return loss(model, {**batch, "key": jax.random.split(batch["key"], len(batch["x"]))})

    model, batch = Noisy(), {**batch_of(), "key": jax.random.key(5)}
    variables = model.init(jax.random.key(1), batch["x"], jax.random.split(batch["key"], ROWS))
    pipeline = pipeline_of(model, batch, function=shared, replicas=replicas, runtime=runtime)
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0), variables=variables), batch)
    count = 2 * (replicas or 1)
    assert relative_l2(gradients, plain_gradient(model, variables, batch, count, shared)) < FUSED


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_replicas_steps_evaluation_and_prediction(runtime):
    model, batch = Noisy(), batch_of()
    variables = model.init(jax.random.key(1), batch["x"], batch["key"])
    pipeline = pipeline_of(
        model,
        batch,
        replicas=2,
        runtime=runtime,
        evaluate=loss,
        predict=lambda model, batch: {"y": model(batch["x"], batch["key"]), "next": jax.random.key_data(batch["key"])},
    )
    state = pipeline.init(jax.random.key(0), variables=variables)
    plain = jax.jit(model.apply)(variables, batch["x"], batch["key"])
    predicted = pipeline.predict(state, batch)
    np.testing.assert_allclose(predicted["y"], plain, rtol=FUSED, atol=FUSED)
    np.testing.assert_array_equal(predicted["next"], jax.random.key_data(batch["key"]))
    expected = jnp.square(plain - batch["x"]).mean()
    np.testing.assert_allclose(pipeline.evaluate(state, batch)["loss"], expected, rtol=FUSED)
    assert pipeline.find_nonfinite(state, batch) is None
    _, metrics = pipeline.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=FUSED)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_keys_that_are_predicted(runtime):
    model, batch = Noisy(), batch_of()

    def predict(model, batch):
        return model(batch["x"], batch["key"]), jax.vmap(jax.random.fold_in, (0, None))(batch["key"], 1)

    pipeline = pipeline_of(model, batch, runtime=runtime, predict=predict)
    _, keys = pipeline.predict(pipeline.init(jax.random.key(0)), batch)
    expected = jax.vmap(jax.random.fold_in, (0, None))(batch["key"], 1)
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(expected))


def test_measured_profiles_and_keys_on_a_mesh():
    """Operators are timed on keys, too; a batch whose arrays are spread over devices is cut as one on the host."""
    model, batch, mesh = Noisy(), batch_of(), mesh_of(2, 2)
    variables = model.init(jax.random.key(1), batch["x"], batch["key"])
    pipeline = pipeline_of(model, batch, replicas=2, profile="measured", runtime="mpmd")
    state = pipeline.init(jax.random.key(0), variables=variables)
    _, gradients = pipeline.value_and_grad(state, batch)
    for spec in (jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()):
        spread = jax.device_put(batch, jax.sharding.NamedSharding(mesh, spec))
        _, again = pipeline.value_and_grad(state, spread)
        assert relative_l2(again, gradients) == 0
    assert relative_l2(gradients, plain_gradient(model, variables, batch, 4)) < FUSED


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_key_of_another_implementation_than_the_plan_has(runtime, tmp_path):
    """Programs read its words, of which "rbg" has twice as many: XLA would name a buffer of the wrong size."""
    model, batch = Noisy(), batch_of()
    variables = model.init(jax.random.key(1), batch["x"], batch["key"])
    before = pipeline_of(model, batch, runtime=runtime)
    state = before.init(jax.random.key(0), variables=variables)
    before.save(state, tmp_path)
    with jax.default_prng_impl("rbg"):
        pipeline = pipeline_of(model, batch, runtime=runtime)
        key = jax.random.key(0)
    message = r"is of the implementation 'threefry2x32'; .* traced for 'rbg'.* default before partition"
    takes = [lambda: pipeline.init(jax.random.key(0), variables=variables), lambda: pipeline.restore(tmp_path)]
    for take in [*takes, lambda: pipeline.adopt(state)] if runtime == "mpmd" else takes:
        with pytest.raises(jaxpipe.PartitionError, match=message):
            take()
    assert jax.random.key_impl(pipeline.init(key, variables=variables).key) == jax.random.key_impl(key)
