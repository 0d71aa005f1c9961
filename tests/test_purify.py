from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe import ModelError, memory_encoded
from jaxpipe.models.purify_nnx import purify
from tests.support.compare import FUSION, assert_same_bits, relative_l2


class Tied(nnx.Module):
    """An embedding that is also the last layer, with every kind of variable."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(5, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.table = self.embed.embedding

    def __call__(self, rows):
        x = self.dropout(self.norm(self.blocks[0](self.embed(rows))))
        self.seen = nnx.BatchStat(x.mean())
        return x @ self.table.T


@pytest.fixture
def model():
    return Tied(nnx.Rngs(0))


@pytest.mark.core
def test_parameters_and_names_in_the_models_own_layout(model):
    call = purify(model, jnp.arange(3))
    assert dict(zip(call.names, zip(call.parameters, call.held, strict=True), strict=True)) == {
        "blocks/0/bias": (True, True),
        "blocks/0/kernel": (True, True),
        "dropout/rngs/count": (False, True),
        "dropout/rngs/key": (False, True),
        "embed/embedding": (True, True),
        "norm/bias": (True, True),
        "norm/mean": (False, True),
        "norm/scale": (True, True),
        "norm/var": (False, True),
        "1": (False, False),
    }
    leaves = dict(zip(call.names, call.leaves, strict=True))
    assert np.array_equal(leaves["embed/embedding"], model.embed.embedding[...])  # under the first name that it has


def test_state_is_written_back_and_new_variables_are_added(model):
    other = Tied(nnx.Rngs(0))
    rows = jnp.arange(3)
    expected = other(rows)
    call = purify(model, rows)
    outputs = call.function(*call.leaves)
    assert not hasattr(model, "seen") and int(model.dropout.rngs.count[...]) == 0
    assert_same_bits(call.finish(outputs), expected)
    assert_same_bits(nnx.state(model), nnx.state(other))
    assert int(model.dropout.rngs.count[...]) == 1 and hasattr(model, "seen")
    assert model.table is model.embed.embedding


def test_only_what_changed_is_returned(model):
    call = purify(lambda m, x: m.blocks[0](x), model, jnp.ones((1, 4)))
    assert len(jax.eval_shape(call.function, *call.leaves)) == 1


@pytest.mark.core
def test_tied_gradients_through_the_decorator(model):
    def loss(m, rows):
        return (m(rows) ** 2).sum()

    encoded = memory_encoded(Tied)(nnx.Rngs(0))
    rows = jnp.arange(3)
    expected, actual = nnx.grad(loss)(model, rows), nnx.grad(loss)(encoded, rows)
    # Eager: some of JAX's functions are jitted, ours run alone. The bias before BatchNorm has a true gradient of zero.
    assert relative_l2(jax.tree.leaves(actual), jax.tree.leaves(expected)) < 1e-6


def test_two_modules_that_share_a_part():
    shared = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    class Part(nnx.Module):
        def __init__(self, linear):
            self.linear = linear

    first, second = Part(shared), Part(shared)
    call = purify(lambda a, b, x: a.linear(b.linear(x)), first, second, jnp.ones((1, 2)))
    assert sum(call.parameters) == 2
    assert call.names[:2] == ("0/linear/bias", "0/linear/kernel")


class Changing(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.calls, self.mean, self.old = 0, nnx.data(None), nnx.Intermediate(jnp.zeros(4))


def counts(model):
    model.calls += 1
    return model.calls


def keeps_an_array(model):
    old, model.mean = model.mean, model.first.kernel.mean()
    return 1.0 if old is None else old


def takes_a_variable_away(model):
    return 1.0 if len(nnx.pop(model, nnx.Intermediate)) else 2.0


def has_one_layer_twice(model):
    model.first, model.third = model.second, model.first
    return model.third(jnp.ones(4)).sum()


@pytest.mark.parametrize(
    "change", [counts, keeps_an_array, takes_a_variable_away, has_one_layer_twice, nnx.Module.eval]
)
def test_a_call_changes_a_module_as_under_nnx_grad(change):
    def loss(model, x):
        factor = change(model)
        return (model.second(jnp.tanh(model.first(x))) ** 2).mean() * (1.0 if factor is None else factor)

    def two_steps(loss):
        model, x = Changing(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (8, 4))
        return model, [jax.tree.leaves(nnx.value_and_grad(loss)(model, x)) for _ in range(2)]

    (model, steps), (expected, plain_steps) = two_steps(memory_encoded(loss)), two_steps(loss)
    assert relative_l2(steps, plain_steps) < 1e-6
    graphdef, state = nnx.split(model)
    expected_graphdef, expected_state = nnx.split(expected)
    assert graphdef == expected_graphdef
    assert_same_bits(state, expected_state)


def test_a_module_of_an_outer_transformation_stays_untouched_by_one_that_changes():
    def gradients(decorate):
        teacher, x = nnx.Linear(4, 4, rngs=nnx.Rngs(1)), jax.random.normal(jax.random.key(1), (8, 4))

        @decorate
        def loss(model, teacher, x):
            return counts(model) * ((model.first(x) - teacher(x)) ** 2).mean()

        return nnx.grad(lambda model: loss(model, teacher, x))(Changing(nnx.Rngs(0)))

    assert_same_bits(gradients(memory_encoded), gradients(lambda loss: loss))


def test_variables_by_themselves_change_as_under_nnx_grad():
    def loss(scale, counts, x):
        counts["calls"][...] += 1
        scale[...] *= 2
        return (scale[...] * counts["calls"][...] * x).sum()

    def two_gradients(loss):
        scale, counts = nnx.Param(jnp.float32(2)), {"calls": nnx.Variable(jnp.float32(0))}
        return [nnx.grad(loss)(scale, counts, jnp.arange(3.0)) for _ in range(2)], scale, counts

    assert_same_bits(*map(jax.tree.leaves, (two_gradients(memory_encoded(loss)), two_gradients(loss))))
    call = purify(loss, nnx.Param(jnp.float32(2)), {"calls": nnx.Variable(jnp.float32(0))}, jnp.arange(3.0))
    assert call.names == ("0", "1['calls']", "2") and call.parameters == (True, False, False)


def test_arrays_in_a_container_are_held_and_bare_arrays_are_not():
    call = purify(lambda p, x, *, flag: x, {"w": jnp.ones(2)}, jnp.ones(3), flag=True)
    assert dict(zip(call.names, call.held, strict=True)) == {"0['w']": True, "1": False}


@pytest.mark.parametrize("is_linen", [True, False])
def test_a_result_with_arrays_that_jax_cannot_see_is_refused_until_its_class_is_a_pytree(is_linen):
    @dataclass
    class Output:
        logits: jax.Array
        kind: str

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Output(jnp.square(self.param("w", nn.initializers.ones, 3) * x), "net")

    def function(variables, x):
        return Output(jnp.square(variables["params"]["w"] * x), "function")

    module, x = memory_encoded(Net)(), jnp.arange(3.0)
    call = module.apply if is_linen else memory_encoded(function)
    gradient = jax.jit(jax.grad(lambda w: call({"params": {"w": w}}, x).logits.sum()))
    with pytest.raises(ModelError, match=r"class Output, which is no pytree, with traced arrays in it \(logits\)"):
        gradient(jnp.ones(3))
    jax.tree_util.register_dataclass(Output, ["logits"], ["kind"])
    assert gradient(jnp.ones(3)).tolist() == [0, 2, 8]  # of (w x)^2 with respect to w


def test_modules_run_under_their_paths(model):
    call = purify(model, jnp.arange(3))
    paths = {str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(call.function)(*call.leaves).eqns}
    assert {"Tied", "Tied/embed", "Tied/blocks/0", "Tied/norm", "Tied/dropout"} <= paths


def test_no_tracer_outlives_the_call_of_a_decorated_module():
    """The new state that a call leaves in a module holds what is unchanged as it was outside."""

    def gradients(cls):
        return nnx.grad(lambda model: (model(jnp.arange(3)) ** 2).sum())(cls(nnx.Rngs(0)))

    expected = gradients(Tied)
    with jax.checking_leaks():
        assert relative_l2(gradients(memory_encoded(Tied)), expected) < FUSION
