"""Schedules whose stages are on devices in a V, or as a map of one's own says: tables, files, plans and training."""

import dataclasses
import functools
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe import schedules
from jaxpipe.errors import PartitionError, ScheduleError
from jaxpipe.schedules import (
    Action,
    Kind,
    Schedule,
    dual_pipe_v,
    from_csv,
    from_orders,
    interleaved,
    list_schedule,
    makespan_bound,
    one_f_one_b,
    to_csv,
    v_half,
    v_shape,
    zero_bubble,
    zero_bubble_v,
)
from jaxpipe.schedules.schedule_makers import BUILT_IN
from jaxpipe.schedules.synchronous import forward_only
from tests.support.compare import arrays, assert_same_bits
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import (
    Convolutions,
    classifier,
    images,
    linen,
    nnx_case,
    pipeline_of,
    plain_gradients,
)


V = [zero_bubble_v, dual_pipe_v, v_half]

BATCH = jax.random.normal(jax.random.key(1), (16, 8))

#: torch's tests/distributed/pipelining/artifacts/dualpipev_4rank_10mb.csv, of DualPipeV on 4 ranks.
DUAL_PIPE_V_OF_TORCH = """\
0F0,0F1,0F2,0F3,0F4,0F5,0F6,7F0,7I0,7W0,7F1,7I1,7W1,7F2,7I2,7W2,7F3,(0F7;7B3)OVERLAP_F_B,(7F4;0B0)OVERLAP_F_B,\
(0F8;7B4)OVERLAP_F_B,(7F5;0B1)OVERLAP_F_B,(0F9;7B5)OVERLAP_F_B,(7F6;0B2)OVERLAP_F_B,7B6,(7F7;0B3)OVERLAP_F_B,7B7,\
(7F8;0B4)OVERLAP_F_B,7B8,(7F9;0B5)OVERLAP_F_B,7B9,0I6,0W6,0I7,0W7,0I8,0W8,0I9,0W9
1F0,1F1,1F2,1F3,1F4,6F0,1F5,6F1,6I0,6W0,6F2,6I1,6W1,6F3,(1F6;6B2)OVERLAP_F_B,(6F4;1B0)OVERLAP_F_B,\
(1F7;6B3)OVERLAP_F_B,(6F5;1B1)OVERLAP_F_B,(1F8;6B4)OVERLAP_F_B,(6F6;1B2)OVERLAP_F_B,(1F9;6B5)OVERLAP_F_B,\
(6F7;1B3)OVERLAP_F_B,6B6,(6F8;1B4)OVERLAP_F_B,6B7,(6F9;1B5)OVERLAP_F_B,6B8,1B6,6I9,1I7,6W9,1I8,1W7,1I9,1W8,1W9
2F0,2F1,2F2,5F0,2F3,5F1,2F4,5F2,5I0,5W0,5F3,(2F5;5B1)OVERLAP_F_B,(5F4;2B0)OVERLAP_F_B,(2F6;5B2)OVERLAP_F_B,\
(5F5;2B1)OVERLAP_F_B,(2F7;5B3)OVERLAP_F_B,(5F6;2B2)OVERLAP_F_B,(2F8;5B4)OVERLAP_F_B,(5F7;2B3)OVERLAP_F_B,\
(2F9;5B5)OVERLAP_F_B,(5F8;2B4)OVERLAP_F_B,5B6,(5F9;2B5)OVERLAP_F_B,5B7,2B6,5B8,2I7,5I9,2I8,2W7,2I9,5W9,2W8,2W9
3F0,4F0,3F1,4F1,3F2,4F2,3F3,4F3,3F4,4B0,(4F4;3B0)OVERLAP_F_B,(3F5;4B1)OVERLAP_F_B,(4F5;3B1)OVERLAP_F_B,\
(3F6;4B2)OVERLAP_F_B,(4F6;3B2)OVERLAP_F_B,(3F7;4B3)OVERLAP_F_B,(4F7;3B3)OVERLAP_F_B,(3F8;4B4)OVERLAP_F_B,\
(4F8;3B4)OVERLAP_F_B,(3F9;4B5)OVERLAP_F_B,(4F9;3B5)OVERLAP_F_B,4B6,3B6,4B7,3B7,4I8,3I8,4I9,3I9,4W8,3W8,4W9,3W9
"""

