"""Asynchronous weight updates, against a plain loop over the same recurrence of delayed gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe.errors import PartitionError, ScheduleError
from jaxpipe.gradients import per_stage
from jaxpipe.schedules import (
    Schedule,
    double_buffered,
    interleaved,
    local_accumulation,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from tests.support.compare import FUSION, arrays, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import case_of, pipeline_of


planned_of = functools.partial(pipeline_of, runtime="mpmd")


@pytest.mark.core
def test_weight_versions_of_four_stages_and_eight_mini_batches():
    assert pipedream(4, 8).versions == (
        (0, 0, 0, 0, 1, 2, 3, 4),
        (0, 0, 0, 1, 2, 3, 4, 5),
        (0, 0, 1, 2, 3, 4, 5, 6),
        (0, 1, 2, 3, 4, 5, 6, 7),
    )
    assert double_buffered(4, 16).versions == ((0,) * 8 + (1,) * 4 + (2,) * 4,) * 4
    assert [s(4, 16).staleness for s in (pipedream, double_buffered, one_f_one_b)] == [
        (3, 2, 1, 0),
        (1, 1, 1, 1),
        (0, 0, 0, 0),
    ]


def test_with_local_accumulation_few_updates_are_between_forward_and_backward():
    assert local_accumulation(4, 12).versions == (
        (0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2),
        (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2),
        (0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2),
        (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2),
    )
    # Of 7, 6, ..., 0 gradients between both, as many updates as groups, rounded up.
    for group, most in ((1, 7), (2, 4), (4, 2), (8, 1)):
        staleness = local_accumulation(8, 16, group=group).staleness
        assert max(staleness) == most and staleness[-1] == 0
        assert list(staleness) == [-(-(7 - s) // group) for s in range(8)]
    with pytest.raises(ScheduleError, match="groups divide all"):
        local_accumulation(2, 8, group=3)


def recurrence(pipeline: jaxpipe.Pipeline, name: str, optimizer, keys, replicas: int):
    """Mini-batch after mini-batch: the gradient at each stage's old weights goes to the newest. Loss and variables."""
    schedule, model, case = pipeline.schedule, pipeline._planned.model, case_of(name)
    stages = model.parameter_tree(pipeline._planned.program.placement.parameters)
    params, state = case.start(jax.random.key(3))
    history, slots, m = [params], optimizer.init(params), schedule.num_microbatches
    states, losses = [state] * replicas, []
    gradient = jax.jit(jax.value_and_grad(case.plain, has_aux=True))

    @jax.jit  # as one program: XLA contracts products and sums
    def update(mean, slots, params):
        updates, slots = optimizer.update(mean, slots, params)
        return optax.apply_updates(params, updates), slots

    rows = jax.tree.leaves(case.batch)[0].shape[0] // (m * replicas)
    total = None
    for j in range(m):
        used = jax.tree.map(lambda s, *x, j=j: x[schedule.versions[s][j]], stages, *history)
        for r in range(replicas):
            k = r * m + j
            batch = jax.tree.map(lambda x, k=k: x[k * rows : (k + 1) * rows], case.batch)
            (loss, states[r]), step_gradient = gradient(used, states[r], keys[k], batch)
            losses.append(loss)
            total = step_gradient if total is None else jax.tree.map(jnp.add, total, step_gradient)
        if (j + 1) % schedule.group == 0:
            mean = jax.tree.map(lambda x: x / (schedule.group * replicas), total)
            new, slots = update(mean, slots, history[-1])
            history.append(new)
            total = None
    state = jax.tree.map(lambda *x: jnp.stack(x).mean(0), *states)
    return np.mean(losses), case.variables(history[-1], state)


def check(
    name: str, stages: int, m: int, schedule, replicas: int | None = None, exact: bool = True, clip: float | None = None
) -> None:
    # Products with powers of two are exact, so that it does not matter which sums a compiler contracts them with.
    optimizer = momentum = optax.sgd(0.5, momentum=0.5) if exact else optax.sgd(0.05, momentum=0.9)
    if clip is not None:
        optimizer = optax.chain(per_stage(optax.clip_by_global_norm(clip)), momentum)
    pipeline = planned_of(name, stages, m, replicas, schedule=schedule, optimizer=optimizer)
    assert pipeline.plan.per_stage == ("each stage apart" in str(pipeline.plan)) == (clip is not None)
    if clip is not None:  # the same by optax's own means, where the stages are known
        labels = pipeline._planned.model.parameter_tree(pipeline._planned.program.placement.parameters)
        clips = {s: optax.clip_by_global_norm(clip) for s in range(stages)}
        optimizer = optax.chain(optax.multi_transform(clips, lambda _: labels), momentum)
    state = pipeline.init(jax.random.key(3))
    keys = [pipeline.microbatch_key(state, j) for j in range(m * (replicas or 1))]
    loss, wanted = recurrence(pipeline, name, optimizer, keys, replicas or 1)
    state, metrics = pipeline.step(state, case_of(name).batch)
    trained = arrays(pipeline.parameters(state))
    if exact:
        assert_same_bits(trained, arrays(wanted))
    assert relative_l2(trained, arrays(wanted)) < FUSION
    # Losses are added up in another order.
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("schedule", [pipedream, double_buffered])
def test_delayed_gradients_are_those_of_the_recurrence(schedule):
    check("mlp", 2, 8, schedule)


