"""First tries of new users: each case works, or its error says what was passed, the rule and the fix.

No message shows a private class, a tree definition or words of JAX's own.
"""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe import (
    BatchError,
    MemoryBudgetError,
    ModelError,
    PartitionError,
    ScheduleError,
    schedules,
)
from tests.support.compare import assert_same_bits
from tests.support.meshes import mesh_of, named_mesh
from tests.support.two_layers import mean, two_layers, untouched


KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (8, 3))


WEIGHTS = {"a": jnp.full((3, 4), 0.5), "b": jnp.full((4, 2), 0.25)}
FUNCTION = jax.tree_util.Partial(two_layers, WEIGHTS)


class Net(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(self.width)(x))
        return nn.Dense(2)(x)

    def half(self, x):
        return x / 2


class Wide(nnx.Module):
    def __init__(self, width, *, rngs):
        self.a, self.b = nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


class WithOptimizer(Wide):
    def __init__(self, *, rngs):
        super().__init__(4, rngs=rngs)
        self.optimizer = nnx.Optimizer(Wide(4, rngs=rngs), optax.adam(1e-3), wrt=nnx.Param)


class PretrainedNet:
    """As Hugging Face wraps a Linen module; its ``params`` may be missing."""

    module = Net()

    @property
    def params(self):
        raise ValueError("no parameters yet")

    def __call__(self, x):
        raise NotImplementedError


