"""Stages on unequal numbers of devices train as plain accumulation does; who works on what, and who sends what where.

Expected gradients are those of a plain loop. It adds up as the devices of a stage do: each its own micro-batches, one
after the other, then their sums in the order of the devices; so parameters of stages of different width are added up in
different orders.
"""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import Network
from jaxpipe.errors import PartitionError, ScheduleError
from jaxpipe.planning import partition_layers
from jaxpipe.planning.dispatch_timeline import CALL_SECONDS
from jaxpipe.schedules import one_f_one_b
from jaxpipe.schedules.replicas import StageReplicas
from tests.support.compare import FUSION, arrays, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import case_of, classifier, entropy, images, linen, pipeline_of
from tests.support.texts import one_line


# Some models here update their statistics in initialization already, which is from shapes alone.
pytestmark = pytest.mark.filterwarnings("ignore::jaxpipe.InitialValuesWarning")


planned_of = functools.partial(pipeline_of, runtime="mpmd")


WIDTHS = [(3, 1), (2, 1, 1), (1, 3)]
M = 8

#: Products with powers of two are exact, so that it does not matter which sums a compiler contracts them with.
EXACT = optax.sgd(0.5, momentum=0.5)


def test_microbatches_are_dealt_round_robin():
    stage_replicas = StageReplicas((2, 3))
    assert (stage_replicas.round_size, stage_replicas.groups) == (6, ((0, 1), (2, 3, 4)))
    assert [stage_replicas.per_device(s) for s in range(2)] == [3, 2]
    assert (stage_replicas.rounds(12), stage_replicas.rounds(13)) == (2, 3)


@pytest.mark.parametrize("widths", [(), (2, 0), (-1, 3)])
def test_every_stage_has_a_device(widths):
    with pytest.raises(ScheduleError, match=r"StageReplicas\(per_stage=.* at least 1 device"):
        StageReplicas(widths)


@functools.cache
def gradient_of(plain):
    return jax.jit(jax.value_and_grad(plain, has_aux=True))


@jax.jit
def add(a, b):
    return jax.tree.map(jnp.add, a, b)


def plain_step(case, params, state, keys, widths):
    """Loss, gradients by width, and state of one step of plain accumulation; state in the micro-batches' order."""
    rows = jax.tree.map(lambda x: x.reshape(len(keys), -1, *x.shape[1:]), case.batch)
    answers = []
    for j, key in enumerate(keys):
        (loss, state), gradient = gradient_of(case.plain)(params, state, key, jax.tree.map(lambda x, j=j: x[j], rows))
        answers.append((loss, gradient))
    totals = {}
    for k in set(widths):
        mine = [functools.reduce(add, answers[r::k]) for r in range(min(k, len(answers)))]
        totals[k] = jax.tree.map(lambda x: x / len(keys), functools.reduce(add, mine))
    return totals[widths[-1]][0], {k: gradient for k, (_, gradient) in totals.items()}, state


def of_stages(pipeline, gradients):
    """Pick each parameter's gradient, of gradients by width, by the width of its stage."""
    widths = [pipeline.plan.stage_replicas.per_stage[s] for s in pipeline._planned.program.placement.parameters]
    leaves = {k: jax.tree.leaves(gradient) for k, gradient in gradients.items()}
    tree = jax.tree.structure(next(iter(gradients.values())))
    return jax.tree.unflatten(tree, [leaves[k][n] for n, k in enumerate(widths)])


