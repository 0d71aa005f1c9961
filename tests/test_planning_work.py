"""The work of planning: each kind of it once, in the log, with an outcome that depends on nothing else."""

import logging
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpipe
from jaxpipe.graph import rules
from jaxpipe.runtime.mpmd import step_graph


def layers(params, x):
    for weights in params:
        x = x + jnp.tanh(jnp.dot(jnp.sin(x), weights))
    return x


def planned(count, loss=lambda f, x: jnp.mean(f(x) ** 2), model=None):
    """The pipeline of some equal layers, or of another model, on two stages."""
    if model is None:
        model = jax.tree_util.Partial(layers, [jnp.zeros((8, 8))] * count)
    return jaxpipe.partition(
        model,
        Mesh(np.array(jax.devices()[:2]), ("stage",)),
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        loss=loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=4,
        profile="analytic",
    )


def counted(monkeypatch, module, name):
    """Count the calls of a function of a module."""
    function, calls = getattr(module, name), []

    def count(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, count)
    return calls


@pytest.mark.core
def test_derivatives_of_equal_operators_are_traced_once(monkeypatch):
    calls = counted(monkeypatch, rules, "derive")
    planned(2)
    few = len(calls)
    planned(8)
    assert 0 < few == len(calls) - few


def test_a_loss_is_traced_once_and_with_variables_to_be_found_twice():
    traced = []

    def loss(f, x):
        traced.append(x.shape)
        return jnp.mean(f(x) ** 2)

    planned(4, loss)
    assert traced == [(4, 8)]
    planned(4, lambda f, x: (loss(f, x), {"largest": jnp.max(x)}))
    assert traced[1:] == [(4, 8)]
    planned(4, loss, model=nn.Sequential([nn.Dense(8), jnp.tanh, nn.Dense(8)]))
    assert traced[2:] == [(4, 8), (4, 8)]


@pytest.mark.core
def test_bytes_are_predicted_when_they_are_asked_for(monkeypatch):
    calls = counted(monkeypatch, step_graph, "trace_task")
    pipeline = planned(4)
    assert not calls
    # Weights, gradients and one update of the stage that has two of the four layers are no less than this.
    assert pipeline.plan.predicted_bytes >= 2 * 2 * 8 * 8 * 4
    assert calls
    before = len(calls)
    assert pipeline.plan.predicted_bytes == max(pipeline.plan.each_device)
    assert len(calls) == before


def test_a_plan_logs_the_seconds_of_each_phase(caplog):
    caplog.set_level(logging.INFO, logger="jaxpipe")
    pipeline = planned(4)
    lines = [text for text in map(str, caplog.messages) if text.startswith("planning, ")]
    phases = [line.removeprefix("planning, ").split(": ") for line in lines]
    assert [name for name, _ in phases] == ["profile", "trace", "cut", "candidates", "all else"]
    assert all(seconds.endswith(" s") and float(seconds[:-2]) >= 0 for _, seconds in phases)
    caplog.clear()
    assert pipeline.plan
    assert [text.split(": ")[0] for text in caplog.messages if text.startswith("planning, ")] == ["planning, bytes"]


#: Plans models with the seed of hashes that it is started with.
PLANS = """
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 4)
import jaxpipe
from examples import models as zoo

def loss(model, batch):
    logits = model(batch, train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch).mean()

model = zoo.Transformer(vocab=16, num_layers=3, width=16, num_heads=2, max_length=8, tied=False)
batch = jax.ShapeDtypeStruct((32, 8), jnp.int32)
for schedule in ("auto", "zero_bubble"):
    pipeline = jaxpipe.partition(model, jax.make_mesh((4,), ("stage",)), batch, loss=loss, optimizer=optax.adamw(1e-3),
                                 schedule=schedule, profile="analytic")
    print(pipeline.plan.to_json())
"""


def test_a_plan_does_not_depend_on_the_hashes_of_a_process():
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PLANS],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert first.count('"predicted_bytes"') == 2
    assert first == second
