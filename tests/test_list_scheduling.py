"""Schedules searched for with seconds, against brute force, published makespans, fixed tables and the bound."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Action,
    Kind,
    from_orders,
    gpipe,
    interleaved,
    list_schedule,
    makespan_bound,
    one_f_one_b,
    simulate,
    zero_bubble,
)
from tests.support.compare import arrays, assert_same_bits
from tests.support.pipeline_models import case_of, pipeline_of, plain_gradients


UNIT = {"forward": 1, "backward_input": 1, "backward_weight": 1}
SIZES = ("num_chunks", "in_flight")


def makespan(schedule, costs):
    """Seconds of a step, by the simulator."""
    seconds = {name: value for name, value in costs.items() if name not in SIZES}
    return simulate(schedule, lockstep=False, **seconds).makespan


def searched(p, m, costs):
    """A valid table within its limits, its makespan, and the bound."""
    table = list_schedule(p, m, **costs)
    table.validate()
    limits = costs.get("in_flight", p * costs.get("num_chunks", 1))
    limits = [limits] * p if isinstance(limits, int) else limits
    assert all(table.in_flight(d) <= limit for d, limit in enumerate(limits))
    seconds, bound = makespan(table, costs), makespan_bound(p, m, **costs)
    assert bound <= seconds * (1 + 1e-9)
    return table, seconds, bound


def random_costs(draw, stages):
    costs = {name: [draw.uniform(0.2, 2.0) for _ in range(stages)] for name in UNIT}
    return costs | {"communication": draw.choice((0.0, 0.1, 0.5))}


def words(m, limit):
    """Every order of F, I and W on a device that holds at most so many stashes."""

    def grow(word, f, i, w):
        if w == m:
            yield tuple(word)
        if f < m and f - w < limit:
            yield from grow([*word, Action(Kind.FORWARD, f)], f + 1, i, w)
        if i < f:
            yield from grow([*word, Action(Kind.BACKWARD_INPUT, i)], f, i + 1, w)
        if w < i:
            yield from grow([*word, Action(Kind.BACKWARD_WEIGHT, w)], f, i, w + 1)

    return list(grow([], 0, 0, 0))


def optimum(p, m, costs):
    """The shortest step of all orders that do not deadlock."""
    best = float("inf")
    for orders in itertools.product(*(words(m, limit) for limit in costs["in_flight"])):
        try:
            best = min(best, makespan(from_orders("tried", orders, m), costs))
        except ScheduleError:
            continue
    return best


@pytest.mark.core
@pytest.mark.parametrize(("p", "m", "limits"), [(2, 3, (2, 1)), (2, 3, (2, 2)), (3, 2, (2, 1, 1)), (3, 2, (2, 2, 2))])
def test_brute_force_finds_nothing_shorter(p, m, limits):
    costs = random_costs(random.Random(p * m), p) | {"in_flight": limits}
    best = optimum(p, m, costs)
    _, seconds, bound = searched(p, m, costs)
    assert bound <= best * (1 + 1e-9)
    assert seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.core
def test_equal_stages_take_the_published_makespan_of_zero_bubble():
    # P. Qi et al., ICLR 2024: of H1 the bubble is (p - 1)(F + I - W), here 7 of 3 x 16 + 7 units.
    table, seconds, bound = searched(8, 16, UNIT)
    assert seconds == bound == makespan(zero_bubble(8, 16), UNIT) == 55
    assert max(table.in_flight(d) for d in range(8)) <= 8


def test_equal_stages_take_less_with_the_stashes_of_1f1b():
    limits = [one_f_one_b(8, 16).in_flight(d) for d in range(8)]
    _, seconds, bound = searched(8, 16, UNIT | {"in_flight": limits})
    assert makespan(one_f_one_b(8, 16), UNIT) == 69
    assert seconds == bound == 62


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16)])
def test_two_stages_on_each_device_leave_less_bubble_than_zero_bubble_with_as_many_bytes(p, m):
    # Each of two stages on a device has half the work, and half the stash: 2 p of them are p whole ones.
    half = dict.fromkeys(UNIT, 0.5) | {"num_chunks": 2, "in_flight": 2 * p}
    _, seconds, bound = searched(p, m, half)
    assert bound == 3 * m + (p - 1) / 2
    assert bound <= seconds < makespan(zero_bubble(p, m), UNIT)
    assert interleaved(p, m).in_flight(0) > 2 * p


def test_no_fixed_table_with_as_many_stashes_is_shorter():
    draw = random.Random(0)
    makers = (one_f_one_b, zero_bubble, gpipe)
    for _ in range(200):
        p, m = draw.randint(2, 4), draw.randint(2, 8)
        tables = [maker(p, m) for maker in makers]
        limits = [draw.choice(tables).in_flight(d) for d in range(p)]
        costs = random_costs(draw, p) | {"in_flight": limits}
        kept = [t for t in tables if all(t.in_flight(d) <= limit for d, limit in enumerate(limits))]
        _, seconds, _ = searched(p, m, costs)
        assert all(seconds <= makespan(table, costs) for table in kept)


UNEVEN = [
    {"forward": [1, 2, 1, 1], "backward_input": [1, 2, 1, 1], "backward_weight": [1, 2, 1, 1]},
    {"forward": [3, 2, 2, 1], "backward_input": [3, 3, 2, 1], "backward_weight": [2, 2, 1, 2]},
    {"forward": [1, 1, 2, 4], "backward_input": [2, 1, 2, 3], "backward_weight": [1, 1, 2, 2], "communication": 0.25},
]


@pytest.mark.core
@pytest.mark.parametrize("costs", UNEVEN)
def test_uneven_stages_take_less_than_1f1b_with_its_stashes_or_come_near_the_bound(costs):
    table = one_f_one_b(4, 12)
    limits = [table.in_flight(d) for d in range(4)]
    _, seconds, bound = searched(4, 12, costs | {"in_flight": limits})
    before = makespan(table, costs)
    assert seconds <= 0.95 * before or bound > 0.95 * before


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_every_size_has_a_table(chunks):
    draw = random.Random(chunks)
    for p, m in itertools.product((1, 3), (1, 5)):
        for limit in (chunks, chunks + 1, p * chunks):
            searched(p, m, random_costs(draw, p * chunks) | {"num_chunks": chunks, "in_flight": limit})


def test_equal_arguments_give_equal_tables():
    costs = random_costs(random.Random(5), 4) | {"in_flight": [4, 3, 3, 2]}
    assert list_schedule(4, 9, **costs) == list_schedule(4, 9, **costs)


def test_a_backward_pass_without_work_for_weights_is_not_split():
    costs = {"forward": [1, 2], "backward_input": [2, 1], "backward_weight": 0, "in_flight": 2}
    assert not list_schedule(2, 6, **costs).splits_backward


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forward": [1, 1]}, r"forward= has 2 times, but there are 3 stages"),
        ({"backward_weight": [1, 1, -1]}, r"backward_weight= has -1 among its times"),
        ({"communication": [(1, 1)]}, r"communication= has 1 pairs, but there are 3 stages: pass 2"),
        ({"communication": float("nan")}, r"communication= has nan"),
        ({"in_flight": [2, 2]}, r"in_flight= has 2 limits, but there are 3 devices"),
        ({"in_flight": 0}, r"in_flight= has the limit 0; .* at least 1"),
        ({"in_flight": 1, "num_chunks": 2}, r"in_flight= has the limit 1; .* at least 2"),
        ({"num_chunks": 0}, r"num_chunks=0"),
        ({"num_chunks": "2"}, r"num_chunks='2'"),
    ],
)
@pytest.mark.parametrize("function", [list_schedule, makespan_bound])
def test_arguments_that_do_not_fit_are_refused(function, changed, message):
    with pytest.raises(ScheduleError, match=message):
        function(3, 4, **(UNIT | changed))


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_has_the_bits_of_plain_gradients(chunks):
    stages, m = 2, 4
    draw = random.Random(chunks)
    costs = random_costs(draw, stages * chunks) | {"num_chunks": chunks, "in_flight": [3, 4]}
    case, maker = case_of("mlp"), functools.partial(list_schedule, **costs)
    assert maker(stages, m).splits_backward
    pipeline = pipeline_of("mlp", stages, m, None, schedule=maker)
    assert pipeline.plan.schedule.startswith("list-schedule")
    state, (params, variables) = pipeline.init(jax.random.key(3)), case.start(jax.random.key(3))
    keys = jnp.stack([pipeline.microbatch_key(state, j) for j in range(m)])
    _, gradients, _ = plain_gradients(case, params, variables, keys, 1, m)
    assert_same_bits(arrays(pipeline.value_and_grad(state, case.batch)[1]), arrays(gradients))
