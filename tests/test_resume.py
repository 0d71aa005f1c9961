"""Plain Flax and optax go on in a pipeline, and it in plain Flax and optax: values, moments, counts, schedules."""

import copy
import dataclasses
import functools
import pickle
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import jax_utils, nnx, serialization
from flax.training import train_state

import jaxpipe
from examples import models as zoo
from jaxpipe import ModelError, PlanOptions
from jaxpipe.gradients import block_sparse, master_weights
from tests.support.compare import assert_same_bits
from tests.support.meshes import mesh_of


KEY = jax.random.key(0)
BATCH = {
    "x": jax.random.normal(jax.random.key(1), (8, 6)),
    "y": jax.random.randint(jax.random.key(2), (8,), 0, 5),
}


class Net(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x):
        start = nn.initializers.lecun_normal()
        start = nn.with_partitioning(start, (None, None)) if self.boxed else start
        x = jnp.tanh(nn.BatchNorm(use_running_average=False)(nn.Dense(8, kernel_init=start)(x)))
        return nn.Dense(5)(nn.Dropout(0.2, deterministic=False)(nn.Dense(8)(x)))


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(jnp.tanh(self.norm(self.layers[0](x)))))


class WithStatistics(train_state.TrainState):
    """A TrainState as users write it: a collection, and fields that are none."""

    batch_stats: Any
    averages: Any
    dropout_key: jax.Array


def entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def loss(model, batch):
    return entropy(model(batch["x"]), batch)


def partition(model, optimizer, stages=2, replicas=None, batch=BATCH, **options):
    options = {"runtime": "mpmd", **options}
    mesh = mesh_of(stages, replicas)
    return jaxpipe.partition(
        model, mesh, batch, loss=loss, optimizer=optimizer, num_microbatches=2, profile="analytic", **options
    )


