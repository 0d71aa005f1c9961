"""Labels of optimizers have the tree of the model; adapters train beside a module that is frozen, as in plain optax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.plain_training import train


KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 6))
OPTIONS = {"profile": "analytic", "num_microbatches": 2}


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("first", "second"):
            x = x + nn.Dense(6, name=name)(jnp.tanh(x))
        return nn.Dense(3, name="head")(x)


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.first, self.head = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.first(x)))


def square(model, x):
    return jnp.square(model(x)).mean()


def tuned(labels):
    return optax.multi_transform({"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels)


def by_path(tree):
    def label(path, _):
        return "trained" if "head" in jax.tree_util.keystr(path) else "frozen"

    return jax.tree_util.tree_map_with_path(label, tree)


def apply(variables, x):
    return Encoder().apply({"params": variables}, x)


VARIABLES = jax.jit(Encoder().init)(KEY, X)["params"]
PREFIX = {"first": "frozen", "second": "frozen", "head": "trained"}
#: A model, values if it needs them, and the labels that docs/training.md allows.
MODELS = {
    "linen": (Encoder(), None, [PREFIX, by_path]),
    "nnx": (Layers(nnx.Rngs(0)), None, [by_path(nnx.state(Layers(nnx.Rngs(0)), nnx.Param)), by_path]),
    "function": (apply, VARIABLES, [PREFIX, by_path]),
    "partial": (jax.tree_util.Partial(apply, VARIABLES), None, [by_path]),
}


@pytest.mark.parametrize("name", MODELS)
def test_labels_have_the_tree_of_the_model(name):
    model, variables, choices = MODELS[name]
    for labels in choices:
        pipeline = jaxpipe.partition(model, mesh_of(2), loss=square, optimizer=tuned(labels), **OPTIONS)
        state = pipeline.init(KEY, X, variables=variables)
        before = pipeline.parameters(state)
        after = pipeline.parameters(pipeline.step(state, X)[0])
        leaves = jax.tree_util.tree_leaves_with_path
        for (path, old), (_, new) in zip(leaves(before), leaves(after), strict=True):
            assert np.array_equal(old, new) is ("head" not in jax.tree_util.keystr(path))


def test_labels_of_another_tree_are_refused_with_the_rule():
    model = jax.tree_util.Partial(apply, VARIABLES)
    with pytest.raises(jaxpipe.PartitionError, match=r"the model's own tree .* as functions of it"):
        jaxpipe.partition(model, mesh_of(2), X, loss=square, optimizer=tuned(PREFIX), **OPTIONS)


def with_adapters(variables, x):
    def add_product(call, args, kwargs, context):
        adapter = variables["lora"].get("/".join(context.module.path))
        y = call(*args, **kwargs)
        return y if adapter is None else y + args[0] @ adapter["a"] @ adapter["b"]

    with nn.intercept_methods(add_product):
        return Encoder().apply({"params": variables["base"]}, x)


@pytest.mark.core
def test_adapters_train_beside_a_module_that_is_frozen():
    keys = jax.random.split(KEY, len(VARIABLES))
    lora = {
        name: {"a": jax.random.normal(key, (6, 2)), "b": jnp.zeros((2, layer["kernel"].shape[1]))}
        for key, (name, layer) in zip(keys, VARIABLES.items(), strict=True)
    }
    variables, optimizer = {"base": VARIABLES, "lora": lora}, tuned({"base": "frozen", "lora": "trained"})
    pipeline = jaxpipe.partition(with_adapters, mesh_of(2), loss=square, optimizer=optimizer, **OPTIONS)
    state = pipeline.init(KEY, X, variables=variables)
    for _ in range(3):
        state, _ = pipeline.step(state, X)
    after = pipeline.parameters(state)

    def plain(params, state, x, _):
        return square(lambda x: with_adapters(params, x), x), state

    _, expected, _ = train(plain, variables, None, optimizer, X, 2, 3)
    assert_same_bits(after["base"], jax.tree.map(np.asarray, VARIABLES))
    moved, wanted = (jax.tree.map(np.subtract, tree["lora"], lora) for tree in (after, expected))
    assert relative_l2(moved, wanted) < 10 * FUSION  # Adam divides by the root of squares, in three steps
    assert len(pipeline.plan.frozen.parameters) == len(jax.tree.leaves(VARIABLES))
