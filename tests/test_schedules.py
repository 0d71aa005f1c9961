"""Schedules against literal tables, closed forms and published makespans."""

import itertools
import time
import tracemalloc

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxpipe import schedules
from jaxpipe.errors import ScheduleError
from jaxpipe.runtime.spmd.pair_ticks import pair_ticks
from jaxpipe.runtime.spmd.tick_table import slots, tick_table
from jaxpipe.schedules import (
    Action,
    Kind,
    Schedule,
    from_csv,
    from_orders,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    to_csv,
    zero_bubble,
)
from jaxpipe.schedules.synchronous import forward_only


F, B = Kind.FORWARD, Kind.BACKWARD
MAKERS = pytest.mark.parametrize("maker", [pair_ticks, gpipe])
STAGES, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)
SECONDS = st.integers(1, 50)


def drawn(*rows):
    """A schedule from one text for each stage: ``"F0 | F1 B0 | B1"``."""
    cells = [[[Action(Kind(a[0]), int(a[1:])) for a in cell.split()] for cell in row.split("|")] for row in rows]
    microbatches = 1 + max(a.microbatch for row in cells for cell in row for a in cell)
    ticks = tuple(tuple(tuple(cell) for cell in tick) for tick in zip(*cells, strict=True))
    return Schedule("drawn", len(rows), microbatches, ticks)


@pytest.mark.core
@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (pair_ticks(1, 2), ["F0 B0 | F1 B1"]),
        (pair_ticks(2, 1), ["F0 | | B0", " | F0 B0 | "]),
        (pair_ticks(2, 4), ["F0 | F1 | F2 B0 | F3 B1 | B2 | B3", " | F0 B0 | F1 B1 | F2 B2 | F3 B3 | "]),
        (
            pair_ticks(3, 2),
            ["F0 | F1 | | | B0 | B1", " | F0 | F1 | B0 | B1 | ", " | | F0 B0 | F1 B1 | | "],
        ),
        (gpipe(1, 2), ["F0 | F1 | B0 | B1"]),
        (gpipe(2, 2), ["F0 | F1 | | | B0 | B1", " | F0 | F1 | B0 | B1 | "]),
        (gpipe(3, 1), ["F0 | | | | | B0", " | F0 | | | B0 | ", " | | F0 | B0 | | "]),
        (forward_only(2, 3), ["F0 | F1 | F2 | ", " | F0 | F1 | F2"]),
    ],
    ids=lambda x: x.name if isinstance(x, Schedule) else "",
)
def test_literal_tables(made, rows):
    assert made.ticks == drawn(*rows).ticks
    made.validate()


@MAKERS
@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES)
def test_all_work_once_and_in_order(maker, p, m):
    schedule = maker(p, m)
    at = {}
    for t, tick in enumerate(schedule.ticks):
        assert len(tick) == p
        for s, actions in enumerate(tick):
            for place, action in enumerate(actions):
                assert (s, action) not in at
                at[s, action] = t, place
    assert set(at) == {(s, Action(k, j)) for s in range(p) for k in (F, B) for j in range(m)}
    for s, j in itertools.product(range(p), range(m)):
        assert at[s, Action(F, j)] < at[s, Action(B, j)]
        if s:
            # What a tick makes is there in the next, and the executor keeps it no longer.
            assert at[s, Action(F, j)][0] == at[s - 1, Action(F, j)][0] + 1
            assert at[s - 1, Action(B, j)][0] == at[s, Action(B, j)][0] + 1
    schedule.validate()
    # So one message waits at a time, forward and back.
    for kept in ([1, 0, 0, 0], [0, 1, 0, 0]):
        assert tick_table(schedule, [kept] * p).pages == (p > 1, 0)


@MAKERS
@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES)
def test_slots_and_in_flight(maker, p, m):
    schedule = maker(p, m)
    for s in range(p):
        begin, end = schedule.when(s, F), schedule.when(s, B)
        places = slots([(begin[j], end[j]) for j in range(m)])
        for i, j in itertools.combinations(range(m), 2):
            if places[i] == places[j]:
                assert end[i] < begin[j] or end[j] < begin[i]
        bound = m if maker is gpipe else min(m, 2 * (p - 1 - s) + 1)
        most = max(sum(begin[j] <= t <= end[j] for j in range(m)) for t in range(len(schedule.ticks)))
        assert schedule.in_flight(s) == most == len(set(places))
        assert most == bound or (maker is gpipe and most < bound)


def test_gpipe_holds_every_micro_batch():
    assert [gpipe(3, 5).in_flight(s) for s in range(3)] == [5, 5, 5]