# Tables


def makespan(schedule: Schedule, forward=1.0, backward_input=1.0, backward_weight=1.0, stages: int = 1) -> float:
    """The seconds of a step, for stages that have a share of the work each."""
    times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    return schedule.simulate(**{name: seconds / stages for name, seconds in times.items()}).makespan


def test_literal_tables():
    # By hand, F, I and W of both stages in turn: device 0 has the stages 0 and 3, device 1 has 1 and 2.
    assert to_csv(zero_bubble_v(2, 3)) == (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2,\n"
        ",1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2\n"
    )
    assert zero_bubble_v(2, 3).stage_of == v_shape(2) == ((0, 3), (1, 2))
    assert to_csv(v_half(1, 2)) == "0F0,1F0,1I0,0I0,1W0,0F1,0W0,1F1,1I1,0I1,1W1,0W1\n"


@pytest.mark.core
def test_dual_pipe_v_is_the_table_of_torch():
    assert from_csv(DUAL_PIPE_V_OF_TORCH, "dual-pipe-v") == dual_pipe_v(4, 10)
    assert dual_pipe_v(4, 10).most_in_flight == (9, 9, 9, 9)  # published: a stage for each of 8, and one


def overlapped_makespan(text: str) -> float:
    """The step of a table of torch where each pass takes 1, and F and B of a cell end together after 3."""
    rows = [row.split(",") for row in text.splitlines()]
    last = max(int(number) for number in re.findall(r"(\d+)F", text))
    ends: dict[tuple[int, str, int], int] = {}
    free, position = [0] * len(rows), [0] * len(rows)

    def needs(stage: int, kind: str, j: int) -> list[tuple[int, str, int]]:
        if kind == "F":
            return [(stage - 1, "F", j)] * (stage > 0)
        if kind == "W":
            return [(stage, "I", j)]
        return [(stage, "F", j)] + [(stage + 1, "I", j)] * (stage < last)

    while any(position[d] < len(row) for d, row in enumerate(rows)):
        before = list(position)
        for d, row in enumerate(rows):
            if position[d] == len(row):
                continue
            parts = [(int(s), kind, int(j)) for s, kind, j in re.findall(r"(\d+)([FBIW])(\d+)", row[position[d]])]
            needed = [need for part in parts for need in needs(*part)]
            if all(need in ends for need in needed):
                seconds = sum(2 if kind == "B" else 1 for _, kind, _ in parts)
                free[d] = max([free[d], *(ends[need] for need in needed)]) + seconds
                ends |= {(s, "I" if kind == "B" else kind, j): free[d] for s, kind, j in parts}
                position[d] += 1
        assert position != before
    return max(ends.values())


def test_published_makespans_of_dual_pipe_v():
    # (p - 1) (F&B + B - 3 W) beside 2 m (F + B) in passes of stages half as long, where F&B takes F + B: 66.
    assert overlapped_makespan(DUAL_PIPE_V_OF_TORCH) == 6 * 10 + (4 - 1) * (3 + 2 - 3) == 66
    for p, m in itertools.product((2, 4, 8), (16, 21)):
        assert 6 * m + p - 1 <= makespan(dual_pipe_v(p, m)) <= 6 * m + 2 * (p - 1)
        assert set(dual_pipe_v(p, m).most_in_flight) == {2 * p + 1}


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_closed_forms(p, rounds):
    m = rounds * p
    # Zero-bubble V: the last device begins p - 1 passes late and never waits, with the stashes of 1F1B's first device.
    assert makespan(zero_bubble_v(p, m)) == 6 * m + p - 1 == makespan_bound(p, m, **UNIT, stage_of=v_shape(p))
    assert set(zero_bubble_v(p, m).most_in_flight) == {2 * p}
    # V-Half: half of 1F1B's bubble, 6 (p - 1), with half of the stashes and one or three more.
    assert abs(makespan(v_half(p, m)) - 6 * m - 3 * (p - 1)) <= 2
    assert max(v_half(p, m).most_in_flight) <= p + (1 if p % 2 else 3)