@pytest.mark.core
def test_backward_work_uses_the_newest_weights_with_local_accumulation():
    """Against each layer's derivative by hand: products forward with the older, backward with the newer weights."""
    draw = np.random.default_rng(0)
    weights = [draw.standard_normal((8, 8)).astype(np.float32) / 3 for _ in range(6)]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    batch, m, rate = draw.standard_normal((24, 8)).astype(np.float32), 12, 0.5
    pipeline = jaxpipe.partition(
        model, mesh_of(3, None), batch, loss=lambda f, x: jnp.square(f(x)).mean(), optimizer=optax.sgd(rate),
        num_microbatches=m, profile="analytic", schedule=functools.partial(local_accumulation, group=2),
    )  # fmt: skip
    schedule, stages = pipeline.schedule, pipeline._planned.program.placement.parameters
    assert max(schedule.staleness) == 1 and len(set(stages)) == 3
    history = [[w.astype(np.float64)] for w in weights]
    sums = [np.zeros((8, 8)) for _ in weights]
    for j, rows in enumerate(np.split(batch.astype(np.float64), m)):
        inputs = [rows]
        for k, s in enumerate(stages):
            inputs.append(np.tanh(inputs[-1] @ history[k][schedule.versions[s][j]]))
        cotangent = 2 * inputs[-1] / inputs[-1].size
        for k in reversed(range(len(weights))):
            product = cotangent * (1 - inputs[k + 1] ** 2)
            sums[k] += inputs[k].T @ product
            cotangent = product @ history[k][-1].T
        if (j + 1) % 2 == 0:
            for k, total in enumerate(sums):
                history[k].append(history[k][-1] - rate * total / 2)
            sums = [np.zeros((8, 8)) for _ in weights]
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), batch)
    trained = jax.tree.leaves(pipeline.parameters(state))
    assert relative_l2(trained, [row[-1] for row in history]) < 1e-6  # float32 against float64
    kept = jaxpipe.Plan.from_json(pipeline.plan.to_json())
    again = jaxpipe.partition(
        model, mesh_of(3, None), batch, loss=lambda f, x: jnp.square(f(x)).mean(), optimizer=optax.sgd(rate), plan=kept
    )
    assert again.schedule == schedule
    state, _ = again.step(again.init(jax.random.key(0)), batch)
    assert_same_bits(jax.tree.leaves(again.parameters(state)), trained)


def test_local_accumulation_keeps_one_version_of_the_weights():
    """Of a stage with large weights and small activations; what keeps versions has those of several updates."""
    weights = [np.eye(256, dtype=np.float32) for _ in range(4)]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    reserved = {}
    for schedule in (one_f_one_b, local_accumulation, double_buffered):
        pipeline = jaxpipe.partition(
            model, mesh_of(4, None), np.ones((8, 256), np.float32), loss=lambda f, x: f(x).mean(),
            optimizer=optax.sgd(0.1), num_microbatches=8, profile="analytic", schedule=schedule,
        )  # fmt: skip
        pipeline.compile()
        reserved[pipeline.plan.schedule] = pipeline.memory_report().compiled_bytes[0]
    weight = 256 * 256 * 4
    assert reserved["paci"] < reserved["1f1b"] + weight / 2
    assert reserved["2bw"] > reserved["paci"] + weight / 2


@pytest.mark.parametrize("schedule", [pipedream, one_f_one_b])
def test_each_stage_is_clipped_by_its_own_norm(schedule):
    """Norms differ by rounding: a stage adds up its squares in another order than ``jnp.sum`` over a tree."""
    optimizer = optax.chain(per_stage(optax.clip_by_global_norm(1e-3)), optax.sgd(1.0))
    pipeline = planned_of("mlp", 2, 1, None, schedule=schedule, optimizer=optimizer)
    start = pipeline.init(jax.random.key(3))
    before = arrays(pipeline.parameters(start))
    after = arrays(pipeline.parameters(pipeline.step(start, case_of("mlp").batch)[0]))
    model = pipeline._planned.model
    stages = jax.tree.leaves(model.parameter_tree(pipeline._planned.program.placement.parameters))
    for s in (0, 1):
        squares = [np.square(b - a).sum() for a, b, n in zip(after, before, stages, strict=True) if n == s]
        assert np.sqrt(sum(squares)) == pytest.approx(1e-3, rel=1e-3)  # a difference of parameters has rounding errors


def test_delayed_gradients_of_clipped_stages():
    check("mlp", 2, 8, pipedream, exact=False, clip=0.05)


