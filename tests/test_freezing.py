"""Parameters that the optimizer does not train: no gradients, no backward pass below the first trained one."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models as zoo
from jaxpipe import PartitionError, Plan, Profile, ScheduleError
from jaxpipe.runtime.spmd.pair_ticks import pair_ticks
from jaxpipe.schedules import Kind, gpipe, one_f_one_b, simulate, zero_bubble
from jaxpipe.schedules.swap_points import swap_points
from jaxpipe.schedules.table import without_backward
from tests.support.compare import assert_same_bits
from tests.support.heavy_profile import heavy
from tests.support.pipeline_models import entropy, linen, plain_gradients
from tests.support.texts import one_line


KEY = jax.random.key(0)
MODEL = jax.tree_util.Partial(zoo.mlp, jax.jit(zoo.init_mlp, static_argnums=1)(KEY, (12, *[32] * 7, 10)))
BATCH = {
    "x": jax.random.normal(jax.random.key(1), (256, 12)),
    "y": jax.random.randint(jax.random.key(2), (256,), 0, 10),
}
#: Micro-batches; of 32 examples, so that activations weigh more than parameters.
COUNT = 8


def loss(f, batch):
    return entropy(f(batch["x"]), batch["y"])


def first_leaves(count, tree=MODEL):
    """A function of trees like this one: whether a leaf is among the first ones, as ``frozen`` or ``trained``."""
    flags = [k < count for k in range(len(jax.tree.leaves(tree)))]
    labels = ["frozen" if flag else "trained" for flag in flags]
    return lambda _: jax.tree.unflatten(jax.tree.structure(tree), labels)


def frozen_behind(optimizer, labels):
    return optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optimizer}, labels)


MOMENTUM = optax.sgd(0.1, momentum=0.9)
HALF = frozen_behind(MOMENTUM, first_leaves(8))


def partition(optimizer, model=MODEL, batch=BATCH, function=loss, *, stages=4, **options):
    mesh = jax.make_mesh((stages,), ("stage",), devices=jax.devices()[:stages])
    options = {"num_microbatches": COUNT, "profile": "analytic", **options}
    return jaxpipe.partition(model, mesh, batch, loss=function, optimizer=optimizer, **options)


@functools.cache
def pipeline(frozen):
    """Return the pipeline as one program, whose devices all have the buffers of the largest stage."""
    return partition(HALF if frozen else MOMENTUM, runtime="spmd")


@functools.cache
def plain_gradient(count):
    """Mean gradients of plain JAX over so many micro-batches, added up in their order."""
    rows = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), BATCH)
    gradient_of = jax.jit(jax.grad(loss))
    parts = [gradient_of(MODEL, jax.tree.map(lambda x, j=j: x[j], rows)) for j in range(count)]
    return jax.tree.map(lambda *xs: functools.reduce(jnp.add, xs) / count, *parts)


def assert_frozen_leaves_are(count, actual, expected):
    for a, b in zip(jax.tree.leaves(actual)[:count], jax.tree.leaves(expected)[:count], strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))


# What freezing the first half saves


@pytest.mark.core
def test_there_is_no_backward_work_below_the_first_trained_parameter():
    pipe = pipeline(True)
    frozen = pipe.plan.frozen
    assert frozen.stages == tuple(range(pipe.schedule.frozen))
    assert pipe.schedule.frozen >= 1
    for s in frozen.stages:
        stage = pipe.plan.stages[s]
        assert (stage.backward_seconds, stage.stash_bytes, stage.in_flight) == (0, 0, 0)
        assert pipe.schedule.when(s, Kind.BACKWARD) == {}
        assert len(pipe.schedule.when(s, Kind.FORWARD)) == COUNT
    pipe.schedule.validate()
    stages = pipe._planned.program.stages
    assert all(part.returning == () for part in stages[: pipe.schedule.frozen + 1])
    assert all(part.returning for part in stages[pipe.schedule.frozen + 1 :])
    assert len(pipe.schedule.ticks) == len(pair_ticks(4, COUNT).ticks) - pipe.schedule.frozen


def test_the_plan_says_what_is_frozen():
    pipe = pipeline(True)
    frozen, text = pipe.plan.frozen, one_line(pipe.plan)
    assert (len(frozen.parameters), frozen.trained) == (8, 8)
    assert frozen.bytes == 4 * (12 * 32 + 3 * 32 * 32 + 4 * 32)
    assert "8 of 16 parameters are frozen (14.00 KiB)" in text and "no backward work in stage 0" in text
    assert frozen.gradient_bytes == pipe.plan.memory["parameters"] - pipe.plan.memory["gradients"] > 0
    assert Plan.from_json(pipe.plan.to_json()) == pipe.plan
    assert pipeline(False).plan.frozen is None and "frozen" not in str(pipeline(False).plan)


def work(plan):
    return sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)


def test_step_and_bytes_fall_in_the_plan_and_in_the_compiled_step():
    half, whole = pipeline(True), pipeline(False)
    # Of 24 passes through 8 layers, 3 for each, 9 are left out: backward is twice forward, and the first trained layer
    # sends nothing back. The rest of the estimate is element-wise work and the loss.
    assert 0.55 < work(half.plan) / work(whole.plan) < 0.75
    assert half.plan.step_seconds < 0.9 * whole.plan.step_seconds
    # Of all stages: the largest may hold as much, since the frozen one has more layers.
    predicted, compiled = zip(*((sum(x.predicted_bytes), sum(x.compiled_bytes)) for x in reports()), strict=True)
    assert predicted[0] < predicted[1] and compiled[0] < compiled[1]
    # A prediction is within a tenth of what XLA reserves for programs this small; so is what freezing saves, of all.
    assert abs((predicted[1] - predicted[0]) - (compiled[1] - compiled[0])) < 0.1 * compiled[1]


@functools.cache
def reports():
    return tuple(partition(optimizer).memory_report() for optimizer in (HALF, MOMENTUM))


@pytest.mark.slow
def test_measured_work_falls():
    """With layers that take milliseconds; those of the other tests take as long as it takes to start a program."""
    model = jax.tree_util.Partial(zoo.mlp, zoo.init_mlp(KEY, [*[256] * 8, 10]))
    batch = {"x": jnp.ones((COUNT * 512, 256)), "y": jnp.zeros((COUNT * 512,), jnp.int32)}
    optimizers = frozen_behind(MOMENTUM, first_leaves(8, model)), MOMENTUM
    pipes = [partition(optimizer, model, batch) for optimizer in optimizers]
    timelines = [[pipe.timeline(measured=True).spans for pipe in pipes] for _ in range(3)]
    # Of each action the shortest of three: what else the machine does only adds time.
    half, whole = (
        sum(min(s.end - s.start for s in same) for same in zip(*spans, strict=True))
        for spans in zip(*timelines, strict=True)
    )
    assert half < 0.85 * whole  # 15 of 24 passes through layers
    assert not any(s.stage == 0 and s.action.kind is Kind.BACKWARD for s in timelines[0][0])


# What it computes


@pytest.mark.core
def test_steps_are_those_of_optax_on_the_whole_tree():
    pipe = pipeline(True)
    state, plain, plain_state = pipe.init(KEY), MODEL, HALF.init(MODEL)

    @jax.jit
    def update(gradients, plain_state, plain):
        updates, plain_state = HALF.update(gradients, plain_state, plain)
        return optax.apply_updates(plain, updates), plain_state

    for _ in range(3):
        _, gradients = pipe.value_and_grad(state, BATCH)
        state, metrics = pipe.step(state, BATCH)
        plain, plain_state = update(gradients, plain_state, plain)
        # Sums of other squares in another order: the last bit.
        assert metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-6)
    new = pipe.parameters(state)
    assert_frozen_leaves_are(8, new, MODEL)
    assert_same_bits(jax.tree.map(np.asarray, new), jax.tree.map(np.asarray, plain))
    assert not any(np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(x)[8:] for x in (new, MODEL)), strict=True))


@pytest.mark.core
def test_gradients_of_frozen_parameters_are_zeros_and_the_others_those_of_jax():
    pipe = pipeline(True)
    (value, _), gradients = pipe.value_and_grad(pipe.init(KEY), BATCH)
    expected = plain_gradient(COUNT)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    assert_frozen_leaves_are(8, gradients, jax.tree.map(jnp.zeros_like, MODEL))
    for a, b in zip(*(jax.tree.leaves(x)[8:] for x in (gradients, expected)), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))
    assert float(value) == pytest.approx(float(loss(MODEL, BATCH)), rel=1e-6)  # a mean of means: rounded otherwise


def lora(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer["kernel"] + x @ layer["down"] @ layer["up"])
    return x


def test_adapters_beside_frozen_kernels():
    keys = jax.random.split(KEY, 3)
    w = [
        {"kernel": jax.random.normal(k, (8, 8)), "down": jax.random.normal(k, (8, 2)) / 3, "up": jnp.ones((2, 8)) / 9}
        for k in keys
    ]
    model = jax.tree_util.Partial(lora, w)
    labels = jax.tree.map_with_path(lambda path, _: "frozen" if path[-1].key == "kernel" else "trained", w)
    optimizer = frozen_behind(
        MOMENTUM, lambda tree: jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(labels))
    )
    batch = jax.random.normal(KEY, (8, 8))

    def square(f, x):
        return jnp.square(f(x) - x).mean()

    short = partition(optimizer, model, batch, square, stages=2, num_microbatches=2).profile
    # Work that takes long beside calls: both stages have layers then, and not the first one a frozen product alone.
    pipe = partition(optimizer, model, batch, square, stages=2, num_microbatches=2, profile=heavy(short))
    assert pipe.plan.frozen.stages == () and len(pipe.plan.frozen.parameters) == 3
    assert pipe.plan.memory["gradients"] < 0.6 * pipe.plan.memory["parameters"]
    state, metrics = pipe.step(pipe.init(KEY), batch)
    parts = [jax.jit(jax.grad(square))(model, rows) for rows in jnp.split(batch, 2)]
    gradients = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(model), model)
    plain = optax.apply_updates(model, updates)
    # A product and a sum of the update are contracted in one program and not in the other.
    for a, b in zip(*map(jax.tree.leaves, (pipe.parameters(state), plain)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-7, atol=2e-7)
    trained = [g for g, label in zip(*map(jax.tree.leaves, (gradients, labels)), strict=True) if label == "trained"]
    assert float(metrics["gradient_norm"]) == pytest.approx(float(optax.tree.norm(trained)), rel=1e-6)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 64, 10):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(width)(x)))
        return x


def test_running_statistics_of_frozen_stages_go_on():
    case = linen(Normed(), {name: x[:32] for name, x in BATCH.items()}, lambda model, batch: loss(model, batch))
    params, start = case.start(KEY)
    labels = {name: "trained" if name == "Dense_2" else "frozen" for name in params}
    pipe = partition(
        frozen_behind(MOMENTUM, lambda tree: labels), case.model, case.batch, case.loss, stages=2, num_microbatches=2
    )
    assert pipe.plan.frozen.stages == (0,)
    state = pipe.init(KEY)
    keys = [pipe.microbatch_key(state, j) for j in range(2)]
    _, gradients, statistics = plain_gradients(case, params, start, keys, 1, 2)
    new = pipe.parameters(pipe.step(state, case.batch)[0])
    assert_same_bits(jax.tree.map(np.asarray, new["batch_stats"]), jax.tree.map(np.asarray, statistics["batch_stats"]))
    assert_same_bits(np.asarray(new["params"]["Dense_0"]["kernel"]), np.asarray(params["Dense_0"]["kernel"]))
    kernel = params["Dense_2"]["kernel"] - 0.1 * gradients["Dense_2"]["kernel"]
    np.testing.assert_allclose(new["params"]["Dense_2"]["kernel"], kernel, rtol=1e-6, atol=1e-8)  # contracted in XLA


def tied(w, x):
    x = x @ w["embedding"]
    for name in ("a", "b"):
        x = jnp.tanh(x @ w[name])
    return x @ w["embedding"].T


@pytest.mark.parametrize("frozen", ["embedding", "a"])
def test_a_tied_parameter_is_frozen_or_trained_in_all_its_stages(frozen):
    w = {name: jax.random.normal(jax.random.key(k), (8, 8)) / 3 for k, name in enumerate(("a", "b", "embedding"))}
    model, batch = jax.tree_util.Partial(tied, w), jax.random.normal(KEY, (8, 8))
    labels = ["frozen" if name == frozen else "trained" for name in sorted(w)]
    optimizer = frozen_behind(optax.sgd(0.5), lambda tree: jax.tree.unflatten(jax.tree.structure(tree), labels))

    def square(f, x):
        return jnp.square(f(x)).mean()

    pipe = partition(optimizer, model, batch, square, stages=2, num_microbatches=2)
    (_, _), gradients = pipe.value_and_grad(pipe.init(KEY), batch)
    parts = [jax.jit(jax.grad(square))(model, rows) for rows in jnp.split(batch, 2)]
    expected = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    for name, a, b in zip(sorted(w), *map(jax.tree.leaves, (gradients, expected)), strict=True):
        # Uses of a tied parameter are added up over the micro-batches first, which rounds otherwise.
        np.testing.assert_allclose(a, np.zeros_like(b) if name == frozen else b, rtol=1e-5, atol=1e-7)


# Schedules, budgets, profiles


@pytest.mark.parametrize("maker", [gpipe, one_f_one_b, zero_bubble])
def test_a_table_without_the_backward_work_of_its_first_stages(maker):
    whole = maker(4, 6)
    table = without_backward(whole, 2)
    table.validate()
    for s in range(4):
        kinds = {action.kind for action in table.order(s)}
        assert (kinds == {Kind.FORWARD}) == (s < 2)
    assert [table.in_flight(s) for s in (0, 1)] == [0, 0]
    assert [table.in_flight(s) for s in (2, 3)] == [whole.in_flight(s) for s in (2, 3)]
    assert without_backward(whole, 0) is whole
    broken = jax.tree_util.Partial(
        type(table), **{f.name: getattr(table, f.name) for f in dataclasses.fields(table)} | {"frozen": 1}
    )
    with pytest.raises(ScheduleError, match=r"device 1 does [BI] of micro-batches \[\]; it must do each of 0..5 once"):
        broken().validate()


def test_a_device_goes_on_to_backward_work_without_waiting():
    table = without_backward(pair_ticks(2, 3), 1)
    # Stage 1 does F0 and B0 in the second tick, and so on; a tick takes as long as the longer of 3 and 1 + 1.
    timeline = simulate(table, forward=[3, 1], backward=[100, 1], lockstep=True)
    assert timeline.makespan == 3 + 3 + 3 + 2
    points = [swap_points(x, 0) for x in (one_f_one_b(4, 16), without_backward(one_f_one_b(4, 16), 1))]
    assert points[0].away > 0 and (points[1].home, points[1].away) == (0, 0)


@pytest.mark.parametrize(("schedule", "stages"), [("interleaved", 2), ("zero_bubble", 4)])
def test_every_schedule_trains_alike(schedule, stages):
    pipe = partition(HALF, schedule=schedule, stages=stages)
    assert pipe.schedule.frozen >= 1
    (_, _), gradients = pipe.value_and_grad(pipe.init(KEY), BATCH)
    assert_frozen_leaves_are(8, gradients, jax.tree.map(jnp.zeros_like, MODEL))
    for a, b in zip(*(jax.tree.leaves(x)[8:] for x in (gradients, plain_gradient(COUNT))), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))


def test_within_a_budget():
    default = pipeline(True).plan
    pipe = partition(HALF, memory=int(0.9 * default.predicted_bytes), options=jaxpipe.PlanOptions(compile=False))
    assert pipe.plan.predicted_bytes <= pipe.plan.budget < default.predicted_bytes
    assert pipe.plan.stages[0].stash_bytes == 0


def test_an_optimizer_that_looks_at_all_gradients_gets_them():
    pipe = partition(optax.chain(optax.clip_by_global_norm(0.01), HALF))
    assert pipe.plan.frozen is None and pipe.schedule.frozen == 0
    assert pipe.plan.memory["gradients"] == pipe.plan.memory["parameters"]


def test_an_optimizer_that_trains_nothing_runs():
    pipe = partition(optax.set_to_zero(), stages=2)
    state, metrics = pipe.step(pipe.init(KEY), BATCH)
    assert float(metrics["gradient_norm"]) == 0
    assert_frozen_leaves_are(16, pipe.parameters(state), MODEL)


def test_a_profile_of_all_work_or_of_what_is_trained():
    profile = functools.partial(jaxpipe.profile_model, MODEL, BATCH, loss=loss, source="analytic", num_microbatches=8)
    whole, less = profile(), profile(optimizer=HALF)
    assert (
        sum(less.backward_seconds) < 0.6 * sum(whole.backward_seconds) and less.forward_seconds == whole.forward_seconds
    )
    assert len(less.frozen) == 8 and Profile.from_json(less.to_json()) == less and whole.frozen == ()
    plans = [partition(HALF, profile=given).plan for given in (whole, less)]
    assert work(plans[0]) == pytest.approx(work(plans[1]), rel=1e-9)  # one is made of sums of products
    other = frozen_behind(MOMENTUM, first_leaves(6))
    with pytest.raises(PartitionError, match=r"profile= was made with 8 parameters that are not trained.* trains? 6"):
        partition(other, profile=less)
