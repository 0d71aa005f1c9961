"""Answers of docs/questions.md that no other test shows as plainly: the layout of a pipeline changes no result."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import assert_same_bits, relative_l2
from tests.support.heavy_profile import heavy


STAGES = (1, 4)
BATCH = {"x": jax.random.normal(jax.random.key(1), (16, 8)), "y": jnp.arange(16) % 3}


class Layers(nn.Module):
    """A number of layers with dropout between them, and a head."""

    count: int = 5
    width: int = 8
    classes: int = 3

    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(self.count):
            x = nn.tanh(nn.Dense(self.width)(x))
            x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.classes)(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def evaluate(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], train=False), batch["y"]).mean()


def pipeline_of(stages: int, model: nn.Module, **options) -> jaxpipe.Pipeline:
    mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic", "runtime": "mpmd", **options}
    return jaxpipe.partition(model, mesh, BATCH, loss=loss, evaluate=evaluate, **options)


@pytest.fixture(scope="module")
def pipelines() -> list[jaxpipe.Pipeline]:
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    return [pipeline_of(stages, Layers(), optimizer=clipped) for stages in STAGES]


def test_no_layer_is_lost_where_layers_do_not_divide(pipelines, key):
    plain = Layers().init(key, BATCH["x"])
    sizes = jax.tree.map(jnp.shape, plain)
    for stages, pipeline in zip(STAGES, pipelines, strict=True):
        state = pipeline.init(key)
        assert len(pipeline.plan.stages) == stages
        held = sum(stage.parameter_bytes for stage in pipeline.plan.stages)
        assert held == sum(x.nbytes for x in jax.tree.leaves(plain))
        before = pipeline.parameters(state)
        after = pipeline.parameters(pipeline.step(state, BATCH)[0])
        assert jax.tree.map(jnp.shape, before) == sizes
        changed = jax.tree.map(lambda old, new: bool((old != new).any()), before, after)
        assert all(jax.tree.leaves(changed))


def test_initial_values_do_not_depend_on_the_layout(pipelines, key):
    expected = jax.tree.map(np.asarray, Layers().init(key, BATCH["x"]))
    for pipeline in pipelines:
        assert_same_bits(pipeline.parameters(pipeline.init(key)), expected)


def test_losses_and_norms_with_dropout_do_not_depend_on_the_layout(pipelines, key):
    rows = []
    for pipeline in pipelines:
        state, metrics = pipeline.init(key), []
        for _ in range(3):
            state, values = pipeline.step(state, BATCH)
            metrics.append((float(values["loss"]), float(values["gradient_norm"])))
        rows.append(metrics)
    # XLA fuses other operators at other cuts: float32 rounding.
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-5)


def test_evaluation_before_training_leaves_training_as_it_is(pipelines, key):
    pipeline = pipelines[-1]
    untouched, _ = pipeline.step(pipeline.init(key), BATCH)
    expected = pipeline.parameters(untouched)
    state = pipeline.init(key)
    variables = pipeline.parameters(state)
    value = float(pipeline.evaluate(state, BATCH)["loss"])
    plain = evaluate(lambda x, train: Layers().apply(variables, x, train), BATCH)
    assert value == pytest.approx(float(plain), rel=1e-6)  # means of micro-batches are added up in another order
    assert_same_bits(pipeline.parameters(pipeline.step(state, BATCH)[0]), expected)


def test_a_heavy_head_gets_a_stage_with_fewer_layers():
    model = Layers(count=6, width=64, classes=192)  # the head costs as much as three layers
    short = pipeline_of(3, model, num_microbatches=8).profile
    stages = pipeline_of(3, model, num_microbatches=8, profile=heavy(short)).plan.stages
    layers = [sum("Dense" in name for name in stage.modules) for stage in stages]
    assert layers[-1] < layers[0]
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in stages]
    assert max(seconds) < 1.5 * min(seconds)


@pytest.mark.slow  # 20 s, most of them compilation
def test_recomputed_dropout_is_that_of_the_forward_pass(key):
    usual = pipeline_of(2, Layers(width=64))
    state = usual.init(key)
    with pytest.raises(jaxpipe.MemoryBudgetError) as refused:
        pipeline_of(2, Layers(width=64), memory="1B")
    tight = pipeline_of(2, Layers(width=64), memory=refused.value.smallest)
    assert any(stage.recomputed for stage in tight.plan.stages)
    (_, expected), (_, gradients) = (
        pipeline.value_and_grad(s, BATCH) for pipeline, s in ((usual, state), (tight, tight.init(key)))
    )
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(expected)) < 1e-6