def updated(optimizer, params, state, gradient):
    """Two updates of plain optax, compiled; the gradient of the second is another."""

    @jax.jit
    def update(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state = update(params, state, gradient)
    return update(params, state, jax.tree.map(lambda g: jnp.sin(3 * g), gradient))


def started(optimizer, params):
    """Parameters and optimizer state after two updates."""
    return updated(optimizer, params, optimizer.init(params), jax.tree.map(lambda x: jnp.cos(7 * x + 1), params))


def linen_run(optimizer, net=None, step=2):
    """A plain run's state after two steps."""
    net = Net() if net is None else net
    variables = net.init({"params": KEY, "dropout": KEY}, BATCH["x"])
    params, opt_state = started(optimizer, variables["params"])
    statistics = jax.tree.map(lambda x: x + 0.5, variables["batch_stats"])
    return WithStatistics(step, net.apply, params, optimizer, opt_state, statistics, params, KEY)


def assert_same(actual, expected):
    """Equal in structure and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_same_bits(actual, expected)


# Values


def first_frozen(params):
    def label(path, _):
        return "frozen" if "Dense_0" in jax.tree_util.keystr(path) else "trained"

    return jax.tree_util.tree_map_with_path(label, params)


def adam():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 20)))


OPTIMIZERS = {
    "adam": adam,
    "schedule of a hyperparameter": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.01, 9)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
    "frozen layer": lambda: optax.partition({"frozen": optax.set_to_zero(), "trained": adam()}, first_frozen),
    "masked": lambda: optax.masked(optax.trace(0.9), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "schedule-free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "random key": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1, momentum=0.9)),
    "master weights": lambda: master_weights(optax.adam(1e-2)),
    "no state": lambda: optax.sgd(0.1),
}
WHERE = {
    "one stage": {"stages": 1},
    "four stages": {"stages": 4},
    "replicas": {"stages": 2, "replicas": 2},
    "zero": {"stages": 2, "replicas": 2, "options": PlanOptions(zero=1)},
    "one program": {"stages": 2, "runtime": "spmd"},
}


def cases():
    """Every optimizer somewhere, and adam everywhere; before a release all of them."""
    for n, name in enumerate(OPTIMIZERS):
        for k, where in enumerate(WHERE):
            core = (name, where) == ("adam", "one program")
            mark = pytest.mark.core if core else () if name == "adam" or (n + 3) % len(WHERE) == k else pytest.mark.slow
            yield pytest.param(name, where, marks=mark)


@pytest.mark.parametrize(("name", "where"), cases())
def test_a_plain_run_goes_into_a_pipeline_and_back(name, where):
    optimizer = OPTIMIZERS[name]()
    run = linen_run(optimizer, Net(boxed=where == "four stages"))
    pipeline = partition(Net(boxed=where == "four stages"), optimizer, **WHERE[where])
    before = jax.tree.map(np.array, (run.params, run.batch_stats))
    state = pipeline.init(KEY, variables=run)
    assert int(state.step) == 2
    assert_same(pipeline.parameters(state), {"params": run.params, "batch_stats": run.batch_stats})
    assert_same(pipeline.optimizer_state(state), run.opt_state)
    back = run.replace(step=int(state.step), opt_state=pipeline.optimizer_state(state), **pipeline.parameters(state))
    assert type(back) is WithStatistics
    assert back.step == 2
    assert_same((back.params, back.opt_state, back.batch_stats), (run.params, run.opt_state, run.batch_stats))
    jax.tree.map(lambda x: x.delete(), state)
    assert_same_bits((run.params, run.batch_stats), before)  # the state had copies of them


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_the_next_step_is_that_of_optax(runtime):
    optimizer = adam()
    run = linen_run(optimizer)
    pipeline = partition(Net(), optimizer, runtime=runtime)
    state = pipeline.init(KEY, variables=run)
    _, gradient = pipeline.value_and_grad(state, BATCH)
    state, _ = pipeline.step(state, BATCH)
    wanted = jax.jit(lambda run, gradient: run.apply_gradients(grads=gradient))(run, gradient)
    assert int(state.step) == int(wanted.step) == 3
    new = pipeline.parameters(state)["params"], pipeline.optimizer_state(state)
    for (path, a), (_, b) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (new, (wanted.params, wanted.opt_state))), strict=True
    ):
        # XLA fuses the update of a stage and that of the whole tree differently: the last bit of a term may differ.
        # Adam's second moment is made of squares, which double relative errors.
        ulps = 3 * (2 if ".nu" in jax.tree_util.keystr(path) else 1)
        assert np.max(np.abs(a - b)) <= ulps * np.finfo(np.float32).eps * np.max(np.abs(b)), path


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(jnp.tanh(nn.Dense(16)(jnp.tanh(nn.Dense(16)(x)))))


def test_moments_make_the_difference():
    """Plain Adam for five steps and a sixth in stages; with new moments the sixth is another one."""
    net, optimizer = Dense(), optax.adam(1e-2)
    params = net.init(KEY, BATCH["x"])["params"]
    opt_state = optimizer.init(params)

    @jax.jit
    def plain(params, opt_state):
        gradient = jax.grad(lambda p: entropy(net.apply({"params": p}, BATCH["x"]), BATCH))(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(5):
        params, opt_state = plain(params, opt_state)
    wanted, _ = plain(params, opt_state)
    pipeline = partition(net, optimizer)

    def distance(state):
        new = pipeline.parameters(pipeline.step(state, BATCH)[0])["params"]
        return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (new, wanted)), strict=True))

    # The mean over two micro-batches has another last bit than that over the batch, which Adam divides by the root of
    # a moment of its size: a millionth of a step of 1e-2.
    assert distance(pipeline.init(KEY, variables={"params": params}, optimizer_state=opt_state)) < 1e-7
    assert distance(pipeline.init(KEY, variables={"params": params})) > 1e-3


@pytest.mark.core
def test_a_run_goes_on_as_if_it_had_not_been_interrupted():
    """Through a TrainState into the same pipeline: random numbers too, which follow the number of the step."""
    optimizer = adam()
    pipeline = partition(Net(), optimizer)
    state = pipeline.init(KEY)
    for _ in range(2):
        state, _ = pipeline.step(state, BATCH)
    variables, opt_state = pipeline.parameters(state), pipeline.optimizer_state(state)
    run = WithStatistics(
        int(state.step), None, tx=optimizer, opt_state=opt_state, averages=None, dropout_key=KEY, **variables
    )
    again = pipeline.init(KEY, variables=run)
    assert_same_bits(
        jax.random.key_data(pipeline.microbatch_key(again, 1)),
        jax.random.key_data(jax.random.fold_in(jax.random.fold_in(KEY, 2), 1)),
    )
    wanted, metrics = pipeline.step(state, BATCH)
    got, other = pipeline.step(again, BATCH)
    assert_same_bits(other, metrics)
    assert_same_bits(pipeline.parameters(got), pipeline.parameters(wanted))
    assert_same_bits(pipeline.optimizer_state(got), pipeline.optimizer_state(wanted))
    assert int(got.step) == int(wanted.step) == 3


# NNX, functions, layers in one scan


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_an_nnx_optimizer_goes_in_and_comes_back(runtime):
    model, optimizer = Layers(nnx.Rngs(0)), adam()
    plain = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for scale in (1.0, 2.0):
        plain.update(model, jax.tree.map(lambda x, c=scale: jnp.cos(c * x), nnx.state(model, nnx.Param)))
    pipeline = partition(Layers, optimizer, runtime=runtime)
    state = pipeline.init(KEY, variables=model, optimizer_state=plain)
    assert int(state.step) == 2
    assert_same(nnx.as_pure(pipeline.optimizer_state(state)), nnx.as_pure(plain.opt_state))

    other = Layers(nnx.Rngs(1))
    back = nnx.Optimizer(other, optimizer, wrt=nnx.Param)
    nnx.update(other, pipeline.parameters(state))
    nnx.update(back.opt_state, nnx.state(pipeline.optimizer_state(state)))
    back.step[...] = int(state.step)
    for module, its_optimizer in ((model, plain), (other, back)):
        its_optimizer.update(module, jax.tree.map(jnp.sin, nnx.state(module, nnx.Param)))
    assert_same_bits(nnx.state(other, nnx.Param), nnx.state(model, nnx.Param))
    assert_same_bits(nnx.state(back), nnx.state(plain))


def test_a_model_and_its_optimizer_in_one():
    both = nnx.ModelAndOptimizer(Layers(nnx.Rngs(0)), adam())
    both.update(jax.tree.map(jnp.cos, nnx.state(both.model, nnx.Param)))
    pipeline = partition(Layers, adam())
    state = pipeline.init(KEY, variables=both)
    assert int(state.step) == 1
    assert_same(nnx.as_pure(pipeline.optimizer_state(state)), nnx.as_pure(both.opt_state))
    kept = nnx.state(both.model, nnx.Not(nnx.RngState))
    assert_same_bits(nnx.to_pure_dict(pipeline.parameters(state)), nnx.to_pure_dict(kept))


def test_a_train_state_of_an_nnx_module():
    """As Flax's own examples have it: the parts of ``nnx.split`` are fields."""

    class Split(train_state.TrainState):
        graphdef: Any
        rest: nnx.State
        averages: nnx.State

    graphdef, params, rest = nnx.split(Layers(nnx.Rngs(0)), nnx.Param, ...)
    optimizer = adam()
    params, opt_state = started(optimizer, params)
    run = Split(5, None, params, optimizer, opt_state, graphdef, rest, jax.tree.map(jnp.sin, params))
    pipeline = partition(Layers, optimizer)
    state = pipeline.init(KEY, variables=run)
    assert int(state.step) == 5
    assert_same(pipeline.optimizer_state(state), opt_state)
    wanted = nnx.filter_state(nnx.merge_state(params, rest), nnx.Not(nnx.RngState))
    assert_same_bits(nnx.to_pure_dict(pipeline.parameters(state)), nnx.to_pure_dict(wanted))


class Trained(NamedTuple):
    """A training state of one's own."""

    params: Any
    opt_state: Any
    step: int


@pytest.mark.parametrize("captured", [False, True], ids=["function", "partial"])
def test_a_function_of_variables(captured):
    params, optimizer = zoo.init_mlp(KEY, [6, 8, 5]), adam()
    params, opt_state = started(optimizer, params)
    pipeline = partition(jax.tree_util.Partial(zoo.mlp, params) if captured else zoo.mlp, optimizer)
    state = pipeline.init(KEY, variables=Trained(params, opt_state, 7))
    assert int(state.step) == 7
    assert_same_bits(jax.tree.leaves(pipeline.parameters(state)), jax.tree.leaves(params))
    assert_same_bits(jax.tree.leaves(pipeline.optimizer_state(state)), jax.tree.leaves(opt_state))
    if not captured:  # a Partial is a tree around the parameters
        assert_same(pipeline.optimizer_state(state), opt_state)


def test_scanned_layers_that_are_cut():
    net, optimizer = zoo.ScannedMLP(num_layers=4, width=6), adam()
    params, opt_state = started(optimizer, net.init(KEY, BATCH["x"])["params"])
    pipeline = partition(net, optimizer, options=PlanOptions(unroll_scans=True))
    state = pipeline.init(KEY, variables={"params": params}, optimizer_state=opt_state)
    assert_same(pipeline.parameters(state)["params"], params)
    assert_same(pipeline.optimizer_state(state), opt_state)


def test_a_block_sparse_exchange_begins_with_nothing_left_to_send():
    net, optimizer = Dense(), optax.sgd(0.1, momentum=0.9)
    params, opt_state = started(optimizer, net.init(KEY, BATCH["x"])["params"])
    pipeline = partition(net, optimizer, 2, 2, gradient_exchange=block_sparse(k=1))
    state = pipeline.init(KEY, variables={"params": params}, optimizer_state=opt_state)
    assert_same(pipeline.optimizer_state(state), opt_state)
    assert state.residual
    assert not any(np.any(x) for x in state.residual)


# Trees


@pytest.fixture(scope="module")
def dense():
    return partition(Dense(), injected())


@functools.cache
def injected():
    return optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)


