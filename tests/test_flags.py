"""Projects that set JAX's strict flags: a pipeline runs under each, with the bits that it has without."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of


class Net(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x)))
        return x


def loss(model, batch):
    y = jnp.square(model(batch["x"])).sum(-1)
    weight = batch["w"].astype(jnp.float32)
    return (y * weight).sum(), batch["w"].sum(), {"n": jaxpipe.Sum(batch["w"].sum())}


def trained(runtime, layers=3):
    """Gradients, and parameters after a step, of a pipeline that is planned, compiled and run here."""
    batch = {"x": np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32), "w": np.arange(1, 9, dtype=np.int32)}
    options = {
        "optimizer": optax.sgd(1e-2, momentum=0.9),
        "num_microbatches": 2,
        "profile": "analytic",
        "runtime": runtime,
    }
    pipeline = jaxpipe.partition(Net(layers), mesh_of(2), batch, loss=loss, evaluate=loss, **options)
    state = pipeline.init(jax.random.key(0))
    results = pipeline.value_and_grad(state, batch), pipeline.evaluate(state, batch)
    state, metrics = pipeline.step(state, batch)
    return jax.device_get((*results, metrics, pipeline.parameters(state)))


@pytest.fixture(scope="module", params=["mpmd", "spmd"])
def runtime_and_expected(request):
    return request.param, trained(request.param)


@pytest.mark.parametrize(
    "flag",
    [
        lambda: jax.disable_jit(),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.debug_nans(True),
        lambda: jax.debug_infs(True),
    ],
    ids=["disable_jit", "dtype_promotion", "rank_promotion", "debug_nans", "debug_infs"],
)
def test_a_pipeline_runs_under_strict_flags(runtime_and_expected, flag):
    runtime, expected = runtime_and_expected
    with flag():
        assert_same_bits(trained(runtime), expected)


@pytest.mark.parametrize("runtime", ["mpmd", pytest.param("spmd", marks=pytest.mark.slow)])
def test_a_pipeline_runs_while_jax_looks_for_leaks(runtime):
    """JAX traces everything anew then, which takes long: one layer will do."""
    expected = trained(runtime, layers=1)
    with jax.checking_leaks():
        assert_same_bits(trained(runtime, layers=1), expected)


@pytest.fixture
def arrays_as_literals():
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", False)


@pytest.mark.parametrize("unroll", [False, True])
def test_scans_run_over_arrays_that_programs_have_as_literals(unroll, arrays_as_literals):
    rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def run(layers, x):
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer[0] + layer[1]), None), x, (layers, rows))[0]

    def summed(layers, x):
        return run(layers, x).sum()

    layers, x = (jax.random.normal(jax.random.key(k), (4, 3, 3)[k:]) for k in (0, 1))
    expected = jax.jit(jax.grad(summed))(layers, x)
    assert_same_bits(jax.jit(jax.grad(jaxpipe.memory_encoded(summed)))(layers, x), expected)
    settings = {"optimizer": optax.sgd(0.1), "num_microbatches": 1, "profile": "analytic"}
    pipeline = jaxpipe.partition(
        jax.tree_util.Partial(run, layers),
        mesh_of(2 if unroll else 1),
        x,
        loss=lambda model, x: model(x).sum(),
        options=jaxpipe.PlanOptions(unroll_scans=unroll),
        **settings,
    )
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), x)
    assert relative_l2(jax.tree.leaves(gradients), [expected]) < FUSION
