"""Mesh axes and schedules by the names that people call them: the same pipelines as by our own names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import schedules
from jaxpipe.sharding.mesh_axes import with_own_names
from tests.support.meshes import mesh_of, named_mesh
from tests.support.two_layers import mean, two_layers


KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 3))
WEIGHTS = {"a": jnp.full((3, 4), 0.5), "b": jnp.full((4, 2), 0.25)}
FUNCTION = jax.tree_util.Partial(two_layers, WEIGHTS)


def partition(mesh=None, **options):
    options = {"optimizer": optax.sgd(0.1), "profile": "analytic", "num_microbatches": 2, **options}
    return jaxpipe.partition(FUNCTION, mesh_of(2) if mesh is None else mesh, X, loss=mean, **options)


@pytest.fixture(scope="module")
def reference():
    """The loss and the weights after a step of plain training on the same micro-batches."""

    def loss(w, x):
        return two_layers(w, x).mean()

    sums = [jax.jit(jax.value_and_grad(loss))(WEIGHTS, part) for part in jnp.split(X, 4)]
    value = sum(value for value, _ in sums) / 4
    gradient = jax.tree.map(lambda *parts: sum(parts) / 4, *(gradient for _, gradient in sums))
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, WEIGHTS, gradient)


@pytest.mark.core
@pytest.mark.parametrize(("axes", "types"), [(("dp", "pp"), AxisType.Explicit), (("replica", "pipe"), AxisType.Auto)])
def test_common_names_of_mesh_axes(axes, types, reference):
    mesh = named_mesh(types, **dict.fromkeys(axes, 2))
    pipeline = partition(mesh=mesh, predict=lambda m, x: m(x))
    assert pipeline.mesh.axis_names == ("data", "stage")
    assert (pipeline.mesh.devices == mesh.devices).all() and pipeline.mesh.axis_types == mesh.axis_types
    # A global array on the caller's mesh, and the caller's mesh as JAX's.
    batch = jax.device_put(X, NamedSharding(mesh, P(axes[0])))
    with jax.set_mesh(mesh):
        state, metrics = pipeline.step(pipeline.init(KEY), batch)
        predicted = pipeline.predict(state, batch)
        assert jax.sharding.get_abstract_mesh().axis_names == axes
    value, weights = reference
    # Sums over four micro-batches are in another order.
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), pipeline.parameters(state).args[0], weights)
    np.testing.assert_allclose(predicted, two_layers(weights, X), rtol=1e-6)


@pytest.mark.core
def test_a_plan_is_made_under_the_callers_mesh():
    mesh = named_mesh(AxisType.Explicit, stage=2)
    plan = partition(mesh=mesh).plan
    with jax.set_mesh(mesh):
        inside = partition(mesh=mesh)
        assert inside.plan == plan
        assert jaxpipe.profile_model(FUNCTION, X, loss=mean, source="analytic", num_microbatches=2) == inside.profile


@pytest.mark.parametrize("stage", ["stage", "stages", "pipe", "pipeline", "pp"])
@pytest.mark.parametrize("data", ["data", "dp", "batch", "replica", "replicas"])
def test_every_common_name_of_an_axis(stage, data):
    assert with_own_names(named_mesh(**{stage: 2, data: 2})).axis_names == ("stage", "data")
    assert with_own_names(named_mesh(**{stage: 2})).axis_names == ("stage",)


@pytest.mark.parametrize("axes", [("stage", "data"), ("tensor", "model"), ("pp", "pipe"), ("dp", "data")])
def test_a_mesh_of_its_own_or_of_other_names_stays(axes):
    mesh = named_mesh(**dict.fromkeys(axes, 2))
    assert with_own_names(mesh) is mesh


def test_a_block_sparse_exchange_along_an_axis_of_another_name():
    mesh = named_mesh(dp=2, pp=2)
    plan = partition(mesh=mesh, gradient_exchange=jaxpipe.gradients.block_sparse("dp")).plan
    assert plan.exchange_bytes is not None


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("1f1b", "1f1b"),
        ("1F1B", "1f1b"),
        ("one-f-one-b", "1f1b"),
        ("1f1b-textbook", "1f1b"),
        ("GPipe", "gpipe"),
        ("zb", "zero-bubble-h1"),
        ("ZB-H1", "zero-bubble-h1"),
        ("ZeroBubble", "zero-bubble-h1"),
        ("zero-bubble-h1", "zero-bubble-h1"),
        ("Interleaved-1F1B", "interleaved-2"),
        ("interleaved-2", "interleaved-2"),
        ("ZBV", "zero-bubble-v"),
        ("zb-v", "zero-bubble-v"),
        ("DualPipeV", "dual-pipe-v"),
        ("v-half", "v-half"),
        ("PipeDream", "pipedream"),
        ("2bw", "2bw"),
    ],
)
def test_common_names_of_schedules(name, printed):
    assert partition(schedule=name, num_microbatches=4).plan.schedule == printed


def test_every_name_that_a_plan_prints_is_taken():
    for name in schedules.BY_NAME:
        printed = partition(schedule=name, num_microbatches=4).plan.schedule
        assert partition(schedule=printed, num_microbatches=4).plan.schedule == printed