def test_a_transformation_per_stage_keeps_nothing():
    with pytest.raises(ValueError, match=r"keeps 2 arrays .* may keep none"):
        per_stage(optax.trace(0.9)).init({"a": jnp.ones(3), "b": jnp.ones(2)})


def test_without_a_pipeline_all_parameters_are_one_stage():
    gradients = {"a": jnp.arange(3.0), "b": {"c": jnp.arange(4.0)}}
    clip = optax.clip_by_global_norm(0.5)
    clipped, _ = per_stage(clip).update(gradients, per_stage(clip).init(gradients))
    assert_same_bits(arrays(clipped), arrays(clip.update(gradients, clip.init(gradients))[0]))


@pytest.mark.slow
def test_delayed_gradients_with_running_statistics_and_replicas():
    check("cnn-linen", 2, 4, pipedream, replicas=2, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pipedream, double_buffered])
@pytest.mark.parametrize(("name", "stages"), [("mlp", 1), ("mlp", 4), ("cnn-nnx", 2), ("unet", 2)])
def test_every_asynchronous_schedule_on_more_models(name, stages, schedule):
    check(name, stages, 8, schedule, exact=False)


def test_value_and_grad_is_synchronous():
    pipelines = [planned_of("mlp", 2, 4, None, schedule=schedule) for schedule in (pipedream, one_f_one_b)]
    batch = case_of("mlp").batch
    answers = [pipeline.value_and_grad(pipeline.init(jax.random.key(3)), batch) for pipeline in pipelines]
    assert_same_bits(*(arrays(x) for x in answers))


def test_one_name_is_enough():
    assert planned_of("mlp", 2, 4, None, schedule="pipedream").plan.schedule == "pipedream"


def line(model, x):
    return model(x).mean()


def partition(schedule, optimizer=None, loss=line, **options):
    weights = [jnp.ones((4, 4)), jnp.ones((4, 4))]
    model = jax.tree_util.Partial(lambda w, x: jax.nn.relu(x @ w[0]) @ w[1], weights)
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    options = {"profile": "analytic", "num_microbatches": 4, "schedule": schedule, **options}
    return jaxpipe.partition(model, mesh_of(2, None), jnp.ones((8, 4)), loss=loss, optimizer=optimizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))},
            r"schedule=pipedream: .* before the gradient of an early one exists, .* \(of shape \(\)\).*per_stage",
        ),
        (
            {"loss": lambda model, x: (line(model, x), 2.0, {})},
            r"total weight of a batch is not known .* Return a mean",
        ),
    ],
)
def test_what_needs_the_whole_gradient_is_refused(options, message):
    with pytest.raises(PartitionError, match=message):
        partition(pipedream, **options)


@pytest.mark.parametrize("schedule", ["double_buffered", "local_accumulation"])
def test_a_batch_without_whole_groups_is_refused(schedule):
    """Three micro-batches make no groups of two; one update of all three would be other training."""
    pipeline = partition(schedule)
    state = pipeline.init(jax.random.key(0))
    with pytest.raises(ScheduleError, match="has no table of 3 micro-batches on 2 devices"):
        pipeline.step(state, jnp.ones((6, 4)))
    state, _ = pipeline.step(state, jnp.ones((4, 4)))  # one group
    assert int(state.step) == 1


@pytest.mark.parametrize("schedule", ["pipedream", "double_buffered"])
def test_one_program_does_not_update_weights_during_a_step(schedule):
    def loss(model, x):
        pytest.fail("traced")

    message = r"runtime='spmd' with schedule=(pipedream|2bw): .* at the end of a step, .* Pass runtime='mpmd'"
    with pytest.raises(PartitionError, match=message):
        partition(schedule, loss=loss, runtime="spmd")
    plan = partition(schedule).plan
    assert plan.runtime == "mpmd"


def table_of(schedule: Schedule, **changed) -> Schedule:
    return Schedule(**{**{k: getattr(schedule, k) for k in schedule.__dataclass_fields__}, **changed})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: table_of(pipedream(2, 2), versions=((0, 1), (0, 1))), "stage 0 uses weights with 1 updates for micro"),
        (lambda: table_of(pipedream(2, 2), versions=((0,), (0,))), "a number for each stage and micro-batch"),
        (lambda: table_of(pipedream(2, 3), group=2), "group=2 does not divide 3"),
        (
            lambda: table_of(zero_bubble(2, 2), versions=((0, 0),) * 2),
            "need one stage on each device and backward work that is not split",
        ),
        (
            lambda: table_of(interleaved(2, 2), versions=((0, 0),) * 2),
            "need one stage on each device and backward work that is not split",
        ),
    ],
)
def test_versions_that_cannot_be(made, message):
    with pytest.raises(ScheduleError, match=message):
        made().validate()


@pytest.mark.parametrize("sizes", [(2, 3, {}), (4, 8, {"group": 2})])
def test_groups_that_do_not_fit(sizes):
    with pytest.raises(ScheduleError, match="a group has at least as many micro-batches as there are stages"):
        double_buffered(*sizes[:2], **sizes[2])
