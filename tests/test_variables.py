"""Variables in any tree of them reach the model; what does not fit is listed by path."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import jaxpipe
from jaxpipe import ModelError
from jaxpipe.models.variable_trees import select
from tests.support.compare import assert_same_bits


KEY = jax.random.key(0)
X = jnp.ones((8, 3))


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


class Net(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x, train=True):
        start = nn.initializers.lecun_normal()
        start = nn.with_partitioning(start, (None, "model")) if self.boxed else start
        return nn.Dense(2)(nn.BatchNorm(not train)(nn.Dense(4, kernel_init=start)(x)))


def pipeline_of(model, batch=X):
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    options = {"optimizer": optax.sgd(0.1), "profile": "analytic", "num_microbatches": 2}
    return jaxpipe.partition(model, mesh, batch, loss=lambda model, x: model(x).mean(), **options)


@pytest.fixture(scope="module")
def layered():
    return pipeline_of(Layers)


@pytest.fixture(scope="module")
def net():
    return pipeline_of(Net())


def text_keys(tree):
    return {str(k): text_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def without_random(pure):
    return {name: value for name, value in pure.items() if name != "dropout"}


@pytest.mark.core
@pytest.mark.parametrize(
    "tree_of",
    [
        lambda module: module,
        nnx.state,
        lambda module: nnx.state(module, nnx.Not(nnx.RngState)),
        lambda module: nnx.to_pure_dict(nnx.state(module)),
        lambda module: without_random(nnx.to_pure_dict(nnx.state(module))),
        lambda module: text_keys(without_random(nnx.to_pure_dict(nnx.state(module)))),
        lambda module: jax.tree.map(
            lambda x: np.asarray(x, np.float64), without_random(nnx.to_pure_dict(nnx.state(module)))
        ),
    ],
    ids=["module", "state", "variables", "pure", "pure-no-random", "text-keys", "float64"],
)
def test_nnx_variables_in_any_tree(layered, tree_of):
    module = Layers(nnx.Rngs(7))
    parameters = layered.parameters(layered.init(KEY, variables=tree_of(module)))
    wanted = nnx.state(module, nnx.Not(nnx.RngState))
    assert_same_bits(jax.tree.leaves(parameters), jax.tree.leaves(wanted))


@pytest.mark.core
@pytest.mark.parametrize("wrap", [lambda v: v, freeze, lambda v: Net().bind(v)], ids=["dict", "frozen", "bound"])
def test_linen_variables_in_any_tree(net, wrap):
    variables = Net().init(jax.random.key(7), X)
    parameters = net.parameters(net.init(KEY, variables=wrap(variables)))
    assert_same_bits(jax.tree.leaves(parameters), jax.tree.leaves(variables))
    assert jax.tree.structure(parameters) == jax.tree.structure(variables)


@pytest.mark.core
@pytest.mark.parametrize("planned", [True, False], ids=["planned-before", "planned-in-init"])
def test_linen_parameters_without_their_level(planned):
    """As Hugging Face models keep them in ``model.params``."""
    module = nn.Sequential([nn.Dense(4), nn.Dense(2)])
    variables = module.init(jax.random.key(7), X)
    pipeline = pipeline_of(module, X if planned else None)
    parameters = pipeline.parameters(pipeline.init(KEY, X, variables=freeze(variables["params"])))
    assert_same_bits(jax.tree.leaves(parameters), jax.tree.leaves(variables))
    assert jax.tree.structure(parameters) == jax.tree.structure(variables)


@pytest.mark.parametrize("boxed", [True, False], ids=["boxed-model", "boxed-variables"])
def test_boxes_around_arrays_are_no_part_of_their_path(boxed):
    pipeline = pipeline_of(Net(boxed))
    variables = Net(not boxed).init(jax.random.key(7), X)
    parameters = pipeline.parameters(pipeline.init(KEY, variables=variables))
    assert_same_bits(jax.tree.leaves(parameters), jax.tree.leaves(variables))
    assert isinstance(parameters["params"]["Dense_1"]["kernel"], nn.Partitioned) == boxed


def test_a_functions_variables_without_what_wraps_them():
    weights = {"a": jnp.ones((3, 4)), "b": 2 * jnp.ones((4, 2))}
    model = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], weights)
    pipeline = pipeline_of(model)
    other = jax.tree.map(lambda x: x + 1, weights)
    parameters = pipeline.parameters(pipeline.init(KEY, variables=other))
    assert_same_bits(jax.tree.leaves(parameters), jax.tree.leaves(other))


def test_a_state_keeps_its_values_when_the_arrays_that_were_given_change():
    memory = np.zeros(64 + 4 * 3 * 2, np.uint8)  # XLA reads arrays that begin at a multiple of 64 bytes where they lie
    start = -memory.ctypes.data % 64
    weights = memory[start : start + 4 * 3 * 2].view(np.float32).reshape(3, 2)
    weights[:] = 1.0
    pipeline = pipeline_of(lambda weights, x: x @ weights)
    state = pipeline.init(KEY, X, variables=weights)
    weights[:] = 2.0
    np.testing.assert_array_equal(pipeline.parameters(state), np.ones((3, 2)))


def test_variables_that_do_not_fit_are_listed(layered, net):
    pure = nnx.to_pure_dict(nnx.state(Layers(nnx.Rngs(0))))
    pure["layers"][2] = pure["layers"].pop(1)
    pure["layers"][0]["kernel"] = jnp.ones((3, 5))
    message = (
        r"the model's 8 variables\. Missing: layers/1/bias \(float32\[2\]\), layers/1/kernel \(float32\[4, 2\]\)\. "
        r"Unexpected: layers/2/bias \(float32\[2\]\), .*\. Of another shape or dtype: layers/0/kernel is "
        r"float32\[3, 5\], the model's is float32\[3, 4\]\. Pass a tree"
    )
    with pytest.raises(ModelError, match=message):
        layered.init(KEY, variables=pure)
    variables = Net().init(KEY, X)
    with pytest.raises(ModelError, match=r"Missing: batch_stats/BatchNorm_0/mean \(float32\[4\]\), batch_stats/.*var"):
        net.init(KEY, variables=variables["params"])
    with pytest.raises(
        ModelError, match=r"params/Dense_0/bias is 0 \(int\), which is no array, the model's is float32"
    ):
        net.init(KEY, variables={**variables, "params": {**variables["params"], "Dense_0": {"kernel": X, "bias": 0}}})


class Counted(nn.Module):
    """Its state begins as numbers of Python, which Module.init returns as they are."""

    @nn.compact
    def __call__(self, x):
        calls, peak = self.variable("seen", "calls", lambda: 0), self.variable("seen", "peak", lambda: 0.0)
        if not self.is_initializing():
            calls.value, peak.value = calls.value + 1, jnp.maximum(peak.value, jnp.abs(x).max())
        return nn.Dense(2)(nn.Dense(4)(x)) * calls.value


def test_numbers_of_python_that_a_module_begins_with_are_arrays():
    variables = Counted().init(KEY, X)
    assert variables["seen"] == {"calls": 0, "peak": 0.0}
    pipeline = pipeline_of(Counted())
    state, metrics = pipeline.step(pipeline.init(KEY, variables=variables), X)
    first, new = Counted().apply(variables, X[:4], mutable=["seen"])
    second, new = Counted().apply({**variables, **new}, X[4:], mutable=["seen"])
    np.testing.assert_allclose(metrics["loss"], (first.mean() + second.mean()) / 2, rtol=1e-6)
    assert_same_bits(pipeline.parameters(state)["seen"], jax.tree.map(jnp.asarray, new["seen"]))
    with pytest.raises(ModelError, match=r"seen/calls is 0\.5 \(float\), which is no array, the model's is int32"):
        pipeline.init(KEY, variables={**variables, "seen": {"calls": 0.5, "peak": 0}})


def test_a_long_list_is_cut():
    expected = {(str(k),): jax.ShapeDtypeStruct((), jnp.float32) for k in range(8)}
    with pytest.raises(ModelError, match=r"Missing: 0 \(float32\[\]\), .*, 4 \(float32\[\]\) and 3 more\. Pass"):
        select({}, expected)