@functools.cache
def dense_run():
    return started(injected(), Dense().init(KEY, BATCH["x"])["params"])


def test_a_checkpoint_of_orbax_without_its_structure(dense, tmp_path):
    params, opt_state = dense_run()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", jax.tree.map(np.asarray, {"params": params, "opt_state": opt_state}))
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "run")
    assert not isinstance(restored["opt_state"], tuple)
    state = dense.init(KEY, variables=restored["params"], optimizer_state=restored["opt_state"])
    assert_same(dense.optimizer_state(state), opt_state)
    assert int(state.step) == 0


@pytest.mark.parametrize(
    "form",
    [serialization.to_state_dict, lambda state: jax.tree.map(np.asarray, state)],
    ids=["state dictionary", "host arrays"],
)
def test_other_trees_with_the_same_paths(form, dense):
    params, opt_state = dense_run()
    state = dense.init(KEY, variables={"params": params}, optimizer_state=form(opt_state))
    assert_same(dense.optimizer_state(state), opt_state)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_wide_host_arrays_get_the_types_of_the_run(runtime):
    """NumPy makes float64 of what it reads from text; each array is float32 again, and the caller's stays as it is."""
    params, opt_state = dense_run()

    def wide(x):
        return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    given = jax.tree.map(wide, (params, opt_state))
    pipeline = partition(Dense(), injected(), runtime=runtime)
    state = pipeline.init(KEY, variables=given[0], optimizer_state=given[1])
    assert_same(pipeline.optimizer_state(state), opt_state)
    assert_same(pipeline.parameters(state)["params"], params)


