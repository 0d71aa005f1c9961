"""Models as named variables; what they compute is compared with calling Flax directly."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import ScopeCollectionNotFound

from jaxpipe.errors import ModelError
from jaxpipe.models.bind import bind, needs_variables
from jaxpipe.models.bind_nnx import reseed
from tests.support.compare import assert_same_bits


X = jax.ShapeDtypeStruct((4, 3), jnp.float32)
KEY = jax.random.key(5)


def rows():
    return jax.random.normal(jax.random.key(1), X.shape)


def names(variables):
    return [v.name for v in variables]


def once(model, x):
    return model(x)


# Linen


class Counting(nn.Module):
    """Counts its calls, and adds noise."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("state", "count", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing():
            count.value += 1
        return nn.Dense(3)(x) + jax.random.normal(self.make_rng("dropout"), x.shape)


@pytest.mark.core
def test_linen_threads_state_and_keys_through_the_calls_of_a_loss():
    module = Counting()

    def loss(model, x):
        return model(model(x))

    bound = bind(module, loss, X)
    assert names(bound.parameters) == ["Dense_0/bias", "Dense_0/kernel"]
    assert names(bound.state) == ["state/count"]
    assert [v.aval.shape for v in bound.parameters] == [(3,), (3, 3)]
    assert bound.values is None

    parameters, state = bound.flatten(bound.make(KEY, jnp.zeros(X.shape)))
    plain = module.init(KEY, jnp.zeros(X.shape))
    assert_same_bits(bound.variable_tree(parameters, state), plain)
    assert_same_bits(bound.parameter_tree(parameters), plain["params"])

    result, new = bound.run(loss, parameters, state, KEY, rows())
    first, after = module.apply(plain, rows(), rngs={"dropout": KEY}, mutable=["state"])
    second, after = module.apply(
        {**plain, **after}, first, rngs={"dropout": jax.random.fold_in(KEY, 1)}, mutable=["state"]
    )
    assert_same_bits(result, second)
    assert [int(x) for x in new] == [int(after["state"]["count"])] == [2]
    # The same key twice would have given another result.
    assert not np.array_equal(second, module.apply({**plain, **after}, first, rngs={"dropout": KEY}, mutable=True)[0])