def check_exactly(widths, m=M, steps=3, **options):
    """Parameters after some steps have the bits of plain accumulation."""
    case = case_of("mlp")
    pipeline = planned_of(
        "mlp", sum(widths), m, None, optimizer=EXACT, options=jaxpipe.PlanOptions(devices_per_stage=widths), **options
    )
    assert tuple(len(stage.devices) for stage in pipeline.plan.stages) == widths
    state, (params, _) = pipeline.init(jax.random.key(3)), case.start(None)
    slots, update = EXACT.init(params), jax.jit(EXACT.update)
    for _ in range(steps):
        keys = [pipeline.microbatch_key(state, j) for j in range(m)]
        loss, gradients, _ = plain_step(case, params, (), keys, widths)
        updates, slots = update(of_stages(pipeline, gradients), slots, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipeline.step(state, case.batch)
        assert float(metrics["loss"]) == float(loss)
        # Sums of squares buffer by buffer and then over stages: float32 rounding.
        norm = float(optax.global_norm(of_stages(pipeline, gradients)))
        assert float(metrics["gradient_norm"]) == pytest.approx(norm, rel=1e-6)
    assert_same_bits(arrays(pipeline.parameters(state)), [np.asarray(x) for x in arrays(params)])
    return pipeline, state


@pytest.mark.parametrize(
    "widths",
    [pytest.param(WIDTHS[0], marks=pytest.mark.core), WIDTHS[1], pytest.param(WIDTHS[2], marks=pytest.mark.slow)],
)
def test_parameters_after_three_steps_are_those_of_plain_accumulation(widths):
    """8 micro-batches: the last round of 3 is short."""
    check_exactly(widths)


def test_a_smaller_batch_is_shared_like_a_whole_one():
    case = case_of("mlp")
    pipeline = planned_of("mlp", 4, M, None, optimizer=EXACT, options=jaxpipe.PlanOptions(devices_per_stage=(3, 1)))
    state, (params, _) = pipeline.init(jax.random.key(3)), case.start(None)
    half = jax.tree.map(lambda x: x[: len(x) // 2], case.batch)
    keys = [pipeline.microbatch_key(state, j) for j in range(M // 2)]
    smaller = dataclasses.replace(case, batch=half)
    _, gradients, _ = plain_step(smaller, params, (), keys, (3, 1))
    updates, _ = jax.jit(EXACT.update)(of_stages(pipeline, gradients), EXACT.init(params), params)
    state, _ = pipeline.step(state, half)
    expected = [np.asarray(x) for x in arrays(optax.apply_updates(params, updates))]
    assert_same_bits(arrays(pipeline.parameters(state)), expected)


def test_a_backward_pass_in_two_parts():
    check_exactly((2, 1), m=4, steps=1, schedule="zero_bubble")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("widths", [(2, 3), (1, 4, 1), (2, 2), (4,)])
def test_every_width_number_and_schedule(widths, m, schedule):
    check_exactly(widths, m, 2, schedule=schedule)


@pytest.mark.slow
def test_a_budget_is_kept_with_the_same_gradients():
    usual = layers((2, 1, 1), rows=960)
    budget = int(0.8 * usual.plan.predicted_bytes)
    small = layers((2, 1, 1), rows=960, memory=budget)
    assert any(stage.added_seconds > 0 for stage in small.plan.stages)
    assert max(small.memory_report().compiled_bytes) <= budget
    batch = jax.random.normal(jax.random.key(1), (960, 64))
    answers = [pipeline.value_and_grad(pipeline.init(jax.random.key(0)), batch) for pipeline in (usual, small)]
    assert_same_bits(*(jax.tree.map(np.asarray, answer) for answer in answers))


class Normalized(nn.Module):
    """Layers with running statistics and dropout."""

    convolutions: bool

    @nn.compact
    def __call__(self, x, train):
        x = x if self.convolutions else x.reshape(x.shape[0], -1)
        for width in (4, 6):
            x = nn.Conv(width, (3, 3), strides=2)(x) if self.convolutions else nn.Dense(width)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


@functools.cache
def normalized_case(convolutions):
    return linen(Normalized(convolutions), images(8, 8, 1, rows=16), classifier(train=True))


def accuracy(model, batch):
    return {"accuracy": (model(batch["x"], train=False).argmax(-1) == batch["y"]).mean()}


@functools.cache
def normalized_pipeline(widths, convolutions=False):
    case = normalized_case(convolutions)
    return jaxpipe.partition(
        case.model,
        mesh_of(sum(widths), None),
        case.batch,
        loss=case.loss,
        optimizer=optax.sgd(0.05, momentum=0.9),
        evaluate=accuracy,
        predict=lambda model, batch: model(batch["x"], train=False),
        num_microbatches=M,
        profile="analytic",
        options=jaxpipe.PlanOptions(devices_per_stage=widths),
    )


def trained(widths, convolutions, steps=2):
    """A pipeline's state after some steps, and the variables of plain training."""
    case, pipeline = normalized_case(convolutions), normalized_pipeline(widths, convolutions)
    state, (params, variables) = pipeline.init(jax.random.key(3)), case.start(jax.random.key(3))
    optimizer = optax.sgd(0.05, momentum=0.9)
    slots, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(steps):
        keys = [pipeline.microbatch_key(state, j) for j in range(M)]
        loss, gradients, variables = plain_step(case, params, variables, keys, widths)
        updates, slots = update(of_stages(pipeline, gradients), slots, params)
        params = optax.apply_updates(params, updates)
        state, metrics = pipeline.step(state, case.batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=FUSION)
    return pipeline, state, case.variables(params, variables)


def check_statistics(widths, convolutions):
    pipeline, state, wanted = trained(widths, convolutions)
    parameters = pipeline.parameters(state)
    for part in ("params", "batch_stats"):
        assert relative_l2(arrays(parameters[part]), arrays(wanted[part])) < FUSION
    for x in (*state.parameters, *state.variables, *state.optimizer):
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        for other in others:
            assert_same_bits(other, first)
    return pipeline, state, parameters


@pytest.mark.slow
def test_running_statistics_and_dropout_are_those_of_plain_training():
    """And all devices of a stage agree; evaluation and prediction take batches that no round divides."""
    pipeline, state, variables = check_statistics((2, 1), False)
    batch = images(8, 8, 1, rows=14)
    logits = jax.jit(lambda v, x: normalized_case(False).model.apply(v, x, train=False))(variables, batch["x"])
    predicted = pipeline.predict(state, {"x": batch["x"]})
    assert predicted.shape == logits.shape
    # One batch of 14 or micro-batches of 2: other blocks in the products.
    assert relative_l2(predicted, logits) < FUSION
    wanted = float((logits.argmax(-1) == batch["y"]).mean())
    assert float(pipeline.evaluate(state, batch)["accuracy"]) == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS)
def test_running_statistics_of_convolutions(widths):
    check_statistics(widths, True)


def test_a_checkpoint_goes_on_in_stages_that_are_alike(tmp_path):
    """With the same bits: what is saved knows nothing of replicas."""
    case = normalized_case(False)
    pipeline = normalized_pipeline((2, 1))
    state, _ = pipeline.step(pipeline.init(jax.random.key(3)), case.batch)
    pipeline.save(state, tmp_path)
    other = normalized_pipeline((1, 1))
    restored = other.restore(tmp_path)
    assert_same_bits(other.parameters(restored), pipeline.parameters(state))
    other.save(dataclasses.replace(restored, step=restored.step + 1), tmp_path)
    again = pipeline.restore(tmp_path)
    for name in ("parameters", "variables", "optimizer", "shared"):
        assert_same_bits(getattr(again, name), getattr(state, name))


class Halving(nn.Module):
    """State whose value tells the order: half of the old one and something of the micro-batch; and a count."""

    read: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        seen = self.variable("seen", "mean", jnp.zeros, (4,))
        count = self.variable("seen", "count", lambda: jnp.zeros((), jnp.int32))
        seen.value = 0.5 * seen.value + jnp.round(x.sum(0))
        count.value = count.value + 1
        return nn.Dense(3)(jnp.tanh(x + seen.value if self.read else x))


def halving(read, widths, model=None):
    return jaxpipe.partition(
        model or Halving(read),
        mesh_of(sum(widths), None),
        jnp.ones((14, 5)),
        loss=lambda model, x: jnp.square(model(x)).mean(),
        optimizer=optax.sgd(0.5),
        num_microbatches=7,
        profile="analytic",
        options=jaxpipe.PlanOptions(devices_per_stage=widths),
    )


def test_state_is_folded_in_the_order_of_the_micro_batches():
    """Bit for bit: whole numbers and halves."""
    batch = jax.random.normal(jax.random.key(1), (14, 5)) * 10
    pipeline = halving(False, (3, 1))
    state = pipeline.init(jax.random.key(0))
    variables = pipeline.parameters(state)
    assert any(
        "seen" in v.name
        for k, v in enumerate(pipeline._planned.model.state)
        if not pipeline._planned.program.placement.state[k]
    )
    seen = variables["seen"]
    apply = jax.jit(lambda seen, x: Halving().apply({**variables, "seen": seen}, x, mutable=["seen"])[1]["seen"])
    for rows in batch.reshape(7, 2, 5):
        seen = apply(seen, rows)
    state, _ = pipeline.step(state, batch)
    updated = pipeline.parameters(state)["seen"]
    assert int(updated["count"]) == int(variables["seen"]["count"]) + 7
    assert_same_bits(updated, jax.tree.map(np.asarray, seen))


class Counting(nn.Module):
    """A count, to which a micro-batch adds nothing of its own."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("seen", "count", lambda: jnp.zeros((), jnp.int32))
        count.value = count.value + 1
        return nn.Dense(3)(jnp.tanh(nn.Dense(4)(x)))


def test_a_count_alone_is_advanced_by_every_micro_batch():
    pipeline = halving(False, (3, 1), Counting())
    state = pipeline.init(jax.random.key(0))
    before = int(pipeline.parameters(state)["seen"]["count"])
    assert not pipeline._planned.program.placement.state[0]  # in the stage on three devices
    for steps in (1, 2):
        state, _ = pipeline.step(state, jnp.ones((14, 5)))
        assert int(pipeline.parameters(state)["seen"]["count"]) == before + 7 * steps


def test_state_that_the_next_micro_batch_reads_needs_one_device():
    with pytest.raises(
        PartitionError, match=r"on 3 devices .* depends on seen/mean, .* one device \(devices_per_stage=\)"
    ):
        halving(True, (3, 1))


def tied_loss(model, batch):
    table = model.args[0]["table"]
    x = table[batch["token"]]
    for w in model.args[0]["layers"]:
        x = jnp.tanh(x @ w)
    return entropy(x @ table.T, batch["y"])


@pytest.mark.slow
def test_a_tied_parameter_a_clipped_adam_and_a_guard():
    """A parameter that stages of different width use; norms and shared scalars count every stage once."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "table": jax.random.normal(keys[0], (10, 6)),
        "layers": [jax.random.normal(k, (6, 6)) for k in keys[1:]],
    }
    batch = {"token": jnp.arange(12) % 10, "y": (3 * jnp.arange(12)) % 10}
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    model = jax.tree_util.Partial(lambda params, x: None, params)
    options = {"loss": tied_loss, "optimizer": optimizer, "num_microbatches": 6, "profile": "analytic"}
    pipeline = jaxpipe.partition(
        model,
        mesh_of(3, None),
        batch,
        options=jaxpipe.PlanOptions(devices_per_stage=(1, 2), on_nonfinite="skip"),
        **options,
    )
    state, slots = pipeline.init(jax.random.key(0)), optimizer.init(params)
    wanted = params
    for _ in range(3):
        gradient = jax.grad(lambda p: tied_loss(jax.tree_util.Partial(model.func, p), batch))(wanted)
        state, metrics = pipeline.step(state, batch)
        assert float(metrics["gradient_norm"]) == pytest.approx(float(optax.global_norm(gradient)), rel=1e-5)
        assert int(metrics["skipped"]) == 0 and not metrics["nonfinite_stages"].any()
        assert metrics["nonfinite_stages"].shape == (2,)
        updates, slots = optimizer.update(gradient, slots, wanted)
        wanted = optax.apply_updates(wanted, updates)
    # Six means against one mean of all rows: float32 rounding, which Adam divides by what it has seen.
    assert relative_l2(arrays(pipeline.parameters(state)), arrays(wanted)) < 1e-5


def test_the_plan_names_the_devices_of_its_stages():
    pipeline = normalized_pipeline((2, 1))
    plan = pipeline.plan
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2,)]
    assert plan.num_microbatches == M and pipeline.schedule.num_microbatches == M // 2
    assert "2 stages x 2 + 1 devices, 8 micro-batches of 2" in one_line(plan)
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan
    assert plan.identity != normalized_pipeline((1, 1)).plan.identity
    for stage, n, s in zip(plan.stages, (1, 2), range(2), strict=True):
        assert stage.in_flight == n * pipeline.schedule.in_flight(s)
        spans = [span for span in pipeline.timeline().spans if span.stage == s]
        busy = sum(span.end - span.start for span in spans)
        # Forward and backward are two calls of the first stage, and one of the last.
        calls = CALL_SECONDS * (2 if stage is plan.stages[0] else 1)
        assert busy == pytest.approx(M // 2 * n * (stage.forward_seconds + stage.backward_seconds + calls), rel=1e-9)
    # The timeline ends before the devices of the first stage add up their gradients, a few KiB.
    makespan = pipeline.timeline().makespan
    assert makespan < plan.step_seconds < makespan * (1 + 1e-4)
    first, second, third = pipeline.memory_report().predicted_bytes
    assert first == second and max(first, third) == plan.predicted_bytes


CHAIN = jax.tree_util.Partial(
    lambda w, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), w, x),
    [jax.random.normal(jax.random.key(k), (64, 64)) / 8 for k in range(8)],
)