@pytest.mark.core
@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 16, 57), (8, 32, 117)])
@MAKERS
def test_published_makespans(maker, p, m, makespan):
    assert simulate(maker(p, m), forward=[1] * p, backward=[2] * p, lockstep=True).makespan == makespan


@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES, f=SECONDS, b=SECONDS)
def test_equal_stages_lose_only_the_fill(p, m, f, b):
    timeline = simulate(pair_ticks(p, m), forward=[f] * p, backward=[b] * p, lockstep=True)
    assert timeline.makespan == (m + p - 1) * (f + b)
    # Integer seconds, so both sides round once, in a division.
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
    assert timeline.peak_in_flight == tuple(min(m, 2 * (p - 1 - i) + 1) for i in range(p))


@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES, f=SECONDS, b=SECONDS)
def test_gpipe_closed_forms(p, m, f, b):
    timeline = simulate(gpipe(p, m), forward=[f] * p, backward=[b] * p, lockstep=True)
    assert timeline.makespan == (m + p - 1) * (f + b)
    # Integer seconds, so both sides round once, in a division.
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)


@settings(deadline=None)
@given(data=st.data(), p=STAGES, m=MICROBATCHES, communication=st.integers(0, 5))
def test_unequal_stages_wait_for_the_slowest(data, p, m, communication):
    forward, backward = (data.draw(st.lists(SECONDS, min_size=p, max_size=p)) for _ in range(2))
    timeline = simulate(
        pair_ticks(p, m), forward=forward, backward=backward, communication=communication, lockstep=True
    )
    # Stage i is at work forward in the m ticks from i on; backward likewise, last stage first.
    rounds = range(m + p - 1)
    expected = sum(max(forward[i] for i in range(p) if 0 <= t - i < m) for t in rounds)
    expected += sum(max(backward[i] for i in range(p) if 0 <= t - (p - 1 - i) < m) for t in rounds)
    assert timeline.makespan == expected + (communication * (m + 2 * (p - 1)) if p > 1 else 0)
    assert sum(span.end - span.start for span in timeline.spans) == m * (sum(forward) + sum(backward))
    for stage in range(p):
        spans = sorted((x.start, x.end) for x in timeline.spans if x.stage == stage)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.core
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["F0 | F1 | B0"], r"device 0 does B of micro-batches \[0\]; it must do each of 0..1 once"),
        (["F0 B0 | F1 | B1 | F0"], r"device 0 does F of micro-batches \[0, 0, 1\]; it must do each of 0..1 once"),
        (["F0 | B0", " | "], r"device 1 does F of micro-batches \[\]"),
        (["B0 | F0"], r"B of stage 0 for micro-batch 0 is in tick 0, .* F of stage 0, which is in tick 1"),
        (["B0 F0"], r"device 0 does B0 F0 in one tick; a tick holds at most one each of F, B, in this order"),
        (["F0 F1 | B0 | B1"], r"device 0 does F0 F1 in one tick"),
        (["F0 | | B0", "F0 | B0 | "], r"F of stage 1 for micro-batch 0 is in tick 0, .* it may start in tick 1"),
        ([" | F0 | | B0", "F0 | | B0 | "], r"F of stage 1 .* needs F of stage 0, which is in tick 1"),
        (["F0 | B0 | ", " | F0 | B0"], r"B of stage 0 for micro-batch 0 is in tick 1, but it needs B of stage 1"),
    ],
)
def test_validate_names_the_broken_rule(rows, message):
    with pytest.raises(ScheduleError, match=message):
        drawn(*rows).validate()


def test_validate_counts_the_devices_of_a_tick():
    schedule = Schedule("odd", 2, 1, (((Action(F, 0),),),))
    with pytest.raises(ScheduleError, match="odd: a tick has 1 devices, expected 2"):
        schedule.validate()


@pytest.mark.parametrize("maker", [pair_ticks, gpipe, forward_only])
@pytest.mark.parametrize("size", [(0, 3), (3, 0), (-1, 1)])
def test_sizes_below_one(maker, size):
    with pytest.raises(
        ScheduleError, match=f"num_devices={size[0]}, num_microbatches={size[1]}; both must be at least"
    ):
        maker(*size)


# The one_f_one_b's 1F1B, interleaved, zero-bubble.


PARTS = {"backward_input": 1, "backward_weight": 1}


def two_chunks(p, m):
    return interleaved(p, p * m)


def three_chunks(p, m):
    return interleaved(p, p * m, 3)


EVERY = [pair_ticks, gpipe, one_f_one_b, zero_bubble, two_chunks, three_chunks]