UNIT = {"forward": 1, "backward_input": 1, "backward_weight": 1}


def test_no_device_of_zero_bubble_v_waits_between_its_first_and_last_work():
    timeline = zero_bubble_v(8, 16).simulate(**UNIT)
    for d in range(8):
        spans = [span for span in timeline.spans if span.stage == d]
        assert all(a.end == b.start for a, b in itertools.pairwise(spans)) and len(spans) == 6 * 16


@pytest.mark.parametrize("maker", V)
def test_every_size_is_valid(maker):
    for p, m in itertools.product(range(1, 7), (1, 2, 3, 7, 12, 13)):
        if maker is not dual_pipe_v or m >= 2 * p:
            schedule = maker(p, m)
            schedule.validate()
            assert (schedule.num_chunks, schedule.stage_of) == (2, v_shape(p))
            for d, chunk, kind in itertools.product(range(p), range(2), "FIW"):  # sums have the order of plain training
                ticks = schedule.when(d, Kind(kind), chunk)
                assert sorted(ticks, key=ticks.__getitem__) == list(range(m))


NEAR = list(itertools.product((0.8, 1.0, 1.25), repeat=3))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubble_v_is_shorter_than_zero_bubble_with_the_same_bytes(p):
    for m, times in itertools.product((2 * p - 1, 2 * p, 3 * p), NEAR):
        assert makespan(zero_bubble_v(p, m), *times, stages=2) < makespan(zero_bubble(p, m), *times)
        assert max(zero_bubble_v(p, m).most_in_flight) == 2 * max(zero_bubble(p, m).most_in_flight)


def test_with_few_micro_batches_and_long_work_for_weights_a_search_is_no_longer_than_zero_bubble():
    times = 0.8, 0.8, 1.25
    assert makespan(zero_bubble_v(8, 8), *times, stages=2) > makespan(zero_bubble(8, 8), *times)
    halves = dict(zip(UNIT, (x / 2 for x in times), strict=True))
    searched = list_schedule(8, 8, **halves, stage_of=v_shape(8))
    assert searched.stage_of == v_shape(8) and searched.name == "list-schedule-v"
    assert makespan(searched, *times, stages=2) <= makespan(zero_bubble(8, 8), *times)


def test_a_search_over_a_v_with_uneven_stages():
    times = {"forward": [1, 1, 3, 1, 1, 1, 1, 2], "backward_input": 1, "backward_weight": [1] * 7 + [2]}
    searched = list_schedule(4, 8, **times, stage_of=v_shape(4))
    searched.validate()
    fixed = zero_bubble_v(4, 8).simulate(**times).makespan
    bound = makespan_bound(4, 8, **times, stage_of=v_shape(4))
    assert bound <= searched.simulate(**times).makespan < fixed
    assert max(searched.most_in_flight) <= 8
    assert list_schedule(4, 8, **UNIT, stage_of=v_shape(4)) == zero_bubble_v(4, 8)


def test_dual_pipe_v_needs_two_micro_batches_for_each_device():
    with pytest.raises(ScheduleError, match=r"num_devices=4, num_microbatches=7; it needs .*: 8\. Use more"):
        dual_pipe_v(4, 7)


# Maps