def layers(widths, m=12, rows=24, **options):
    """A chain of equal layers."""
    options = {
        "loss": lambda model, x: (model(x).sum(), 1.0, {}),
        "optimizer": optax.sgd(0.1),
        "profile": "analytic",
        **options,
    }
    mesh = options.pop("mesh", None) or mesh_of(4, None)
    batch = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    return jaxpipe.partition(
        CHAIN, mesh, batch, num_microbatches=m, options=jaxpipe.PlanOptions(devices_per_stage=widths), **options
    )


@functools.cache
def one_costly_layer():
    """A profile in which the first layer costs as much as all others together."""
    even = layers(False).profile
    first = min(k for k, name in enumerate(even.names) if "dot_general" in name)
    seconds = tuple(7.0 if k == first else 1.0 if "dot_general" in name else 0.0 for k, name in enumerate(even.names))
    return dataclasses.replace(even, forward_seconds=seconds, backward_seconds=seconds)


def test_the_planner_replicates_stages_that_cannot_be_balanced():
    """One layer costs as much as all others together: two devices for it, or three."""
    profile = one_costly_layer()
    single = layers(False, profile=profile)
    chosen = layers(True, profile=profile)
    assert chosen.plan.step_seconds < single.plan.step_seconds
    assert sum(len(stage.devices) for stage in chosen.plan.stages) == 4
    assert max(chosen.plan.stage_replicas.per_stage) > 1


