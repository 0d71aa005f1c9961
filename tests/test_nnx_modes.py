"""NNX modules in Flax's modes (graphs or trees, references) change as undecorated ones do, or are refused."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.meshes import mesh_of


X = jax.random.normal(jax.random.key(0), (16, 4))


class Net(nnx.Module):
    """A network whose calls change running statistics, counts of a stream, and a variable of its own."""

    def __init__(self, rngs, **kind):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()), **kind)

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


@jaxpipe.memory_encoded
class Encoded(Net):
    pass


def call(model):
    return model(X)


def compiled(model):
    return nnx.jit(lambda model, x: model(x))(model, X)


def differentiate(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        bound = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.square(bound(X)).sum(), nnx.state(bound, nnx.Not(nnx.Param))

    (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    nnx.update(model, state)
    return value, gradients


def differentiated(model):
    return nnx.jit(differentiate)(model)


def arrays(tree):
    def array(x):
        x = x[...] if isinstance(x, jax.Ref) else x
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return list(map(array, jax.tree.leaves(tree)))


def assert_close(actual, expected):
    """Compare arrays; XLA fuses a program otherwise than single operators, and a decorated one than a plain one."""
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


MODES = {
    "graph": lambda: nnx.set_graph_mode(True),
    "tree": lambda: nnx.set_graph_mode(False),
    "tree inside": contextlib.nullcontext,
}


@pytest.mark.versions
@pytest.mark.parametrize("use", [call, compiled, differentiated])
@pytest.mark.parametrize("mode", MODES)
def test_modules_change_as_without_the_decorator_in_each_mode(mode, use):
    results = []
    for cls in (Net, Encoded):
        with MODES[mode]():
            model = cls(nnx.Rngs(0))
            if mode == "tree inside":
                with nnx.set_graph_mode(False):
                    result = use(model)
            else:
                result = use(model)
            results.append(arrays([result, nnx.state(model)]))
    assert float(model.calls[...]) == 1
    assert_close(results[1], results[0])


@pytest.mark.versions
def test_a_variable_by_reference_is_written():
    model = Encoded(nnx.Rngs(0), ref=True)
    for count, use in enumerate((call, compiled), 1):
        use(model)
        assert float(model.calls[...]) == count


def test_a_budget_and_stages_keep_state_of_trees():
    with nnx.set_graph_mode(False):
        models = [cls(nnx.Rngs(0)) for cls in (Net, Encoded)]
        expected = differentiated(models[0])
        step = jaxpipe.jit(differentiate, memory="16MiB")
        assert_close(arrays(step(models[1])), arrays(expected))
        assert_close(arrays(nnx.state(models[1])), arrays(nnx.state(models[0])))

        options = {"optimizer": optax.sgd(0.1), "num_microbatches": 2, "profile": "analytic"}
        pipeline = jaxpipe.partition(Net, mesh_of(2), X, loss=lambda model, x: model(x).mean(), **options)
        state, _ = pipeline.step(pipeline.init(jax.random.key(0)), X)
        assert float(pipeline.parameters(state)["calls"].get_value()) == 2


@pytest.mark.versions
@pytest.mark.parametrize("kind", ["hijax", "ref"])
def test_kinds_of_variables_that_change_while_jax_runs_are_refused(kind):
    message = rf"variable .*calls was made with {kind}=True, .*nnx\.vars_as\(module, {kind}=False\)"
    options = {"loss": lambda model, x: model(x).mean(), "optimizer": optax.sgd(0.1), "profile": "analytic"}
    with pytest.raises(jaxpipe.ModelError, match=message):
        jaxpipe.partition(Net(nnx.Rngs(0), **{kind: True}), mesh_of(1), X, **options)
    if kind == "hijax":
        with pytest.raises(jaxpipe.ModelError, match=message):
            Encoded(nnx.Rngs(0), hijax=True)(X)
