"""Attributes of NNX modules that a call changes in place, and variables that are read as others than they keep."""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import FUSION, relative_l2
from tests.support.meshes import mesh_of


BATCH = {
    "x": jax.random.normal(jax.random.key(1), (16, 8)),
    "y": jax.random.randint(jax.random.key(2), (16,), 0, 5),
}


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def partition(model, stages, microbatches):
    return jaxpipe.partition(
        model,
        mesh_of(stages),
        BATCH,
        loss=loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=microbatches,
        profile="analytic",
    )


class InPlace(nnx.Module):
    """Changes what is in an attribute, in every call, and computes with it if ``counts``."""

    def __init__(self, rngs, attribute, counts):
        self.head, self.attribute, self.counts = nnx.Linear(8, 5, rngs=rngs), attribute, counts

    def __call__(self, x):
        held = self.attribute if isinstance(self.attribute, list) else vars(self.attribute).setdefault("seen", [])
        held.append(x.shape)
        return self.head(x) * (len(held) if self.counts else 1)


@pytest.mark.parametrize("make", [list, lambda: nn.Dense(1), lambda: type("Plain", (), {})()])
def test_what_a_call_changes_in_an_attribute_counts_as_a_change_of_it(make):
    with pytest.raises(jaxpipe.ModelError, match="changes the attribute attribute of the model"):
        partition(InPlace(nnx.Rngs(0), make(), counts=True), 1, 4)
    pipeline = partition(InPlace(nnx.Rngs(0), make(), counts=False), 1, 4)
    (value, _), _ = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), BATCH)
    model = InPlace(nnx.Rngs(0), make(), counts=False)
    np.testing.assert_allclose(value, loss(model, BATCH), rtol=2 * FUSION)


class Doubled(nnx.Param):
    """Reads twice what it keeps, as a variable that is quantized or scaled may."""

    def get_value(self, **options):
        return 2 * super().get_value(**options)


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize("door", ["partition", "memory_encoded"])
def test_variables_that_are_read_as_others_than_they_keep(door):
    class Hooked(nnx.Module):
        def __init__(self, rngs):
            self.head, self.scale = nnx.Linear(8, 5, rngs=rngs), Doubled(jnp.full(8, 0.7))
            hooks: dict[str, Any] = {"on_get_value": lambda _, x: x + 1, "on_set_value": lambda _, x: x / 3}
            self.count = nnx.Variable(jnp.ones(8), **hooks)

        def __call__(self, x):
            self.count.set_value(self.count.get_value() + 1)
            return self.head(x * self.scale.get_value() * self.count.get_value())

    plain, model = Hooked(nnx.Rngs(0)), Hooked(nnx.Rngs(0))
    expected, gradient = nnx.value_and_grad(loss)(plain, BATCH)
    if door == "partition":
        pipeline = partition(model, 2, 1)
        state = pipeline.init(jax.random.key(0))
        (value, _), got = pipeline.value_and_grad(state, BATCH)
        state, _ = pipeline.step(state, BATCH)
        count = pipeline.parameters(state)["count"].get_raw_value()
    else:
        value, got = nnx.value_and_grad(jaxpipe.memory_encoded(loss))(model, BATCH)
        count = model.count.get_raw_value()
    np.testing.assert_allclose(value, expected, rtol=2 * FUSION)
    assert relative_l2(jax.tree.leaves(got), jax.tree.leaves(gradient)) < FUSION
    np.testing.assert_allclose(count, plain.count.get_raw_value(), rtol=2 * FUSION)


class Dense(nnx.Module):
    def __init__(self, width, rngs):
        self.dense = nnx.Linear(8, width, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


class Doubling(Dense):
    def __call__(self, x, doubled=False):
        return super().__call__(x) * (2 if doubled else 1)


class Asking(nnx.Module):
    """Calls a layer otherwise if it is of some class."""

    def __init__(self, rngs, is_doubling):
        self.layers, self.is_doubling = nnx.List([Doubling(8, rngs), Dense(5, rngs)]), is_doubling

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x, doubled=True) if self.is_doubling(layer) else layer(x))
        return x


ASKED = {
    "type": lambda layer: type(layer) is Doubling,
    "table": lambda layer: {Doubling: True}.get(type(layer), False),
    "signature": lambda layer: "doubled" in inspect.signature(layer.__call__).parameters,
}


@pytest.mark.parametrize("name", ASKED)
def test_modules_that_ask_for_the_class_of_a_layer(name):
    model = Asking(nnx.Rngs(0), ASKED[name])
    calls = Doubling.__call__, Dense.__call__
    expected, gradients = nnx.value_and_grad(loss)(model, BATCH)
    encoded = jaxpipe.memory_encoded(loss)
    pipeline = partition(model, 2, 1)
    (value, _), pipelined = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), BATCH)
    for result in ((value, pipelined), nnx.value_and_grad(encoded)(model, BATCH)):
        np.testing.assert_allclose(result[0], expected, rtol=2 * FUSION)
        assert relative_l2(result[1], gradients) < 2 * FUSION
    assert (Doubling.__call__, Dense.__call__) == calls


class KeepsIntermediate(nnx.Module):
    """Reads an ``nnx.Intermediate`` that it was made with, changes it if it is no perturbation, and makes another."""

    def __init__(self, rngs, kind):
        self.head, self.kept = nnx.Linear(8, 5, rngs=rngs), kind(jnp.ones(5))

    def __call__(self, x):
        x = self.head(x) + self.kept.get_value()
        if type(self.kept) is nnx.Intermediate:
            self.kept.set_value(self.kept.get_value() / 2)
        self.seen = nnx.Intermediate(x)
        return x


@pytest.mark.parametrize("kind", [nnx.Intermediate, nnx.Perturbation])
def test_intermediates_that_a_module_is_made_with_are_its_state(kind):
    def mean_loss(module, batch):
        return module(batch["x"]).mean()

    model = KeepsIntermediate(nnx.Rngs(0), kind)
    pipeline = jaxpipe.partition(
        model, mesh_of(1), BATCH, loss=mean_loss, optimizer=optax.sgd(0.1), num_microbatches=1, profile="analytic"
    )
    state, values = pipeline.init(jax.random.key(0)), []
    for _ in range(3):
        state, metrics = pipeline.step(state, BATCH)
        values.append(metrics["loss"])
    optimizer, expected = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), []
    for _ in range(3):
        value, gradients = nnx.value_and_grad(mean_loss)(model, BATCH)
        optimizer.update(model, gradients)
        expected.append(value)
    np.testing.assert_allclose(values, expected, rtol=2 * FUSION)
