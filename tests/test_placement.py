"""The network decides which device runs which stage, and the numbers do not notice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import Network
from jaxpipe.planning.arrange_devices import arrange, pair
from jaxpipe.schedules import one_f_one_b


#: Fast links make the path 2 - 0 - 3 - 1.
PATH = Network(
    [[0, 1e6, 1e12, 1e12], [1e6, 0, 1e6, 1e12], [1e12, 1e6, 0, 1e6], [1e12, 1e12, 1e6, 0]],
    latency_seconds=[[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0]],
)


def layers(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return x


WEIGHTS = [jax.random.normal(jax.random.key(k), (4, 4)) for k in range(4)]
BATCH = jax.random.normal(jax.random.key(9), (8, 4))


def loss(model, x):
    return (model(x) ** 2).mean()


def make(mesh, network, **options):
    return jaxpipe.partition(
        jax.tree_util.Partial(layers, WEIGHTS),
        mesh,
        BATCH,
        loss=loss,
        optimizer=optax.sgd(0.1),
        network=network,
        **{"num_microbatches": 2, "profile": "analytic", "runtime": "spmd", **options},
    )


@pytest.mark.optimized
def test_stages_follow_the_fast_links():
    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    pipeline = make(mesh, PATH)
    devices = [stage.devices for stage in pipeline.plan.stages]
    assert devices in ([(2,), (0,), (3,), (1,)], [(1,), (3,), (0,), (2,)])
    order = [d for (d,) in devices]
    assert [d.id for d in pipeline.mesh.devices.flat] == [jax.devices()[k].id for k in order]
    assert pipeline.mesh.axis_types == mesh.axis_types
    state = pipeline.init(jax.random.key(0))
    (value, _), gradients = pipeline.value_and_grad(state, BATCH)
    # The same pipeline with the devices as they come.
    usual = make(mesh, None)
    assert [stage.devices for stage in usual.plan.stages] == [(0,), (1,), (2,), (3,)]
    (expected, _), plain = usual.value_and_grad(usual.init(jax.random.key(0)), BATCH)
    assert float(value) == float(expected)
    jax.tree.map(np.testing.assert_array_equal, gradients, plain)
    # And plain JAX, up to the order in which rows are added up.
    reference = jax.grad(lambda w: loss(lambda x: layers(w, x), BATCH))(WEIGHTS)
    for ours, theirs in zip(jax.tree.leaves(gradients), reference, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * float(jnp.abs(theirs).max()))
    # Every stage's own parameters are on the device that the plan names.
    pipeline.step(state, BATCH)


@pytest.mark.core
def test_replicas_are_paired_over_fast_links():
    mesh = jax.make_mesh((2, 2), ("data", "stage"), devices=jax.devices()[:4])
    # Devices 0 and 3 are of one kind, 1 and 2 of another; 0 - 1 and 3 - 2 are the links between the kinds.
    slow, fast = 1e6, 1e12
    bandwidth = [[0, fast, slow, fast], [fast, 0, fast, slow], [slow, fast, 0, fast], [fast, slow, fast, 0]]
    # A table for two stages keeps both, though one would do for so little work.
    pipeline = make(mesh, Network(bandwidth, speed=(1, 4, 4, 1)), schedule=lambda stages, count: one_f_one_b(2, count))
    groups = [set(stage.devices) for stage in pipeline.plan.stages]
    assert groups in ([{0, 3}, {1, 2}], [{1, 2}, {0, 3}])
    ids = [[d.id for d in row] for row in pipeline.mesh.devices]
    first = jax.devices()[0].id
    linked = {frozenset((first, first + 1)), frozenset((first + 2, first + 3))}
    assert {frozenset(row) for row in ids} == linked
    usual = make(mesh, None)
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), BATCH)
    (expected, _), plain = usual.value_and_grad(usual.init(jax.random.key(0)), BATCH)
    # Other cuts for other speeds: XLA fuses other operators.
    np.testing.assert_allclose(float(value), float(expected), rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), gradients, plain)


@pytest.mark.parametrize("axes", [("data", "stage"), ("stage", "data")])
def test_places_in_the_mesh(axes):
    shape = tuple({"data": 2, "stage": 3}[a] for a in axes)
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[:6])
    groups = [(5, 0), (1, 4), (2, 3)]
    arranged = arrange(mesh, groups, Network.uniform(6, 1.0))
    stages = np.moveaxis(np.array([[d.id for d in row] for row in arranged.devices]), axes.index("stage"), 0)
    first = jax.devices()[0].id
    assert [tuple(row - first) for row in stages] == groups


def test_the_slowest_pair_counts_first():
    # One way has the links 9 and 2, the other 3 and 4: the sum says the first, the slowest link the second.
    matrix = np.ones((4, 4)) * 5.0
    for (a, b), bandwidth in {(0, 2): 9, (1, 3): 2, (0, 3): 3, (1, 2): 4}.items():
        matrix[a, b] = matrix[b, a] = bandwidth
    assert pair((0, 1), (2, 3), Network(matrix)) == (3, 2)


def test_faster_devices_do_more():
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    network = Network([[0, 1e12], [1e12, 0]], speed=(1, 3))
    usual = make(mesh, network).profile
    seconds = tuple(float("dot" in name) for name in usual.names)
    profile = dataclasses.replace(usual, forward_seconds=seconds, backward_seconds=seconds)
    pipeline = make(mesh, network, num_microbatches=8, profile=profile)
    # Four equal layers: three of them for the fast device.
    assert {stage.devices: stage.forward_seconds for stage in pipeline.plan.stages} == {(0,): 1.0, (1,): 3.0}
    # Eight micro-batches and one stage to fill, a second forward and one backward in each tick.
    # What a tick costs besides takes microseconds.
    assert pipeline.plan.step_seconds == pytest.approx(2 * (8 + 1), abs=1e-3)


def test_replicas_count_once():
    """Two replicas of two equal stages, 8 micro-batches each: the search and the executor's timeline agree."""
    mesh = jax.make_mesh((2, 2), ("data", "stage"), devices=jax.devices()[:4])
    network = Network.uniform(4, 1e15)
    usual = make(mesh, network).profile
    seconds = tuple(float("dot" in name) for name in usual.names)
    profile = dataclasses.replace(
        usual, forward_seconds=seconds, backward_seconds=seconds, parameter_bytes=(0.0,) * len(seconds)
    )
    pipeline = make(mesh, network, num_microbatches=4, profile=profile, schedule="one_f_one_b")
    # Two layers in each stage; four micro-batches of a replica and one stage to fill. Links take below a microsecond,
    # what a tick costs besides some.
    assert pipeline.plan.step_seconds == pytest.approx(2 * 2 * (4 + 1), abs=1e-3)
    # 15 calls, of which the last stage has one for both passes, and sends to the next stage and back.
    besides = pipeline._planned.partition.bottleneck_seconds - 2 * 2 * (4 + 1)
    assert 4 * 3 * 25e-6 <= besides <= 15 * 25e-6 + 8 * 40e-6
    assert pipeline.partition.bottleneck_seconds == pipeline.plan.step_seconds
    assert pipeline.partition.num_microbatches == 8


def test_the_plan_says_what_it_was_made_from():
    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    pipeline = make(mesh, PATH)
    assert pipeline.partition.network == PATH
    assert pipeline.partition.profile.seconds == pipeline.profile.seconds
    assert pipeline.plan.lower_bound_seconds <= pipeline.partition.bottleneck_seconds
    assert pipeline.partition.lower_bound_seconds <= pipeline.partition.bottleneck_seconds


@pytest.mark.core
def test_a_network_of_another_size():
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    with pytest.raises(jaxpipe.PartitionError, match=r"network= has 4 devices, the mesh 2; it must have one for each"):
        make(mesh, PATH)
    with pytest.raises(jaxpipe.PartitionError, match=r"network is list; it must be a jaxpipe.Network"):
        make(mesh, [[0, 1], [1, 0]])