def test_a_step_leaves_the_arrays_of_the_caller_alone(dense):
    given = jax.tree.map(np.array, dense_run())
    before = jax.tree.map(np.array, given)
    state = dense.init(KEY, variables=given[0], optimizer_state=given[1])
    for _ in range(2):
        state, _ = dense.step(state, BATCH)
    assert_same_bits(given, before)


def test_the_state_of_an_optimizer_of_all_variables(dense):
    params, _ = dense_run()
    variables, opt_state = started(injected(), {"params": params})
    run = train_state.TrainState(3, None, variables, injected(), opt_state)
    state = dense.init(KEY, variables=run)
    assert_same(dense.parameters(state), variables)
    assert_same_bits(jax.tree.leaves(dense.optimizer_state(state)), jax.tree.leaves(opt_state))


def test_a_learning_rate_that_was_set(dense):
    _, opt_state = dense_run()
    opt_state = opt_state._replace(hyperparams={**opt_state.hyperparams, "learning_rate": 0.25})
    state = dense.init(KEY, optimizer_state=opt_state)
    _, metrics = dense.step(state, BATCH)
    assert float(metrics["learning_rate"]) == 0.25


# Errors


def test_what_does_not_fit_is_listed(dense):
    params, opt_state = dense_run()
    sgd = optax.sgd(0.1, momentum=0.9).init(params)
    message = (
        r"optimizer_state= does not fit the optimizer's \d+ arrays\. Missing: count \(int32\[\]\), .*"
        r"Unexpected: 0/trace/Dense_0/bias \(float32\[5\]\).* as Pipeline.optimizer_state and optimizer.init"
    )
    with pytest.raises(ModelError, match=message):
        dense.init(KEY, variables=params, optimizer_state=sgd)
    replicated = jax.tree.map(lambda x: jnp.stack([x]), opt_state)
    with pytest.raises(
        ModelError, match=r"Of another shape or dtype: count is int32\[1\], the optimizer's is int32\[\]"
    ):
        dense.init(KEY, variables=params, optimizer_state=replicated)
    run = train_state.TrainState(jnp.zeros(1, jnp.int32), None, params, injected(), opt_state)
    with pytest.raises(ModelError, match=r"TrainState has step=.*number of steps.*unreplicate"):
        dense.init(KEY, variables=run)
    assert jax_utils.unreplicate(run).step == 0  # what the message says works