def test_linen_keys_of_three_calls():
    class Draw(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("p", nn.initializers.ones, ())
            return jax.random.key_data(self.make_rng("dropout"))

    def loss(model, x):
        return [model(x) for _ in range(3)]

    bound = bind(Draw(), loss, X)
    drawn, _ = bound.run(loss, [jnp.ones(())], [], KEY, rows())
    for got, key in zip(drawn, [KEY, jax.random.fold_in(KEY, 1), jax.random.fold_in(KEY, 2)], strict=True):
        assert_same_bits(got, Draw().apply({"params": {"p": 1.0}}, rows(), rngs={"dropout": key}))
    # A fresh run begins anew.
    assert_same_bits(bound.run(loss, [jnp.ones(())], [], KEY, rows())[0], drawn)


class AutoEncoder(nn.Module):
    def setup(self):
        self.encoder, self.decoder = nn.Dense(2), nn.Dense(3)

    def __call__(self, x):
        return self.decoder(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)


@pytest.mark.core
def test_linen_methods():
    def loss(model, x):
        z = model(x, method="encode")
        return model(z, method=AutoEncoder.decode) + z.sum()

    module = AutoEncoder()
    bound = bind(module, loss, X)
    assert names(bound.parameters) == ["decoder/bias", "decoder/kernel", "encoder/bias", "encoder/kernel"]
    parameters, _ = bound.flatten(bound.make(KEY, jnp.zeros(X.shape)))
    params = bound.parameter_tree(parameters)
    assert_same_bits(params["encoder"], module.init(KEY, rows(), method="encode")["params"]["encoder"])
    result, new = bound.run(loss, parameters, [], KEY, rows())
    z = module.apply({"params": params}, rows(), method="encode")
    assert_same_bits(result, module.apply({"params": params}, rows()) + z.sum())
    assert new == []
    # A loss that uses a part of the model has the variables of that part.
    part = bind(module, lambda model, x: model(x, method="encode"), X)
    assert names(part.parameters) == ["encoder/bias", "encoder/kernel"]


def test_linen_mapped_variables():
    """``nn.map_variables(init=True)`` makes its variables anew in any call that may change some."""

    class SignDense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.map_variables(nn.Dense, "params", lambda v: jax.tree.map(jnp.sign, v), init=True)(2)(x)

    bound = bind(SignDense(), once, X)
    parameters, _ = bound.flatten(bound.make(KEY, rows()))
    expected = SignDense().init(KEY, rows())
    assert_same_bits(bound.parameter_tree(parameters), expected["params"])
    result, new = bound.run(once, parameters, [], KEY, rows())
    assert_same_bits(result, SignDense().apply(expected, rows()))
    assert new == []


def test_values_are_not_lost_that_mapped_variables_keep_from_being_sown():
    """Plain Flax raises its own error for any ``mutable``, which sown values need."""

    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.map_variables(nn.Dense, "params", lambda v: jax.tree.map(jnp.sign, v), init=True)(2)(x)
            self.sow("losses", "square", jnp.square(x).mean())
            return x

    variables = {"params": Sowing().init(KEY, rows())["params"]}
    with pytest.raises(ScopeCollectionNotFound):
        Sowing().apply(variables, rows(), mutable=["losses"])
    with pytest.raises(ScopeCollectionNotFound):
        bind(Sowing(), lambda model, x: model(x).sum() + sum(model.variables.get("losses", {}).values()), X)


def test_linen_that_is_never_called():
    with pytest.raises(ModelError, match=r"The loss does not call the model.*Call model\(...\) in it"):
        bind(nn.Dense(3), lambda model, x: x.sum(), X)


def test_linen_given_variables():
    plain = nn.Dense(3).init(KEY, rows())
    bound = bind(nn.Dense(3), once, X, plain)
    assert_same_bits(bound.values, ([plain["params"]["bias"], plain["params"]["kernel"]], []))
    assert bound.make is None


# NNX


class Net(nnx.Module):
    def __init__(self, rngs, width=2):
        self.second = nnx.Linear(width, 3, rngs=rngs)
        self.first = nnx.Linear(3, width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, use_scale=False, use_bias=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(self.norm(self.first(x))))


def values_of(net):
    return {"first/kernel": net.first.kernel, "second/bias": net.second.bias, "second/kernel": net.second.kernel}


def assert_values(bound, parameters, net):
    expected = {name: variable[...] for name, variable in values_of(net).items()}
    assert_same_bits(dict(zip(names(bound.parameters), parameters, strict=True)), expected)


@pytest.mark.core
def test_nnx_module_keeps_its_values():
    net = Net(nnx.Rngs(3))
    bound = bind(net, once, X)
    assert names(bound.parameters) == ["first/kernel", "second/bias", "second/kernel"]
    assert names(bound.state) == ["norm/mean", "norm/var"]  # random streams are not state
    assert bound.make is None
    assert_values(bound, bound.values[0], net)
    assert [x.tolist() for x in bound.values[1]] == [[0, 0], [1, 1]]


def test_nnx_runs_as_the_module_does():
    net = Net(nnx.Rngs(3))
    bound = bind(net, once, X)
    result, new = bound.run(once, *bound.values, KEY, rows())
    # The module has one stream, forked for its one dropout layer: the first key in the order of paths.
    streams = nnx.state(net, nnx.RngState)
    nnx.update(net, reseed(streams, KEY))
    assert_same_bits(result, net(rows()))
    assert_same_bits(new, [net.norm.mean[...], net.norm.var[...]])
    assert new[0].any()
    assert not np.array_equal(result, bound.run(once, *bound.values, jax.random.key(6), rows())[0])
    # The bound model's own values did not change.
    assert [x.tolist() for x in bound.values[1]] == [[0, 0], [1, 1]]


@pytest.mark.core
@pytest.mark.parametrize(("factory", "width"), [(Net, 2), (functools.partial(Net, width=5), 5)])
def test_nnx_class_is_initialized_with_the_key(factory, width):
    assert not needs_variables(factory)
    bound = bind(factory, once, X)
    assert bound.values is None
    assert [v.aval.shape for v in bound.parameters] == [(3, width), (3,), (width, 3)]
    parameters, state = bound.flatten(bound.make(KEY, jnp.zeros(X.shape)))
    assert_values(bound, parameters, Net(nnx.Rngs(KEY), width))
    assert [x.shape for x in state] == [(width,), (width,)]


def test_abstract_nnx_module_cannot_be_initialized():
    abstract = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
    bound = bind(abstract, once, X)
    assert bound.values is None
    with pytest.raises(
        ModelError, match=r"abstract.*Give partition its class .* or pass pipeline.init\(key, variables"
    ):
        bound.flatten(bound.make(KEY, jnp.zeros(X.shape)))
    given = bind(abstract, once, X, Net(nnx.Rngs(4)))
    assert_values(given, given.values[0], Net(nnx.Rngs(4)))


@pytest.mark.core
def test_reseed_folds_in_the_place_of_each_stream():
    rngs = nnx.Rngs(params=0, dropout=1)
    rngs.dropout()  # the count is not zero any more
    fresh = reseed(nnx.state(rngs), KEY)
    assert_same_bits(fresh["dropout"]["key"][...], jax.random.fold_in(KEY, 0))
    assert_same_bits(fresh["params"]["key"][...], jax.random.fold_in(KEY, 1))
    assert [int(fresh[name]["count"][...]) for name in ("dropout", "params")] == [0, 0]
    assert fresh["dropout"]["count"][...].dtype == nnx.state(rngs)["dropout"]["count"][...].dtype
    assert int(rngs.dropout.count[...]) == 1  # the module itself did not change


# Functions


def scaled(variables, x, power=1):
    return (x @ variables["w"] * variables["scales"][variables["choice"]]) ** power


def tree():
    return {"w": jnp.ones((3, 2)), "scales": jnp.asarray([2.0, 3.0]), "choice": jnp.asarray(1)}


@pytest.mark.core
def test_partial():
    model = jax.tree_util.Partial(functools.partial(scaled, power=2), tree())
    assert not needs_variables(model)
    bound = bind(model, once, X)
    # Floating leaves are trained, others are state.
    assert [v.aval.shape for v in bound.parameters] == [(2,), (3, 2)]
    assert [n.rsplit("/", 1)[-1] for n in names(bound.parameters)] == ["scales", "w"]
    assert [n.rsplit("/", 1)[-1] for n in names(bound.state)] == ["choice"]
    assert_same_bits(bound.values, ([tree()["scales"], tree()["w"]], [tree()["choice"]]))
    result, new = bound.run(once, *bound.values, KEY, rows())
    assert_same_bits(result, model(rows()))
    assert_same_bits(new, [tree()["choice"]])
    again = bound.variable_tree(*bound.values)
    assert isinstance(again, jax.tree_util.Partial)
    assert_same_bits(again(rows()), model(rows()))


def test_function_with_variables():
    assert needs_variables(scaled)
    bound = bind(scaled, once, X, tree())
    assert (names(bound.parameters), names(bound.state)) == (["scales", "w"], ["choice"])
    result, _ = bound.run(lambda model, x: model(x, power=3), *bound.values, KEY, rows())
    assert_same_bits(result, scaled(tree(), rows(), power=3))
    # What optax sees has no leaf for the integer.
    assert_same_bits(bound.parameter_tree(bound.values[0]), {**tree(), "choice": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: {**v, "extra": jnp.ones(1)}, r"the model's 3 variables\. Unexpected: 0/0/extra \(float32\[1\]\)"),
        (lambda v: {**v, "w": jnp.ones((3, 9))}, r"0/0/w is float32\[3, 9\], the model's is float32\[3, 2\]"),
        (lambda v: {**v, "scales": v["scales"].astype(jnp.float16)}, r"scales is float16\[2\], the model's is float32"),
    ],
)
def test_variables_that_do_not_fit(change, message):
    model = jax.tree_util.Partial(scaled, tree())
    given = jax.tree_util.Partial(scaled, change(tree()))
    with pytest.raises(ModelError, match=message):
        bind(model, once, X, given)


