"""Checkpoints restore into the same bits on any stages and replicas, or without a pipeline; others are refused."""

import functools
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same_bits
from flax import nnx
from pipeline_models import CASES, entropy, images

import jaxpipe
from examples import models as zoo
from jaxpipe.checkpoint import load, steps


ROWS = 16


def mesh_of(stages: int, replicas: int | None = None) -> jax.sharding.Mesh:
    if replicas is None:
        return jax.sharding.Mesh(jax.devices()[:stages], ("stage",))
    return jax.sharding.Mesh(np.array(jax.devices()[: stages * replicas]).reshape(replicas, stages), ("data", "stage"))


@functools.cache
def case_of(name: str):
    return CASES[name](ROWS)


def adam() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20)))


def pipeline_of(name: str, stages: int, replicas: int | None = None, optimizer=None, **options) -> jaxpipe.Pipeline:
    case = case_of(name)
    options = {"profile": "analytic", "num_microbatches": 2, "predict": lambda model, batch: model(batch["x"])} | options
    return jaxpipe.partition(
        case.model, mesh_of(stages, replicas), case.batch, loss=case.loss, optimizer=optimizer or adam(), **options
    )


def trained(pipeline: jaxpipe.Pipeline, name: str, count: int, state=None):
    state = pipeline.init(jax.random.key(3)) if state is None else state
    metrics = {}
    for _ in range(count):
        state, metrics = pipeline.step(state, case_of(name).batch)
    return state, metrics


@functools.cache
def mlp_pipeline() -> jaxpipe.Pipeline:
    return pipeline_of("mlp", 2)


@pytest.fixture(scope="module")
def saved_mlp(tmp_path_factory):
    """A checkpoint of two steps of the MLP on two stages."""
    folder = tmp_path_factory.mktemp("mlp")
    state, _ = trained(mlp_pipeline(), "mlp", 2)
    mlp_pipeline().save(state, folder, data={"epoch": 1})
    return folder


# Resuming


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        pytest.param("mlp", 2, None, marks=pytest.mark.core),
        ("cnn-nnx", 2, None),
        pytest.param("transformer", 4, None, marks=pytest.mark.slow),
        pytest.param("resnet", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(name, stages, replicas, tmp_path):
    pipeline = pipeline_of(name, stages, replicas)
    state, _ = trained(pipeline, name, 2)
    pipeline.save(state, tmp_path)
    expected, metrics = trained(pipeline, name, 2, state)
    again = pipeline_of(name, stages, replicas)
    state, resumed = trained(again, name, 2, again.restore(tmp_path))
    assert_same_bits(state, expected)
    assert_same_bits(resumed, metrics)


def test_residuals_resume_bit_for_bit(tmp_path):
    exchange = jaxpipe.gradients.block_sparse(k=1)
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "gradient_exchange": exchange}
    pipeline = pipeline_of("mlp", 2, 2, **options)
    state, _ = trained(pipeline, "mlp", 2)
    assert all(np.any(x) for x in state.residual)
    pipeline.save(state, tmp_path)
    expected, _ = trained(pipeline, "mlp", 2, state)
    assert_same_bits(trained(pipeline, "mlp", 2, pipeline.restore(tmp_path))[0], expected)

    # Another number of replicas: what is still to be added to the parameters is the same, spread evenly.
    state = pipeline.restore(tmp_path)
    rows = [np.asarray(x) for x in state.residual]
    wider = pipeline_of("mlp", 2, 4, **options).restore(tmp_path)
    for before, after in zip(rows, wider.residual, strict=True):
        assert np.asarray(after).shape == (2, 4, before.shape[2])
        # The mean of two is exact but for one rounding, that of four equal ones exactly.
        np.testing.assert_array_equal(
            np.asarray(after), np.broadcast_to((before[:, :1] + before[:, 1:]) / 2, np.asarray(after).shape)
        )
    whole = pipeline_of("mlp", 2, optimizer=optax.sgd(0.1, momentum=0.9))
    with pytest.warns(UserWarning, match="what had not been sent is lost"):
        assert whole.restore(tmp_path).residual == ()


def test_residuals_begin_at_zero_where_a_checkpoint_has_none(tmp_path):
    optimizer = optax.sgd(0.1, momentum=0.9)
    dense = pipeline_of("mlp", 2, 2, optimizer=optimizer)
    dense.save(dense.init(jax.random.key(0)), tmp_path)
    sparse = pipeline_of("mlp", 2, 2, optimizer=optimizer, gradient_exchange=jaxpipe.gradients.block_sparse(k=1))
    assert_same_bits(sparse.restore(tmp_path), sparse.init(jax.random.key(0)))


def test_random_keys_and_signs_of_zero_are_kept(tmp_path):
    """A typed key in the optimizer state, another kind of key for the run, -0.0 and NaNs with a payload."""
    odd = np.array([-0.0, 0.0, np.nan, -np.nan, 1e-45], np.float32)
    odd[2:3].view(np.uint32)[0] = 0x7FC12345
    model = jax.tree_util.Partial(
        lambda w, x: x @ w["first"] @ w["second"],
        {"first": jnp.asarray(odd)[:, None] * jnp.ones((1, 4)), "second": -jnp.zeros((4, 1)), "a.b/c": jnp.zeros((0, 3))},
    )
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(7)), optax.sgd(0.1))
    batch = jnp.ones((4, 5))
    pipeline = jaxpipe.partition(
        model, mesh_of(2), batch, loss=lambda f, x: f(x).mean(), optimizer=optimizer, profile="analytic"
    )
    state = pipeline.init(jax.random.key(3, impl="threefry2x32"))
    pipeline.save(state, tmp_path)
    assert_same_bits(pipeline.restore(tmp_path), state)


# Other stages


@pytest.fixture(scope="module")
def four_stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    pipeline = pipeline_of("cnn-linen", 4)
    state, _ = trained(pipeline, "cnn-linen", 2)
    pipeline.save(state, folder, data=[1, 2])
    return folder, pipeline.parameters(state)


def plain_prediction(variables):
    # As in training, but one micro-batch after the other is what pipelines predict, too.
    apply = jax.jit(lambda variables, x: case_of("cnn-linen").model.apply(variables, x))
    x = case_of("cnn-linen").batch["x"].reshape(2, ROWS // 2, 8, 8, 1)
    return np.concatenate([np.asarray(apply(variables, row)) for row in x])


@pytest.mark.parametrize("stages", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_four_stages_become_any_number(stages, four_stages):
    folder, variables = four_stages
    pipeline = pipeline_of("cnn-linen", stages)
    state = pipeline.restore(folder)
    assert_same_bits(pipeline.parameters(state), variables)
    assert int(state.step) == 2
    np.testing.assert_array_equal(pipeline.predict(state, case_of("cnn-linen").batch), plain_prediction(variables))