def test_a_train_state_before_there_is_a_plan():
    """Fields that are no collections of the model, as averages of parameters, are not taken for such."""
    run = linen_run(adam())
    pipeline = partition(Net(), adam(), batch=None)
    for given in ({}, {"optimizer_state": run.opt_state}, {"optimizer_state": run}):
        state = pipeline.init(KEY, BATCH, variables=run, **given)
        assert int(state.step) == 2
        assert_same(pipeline.parameters(state), {"params": run.params, "batch_stats": run.batch_stats})
        assert_same(pipeline.optimizer_state(state), run.opt_state)


def test_a_collection_that_a_train_state_lacks():
    run = linen_run(adam())
    plain = train_state.TrainState(2, None, run.params, adam(), run.opt_state)
    with pytest.raises(ModelError, match=r"Missing: batch_stats/BatchNorm_0/mean"):
        partition(Net(), adam()).init(KEY, variables=plain)


def test_an_nnx_optimizer_alone():
    optimizer = nnx.Optimizer(Layers(nnx.Rngs(0)), adam(), wrt=nnx.Param)
    with pytest.raises(ModelError, match=r"does not hold its model.*variables=model, optimizer_state=optimizer"):
        partition(Layers, adam()).init(KEY, variables=optimizer)


def test_a_training_state_as_the_model():
    with pytest.raises(ModelError, match=r"given a WithStatistics as its model.*init\(key, variables=train_state\)"):
        partition(linen_run(adam()), adam())


# Attributes of plain training states


@pytest.mark.parametrize(
    ("name", "instead"),
    {
        "params": "pipeline.parameters(state)",
        "opt_state": "pipeline.optimizer_state(state)",
        "batch_stats": 'pipeline.parameters(state)["batch_stats"]',
        "apply_gradients": "pipeline.step(state, batch)",
        "replace": "pipeline.init(key, variables=..., optimizer_state=...)",
        "apply_fn": "pipeline.predict(state, batch)",
        "tx": "the optimizer that partition was given",
    }.items(),
)
def test_attributes_of_a_train_state_say_what_to_use(name, instead, dense):
    state = dense.init(KEY)
    with pytest.raises(AttributeError) as caught:
        getattr(state, name)
    assert instead in str(caught.value)
    assert not hasattr(state, name)
    assert getattr(state, name, None) is None


def test_other_attributes_are_those_of_a_pytree(dense):
    state = dense.init(KEY)
    with pytest.raises(AttributeError, match=r"no attribute 'anything'$"):
        _ = state.anything  # pyright: ignore[reportAttributeAccessIssue]
    assert_same_bits(jax.tree.map(lambda x: x, state), state)
    assert_same_bits(
        copy.deepcopy(dataclasses.replace(state, key=state.step)), dataclasses.replace(state, key=state.step)
    )
    host = jax.tree.map(np.asarray, dataclasses.replace(state, key=state.step))
    assert_same_bits(pickle.loads(pickle.dumps(host)), host)