class NumberOfPython(nnx.Module):
    """Keeps a number of Python in a variable."""

    def __init__(self):
        self.scale, self.count = nnx.Param(jnp.ones(2)), nnx.Variable(0)


@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (scaled, r"the function 'scaled', and its variables are not known\. Pass them to pipeline\.init"),
        (
            jax.tree_util.Partial(scaled, tree(), power=2),
            r"variable 1/power is 2 \(int\); variables are arrays\..*functools\.partial",
        ),
        (NumberOfPython(), r"variable count is 0 \(int\); variables are arrays\. Make it one with jax\.numpy\.asarray"),
        (3, r"partition was given 3 \(int\) as its model"),
        ({"w": 1}, r"\(dict\) as its model\. A model is a flax"),
    ],
)
def test_what_is_no_model(model, message):
    with pytest.raises(ModelError, match=message):
        bind(model, once, X)


class Writes(nnx.Module):
    """Writes the kernel of a layer, halved, or as it was."""

    def __init__(self, rngs, lifted=False, keeps=False):
        self.layer, self.lifted, self.keeps = nnx.Linear(3, 2, rngs=rngs), lifted, keeps

    def __call__(self, x):
        def call(layer, x):
            kernel = layer.kernel[...]
            layer.kernel[...] = kernel / 2
            x = layer(x)
            if self.keeps:
                layer.kernel[...] = kernel
            return x

        return (nnx.remat(call) if self.lifted else call)(self.layer, x)