@pytest.mark.core
@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (one_f_one_b(2, 3), ["F0 | F1 | | B0 | F2 | B1 | | B2", " | F0 | B0 | F1 | B1 | F2 | B2 | "]),
        (one_f_one_b(1, 2), ["F0 | B0 | F1 | B1"]),
        (zero_bubble(1, 2), ["F0 | I0 | W0 | F1 | I1 | W1"]),
        (
            zero_bubble(2, 3),
            ["F0 | F1 | | I0 | W0 | F2 | I1 | W1 | I2 | W2", " | F0 | I0 | F1 | I1 | W0 | F2 | I2 | W1 | W2"],
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Schedule) else "",
)
def test_literal_tables_for_paper(made, rows):
    assert made.ticks == drawn(*rows).ticks
    made.validate()


def test_literal_interleaved_table():
    schedule = interleaved(2, 2)
    schedule.validate()
    assert to_csv(schedule) == "0F0,0F1,2F0,2F1,,2B0,,2B1,0B0,0B1\n,1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1,\n"


@pytest.mark.core
@pytest.mark.parametrize(
    ("p", "m", "classic", "split", "chunked"),
    [(4, 8, 33, 27, 28.5), (4, 16, 57, 51, 52.5), (8, 16, 69, 55, 58.5), (8, 32, 117, 103, 106.5)],
)
def test_published_makespans_running_free(p, m, classic, split, chunked):
    for maker in (gpipe, one_f_one_b, pair_ticks):
        assert maker(p, m).simulate(forward=1, **PARTS).makespan == classic == (m + p - 1) * 3
    assert zero_bubble(p, m).simulate(forward=1, **PARTS).makespan == split == 3 * m + p - 1
    half = dict.fromkeys(PARTS, 0.5)
    assert interleaved(p, m).simulate(forward=0.5, **half).makespan == chunked


@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES)
def test_stashes_of_the_tables_for_paper(p, m):
    assert one_f_one_b(p, m).simulate(forward=1, **PARTS).peak_in_flight == tuple(min(m, p - i) for i in range(p))
    assert all(zero_bubble(p, m).in_flight(i) <= min(m, p) for i in range(p))
    chunked = interleaved(p, p * m)
    assert [chunked.in_flight(i) for i in range(p)] == [min(2 * p * m, p + 2 * (p - 1 - i) + 1) for i in range(p)]


@settings(deadline=None)
@given(maker=st.sampled_from(EVERY), p=st.integers(1, 5), m=st.integers(1, 6), communication=st.integers(0, 3))
def test_running_free_is_bounded(maker, p, m, communication):
    """No device works longer than its work, nor the whole longer than all work and all transport one after another."""
    schedule = maker(p, m)
    schedule.validate()
    timeline = schedule.simulate(forward=2, backward_input=3, backward_weight=1, communication=communication)
    j, v = schedule.num_microbatches, schedule.num_chunks
    busy = [sum(x.end - x.start for x in timeline.spans if x.stage == s) for s in range(p)]
    assert busy == [6 * j * v] * p
    path = v * p * (2 + 3) + 1 + 2 * (v * p - 1) * communication * (p > 1)  # forth, back, and one weight part
    assert max(6 * j * v, path) <= timeline.makespan <= 6 * j * v * p + 2 * j * v * p * communication
    in_step = schedule.simulate(
        forward=2, backward_input=3, backward_weight=1, communication=communication, lockstep=True
    )
    assert timeline.makespan <= in_step.makespan


@settings(deadline=None)
@given(maker=st.sampled_from(EVERY), p=st.integers(1, 5), m=st.integers(1, 6))
def test_csv_round_trip(maker, p, m):
    schedule = maker(p, m)
    back = from_csv(to_csv(schedule), schedule.name)
    assert [list(back.order(s)) for s in range(p)] == [list(schedule.order(s)) for s in range(p)]
    assert (back.num_microbatches, back.num_chunks) == (schedule.num_microbatches, schedule.num_chunks)


@settings(deadline=None)
@given(data=st.data(), maker=st.sampled_from(EVERY), p=st.integers(1, 4), m=st.integers(1, 5))
def test_corrupted_orders_are_refused_or_run(data, maker, p, m):
    """A missing or a doubled action is named; a swap either breaks a dependency or makes another legal schedule."""
    schedule = maker(p, m)
    orders = [list(schedule.order(s)) for s in range(p)]
    assume(schedule.num_devices * schedule.num_microbatches > 1)  # one forward alone is a schedule for evaluation
    device = data.draw(st.integers(0, p - 1))
    place = data.draw(st.integers(0, len(orders[device]) - 1))
    damage = data.draw(st.sampled_from(["missing", "doubled", "swapped"]))
    action = orders[device][place]
    if damage == "swapped":
        other = data.draw(st.integers(0, len(orders[device]) - 1))
        orders[device][place], orders[device][other] = orders[device][other], action
    else:
        orders[device][place : place + 1] = [action] * (2 if damage == "doubled" else 0)
    size = schedule.num_microbatches, schedule.num_chunks
    if damage == "swapped":
        try:
            changed = from_orders("swapped", orders, *size)
        except ScheduleError as error:
            assert "deadlock: device" in str(error)
        else:
            changed.validate()
    else:
        with pytest.raises(ScheduleError, match=r"deadlock: device|must do each of"):
            from_orders(damage, orders, *size).validate()