def test_devices_of_a_network_are_given_to_stages():
    """Two fast devices, far from the others: a stage of two gets them."""
    bandwidth = np.full((3, 3), 1e6)
    bandwidth[0, 2] = bandwidth[2, 0] = 1e12
    profile = layers((2, 1), mesh=mesh_of(3, None)).profile
    pipeline = layers((2, 1), mesh=mesh_of(3, None), network=Network(bandwidth), profile=profile)
    assert [stage.devices for stage in pipeline.plan.stages] == [(0, 2), (1,)]
    ids = [device.id for device in pipeline.mesh.devices]
    assert ids == [jax.devices()[k].id for k in (0, 2, 1)]


def test_widths_on_paper():
    """``partition_layers`` keeps to the widths it is given: as good as the best of all cuts by brute force."""
    profile = jaxpipe.Profile.chain("abcdef", [4, 1, 1, 2, 1, 3], [0] * 6, [0] * 6, [0] * 6, [0] * 6)
    for widths in [(3, 1), (2, 1, 1), (1, 3), (1, 2, 1)]:
        options = {"cost_model": "min_max", "replicate": widths, "reorder": False}
        partition = partition_layers(profile, Network.uniform(4, 1.0), **options)
        assert tuple(len(stage.devices) for stage in partition.stages) == widths
        seconds = profile.forward_seconds
        best = min(
            max(sum(seconds[a:b]) / k for (a, b), k in zip(itertools.pairwise((0, *cuts, 6)), widths, strict=True))
            for cuts in itertools.combinations(range(1, 6), len(widths) - 1)
        )
        assert partition.bottleneck_seconds == pytest.approx(best)
        assert jaxpipe.planning.Partition.from_json(partition.to_json()) == partition


