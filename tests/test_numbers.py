"""Numbers keep the model's own precision: norms of complex gradients, weights, sums; and weights of zero are named."""

import functools
import math
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import relative_l2
from tests.support.meshes import mesh_of


ROWS, WIDTH = 8, 5
RUNTIMES = ["mpmd", "spmd"]


def pipeline_of(model, batch, loss, *, stages=2, replicas=None, m=4, **options):
    arguments = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": "analytic"} | options
    return jaxpipe.partition(model, mesh_of(stages, replicas), batch, loss=loss, **arguments)


class Spectral(nn.Module):
    """Layers with complex kernels between real ones."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        for _ in range(2):
            x = jnp.tanh(nn.Dense(WIDTH, param_dtype=jnp.complex64, dtype=jnp.complex64)(x))
        return nn.Dense(1)(jnp.abs(x))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("exchange", ["dense", jaxpipe.gradients.block_sparse(k=100)], ids=["dense", "sparse"])
def test_the_norm_of_complex_gradients_is_that_of_optax(runtime, exchange):
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    model = Spectral()
    variables = model.init(jax.random.key(2), x)
    pipeline = pipeline_of(
        model, x, lambda model, x: model(x).mean(), m=2, replicas=2, runtime=runtime, gradient_exchange=exchange
    )
    state = pipeline.init(jax.random.key(0), variables=variables)
    _, metrics = pipeline.step(state, x)
    gradient = jax.grad(lambda v: model.apply(v, x).mean())(variables)
    # Sums over micro-batches and stages are rounded in another order.
    np.testing.assert_allclose(metrics["gradient_norm"], optax.global_norm(gradient), rtol=1e-5)


def test_blocks_of_complex_gradients_are_chosen_by_their_absolute_values():
    """Of two columns the one with the larger imaginary part is sent."""
    transformation = jaxpipe.gradients.block_sparse(k=1)
    gradients = {"kernel": jnp.array([[3.0, 1 + 10j], [3.0, 1 + 10j]], jnp.complex64)}
    for norm in ("l1", "l2"):
        transformation = jaxpipe.gradients.block_sparse(k=1, norm=norm)
        sent, state = transformation.update(gradients, transformation.init(gradients), gradients)
        np.testing.assert_array_equal(sent["kernel"], [[0, 1 + 10j], [0, 1 + 10j]])
        np.testing.assert_allclose(state.sent_share, 202 / 220, rtol=1e-6)  # 2 * (1 + 100) of that and 2 * 9
        np.testing.assert_allclose(state.residual_norm, math.sqrt(18), rtol=1e-6)


class Wide(nn.Module):
    """Float64 throughout."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64, dtype=jnp.float64)(x))
        return x


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_float64_stays_float64(runtime):
    """Weights near 1/3 would be wrong by 1e-8 in float32, and so would the norm."""
    with jax.enable_x64(True):
        generator = np.random.default_rng(0)
        batch = {"x": generator.normal(size=(ROWS, WIDTH)), "w": generator.random(ROWS)}
        model = Wide()
        variables = model.init(jax.random.key(0), batch["x"])

        def loss(model, batch):
            total = (jnp.square(model(batch["x"])).sum(-1) * batch["w"]).sum()
            return total, batch["w"].sum(), {"w": jaxpipe.Sum(batch["w"].sum())}

        def plain(variables):
            total, weight, _ = loss(lambda x: model.apply(variables, x), batch)
            return total / weight

        pipeline = pipeline_of(model, batch, loss, evaluate=loss, runtime=runtime)
        state = pipeline.init(jax.random.key(0), variables=variables)
        value, gradient = jax.value_and_grad(plain)(variables)
        (got, metrics), gradients = pipeline.value_and_grad(state, batch)
        evaluated = pipeline.evaluate(state, batch)
        _, stepped = pipeline.step(state, batch)
        norm = stepped["gradient_norm"]
        assert got.dtype == metrics["w"].dtype == evaluated["loss"].dtype == norm.dtype == np.float64
        # Sums over micro-batches are rounded in another order, in float64.
        assert relative_l2([got, evaluated["loss"], stepped["loss"]], [value] * 3) < 1e-14
        assert relative_l2(gradients, gradient) < 1e-14
        assert relative_l2(norm, optax.global_norm(gradient)) < 1e-14


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (jnp.bfloat16, [256, 1, 1, 1]),  # 8 bits: 256 + 1 is 256
        (jnp.float16, [60000, 60000, 1, 1]),  # 120000 is infinite
        (jnp.int8, [100, 100, 100, 27]),  # 200 is -56
        (jnp.bool_, [True, True, False, True]),
        (jnp.int32, [5, 0, 7, 9]),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_weights_are_added_up_without_loss(dtype, weights, runtime):
    model = jax.tree_util.Partial(lambda w, x: x @ w["a"] @ w["b"], {"a": jnp.eye(3), "b": jnp.ones((3, 1))})
    batch = {"x": jnp.eye(4, 3), "w": jnp.asarray(weights, dtype)}

    def loss(model, batch):
        return model(batch["x"]).sum(), batch["w"][0], {}

    pipeline = pipeline_of(model, batch, loss, runtime=runtime)
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), batch)
    total = np.float32(sum(int(w) for w in weights))
    assert value == np.float32(3) / total  # the rows of the unit matrix, by ones
    np.testing.assert_array_equal(jax.tree.leaves(gradients)[1], np.ones((3, 1), np.float32) / total)