def test_unknown_actions_are_refused():
    with pytest.raises(ScheduleError, match="stage 0 does F0'1, but there are 1 micro-batches and 1 stages"):
        from_orders("drawn", [[Action(F, 0), Action(F, 0, 1)]], 1)
    with pytest.raises(ScheduleError, match="no device does anything"):
        from_orders("drawn", [[], []], 1)


def test_a_deadlock_names_who_waits():
    f, b = Action(F, 0), Action(B, 0)
    with pytest.raises(ScheduleError, match="deadlock: device 0 cannot run B0"):
        from_orders("dead", [[f, b], [b, f]], 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no rows"),
        (",,\n", "all cells are empty"),
        ("0F0,0X0", "row 0 has '0X0'; a cell is a stage"),
        ("0F0,0B0\n0F0,0B0", "stage 0 on 0 and 1, stage 1 on none; each of the stages 0..1 must be on one device"),
        ("0F0,0B0,0F9,0B9", "4 actions cannot be all work of 10 micro-batches"),
        ("0F0,0F1,0B0", r"device 0 does B of micro-batches \[0\]"),
        ("0F0,0I0", r"device 0 does W of micro-batches \[\]"),
        ("0B0,0F0", "deadlock: device 0 cannot run B0"),
        ("0F0,0B999999999", "numbers are at most"),
        ("0" * 200_000, "this is no CSV"),
    ],
)
def test_bad_csv(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


SQUARE = "".join(f"{k}F0,{k}B0\n" for k in range(400))


def test_a_schedule_of_many_devices_is_checked_in_linear_time():
    """4.5 kB: 0.3 s, where looking through the table again for each device took 4 s."""
    begin = time.process_time()
    assert from_csv(SQUARE).num_devices == 400
    pair_ticks(200, 1).validate()
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",\n" * 2**19, "more than 4096 rows"),
        (",\n" * 2**23, "16777216 characters; a schedule has at most 1048576"),
        (",".join(f"0F{j},0B{j}" for j in range(100_000)), "characters; a schedule has at most 1048576"),
        ("".join(f"{k}F0\n" for k in range(3000)), "3000 devices times 3000 ticks are 9000000 cells; .* most 2097152"),
        # Backward work goes one device further in a tick, so that the table is far longer than each row.
        (
            "".join(",".join(f"{k}F{j},{k}B{j}" for j in range(40)) + "\n" for k in range(256)),
            "256 devices times 20480 ticks",
        ),
    ],
    ids=["rows", "characters", "micro-batches", "devices", "ticks"],
)
def test_schedules_too_large_are_refused_in_little_time_and_memory(text, message):
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(ScheduleError, match=message):
            from_csv(text)
        assert time.process_time() - begin < 10.0
        assert tracemalloc.get_traced_memory()[1] < 128 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [None, b"", 3, []])
def test_csv_of_another_type_is_refused(text):
    with pytest.raises(ScheduleError, match=f"text is of type {type(text).__name__}; pass the text of the file"):
        from_csv(text)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({}, "either backward=, or backward_input="),
        ({"backward": 1, "backward_input": 1, "backward_weight": 1}, "either backward="),
        ({"backward_input": 1}, "either backward="),
        ({"backward": [1, 2, 3]}, "backward= has 3 times, but 1f1b has 2 stages"),
    ],
)
def test_bad_costs(costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(one_f_one_b(2, 2), forward=1, **costs)
    with pytest.raises(ScheduleError, match="zero-bubble-h1 splits the backward work"):
        simulate(zero_bubble(2, 2), forward=1, backward=1)


def test_interleaved_needs_whole_groups():
    with pytest.raises(ScheduleError, match=r"num_microbatches=6, num_chunks=2; .* a multiple"):
        interleaved(4, 6)


@pytest.mark.core
@pytest.mark.parametrize("name", schedules.BY_NAME)
def test_gradients_of_micro_batches_are_added_in_their_order(name):
    """So that gradients have the same bits with every built-in schedule."""
    table, orders = schedules.BY_NAME[name](4, 8), {}
    for tick in table.ticks:
        for device, actions in enumerate(tick):
            for action in actions:
                if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                    orders.setdefault(table.stage(device, action.chunk), []).append(action.microbatch)
    assert set(orders) == set(range(table.total_stages))
    assert all(order == list(range(8)) for order in orders.values())