@pytest.mark.parametrize(
    ("replicate", "options", "message"),
    [
        (
            (3, 2),
            {},
            r"devices_per_stage=\(3, 2\); it must be .* add up to the 4 device\(s\) along 'stage', such as \(3, 1\)",
        ),
        ((4, 0), {}, "numbers above 0"),
        ("auto", {}, "devices_per_stage='auto'; it must be True"),
        (
            3,
            {},
            "devices_per_stage=3: each stage would have 3 of the 4 devices along 'stage'",
        ),
        ((3, 1), {"schedule": "interleaved"}, r"interleaved-2, which has several stages on a device; with .* 3 \+ 1"),
        ((3, 1), {"schedule": "pipedream"}, "gave pipedream, which updates weights within a step"),
        ((3, 1), {"gradient_exchange": jaxpipe.gradients.block_sparse(k=1)}, "between the replicas of a whole"),
        (
            (3, 1),
            {"schedule": lambda p, m: one_f_one_b(p, 12)},
            r"num_microbatches=4\) gave 1f1b for 2 stages and 12 micro-batches\. Pass num_microbatches=36, or another "
            r"table\. With stages on 3 \+ 1 devices \(devices_per_stage=\) a micro-batch of a schedule is a round of "
            "3, .* so num_microbatches=12 are 4 for it",
        ),
        (
            (3, 1),
            {"schedule": lambda p, m: one_f_one_b(4, m)},
            r"Pass devices_per_stage= for 4 stages, or .* a round of 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_traced(replicate, options, message):
    def loss(model, x):
        pytest.fail("traced")

    with pytest.raises(PartitionError, match=message):
        layers(replicate, loss=loss, **options)


def test_a_batch_of_one_row_is_for_stages_on_several_devices_too():
    assert layers((1, 1, 2), rows=1, m=1).plan.stage_replicas.per_stage == (1, 1, 2)


def test_a_schedule_that_does_not_exist_for_so_many_rounds_says_so():
    """``interleaved`` wants a multiple of the stages: 3 rounds are none, though 8 micro-batches are."""
    with pytest.raises(ScheduleError, match=r"num_microbatches=3, .* is a round of 3, .* num_microbatches=8 are 3 for"):
        layers((3, 1), m=8, schedule="interleaved")


def test_the_planner_goes_on_with_one_device_each_where_a_schedule_needs_that():
    profile = one_costly_layer()
    assert len(layers(True, m=8, profile=profile).plan.stages) < 4
    plan = layers(True, m=8, profile=profile, schedule="interleaved").plan
    assert (plan.schedule, plan.stage_replicas.is_single) == ("interleaved-2", True)


@pytest.mark.parametrize("widths", [(3, 1), 2, True])
def test_one_program_has_one_device_in_each_stage(widths):
    def loss(model, x):
        pytest.fail("traced")

    with pytest.raises(
        PartitionError, match=r"runtime='spmd' with devices_per_stage=.*: .* one device\. Pass runtime='mpmd'"
    ):
        layers(widths, loss=loss, runtime="spmd")
    plan = layers(widths).plan
    assert plan.runtime == "mpmd"


def test_stage_replicas_beside_a_data_axis_are_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "stage"))
    with pytest.raises(PartitionError, match="there can be one of the two"):
        layers((3, 1), mesh=mesh)
