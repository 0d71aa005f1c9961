"""Initial values: the bits of plain initialization, where they depend on data too."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.plain_training import gradient_of_batch


KEY = jax.random.key(0)
X = 3 + 2 * jax.random.normal(jax.random.key(1), (16, 8))


class ActNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", lambda _: 1 / (x.std(0) + 1e-6))
        bias = self.param("bias", lambda _: -x.mean(0))
        return (x + bias) * scale


class Flow(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Dense(8)(ActNorm()(x))
        book = self.variable("codes", "book", lambda: x[:4])
        return x + book.value.mean()


def partition(stages, batch=X, **kwargs):
    settings = {"optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic"} | kwargs
    return jaxpipe.partition(
        Flow(), mesh_of(stages), batch, loss=lambda model, x: jnp.square(model(x)).mean(), **settings
    )


@pytest.mark.parametrize(
    ("stages", "runtime"),
    [(1, "mpmd"), pytest.param(2, "mpmd", marks=pytest.mark.core), (4, "mpmd"), (2, "spmd")],
)
def test_values_that_depend_on_the_batch(stages, runtime):
    plain = jax.tree.map(np.asarray, Flow().init(KEY, X))
    pipeline = partition(stages, runtime=runtime)
    for batch in (X, np.asarray(X)):
        assert_same_bits(pipeline.parameters(pipeline.init(KEY, batch)), plain)
    assert np.abs(plain["params"]["ActNorm_1"]["bias"]).min() > 0


def test_values_that_depend_on_a_batch_of_shapes_alone():
    zeros = jax.tree.map(np.asarray, Flow().init(KEY, jnp.zeros_like(X)))
    pipeline = partition(2)
    for batch in (None, jax.ShapeDtypeStruct(X.shape, X.dtype)):
        with pytest.warns(jaxpipe.InitialValuesWarning, match=r"ActNorm_0/bias.*depend on the batch.*Pass arrays"):
            state = pipeline.init(KEY, batch)
        assert_same_bits(pipeline.parameters(state), zeros)


def test_a_pipeline_that_is_planned_when_it_is_initialized():
    pipeline = partition(2, batch=None)
    assert_same_bits(pipeline.parameters(pipeline.init(KEY, X)), jax.tree.map(np.asarray, Flow().init(KEY, X)))


class Tied(nn.Module):
    """A decoder that reads the variables of the encoder."""

    def setup(self):
        self.layer, self.head = nn.Dense(6), nn.Dense(3)

    def encode(self, x):
        return jnp.tanh(self.layer(x))

    def decode(self, z):
        return z @ self.layer.variables["params"]["kernel"].T, self.head(z)

    def __call__(self, x):
        return self.decode(self.encode(x))


def test_a_method_reads_variables_of_the_call_before():
    def loss(model, x):
        decoded, z = model(x)[0], model(x, method="encode")
        return jnp.square(decoded - x).mean() + jnp.square(model(z, method="decode")[1]).mean()

    variables = Tied().init(KEY, X)

    def plain(variables, _, x, j):
        z = Tied().apply(variables, x, method="encode")
        decoded, values = Tied().apply(variables, z, method="decode")
        return jnp.square(decoded - x).mean() + jnp.square(values).mean(), None

    pipeline = jaxpipe.partition(
        Tied(), mesh_of(2), X, loss=loss, optimizer=optax.sgd(0.1), num_microbatches=4, profile="analytic"
    )
    state = pipeline.init(KEY)
    assert_same_bits(pipeline.parameters(state), jax.tree.map(np.asarray, variables))
    (value, _), gradients = pipeline.value_and_grad(state, X)
    expected, expected_gradients, _ = gradient_of_batch(plain, variables, None, X, 4)
    assert float(value) == pytest.approx(float(expected), rel=FUSION)
    assert relative_l2(gradients, expected_gradients["params"]) < FUSION


def test_values_that_depend_on_the_arguments_of_an_inner_call_are_refused_by_name():
    with pytest.raises(jaxpipe.ModelError, match=r"ActNorm_0/bias.*depend on the arguments.*Call the model outside"):
        jaxpipe.partition(
            Flow(),
            mesh_of(2),
            X,
            loss=lambda model, x: jnp.square(jax.jit(lambda x: model(x))(x)).mean(),
            optimizer=optax.sgd(0.1),
            num_microbatches=4,
            profile="analytic",
        )


@pytest.mark.parametrize("inside", [False, True])
def test_layers_of_a_scan_do_not_depend_on_what_they_hand_on(inside):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.relu(nn.Dense(8)(x)), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()(x, None)[0]

    def loss(model, x):
        return jnp.square(jax.jit(lambda x: model(x))(x) if inside else model(x)).mean()

    settings = {"optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic"}
    pipeline = jaxpipe.partition(Layers(), mesh_of(2), X, loss=loss, **settings)
    plain = jax.tree.map(np.asarray, Layers().init(KEY, X))
    assert_same_bits(pipeline.parameters(pipeline.init(KEY)), plain)


@pytest.mark.parametrize("kind", ["same", "shorter", "sown", "state"])
def test_a_module_is_traced_twice_unless_its_calls_do_other_than_its_initialization(kind):
    traced = []

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            traced.append(self.is_initializing())
            y = nn.Dense(8)(x)
            if kind == "sown" and not self.is_initializing():
                self.sow("intermediates", "mean", y.mean())
            if kind == "state" and not self.is_initializing():
                self.variable("seen", "mean", lambda: y.mean())
            return y[:, :4] if kind == "shorter" and self.is_initializing() else y

        @nn.compact
        def head(self, y):
            return nn.Dense(3, name="out")(y)

    def loss(model, x):
        return jnp.square(model(model(x), method="head")).mean()

    def plain(variables, x):
        y: Any = Net().apply(variables, x, mutable=["intermediates", "seen"])
        out: Any = Net().apply(variables, y[0], method="head")
        return jnp.square(out).mean()

    pipeline = jaxpipe.partition(
        Net(), mesh_of(2), X, loss=loss, optimizer=optax.sgd(0.1), num_microbatches=1, profile="analytic"
    )
    assert (traced == [True, False]) is (kind == "same")
    state = pipeline.init(KEY, X)
    parameters = pipeline.parameters(state)
    assert parameters["params"]["out"]["kernel"].shape == (8, 3)
    (value, _), gradients = pipeline.value_and_grad(state, X)
    expected, expected_gradients = jax.jit(jax.value_and_grad(plain))(parameters, X)
    assert_same_bits(value, expected)
    assert_same_bits(gradients, expected_gradients["params"])


def test_a_module_that_returns_an_array_of_numpy_beside_its_result():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x), np.arange(3)

    def loss(model, x):
        y, weights = model(x)
        return jnp.square(y * weights).mean()

    settings = {"optimizer": optax.sgd(0.1), "num_microbatches": 1, "profile": "analytic"}
    pipeline = jaxpipe.partition(Net(), mesh_of(1), X, loss=loss, **settings)
    state = pipeline.init(KEY)
    variables = pipeline.parameters(state)
    assert_same_bits(variables, jax.tree.map(np.asarray, Net().init(KEY, X)))
    (_, _), gradients = pipeline.value_and_grad(state, X)
    expected = jax.jit(jax.grad(lambda v: loss(lambda x: Net().apply(v, x), X)))(variables)
    assert relative_l2(gradients, expected["params"]) < FUSION


class ByMethods(nn.Module):
    """A method that returns something else while it is initialized, on which the next call depends."""

    def setup(self):
        self.first, self.second, self.third = nn.Dense(4), nn.Dense(4), nn.Dense(4)

    def encode(self, x, dtype):
        y = self.first(x.astype(dtype))
        return y if self.is_initializing() else (y, jnp.tanh(y))

    def plainly(self, y):
        return self.second(y)

    def both(self, ys):
        return self.third(sum(ys))


def test_methods_and_types_are_arguments_of_calls():
    def loss(model, x):
        y = model(x, dtype=x.dtype, method=ByMethods.encode)
        return model(y, method=ByMethods.both if isinstance(y, tuple) else ByMethods.plainly).mean()

    def initial(module, x):
        y = module.encode(x, x.dtype)
        return module.both(y if isinstance(y, tuple) else (y, y))

    settings = {"optimizer": optax.sgd(0.1), "num_microbatches": 1, "profile": "analytic"}
    pipeline = jaxpipe.partition(ByMethods(), mesh_of(1), X, loss=loss, **settings)
    state = pipeline.init(KEY)
    variables = pipeline.parameters(state)
    assert variables["params"].keys() == ByMethods().init(KEY, X, method=initial)["params"].keys()
    (value, _), _ = pipeline.value_and_grad(state, X)
    assert_same_bits(value, jax.jit(lambda v: loss(lambda x, **k: ByMethods().apply(v, x, **k), X))(variables))
