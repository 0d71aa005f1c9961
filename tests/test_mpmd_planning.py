"""Plans for stage programs: their timeline, the bytes of each device, budgets, and when one program is better."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import _compat
from jaxpipe.errors import MemoryBudgetError, ScheduleError
from jaxpipe.planning.dispatch_timeline import CALL_SECONDS, SEND_SECONDS, Dispatching, dispatched_timeline
from jaxpipe.schedules import StageReplicas, gpipe, interleaved, one_f_one_b, simulate, zero_bubble
from tests.support.texts import one_line


pytestmark = pytest.mark.optimized


WIDTH, LAYERS, ROWS, M = 64, 8, 32, 8
BATCH = jnp.linspace(-1.0, 1.0, M * ROWS * WIDTH).reshape(M * ROWS, WIDTH)


def chain(weights, x):
    for w in weights:
        x = x @ w
    return x


def net(weights, x):
    return functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x)


def weights(width=WIDTH, layers=LAYERS):
    return [jax.random.normal(jax.random.key(k), (width, width)) / width**0.5 for k in range(layers)]


def planned(function=net, stages=2, values=None, batch=BATCH, **options):
    mesh = jax.make_mesh((stages,), ("stage",))
    options = {"optimizer": optax.sgd(0.1), "schedule": one_f_one_b, "runtime": "mpmd", "num_microbatches": M} | options
    return jaxpipe.partition(
        jax.tree_util.Partial(function, weights() if values is None else values),
        mesh,
        batch,
        loss=lambda f, x: jnp.square(f(x)).mean(),
        profile="analytic",
        **options,
    )


@pytest.fixture(scope="module")
def default():
    return planned()


def free(schedule, forward, backward, messages, processes):
    zero = [0.0] * len(forward)
    return dispatched_timeline(
        schedule, (forward, backward, zero), Dispatching(messages, processes, StageReplicas((1, 1)))
    )


ONE = [(0,), (0,)]


def test_devices_run_free_and_messages_overlap():
    timeline = free(one_f_one_b(2, 2), [1.0, 1.0], [2.0, 2.0], [(0.5, 0.0), (0.0, 0.25)], ONE)
    # F0 1, its way 0.5, F0 B0 F1 B1 of stage 1 in two calls 6, the way back 0.25, B1 2; four calls in a row.
    assert timeline.makespan == pytest.approx(9.75 + 4 * CALL_SECONDS + 2 * SEND_SECONDS, rel=1e-12)


@pytest.mark.parametrize("m", [1, 8])
def test_stages_without_work_take_as_long_as_the_host_calls_and_sends(m):
    timeline = free(one_f_one_b(2, m), [0.0, 0.0], [0.0, 0.0], [(0.0, 0.0)] * 2, ONE)
    # Of each micro-batch: forward and backward of stage 0, both in one of stage 1; an activation and a cotangent.
    assert timeline.makespan == pytest.approx(m * (3 * CALL_SECONDS + 2 * SEND_SECONDS), rel=1e-12)


def test_processes_call_at_the_same_time():
    alone, together = (free(one_f_one_b(2, 8), [0.0] * 2, [0.0] * 2, [(0.0, 0.0)] * 2, p) for p in (ONE, [(0,), (1,)]))
    assert together.makespan < 0.8 * alone.makespan


def test_zero_bubble_makes_two_calls_of_a_backward_pass():
    zero = [0.0, 0.0]
    timeline = dispatched_timeline(
        zero_bubble(2, 1), (zero, zero, zero), Dispatching([(0.0, 0.0)] * 2, ONE, StageReplicas((1, 1)))
    )
    # F, I, W of stage 0; F with I, and W, of stage 1: the last weight work follows the message back.
    assert timeline.makespan == pytest.approx(5 * CALL_SECONDS + 2 * SEND_SECONDS, abs=SEND_SECONDS)


def test_messages_take_their_own_time_on_each_boundary_and_direction():
    timeline = simulate(gpipe(3, 1), forward=1, backward=1, communication=[(10, 20), (100, 200)])
    assert timeline.makespan == 6 + 10 + 20 + 100 + 200


@pytest.mark.parametrize("options", [{"communication": [(1, 1)], "lockstep": True}, {"communication": [(1, 1)] * 2}])
def test_seconds_of_boundaries_that_do_not_fit_are_refused(options):
    with pytest.raises(ScheduleError, match=r"communication="):
        simulate(gpipe(2, 1), forward=1, backward=1, **options)


def test_the_timeline_of_a_pipeline_is_that_of_its_plan(default):
    assert default.timeline().makespan == default.plan.step_seconds
    assert default.timeline().bubble_fraction == default.plan.bubble_fraction


def test_messages_take_the_link_between_their_devices():
    network = jaxpipe.Network.uniform(2, 1e9, latency_seconds=1e-5)
    first, last = planned(network=network).plan.stages
    message = 4 * ROWS * WIDTH / 1e9 + 1e-5
    assert first.message_seconds == pytest.approx((message, 0.0))
    assert last.message_seconds == pytest.approx((0.0, message))


def test_bytes_are_those_of_the_arrays_on_each_device():
    plan = planned(chain, values=weights(layers=4)).plan
    assert plan.stages[0].operators == (0, 2)
    first, last = plan.stage_memory
    parameters, message = 2 * 4 * WIDTH**2, 4 * ROWS * WIDTH
    for memory in (first, last):
        assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (parameters, parameters, 0)
    assert (first["batch"], last["batch"]) == (BATCH.nbytes, 0)
    # Two micro-batches wait for stage 1, with the input of its second product each; the last stage keeps nothing.
    assert (first["stash"], last["stash"]) == (2 * message, 0)
    assert plan.each_device == tuple(sum(memory.values()) for memory in plan.stage_memory)
    assert plan.memory == max(plan.stage_memory, key=lambda memory: sum(memory.values()))


@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe, zero_bubble])
def test_predicted_bytes_are_near_those_of_the_compiled_programs(schedule):
    report = planned(schedule=schedule).memory_report()
    # XLA keeps an activation more where forward and backward pass are one program, and pads small arrays.
    np.testing.assert_allclose(report.predicted_bytes, report.compiled_bytes, rtol=0, atol=4 * ROWS * WIDTH + 2048)


def test_all_micro_batches_in_flight_need_as_many_stashes():
    few, many = (
        planned(chain, values=weights(layers=4), schedule=s).plan.stage_memory[0] for s in (one_f_one_b, gpipe)
    )
    assert many["stash"] == 4 * few["stash"]


@pytest.mark.skipif(not _compat.barriers_hold(), reason="XLA drops barriers, and computes all means at once")
def test_the_optimizer_writes_one_parameter_after_the_other():
    runtime = planned(optimizer=optax.adam(1e-3), stages=1)._runtime
    updates = [run for run in runtime.compiled_step.needs.values() if run.label == "stage 0: update"]
    assert updates[0].temporary_bytes < 2 * 4 * WIDTH**2  # of 8 parameters, each with two moments
    assert updates[0].alias_bytes >= 3 * LAYERS * 4 * WIDTH**2


def test_a_plan_tells_its_runtime_and_the_fullest_device(default):
    text = str(default.plan)
    assert "on the fullest device" in text and default.plan.runtime == "mpmd"
    assert jaxpipe.Plan.from_json(default.plan.to_json()) == default.plan


def test_the_smallest_budget_of_a_refusal_is_kept_and_changes_no_bit(default):
    with pytest.raises(MemoryBudgetError) as refused:
        planned(memory=1000, schedule=gpipe)
    least = refused.value.smallest
    pipeline = planned(memory=least, schedule=gpipe)
    assert max(pipeline.memory_report().compiled_bytes) <= least
    key = jax.random.key(0)
    state, other = pipeline.init(key), default.init(key)
    (loss, _), gradients = pipeline.value_and_grad(state, BATCH)
    (expected, _), others = default.value_and_grad(other, BATCH)
    assert loss == expected
    jax.tree.map(np.testing.assert_array_equal, gradients, others)
    _, metrics = pipeline.step(state, BATCH)
    assert metrics["loss"] == expected


def named(weights, x):
    for k, w in enumerate(weights):
        with jax.named_scope(f"layer{k}"):
            x = jnp.tanh(x @ w)
    return x


def test_only_the_stages_of_a_device_over_the_budget_store_less():
    """With cuts that are given, or others would level the devices."""
    options = {"function": named, "cuts": [f"layer{LAYERS // 2}"], "options": jaxpipe.PlanOptions(compile=False)}
    needs = planned(**options).plan.each_device
    assert needs[0] > needs[1]
    budget = needs[0] - 1000
    plan = planned(memory=budget, **options).plan
    assert plan.predicted_bytes <= budget
    assert plan.stages[0].storage != "default" and plan.stages[1].storage == "default"
    assert plan.each_device[1] == needs[1]


def test_a_budget_is_kept_by_the_first_step_where_nothing_was_compiled_before():
    needs = planned(schedule=gpipe).memory_report().compiled_bytes
    budget = max(needs) - 20_000
    pipeline = planned(memory=budget, options=jaxpipe.PlanOptions(compile=False), schedule=gpipe)
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    pipeline.step(state, BATCH)
    assert max(pipeline.memory_report().compiled_bytes) <= budget


def test_a_budget_that_no_plan_keeps_is_raised_if_allowed():
    plan = planned(memory=100_000, options=jaxpipe.PlanOptions(allow_over_budget=True)).plan
    assert plan.raised_from == 100_000 and plan.budget is not None
    assert plan.predicted_bytes <= plan.budget


def shapes(width):
    return {
        "values": [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS,
        "batch": jax.ShapeDtypeStruct((M * ROWS, width), jnp.float32),
        "runtime": "auto",
        "schedule": "auto",
    }


def test_stages_are_programs_of_their_own_however_short():
    assert planned(**shapes(8)).plan.runtime == "mpmd"


def test_one_program_is_taken_by_name_and_the_plan_says_so():
    plan = planned(**{**shapes(8), "runtime": "spmd"}).plan
    assert plan.runtime == "spmd" and 'one program for all devices (runtime="spmd")' in one_line(plan)


def test_the_leaner_of_schedules_that_are_as_fast_is_taken():
    plan = planned(**shapes(1024)).plan
    assert all(stage.in_flight <= 4 for stage in plan.stages)  # not GPipe, which is as fast and holds 8


UNEVEN = [256, 512, 1024, 256, 768, 1024, 512, 256, 1024]


def uneven(**options):
    """A plan of four stages that cannot be cut evenly."""
    values = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in itertools.pairwise(UNEVEN)]
    batch = jax.ShapeDtypeStruct((12 * 128, UNEVEN[0]), jnp.float32)
    return planned(stages=4, values=values, batch=batch, num_microbatches=12, **options)


def test_a_budget_without_room_for_zero_bubble_takes_a_searched_schedule():
    fixed = uneven().plan
    assert uneven(schedule="zero_bubble").plan.predicted_bytes > 1.3 * fixed.predicted_bytes
    pipeline = uneven(schedule="auto", memory=fixed.predicted_bytes, options=jaxpipe.PlanOptions(compile=False))
    plan, table = pipeline.plan, pipeline.schedule
    assert plan.schedule == table.name == "list-schedule"
    assert plan.step_seconds < 0.97 * fixed.step_seconds
    assert plan.predicted_bytes <= fixed.predicted_bytes
    assert all(table.in_flight(d) <= stage.in_flight for d, stage in enumerate(fixed.stages))
    assert pipeline.timeline().makespan == plan.step_seconds
    assert 0 <= plan.schedule_gap < 0.01 and fixed.schedule_gap > 0.02
    assert "another order of the same work saves at most" in one_line(plan)
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble, gpipe, interleaved])
def test_no_table_is_below_the_bound_of_its_plan(schedule):
    plan = planned(schedule=schedule, stages=2).plan
    assert 0 < plan.schedule_bound_seconds <= plan.step_seconds * (1 + 1e-9)


def test_one_program_has_no_bound_for_its_schedule():
    plan = planned(runtime="spmd").plan
    assert plan.schedule_gap is None and "another order" not in one_line(plan)


@pytest.mark.parametrize(("m", "name"), [(4, "list-schedule-2"), (5, "list-schedule-v")])
def test_two_stages_on_each_device_take_less_than_zero_bubble_with_a_searched_schedule(m, name):
    values = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 16
    batch = jax.ShapeDtypeStruct((m * 1024, 512), jnp.float32)
    network = jaxpipe.Network.uniform(4, 50e9, latency_seconds=1e-5)
    # With fewer micro-batches than 2 p - 1 = 7 devices of a zero-bubble V wait.
    options = {"stages": 4, "values": values, "batch": batch, "num_microbatches": m, "network": network}
    searched, *fixed = (planned(schedule=schedule, **options) for schedule in ("auto", "zero_bubble", "zbv"))
    assert searched.plan.schedule == name and len(searched.plan.stages) == 8
    assert searched.plan.step_seconds < 0.98 * min(pipeline.plan.step_seconds for pipeline in fixed)
    # Two stages on a device have one stash each where zero-bubble has a whole one, of at most four micro-batches.
    assert max(searched.schedule.most_in_flight) <= 2 * 4