def test_a_map_says_where_stages_are():
    v = zero_bubble_v(3, 4)
    assert [v.device(s) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [v.chunk(s) for s in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [[v.stage(d, c) for c in range(2)] for d in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert v.apart == (True, True, False, True, True) and not v.takes_turns
    assert interleaved(2, 2).stage_of == ((0, 2), (1, 3)) and interleaved(2, 2).takes_turns
    assert hash(v) == hash(zero_bubble_v(3, 4))


def test_the_turn_of_a_v_sends_nothing():
    # One micro-batch goes down, up, and back: 6 forward, 6 backward for inputs, one for weights, 4 + 4 messages.
    times = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    assert v_half(3, 1).simulate(**times, communication=10).makespan == 6 + 6 + 1 + 8 * 10
    links = [(1, 2), (4, 8), (100, 100), (16, 32), (64, 128)]
    assert v_half(3, 1).simulate(**times, communication=links).makespan == 13 + 255


def test_a_map_is_given_as_rows_or_as_a_function():
    orders = [[*order] for order in (zero_bubble_v(2, 3).order(0), zero_bubble_v(2, 3).order(1))]
    tables = [
        from_orders("zero-bubble-v", orders, 3, 2, stage_of)
        for stage_of in ([[0, 3], [1, 2]], v_shape(2), lambda d, c: d if not c else 3 - d)
    ]
    assert tables == [zero_bubble_v(2, 3)] * 3
    contiguous = list_schedule(2, 4, **UNIT, num_chunks=2, stage_of=lambda device, chunk: 2 * device + chunk)
    assert contiguous.stage_of == ((0, 1), (2, 3)) and contiguous.name == "list-schedule-2"
    contiguous.validate()


@pytest.mark.parametrize(
    ("stage_of", "message"),
    [
        ([[0, 3], [1, 1]], "stage 1 on 1 and 1, stage 2 on none; each of the stages 0..3 must be on one device"),
        ([[0, 3], [1, 4]], r"has 4 on device 1; stages are 0\.\.3"),
        ([[0, 3]], "has 2 stages on its devices; there must be 2 on each of 2"),
        ([[0, 1, 2], [3]], "has 3, 1 stages on its devices"),
        (lambda device, chunk: 0, r"stage 0 on 0 and 0 and 1 and 1, stage 1 on none"),
    ],
)
def test_maps_that_are_none(stage_of, message):
    with pytest.raises(ScheduleError, match=message):
        list_schedule(2, 2, **UNIT, num_chunks=2, stage_of=stage_of)


def test_evaluation_follows_the_map():
    for stage_of in (v_shape(4), [[7, 0], [6, 1], [5, 2], [4, 3]], None):
        schedule = forward_only(4, 6, 2, stage_of)
        schedule.validate()
        assert len(schedule.ticks) <= 2 * 6 + 2 * 4 + 4


def test_one_registry():
    assert set(schedules.BY_NAME) == set(BUILT_IN)
    assert all(getattr(schedules, name) is built_in.maker for name, built_in in BUILT_IN.items())


# Files


@pytest.mark.parametrize("maker", [*V, interleaved, one_f_one_b])
def test_files_keep_the_map(maker):
    schedule = maker(3, 6)
    assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_torchs_zero_bubble_v_is_read():
    # Whole backward passes beside split ones, as torch writes them.
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2I0,2W0,1B0"
    read = from_csv(text)
    assert read.stage_of == v_shape(2) and read.splits_backward
    assert [str(a) for a in read.order(1)] == ["F0", "F0'1", "I0'1", "W0'1", "I0", "W0"]
    with pytest.raises(ScheduleError, match="2, 1 stages on its devices"):
        from_csv("0F0,2F0,2B0,0B0\n1F0,1B0")


# Training


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(12, width, rngs=rngs) for width in (12, 12, 12, 12, 10)])

    def __call__(self, x):
        *layers, head = self.layers
        for layer in layers:
            x = x + nnx.relu(layer(x))
        return head(x)


CASES = {
    "Linen": linen(Convolutions(), images(8, 8, 1, rows=16), classifier()),
    "NNX": nnx_case(Residual, images(12, rows=16)),
}


def plain_loss(case, params, variables, keys):
    """The mean loss of micro-batches, one per key, without a gradient: XLA may round it otherwise beside one."""
    loss_of = jax.jit(lambda key, batch: case.plain(params, variables, key, batch)[0])
    rows = jax.tree.map(lambda x: x.reshape(*keys.shape, -1, *x.shape[1:]), case.batch)
    sums = [
        sum(loss_of(k, jax.tree.map(lambda x, r=r, j=j: x[r, j], rows)) for j, k in enumerate(of))
        for r, of in enumerate(keys)
    ]
    return sum(sums) / keys.size


def check_bits(name: str, key: jax.Array, schedule, stages: int, replicas: int | None = None, m: int = 4, **options):
    """Gradients, a step and an evaluation have the bits of plain training with the same micro-batches."""
    case, count = CASES[name], replicas or 1
    params, variables = case.start(key)
    keys = jax.random.split(key, count * m)
    loss, gradient, _ = plain_gradients(case, params, variables, keys, count, m)
    after = jax.tree.map(lambda p, g: p - 2**-4 * g, params, gradient)
    optimizer = optax.sgd(2**-4)
    options |= {"evaluate": case.loss, "predict": lambda model, batch: model(batch["x"])}
    pipeline = pipeline_of(case, stages, m, replicas, schedule=schedule, optimizer=optimizer, **options)
    state = pipeline.init(key)
    evaluated = pipeline.evaluate(state, case.batch)["loss"]
    (value, _), gradients = pipeline.value_and_grad(state, case.batch)
    assert_same_bits([value, *arrays(gradients)], [loss, *arrays(gradient)])
    assert_same_bits(evaluated, plain_loss(case, params, variables, keys.reshape(count, m)))
    state, metrics = pipeline.step(state, case.batch)
    assert_same_bits([metrics["loss"], *arrays(pipeline.parameters(state))], [loss, *arrays(after)])
    assert pipeline.predict(state, case.batch).shape == (16, 10)
    return pipeline, state


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_zero_bubble_v_has_the_bits_of_plain_jax_grad(name, key):
    pipeline, _ = check_bits(name, key, "zbv", 2)
    plan = pipeline.plan
    assert plan.schedule == "zero-bubble-v" and [stage.devices for stage in plan.stages] == [(0,), (1,), (1,), (0,)]


@pytest.mark.parametrize(
    ("schedule", "replicas", "m"),
    [
        ("zbv", 2, 4),
        ("dualpipev", None, 8),
        ("v-half", None, 4),
        (functools.partial(list_schedule, **UNIT, stage_of=v_shape(2)), None, 4),
        (functools.partial(list_schedule, **UNIT, num_chunks=2, stage_of=lambda d, c: 3 - 2 * d - c), None, 4),
    ],
    ids=["replicas", "dualpipev", "v-half", "searched", "contiguous and reversed"],
)
def test_other_maps_have_the_bits_of_plain_jax_grad(schedule, replicas, m, key):
    check_bits("NNX", key, schedule, 2, replicas, m)


def test_a_checkpoint_goes_on_under_another_schedule(tmp_path, key):
    pipeline, state = check_bits("NNX", key, "zbv", 2)
    pipeline.save(state, tmp_path)
    other = pipeline_of(CASES["NNX"], 2, 4, schedule="1f1b", optimizer=optax.sgd(2**-4))
    ours, _ = pipeline.step(state, CASES["NNX"].batch)
    theirs, _ = other.step(other.restore(tmp_path), CASES["NNX"].batch)
    assert_same_bits(arrays(pipeline.parameters(ours)), arrays(other.parameters(theirs)))


def test_a_plan_counts_both_stages_of_a_device(key):
    pipeline, _ = check_bits("NNX", key, "zbv", 2)
    plan, program = pipeline.plan, pipeline._planned.program
    parameters = {d: sum(plan.stages[s].parameter_bytes for s in program.schedule.stage_of[d]) for d in range(2)}
    assert parameters[0] == 4 * sum(x.size for s in (0, 3) for x in program.avals(program.stages[s].parameters))
    assert [stage.in_flight for stage in plan.stages] == [
        program.schedule.in_flight(*place) for place in ((0, 0), (1, 0), (1, 1), (0, 1))
    ]
    memory = plan.stage_memory
    assert memory[0] == memory[3] and memory[1] == memory[2] and memory[0]["parameters"] >= parameters[0]
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan
    assert plan.schedule_gap >= 0 and pipeline.timeline().makespan == plan.step_seconds


def test_one_program_refuses_a_v():
    case = CASES["NNX"]
    with pytest.raises(PartitionError, match=r"runtime='spmd' with schedule=zero-bubble-v: .* around a ring"):
        jaxpipe.partition(
            case.model, mesh_of(2), case.batch, loss=case.loss, optimizer=optax.sgd(0.1), num_microbatches=4,
            profile="analytic", schedule="zbv", runtime="spmd",
        )  # fmt: skip


def test_a_map_may_be_of_numpy_and_has_to_be_of_whole_numbers():
    orders = [list(zero_bubble_v(2, 3).order(d)) for d in range(2)]
    drawn = from_orders("drawn", orders, 3, 2, np.array([[0, 3], [1, 2]]))
    assert drawn.stage_of == v_shape(2) and {type(s) for row in drawn.stage_of for s in row} == {int}
    for wrong in (5, (0, 1, 2, 3), [[0.0, 3.0], [1.0, 2.0]], lambda device: device):
        with pytest.raises(ScheduleError, match="rows of whole numbers"):
            from_orders("drawn", orders, 3, 2, wrong)


# "auto"


def products_alone(work: jaxpipe.Work) -> tuple[float, float]:
    """A second for each product forward, two backward, and nothing for other operators."""
    return (1.0, 2.0) if work.primitive == "dot_general" else (0.0, 0.0)


def chain_plan(layers: int, p: int, m: int, **options):
    """The plan of equal products, which have three passes of a second each."""
    model = jax.tree_util.Partial(
        lambda weights, x: functools.reduce(jnp.matmul, weights, x),
        [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * layers,
    )
    batch = jax.ShapeDtypeStruct((m * 512, 512), jnp.float32)
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": m, "profile": products_alone} | options
    return jaxpipe.partition(model, mesh_of(p), batch, loss=lambda f, x: f(x).mean(), **options).plan


@pytest.mark.core
def test_auto_takes_zero_bubble_v_where_its_step_is_shorter():
    p, m, each = 4, 8, 2  # products in a stage of the V
    plan, other = (chain_plan(2 * p * each, p, m, schedule=name) for name in ("auto", "zero_bubble"))
    assert plan.schedule == "zero-bubble-v"
    assert [stage.devices for stage in plan.stages] == [(d,) for d in (0, 1, 2, 3, 3, 2, 1, 0)]
    # Published, in passes of such a stage: 6 m + p - 1, and 6 m + 2 (p - 1) for zero-bubble H1.
    assert plan.step_seconds == pytest.approx(each * (6 * m + p - 1), rel=0.01)
    assert other.step_seconds == pytest.approx(each * (6 * m + 2 * (p - 1)), rel=0.01)


def test_one_program_does_not_consider_a_v():
    plan = chain_plan(16, 4, 8, runtime="spmd")
    assert len(plan.search) > 1 and not any("-v" in line for line in plan.search)


def test_a_v_follows_the_devices_of_a_network_and_keeps_a_budget():
    bandwidth = np.full((4, 4), 1e8)
    for a, b in ((2, 0), (0, 3), (3, 1)):  # links between neighbors in the only fast chain
        bandwidth[a, b] = bandwidth[b, a] = 1e11
    options = {"network": jaxpipe.Network(bandwidth), "options": jaxpipe.PlanOptions(compile=False)}
    plan = chain_plan(16, 4, 8, **options)
    devices = [stage.devices[0] for stage in plan.stages]
    assert plan.schedule == "zero-bubble-v" and devices in ([2, 0, 3, 1, 1, 3, 0, 2], [1, 3, 0, 2, 2, 0, 3, 1])
    budget = plan.predicted_bytes
    within, below = (chain_plan(16, 4, 8, memory=size, **options) for size in (budget, int(0.7 * budget)))
    assert (within.schedule, within.step_seconds) == (plan.schedule, plan.step_seconds)
    assert below.predicted_bytes <= 0.7 * budget and below.step_seconds > plan.step_seconds


@pytest.mark.core
def test_a_v_that_auto_takes_has_the_bits_of_plain_jax_grad(key):
    pipeline, _ = check_bits("NNX", key, "auto", 2, profile=products_alone)
    assert pipeline.plan.schedule == "zero-bubble-v"


def in_own_order(*orders):
    """A table whose devices work forward on the micro-batches in some orders, then backward on all of them."""

    def schedule(num_devices, num_microbatches):
        backward = [Action(Kind.BACKWARD, j) for j in range(num_microbatches)]
        return from_orders(
            "own", [[*(Action(Kind.FORWARD, j) for j in o), *backward] for o in orders], num_microbatches
        )

    return schedule


class Normalized(nn.Module):
    """Layers of which some are normalized, and so change state."""

    normalized: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x):
        for k, width in enumerate((8, 6, 4)):
            x = jnp.tanh(nn.Dense(width)(x))
            x = nn.BatchNorm(use_running_average=False)(x) if k in self.normalized else x
        return x


def normalized(layers, schedule, **options):
    call = {"loss": lambda model, x: (model(x) ** 2).mean(), "optimizer": optax.sgd(0.1), "num_microbatches": 4}
    options = {"schedule": schedule, "profile": "analytic", **options}
    return jaxpipe.partition(Normalized(layers), mesh_of(2), BATCH, **call, **options)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("orders", [((3, 2, 1, 0),) * 2, (range(4), (1, 0, 3, 2))])
def test_state_follows_the_order_of_the_micro_batches(orders, runtime):
    order = re.escape(str(list(orders[1])))
    message = rf"gave own, whose stage [01] works forward on .* {order}, in this order; the model changes batch_stats"
    with pytest.raises(PartitionError, match=message):
        normalized((0, 1, 2), in_own_order(*orders), runtime=runtime)
    plan = normalized((0, 1, 2), in_own_order(range(4), range(4)), runtime=runtime).plan
    assert plan.schedule == "own"
    pipelines = [normalized((), schedule, runtime=runtime) for schedule in (in_own_order(*orders), "gpipe")]
    results = [pipeline.value_and_grad(pipeline.init(jax.random.key(0)), BATCH) for pipeline in pipelines]
    for first, second in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-7)  # sums in another order