NET, WIDE = Net(), functools.partial(Wide, 4)
VARIABLES = NET.init(KEY, X)
NNX_OPTIMIZER = nnx.Optimizer(WIDE(rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)


def partition(model=FUNCTION, mesh=None, batch=X, **kwargs):
    kwargs = {"loss": mean, "optimizer": optax.sgd(0.1), "profile": "analytic", "num_microbatches": 2, **kwargs}
    return jaxpipe.partition(model, mesh_of(2) if mesh is None else mesh, batch, **kwargs)


def check(raised, *words):
    """Check that an error says some words, and nothing of what none may say."""
    text = str(raised.value)
    for word in words:
        assert word in text, text
    assert not re.search(r"PyTreeDef|\b_[A-Z]\w+|_src|Tracer|object at 0x|ShapedArray", text), text
    assert len(text) < 700, text


# Arguments of partition, before the model is traced


def options(**settings):
    return {"options": jaxpipe.PlanOptions(**settings)}


ARGUMENTS = {
    "optimizer none": (PartitionError, {"optimizer": None}, ["optimizer= is None", "optax.adam(1e-3)"]),
    "optimizer of nnx": (
        PartitionError,
        {"optimizer": NNX_OPTIMIZER},
        ["optimizer= is an nnx.Optimizer", "Pass the optax transformation", "optimizer=tx"],
    ),
    "optimizer not called": (
        PartitionError,
        {"optimizer": optax.adam},
        ["optimizer= is the function 'adam'", "Call it: optimizer=adam(...)"],
    ),
    "optimizer a name": (PartitionError, {"optimizer": "adam"}, ["'adam' (str)", "optax.GradientTransformation"]),
    "optimizer a rate": (PartitionError, {"optimizer": 1e-3}, ["0.001 (float)", "optax.adam(1e-3)"]),
    "loss none": (PartitionError, {"loss": None}, ["loss= is None", "loss=lambda model, batch"]),
    "loss a name": (PartitionError, {"loss": "mse"}, ["loss= is 'mse' (str)", "loss=lambda model, batch"]),
    "loss of one": (PartitionError, {"loss": lambda m: 0.0}, ["(m)", "called with two", "loss(model, batch)"]),
    "loss of three": (PartitionError, {"loss": lambda m, x, y: 0.0}, ["(m, x, y)", "functools.partial"]),
    "evaluate a name": (PartitionError, {"evaluate": "accuracy"}, ["evaluate= is", "evaluate=lambda model, batch"]),
    "predict a number": (PartitionError, {"predict": 3}, ["predict= is 3 (int)", "predict=lambda model, batch"]),
    "count a text": (BatchError, {"num_microbatches": "4"}, ["num_microbatches='4' (str)", "num_microbatches=4."]),
    "count a float": (BatchError, {"num_microbatches": 4.0}, ["num_microbatches=4.0 (float)", "num_microbatches=4."]),
    "count a flag": (BatchError, {"num_microbatches": True}, ["num_microbatches=True (bool)", "whole number"]),
    "memory a list": (MemoryBudgetError, {"memory": [1]}, ["memory=[1]", "'8GiB' or '500MB'"]),
    "memory a flag": (MemoryBudgetError, {"memory": True}, ["memory=True", "'8GiB' or '500MB'"]),
    "memory without a unit": (MemoryBudgetError, {"memory": 8}, ["memory=8 is 8 bytes", "Did you mean memory='8GB'?"]),
    "memory of many megabytes": (MemoryBudgetError, {"memory": "640"}, ["memory='640'", "memory='640MB'?"]),
    "host memory without a unit": (
        MemoryBudgetError,
        {"memory": "1MB", **options(host_memory="64")},
        ["host_memory='64' is 64 bytes", "host_memory='64GB'?"],
    ),
    "gigabytes a second": (
        PartitionError,
        {"network": jaxpipe.Network.from_nodes([jaxpipe.Node(2, bandwidth_bytes_per_second=300)])},
        ["bandwidth_bytes_per_second=300", "300 gigabytes a second", "300e9"],
    ),
    "megabytes a second": (
        PartitionError,
        {"network": jaxpipe.Network.uniform(2, 12500)},
        ["bandwidth_bytes_per_second=12500", "12500 megabytes a second", "12500e6"],
    ),
    "gigabytes of memory": (
        PartitionError,
        {"network": jaxpipe.Network([[0, 1e9], [1e9, 0]], memory_bytes=(80, 80))},
        ["memory_bytes=80", "80 gigabytes of memory", "80e9"],
    ),
    "host memory": (MemoryBudgetError, options(host_memory="many"), ["host_memory='many'", "'8GiB' or '500MB'"]),
    "raise a text": (PartitionError, options(allow_over_budget="yes"), ["allow_over_budget='yes'", "True or False"]),
    "schedule unknown": (PartitionError, {"schedule": "dualpipe"}, ["schedule='dualpipe'", "'one_f_one_b'", "'gpipe'"]),
    "schedule none": (PartitionError, {"schedule": None}, ["schedule=None", "'auto'"]),
    "schedule a table": (
        PartitionError,
        {"schedule": schedules.gpipe(2, 2)},
        ["schedule= is a table", "Pass a function"],
    ),
    "schedule of one": (
        PartitionError,
        {"schedule": lambda p: None},
        ["(p)", "schedule(num_devices, num_microbatches)"],
    ),
    "profile a file": (PartitionError, {"profile": "profile.json"}, ["profile='profile.json'", "jaxpipe.Profile"]),
    "network a matrix": (PartitionError, {"network": np.ones((2, 2))}, ["network is ndarray", "jaxpipe.Network"]),
    "storage unknown": (ModelError, {"storage": "best"}, ["storage='best'", "'smallest'"]),
    "storage none": (ModelError, {"storage": None}, ["storage=None", "'fast'"]),
    "storage a number": (ModelError, {"storage": {"Net": 3}}, ["storage=3", "'fast'"]),
    "solver": (PartitionError, options(solver="foo"), ["solver='foo'", "solver='HIGHS'"]),
    "time a text": (
        PartitionError,
        options(time_limit="10"),
        ["time_limit='10'", "seconds, 0 or more", "time_limit=10.0"],
    ),
    "time below 0": (PartitionError, options(time_limit=-1), ["time_limit=-1", "seconds, 0 or more"]),
    "exchange": (PartitionError, {"gradient_exchange": "sparse"}, ["gradient_exchange='sparse'", "block_sparse"]),
    "not finite": (PartitionError, options(on_nonfinite="warn"), ["on_nonfinite='warn'", "'raise', 'skip'"]),
    "replicate": (
        PartitionError,
        options(devices_per_stage="2"),
        ["devices_per_stage='2'", "a number of devices for every stage"],
    ),
    "compile a text": (PartitionError, options(compile="no"), ["compile='no'", "True or False"]),
    "measure again": (PartitionError, options(fresh_profile="no"), ["fresh_profile='no'", "True or False"]),
    "unroll": (PartitionError, options(unroll_scans="yes"), ["unroll_scans='yes'", "the number of iterations"]),
    "mesh a list": (PartitionError, {"mesh": ["cpu"]}, ["mesh is list", "jax.make_mesh((4,), ('stage',))"]),
    "mesh of other axes": (
        PartitionError,
        {"mesh": named_mesh(tensor=2)},
        ["the axes ('tensor',)", "'stage' (required)", "'pp'", "'dp'"],
    ),
    "mesh with two of stages": (
        PartitionError,
        {"mesh": named_mesh(pp=2, stage=2)},
        ["the axes ('pp', 'stage')", "'pp' and 'stage' are both taken for 'stage'"],
    ),
    "model none": (ModelError, {"model": None}, ["was given None", "flax.linen.Module"]),
    "model a tree": (ModelError, {"model": VARIABLES}, ["a value of type dict", "jax.tree_util.Partial"]),
    "model a linen class": (ModelError, {"model": Net}, ["the Linen class Net", "partition(Net(...), ...)"]),
    "model an optimizer": (ModelError, {"model": NNX_OPTIMIZER}, ["an nnx.Optimizer", "Pass the nnx.Module"]),
    "model of hugging face": (
        ModelError,
        {"model": PretrainedNet()},
        ["a PretrainedNet", "partition(model.module, ...)", "variables={'params': model.params}"],
    ),
    "model a class with arguments": (
        ModelError,
        {"model": Wide},
        ["Wide(rngs=...)", "'width'", "functools.partial(Wide, ...)"],
    ),
    "batch of lists": (BatchError, {"batch": [[1.0, 2.0]]}, ["batch[0][0] is 1.0 (float)", "numpy.asarray"]),
    "batch a setting": (BatchError, {"batch": {"x": X, "mode": "train"}}, ["batch['mode']", "functools.partial"]),
    "batch a loader": (BatchError, {"batch": iter([X])}, ["batch is a value of type list_iterator", "arrays only"]),
    "batch of texts": (BatchError, {"batch": np.array(["a"] * 8)}, ["dtype <U1", "Convert it"]),
    "batch of objects": (BatchError, {"batch": {"x": np.array([None] * 8)}}, ["batch['x']", "dtype object"]),
    "batch of nothing": (BatchError, {"batch": {}}, ["no array has an axis", "[examples, ...]"]),
    "batch of no examples": (BatchError, {"batch": {"x": X[:0]}}, ["batch['x'] is 0", "Pass one at least"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_of_the_wrong_kind_is_refused_before_tracing(case):
    error, arguments, words = ARGUMENTS[case]
    with pytest.raises(error) as raised:
        partition(**{"loss": untouched, **arguments})
    check(raised, *words)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero": "1"},
        {"shardings": [("kernel", "model")]},
        {"axis_rules": 5},
        {"axis_rules": [("embed",)]},
        {"batch_axes": "fsdp"},
        {"batch_axes": 3},
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_where_it_is_written(settings):
    (name, value), *_ = settings.items()
    with pytest.raises(PartitionError) as raised:
        jaxpipe.PlanOptions(**settings)
    check(raised, f"PlanOptions({name}={value!r}); it must be")


# The loss


RETURNED = {
    "nothing": (lambda m, x: None, ["loss returned None", "a scalar, (scalar, metrics)", "`return`"]),
    "a dictionary": (
        lambda m, x: {"loss": mean(m, x)},
        ["loss returned a dictionary (loss)", "Return (loss, metrics)"],
    ),
    "a list": (lambda m, x: [mean(m, x), {}], ["a list of length 2", "Return a tuple of 2 or 3"]),
    "four": (lambda m, x: (mean(m, x), 1, 2, 3), ["a tuple of length 4", "Return a tuple of 2 or 3"]),
    "a text": (lambda m, x: "high", ["loss returned 'high' (str) as its loss", "a scalar"]),
    "nothing and metrics": (lambda m, x: (None, {}), ["loss returned None as its loss", "a scalar"]),
    "a text as weight": (
        lambda m, x: (mean(m, x), "one", {}),
        ["'one' (str) as its weight", "(loss_sum, weight, metrics)"],
    ),
    "a text as metric": (lambda m, x: (mean(m, x), {"name": "a"}), ["'a' (str) as the metric ['name']", "numbers or"]),
    "a key as metric": (lambda m, x: (mean(m, x), {"key": KEY}), ["as the metric ['key']", "numbers or"]),
    "a key in a sum": (lambda m, x: (mean(m, x), 1, {"n": jaxpipe.Sum(KEY)}), ["as the metric ['n'].value", "numbers"]),
}


@pytest.mark.parametrize("case", RETURNED)
def test_a_loss_that_returns_something_else(case):
    loss, words = RETURNED[case]
    with pytest.raises(PartitionError) as raised:
        partition(loss=loss)
    check(raised, *words)


LINEN_LOSSES = {
    "params and apply": (lambda params, x: NET.apply(params, x).mean(), ["loss(model, batch)", "model(x)"]),
    "params in a tree": (lambda params, x: NET.apply({"params": params}, x).mean(), ["loss(model, batch)", "model(x)"]),
    "a key of params": (lambda params, x: params["params"], ["loss(model, batch)", "model(x)"]),
    "apply": (lambda m, x: m.apply({"params": m.params}, x).mean(), ["'apply'", "model(x)", "variables already"]),
    "params": (lambda m, x: m.params, ["'params'", "model.variables['params']"]),
    "init": (lambda m, x: m.init(KEY, x), ["'init'", "pipeline.init"]),
    "bind": (lambda m, x: m.bind({})(x), ["'bind'", "model(x)"]),
    "eval": (lambda m, x: m.eval(), ["'eval'", "model(x, train=False)"]),
    "a method": (lambda m, x: m.half(x).mean(), ["'half'", "model(..., method='half')"]),
    "a setting": (lambda m, x: m.width, ["'width'", "model.module.width"]),
    "neither": (lambda m, x: m.encoder(x), ["'encoder'", "Net has none either"]),
    "rngs": (lambda m, x: m(x, train=True, rngs={"dropout": KEY}).mean(), ["rngs=", "Leave rngs= out"]),
    "mutable": (
        lambda m, x: m(x, mutable=["batch_stats"])[0].mean(),
        ["mutable=", "the output alone", "Leave mutable="],
    ),
    "variables first": (lambda m, x: sum(m.variables["params"]), ["model.variables", "Write model(x) first"]),
    "no call": (lambda m, x: x.mean(), ["does not call the model", "Call model(...)"]),
    "jit": (jax.jit(mean), ["jax.jit", "Pass the function itself"]),
    "jit inside": (lambda m, x: jax.jit(mean)(m, x), ["hands its model to jax.jit", "without passing it"]),
    "grad inside": (lambda m, x: jax.value_and_grad(mean)(m, x)[0], ["hands its model to jax.jit, jax.grad"]),
}


@pytest.mark.parametrize("case", LINEN_LOSSES)
def test_a_linen_loss_that_takes_its_model_for_something_else(case):
    loss, words = LINEN_LOSSES[case]
    with pytest.raises(ModelError) as raised:
        partition(NET, loss=loss)
    check(raised, *words)


def test_an_attribute_that_the_model_of_a_loss_lacks_can_be_asked_for():
    seen = []

    def loss(model, x):
        seen.append((hasattr(model, "apply"), getattr(model, "eval", None), model.module.width))
        return mean(model, x)

    partition(NET, loss=loss)
    assert set(seen) == {(False, None, 4)}
    with pytest.raises(ModelError) as raised:
        partition(NET, loss=lambda model, x: model.apply(x))
    assert raised.type.__name__ == "MissingAttributeError"  # what a traceback begins with


def test_a_linen_loss_reads_its_variables_after_a_call():
    def loss(model, x):
        output = model(x).mean()
        return output + sum(jnp.square(w).sum() for w in jax.tree.leaves(model.variables["params"]))

    def plain(params):
        return NET.apply({"params": params}, X).mean() + sum(jnp.square(w).sum() for w in jax.tree.leaves(params))

    pipeline = partition(NET, mesh=mesh_of(1), loss=loss, num_microbatches=1)
    (loss_of_stages, _), _ = pipeline.value_and_grad(pipeline.init(KEY), X)
    # The sum over parameters is in another order in the compiled program.
    np.testing.assert_allclose(loss_of_stages, plain(VARIABLES["params"]), rtol=1e-6)


# Methods of a pipeline


@pytest.fixture(scope="module")
def pipeline():
    return partition(
        NET, loss=lambda m, x: m(x, train=True).mean(), evaluate=lambda m, x: None, predict=lambda m, x: {"y": "a"}
    )


@pytest.fixture(scope="module")
def state(pipeline):
    return pipeline.init(KEY)


TRANSFORMED = {
    "step": lambda p, s: jax.jit(p.step)(s, X),
    "step of a constant": lambda p, s: jax.jit(lambda: p.step(s, X)[1])(),
    "grad of step": lambda p, s: jax.grad(lambda scale: p.step(s, X)[1]["loss"] * scale)(1.0),
    "value_and_grad": lambda p, s: jax.jit(p.value_and_grad)(s, X),
    "evaluate": lambda p, s: jax.jit(p.evaluate)(s, X),
    "predict": lambda p, s: jax.vmap(lambda x: p.predict(s, x))(X[None]),
    "parameters": lambda p, s: jax.jit(p.parameters)(s),
    "init": lambda p, s: jax.jit(p.init)(KEY),
}


@pytest.mark.core
@pytest.mark.parametrize("case", TRANSFORMED)
def test_methods_are_called_outside_of_transformations(pipeline, state, case):
    with pytest.raises(PartitionError) as raised:
        TRANSFORMED[case](pipeline, state)
    method = next(name for name in ("step", *TRANSFORMED) if name in case)
    check(raised, f"pipeline.{method} was called inside jax.jit", "without jax.jit")


CALLS = {
    "key a seed": (PartitionError, lambda p, s: p.init(7), ["key= is 7 (int)", "Pass jax.random.key(7)"]),
    "key none": (PartitionError, lambda p, s: p.init(None), ["key= is None", "jax.random.key(0)"]),
    "key rngs": (
        PartitionError,
        lambda p, s: p.init(nnx.Rngs(0)),
        ["of type Rngs", "the key that they were made from"],
    ),
    "key by stream": (PartitionError, lambda p, s: p.init({"params": KEY}), ["of type dict", "a single key"]),
    "keys": (PartitionError, lambda p, s: p.init(jax.random.split(KEY)), ["[2]", "one random key"]),
    "batch as key": (PartitionError, lambda p, s: p.init(X, KEY), ["float32[8, 3]", "one random key"]),
    "other key": (
        PartitionError,
        lambda p, s: p.init(jax.random.key(0, impl="rbg")),
        ["'rbg'", "jax_default_prng_impl"],
    ),
    "number a text": (BatchError, lambda p, s: p.microbatch_key(s, "0"), ["j='0' (str)", "j=0"]),
    "key of no state": (
        ModelError,
        lambda p, s: p.microbatch_key(0, 0),
        ["state is of type int", "The state comes first"],
    ),
    "trace of a pipeline": (
        ScheduleError,
        lambda p, s: jaxpipe.traces.write_trace("t.json", p),
        ["timelines is ", "{'predicted': pipeline.timeline()}"],
    ),
    "number below 0": (BatchError, lambda p, s: p.microbatch_key(s, -1), ["j=-1", "from 0"]),
    "rows": (BatchError, lambda p, s: p.local_rows("all"), ["size='all' (str)", "whole number"]),
    "batch of other structure": (
        BatchError,
        lambda p, s: p.step(s, {"x": X}),
        ["it has ['x']; it lacks (the array itself)", "make another pipeline"],
    ),
    "batch of shapes": (
        BatchError,
        lambda p, s: p.step(s, jax.ShapeDtypeStruct(X.shape, X.dtype)),
        ["batch is a ShapeDtypeStruct", "not on shapes"],
    ),
    "masked batch": (
        BatchError,
        lambda p, s: p.evaluate(s, np.ma.array(np.ones((8, 3), np.float32))),
        ["batch is a MaskedArray", "its mask beside it"],
    ),
    "evaluate nothing": (
        PartitionError,
        lambda p, s: p.evaluate(s, X),
        ["evaluate returned None", "dictionary of metrics"],
    ),
    "predict a text": (PartitionError, lambda p, s: p.predict(s, X), ["'a' (str) at ['y']", "[examples, ...]"]),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_method_that_gets_something_else(pipeline, state, case):
    error, call, words = CALLS[case]
    with pytest.raises(error) as raised:
        call(pipeline, state)
    check(raised, *words)


def test_a_prediction_of_nothing():
    pipeline = partition(predict=lambda m, x: None)
    with pytest.raises(PartitionError) as raised:
        pipeline.predict(pipeline.init(KEY), X)
    check(raised, "predict returned None", "`return`")


# Other functions


OTHERS = {
    "decorated a name": (
        ModelError,
        lambda: jaxpipe.memory_encoded("smallest"),
        ["@memory_encoded(codecs='smallest')"],
    ),
    "codecs a number": (ModelError, lambda: jaxpipe.memory_encoded(mean, codecs=3), ["codecs=3", "'fast'"]),
    "codecs of numbers": (
        ModelError,
        lambda: jaxpipe.memory_encoded(mean, codecs=[3, "mask"]),
        ["unknown codec 3", "'mask'"],
    ),
    "report of linen": (
        ModelError,
        lambda: jaxpipe.residual_report(NET, X),
        ["Linen module Net", "apply(variables, x)"],
    ),
    "report of a class": (ModelError, lambda: jaxpipe.residual_report(Wide, X), ["The class Wide", "a function"]),
    "density of a number": (ModelError, lambda: jaxpipe.measure_density(3, X), ["3 (int)", "Pass a function"]),
    "overflows of a number": (ModelError, lambda: jaxpipe.count_overflows(3, X), ["3 (int)", "Pass a function"]),
    "profile a loss": (PartitionError, lambda: jaxpipe.profile_model(FUNCTION, X, loss=None), ["loss= is None"]),
    "profile a count": (
        BatchError,
        lambda: jaxpipe.profile_model(FUNCTION, X, loss=mean, source="analytic", num_microbatches="2"),
        ["num_microbatches='2' (str)", "num_microbatches=2."],
    ),
    "network a text": (
        PartitionError,
        lambda: jaxpipe.Network.uniform("2", 1e9),
        ["num_devices='2' (str)", "num_devices=2."],
    ),
    "nodes of numbers": (
        PartitionError,
        lambda: jaxpipe.Network.from_nodes([4, 4], 1e9),
        ["nodes[0] is 4 (int)", "jaxpipe.Node", "Node(4, "],
    ),
    "node a text": (PartitionError, lambda: jaxpipe.Node("two"), ["devices='two' (str)", "whole number"]),
    "chain of numbers": (
        PartitionError,
        lambda: jaxpipe.Profile.chain(1, [1], [1], [1], [1], [1]),
        ["names=1", "a sequence"],
    ),
    "table of texts": (ScheduleError, lambda: schedules.gpipe("2", 4), ["num_devices='2' (str)", "num_devices=2."]),
    "table of floats": (
        ScheduleError,
        lambda: schedules.one_f_one_b(2, 4.0),
        ["num_microbatches=4.0", "num_microbatches=4."],
    ),
    "chunks": (ScheduleError, lambda: schedules.interleaved(2, 4, num_chunks="2"), ["num_chunks='2'", "num_chunks=2."]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_functions_that_get_something_else(case):
    error, call, words = OTHERS[case]
    with pytest.raises(error) as raised:
        call()
    check(raised, *words)


# What works


@pytest.mark.versions
def test_a_raw_key_gives_what_a_typed_one_gives():
    pipeline = partition(NET, mesh=mesh_of(1), loss=lambda m, x: m(x, train=True).mean())
    states = [pipeline.init(key) for key in (jax.random.key(5), jax.random.PRNGKey(5), np.array([0, 5], np.uint32))]
    for state in states:
        assert_same_bits(pipeline.parameters(state), NET.init(jax.random.key(5), X))
    losses = [float(pipeline.step(state, X)[1]["loss"]) for state in states]
    assert losses == losses[:1] * 3


@pytest.mark.versions
def test_keys_of_microbatches_go_with_arrays_on_one_device(pipeline, state):
    def plain(params, j):
        rngs = {"dropout": pipeline.microbatch_key(state, j)}
        return NET.apply({"params": params}, X[4 * j : 4 * j + 4], train=True, rngs=rngs).mean()

    parts = [jax.value_and_grad(plain)(VARIABLES["params"], j) for j in range(2)]
    (loss, _), gradient = pipeline.value_and_grad(state, X)
    # Plain, not compiled: sums are rounded in another order.
    np.testing.assert_allclose(loss, sum(value for value, _ in parts) / 2, rtol=1e-5)
    expected = jax.tree.map(lambda *g: sum(g) / 2, *(g for _, g in parts))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), gradient, expected)
    # The same under jit, with a state that is an argument, and one that is not.
    data = jax.random.key_data(pipeline.microbatch_key(state, 1))
    assert_same_bits(jax.jit(lambda s: jax.random.key_data(pipeline.microbatch_key(s, 1)))(state), data)
    assert_same_bits(jax.jit(lambda j: jax.random.key_data(pipeline.microbatch_key(state, j)))(1), data)


def test_a_module_with_an_optimizer_in_it_trains_as_without():
    with pytest.warns(UserWarning, match=r"WithOptimizer holds an optimizer: .* variables .*Leave the nnx\.Optimizer"):
        pipeline = partition(WithOptimizer(rngs=nnx.Rngs(0)))
    plain = partition(Wide(4, rngs=nnx.Rngs(0)))
    (loss, _), gradient = pipeline.value_and_grad(pipeline.init(KEY), X)
    (expected, _), expected_gradient = plain.value_and_grad(plain.init(KEY), X)
    assert_same_bits(loss, expected)
    for name in ("a", "b"):
        assert_same_bits(nnx.to_pure_dict(gradient)[name], nnx.to_pure_dict(expected_gradient)[name])


def test_a_plan_from_a_file_without_components_of_its_bytes_is_printed():
    plan = partition().plan
    plan = dataclasses.replace(plan, compiled_each_device=(2048, 1024), compiled_stage_memory=())
    assert "2.00 KiB on the fullest device, compiled (" in str(jaxpipe.Plan.from_json(plan.to_json()))


def test_numbers_of_numpy_are_numbers():
    plan = partition(
        num_microbatches=np.int64(2), memory=np.int64(10**9), options=jaxpipe.PlanOptions(time_limit=np.float32(3.0))
    ).plan
    assert (plan.num_microbatches, plan.budget) == (2, 10**9)
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan
    assert jaxpipe.Network.uniform(np.int32(2), 1e9).num_devices == 2
    assert schedules.gpipe(np.int64(2), np.int64(2)) == schedules.gpipe(2, 2)