def weighted(model, batch):
    return (jnp.square(model(batch["x"]))[:, 0] * batch["w"]).sum(), batch["w"].sum(), {"n": batch["w"].sum()}


@functools.cache
def weighted_pipeline(runtime, on_nonfinite):
    weights = {"a": 0.1 * jnp.ones((3, 4)), "b": jnp.ones((4, 1))}
    model = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], weights)
    options = jaxpipe.PlanOptions(on_nonfinite=on_nonfinite)
    return pipeline_of(model, weightless(1), weighted, evaluate=weighted, runtime=runtime, options=options)


def weightless(weight=0):
    return {"x": jnp.ones((ROWS, 3)), "w": jnp.full(ROWS, weight, jnp.int32)}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_batch_without_weight_is_warned_of(runtime):
    pipeline = weighted_pipeline(runtime, None)
    state = pipeline.init(jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(pipeline.evaluate(state, weightless(1))) == {"loss", "n"}
    for call in (pipeline.evaluate, pipeline.value_and_grad):
        with pytest.warns(jaxpipe.JaxpipeWarning, match="weights of its micro-batches.*sum to zero") as seen:
            jax.block_until_ready(call(state, weightless()))
            call(state, weightless(1))  # where the devices were not ready in time, the next call tells
        assert all(w.filename == __file__ for w in seen)
    with pytest.warns(jaxpipe.JaxpipeWarning, match="on_nonfinite"):
        state, metrics = pipeline.step(state, weightless())
        jax.block_until_ready(metrics)
        state, metrics = pipeline.step(state, weightless(1))
    assert np.isnan(metrics["loss"])  # as without a pipeline


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_guarded_step_without_weight_is_named(runtime):
    pipeline = weighted_pipeline(runtime, "raise")
    state = pipeline.init(jax.random.key(0))
    with pytest.raises(jaxpipe.NonFiniteError, match=r"loss of step 0 is nan.*weights.*sum to zero"):
        pipeline.step(state, weightless())
    origin = pipeline.find_nonfinite(pipeline.init(jax.random.key(0)), weightless())
    assert (origin.stage, origin.microbatch) == (1, None)
    assert "sum to zero" in str(origin)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_loss_that_is_nan_by_itself_is_named_with_its_operator(runtime):
    def loss(model, x):
        y = jnp.square(model(x)).mean()
        return y + jnp.zeros_like(y) / (x - x).mean()  # 0/0

    model = jax.tree_util.Partial(lambda w, x: x @ w["a"] @ w["b"], {"a": jnp.eye(3), "b": jnp.ones((3, 1))})
    x = jnp.ones((ROWS, 3))
    pipeline = pipeline_of(model, x, loss, runtime=runtime, options=jaxpipe.PlanOptions(on_nonfinite="raise"))
    with pytest.raises(jaxpipe.NonFiniteError, match=r"is nan.*began in stage \d, micro-batch 0, operator div"):
        pipeline.step(pipeline.init(jax.random.key(0)), x)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_losses_and_metrics_of_half_precision_are_averaged_in_float32(runtime):
    """Four losses of 30000 add up to more than 65504, the largest number of float16."""
    model = jax.tree_util.Partial(lambda w, x: x @ w["a"] @ w["b"], {"a": jnp.eye(3), "b": jnp.ones((3, 1))})
    x = jnp.full((ROWS, 3), 1e4, jnp.float16)

    def loss(model, x):
        value = model(x).mean().astype(jnp.float16)
        return value, {"same": value}

    pipeline = pipeline_of(model, x, loss, runtime=runtime)
    (value, metrics), _ = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), x)
    assert value == metrics["same"] == 30000


def test_a_sum_of_losses_that_overflows_is_named():
    model = jax.tree_util.Partial(lambda w, x: x @ w["a"] @ w["b"], {"a": jnp.eye(3), "b": jnp.ones((3, 1))})
    x = jnp.full((ROWS, 3), 1e38)
    pipeline = pipeline_of(model, x, lambda model, x: model(x).mean(), m=ROWS, runtime="mpmd")
    origin = pipeline.find_nonfinite(pipeline.init(jax.random.key(0)), x)  # each loss is 3e38, of at most 3.4e38
    assert (origin.microbatch, origin.what) == (None, "the sum of the losses")