def test_a_stage_without_state_works_in_any_order():
    schedule = in_own_order(range(4), (1, 0, 3, 2))
    pipelines = [normalized((0,), x, cuts=["Dense_2"]) for x in (schedule, "gpipe")]
    steps = [pipeline.step(pipeline.init(jax.random.key(0)), BATCH)[0] for pipeline in pipelines]
    first, second = (pipeline.parameters(state) for pipeline, state in zip(pipelines, steps, strict=True))
    for one_leaf, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(one_leaf, other, rtol=1e-5, atol=1e-7)  # sums in another order


def test_a_given_plan_has_state_follow_the_order_too():
    plan = normalized((0, 1, 2), in_own_order(range(4), range(4)), cuts=["Dense_2"]).plan
    swapped = {"F0": "F1", "F1": "F0"}
    rows = [" ".join(swapped.get(cell, cell) for cell in row.split()) for row in plan.recipe.table]
    changed = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, table=tuple(rows)))
    with pytest.raises(PartitionError, match=r"whose stage 0 works forward on the micro-batches \[1, 0, 2, 3\]"):
        normalized((0, 1, 2), "auto", plan=changed)


def test_a_table_with_frozen_stages_is_made_of_orders():
    forward, backward = ([Action(kind, j) for j in range(2)] for kind in (Kind.FORWARD, Kind.BACKWARD))
    table = dataclasses.replace(from_orders("own", [forward, [*forward, *backward]], 2), frozen=1)
    table.validate()
    with pytest.raises(ScheduleError, match=r"device 1 does B of micro-batches \[0\]; it must do each of 0\.\.1 once"):
        from_orders("own", [[*forward, *backward], [*forward, backward[0]]], 2)
