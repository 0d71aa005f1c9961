"""Devices without work: they are left out where a step takes no longer, and else a sentence says so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxpipe
from jaxpipe import Network
from jaxpipe.schedules import gpipe
from tests.support.compare import assert_same_bits
from tests.support.texts import one_line


BATCH = {"x": np.linspace(-1, 1, 64 * 512, dtype=np.float32).reshape(64, 512), "y": np.arange(64) % 4}


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.tanh(nn.Dense(512)(x))
        return nn.Dense(4)(x)


def pipeline(stages, model=None, **options):
    mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
    options = {"num_microbatches": 4, "profile": "analytic", "schedule": gpipe, **options}
    return jaxpipe.partition(
        nn.Dense(4) if model is None else model, mesh, BATCH, loss=loss, optimizer=optax.sgd(0.1), **options
    )


def trained(pipe):
    state = pipe.init(jax.random.key(0))
    for _ in range(2):
        state, _ = pipe.step(state, BATCH)
    return pipe.parameters(state)


@pytest.mark.core
def test_a_dense_layer_is_not_spread_over_eight_devices():
    """Its product and its bias may be apart; what is behind them has no parameters and adds up a few numbers."""
    many = pipeline(8)
    used = [device.id for device in many.mesh.devices.flat]
    assert len(many.plan.stages) == len(used) <= 2 and used == list(range(len(used)))
    assert f"devices {len(used)}-7 of 8 are left out" in one_line(many.plan)
    assert_same_bits(trained(many), trained(pipeline(len(used))))
    assert jaxpipe.Plan.from_json(many.plan.to_json()) == many.plan


def test_slow_devices_are_left_out():
    """Four devices of a hundredth of the speed: a step on the other four alone is the shortest."""
    links = np.full((8, 8), 25e9)
    network = Network(links, 1e-6, speed=(0.01,) * 4 + (1.0,) * 4)
    plan = pipeline(8, Layers(), network=network).plan
    assert sorted(d for stage in plan.stages for d in stage.device_ids) == [4, 5, 6, 7]
    assert "devices 0-3 of 8 are left out" in one_line(plan)


def test_a_table_for_more_stages_keeps_its_devices():
    plan = pipeline(4, schedule=lambda stages, count: gpipe(4, count)).plan
    assert len(plan.stages) == 4
    assert "next to no work in stage" in one_line(plan) and "on a mesh with 2 devices fewer" in one_line(plan)


def test_stages_that_all_have_work_keep_their_devices():
    plan = pipeline(4, Layers()).plan
    assert len(plan.stages) == 4 and not plan.notes and "no work" not in one_line(plan)


def test_devices_have_the_numbers_that_jax_has():
    """Each stage is on all devices of its row of the mesh, those of other axes included."""
    devices = np.array(jax.devices()[::-1]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("stage", "model"))
    weights = {"a": jnp.ones((512, 8)), "b": jnp.ones((8, 4))}
    model = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], weights)
    options = {"num_microbatches": 2, "options": jaxpipe.PlanOptions(batch_axes=("model",)), "profile": "analytic"}
    plan = jaxpipe.partition(model, mesh, BATCH, loss=loss, optimizer=optax.sgd(0.1), **options).plan
    rows = [[device.id for device in row] for row in devices]
    assert [list(stage.device_ids) for stage in plan.stages] == rows
    lines = [line.split() for line in str(plan).splitlines()]
    assert [line[1] for line in lines if line[:1] in (["0"], ["1"])][:2] == ["4-7", "0-3"]