class Changes(nnx.Module):
    """Gives a layer another kernel without writing the variable: by another one in its place, or by nnx.update."""

    def __init__(self, rngs, change):
        self.layer, self.change = nnx.Linear(3, 2, rngs=rngs), change

    def __call__(self, x):
        self.change(self.layer)
        return self.layer(x)


def replace(layer):
    layer.kernel = nnx.Param(layer.kernel[...] / 2)


def update(layer):
    nnx.update(layer, jax.tree.map(lambda x: x / 2, nnx.state(layer, nnx.Param)))


def checkpoint(layer, written):
    """Write back what a checkpoint by hand leaves of a layer: other arrays, whatever it has computed."""
    graphdef, state = nnx.split(layer)
    after = jax.checkpoint(lambda state: nnx.state(nnx.merge(graphdef, state)))(state)
    nnx.update(layer, nnx.filter_state(after, written))


def put_back(layer):
    arrays = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    update(layer)
    nnx.update(layer, arrays)


def run_once(model, keeps):
    """The result of a call, from flat variables."""
    bound = bind(model, once, X)
    run = functools.partial(bound.run, once, keeps=keeps)
    return jax.jit(lambda p, s: run(p, s, KEY, rows())[0])(*bound.values)


@pytest.mark.parametrize(
    "make",
    [
        Writes,
        functools.partial(Writes, lifted=True),
        lambda rngs: nnx.WeightNorm(nnx.Linear(3, 2, rngs=rngs), rngs=rngs),
        lambda rngs: nnx.SpectralNorm(nnx.Linear(3, 2, rngs=rngs), rngs=rngs),
        functools.partial(Changes, change=replace),
        functools.partial(Changes, change=update),
        functools.partial(Changes, change=functools.partial(checkpoint, written=...)),
    ],
    ids=["written", "lifted", "WeightNorm", "SpectralNorm", "replaced", "updated", "checkpointed"],
)
def test_a_loss_that_writes_parameters_is_refused(make):
    """Plain training goes on from what was written; a pipeline would drop it. Predictions drop what they leave."""
    model = make(nnx.Rngs(0))
    with pytest.raises(ModelError, match=r"The call writes the parameters? .*kernel.* Only the optimizer changes"):
        run_once(model, keeps=True)
    predicted = run_once(model, keeps=False)
    assert_same_bits(predicted, nnx.jit(once)(model, rows()))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(Writes, keeps=True),
        functools.partial(Changes, change=put_back),
        functools.partial(Changes, change=functools.partial(checkpoint, written=nnx.Not(nnx.Param))),
    ],
    ids=["written", "updated", "checkpointed"],
)
def test_a_parameter_that_a_call_leaves_as_it_was(make):
    model = make(nnx.Rngs(0))
    assert_same_bits(run_once(model, keeps=True), nnx.jit(once)(model, rows()))
