"""Schedules against literal tables, closed forms and published makespans."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.pipeline.program import Program
from jaxpipe.schedules import Action, Kind, Schedule, gpipe, one_f_one_b, simulate
from jaxpipe.schedules.gpipe import forward_only


F, B = Kind.FORWARD, Kind.BACKWARD
MAKERS = pytest.mark.parametrize("maker", [one_f_one_b, gpipe])
STAGES, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)
SECONDS = st.integers(1, 50)


def drawn(*rows):
    """A schedule from one text for each stage: ``"F0 | F1 B0 | B1"``."""
    cells = [[[Action(Kind(a[0]), int(a[1:])) for a in cell.split()] for cell in row.split("|")] for row in rows]
    microbatches = 1 + max(a.microbatch for row in cells for cell in row for a in cell)
    ticks = tuple(tuple(tuple(cell) for cell in tick) for tick in zip(*cells, strict=True))
    return Schedule("drawn", len(rows), microbatches, ticks)


def transport(schedule):
    Program(None, (None,) * schedule.num_stages, schedule, None, None, False).check_transport()


@pytest.mark.core
@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (one_f_one_b(1, 2), ["F0 B0 | F1 B1"]),
        (one_f_one_b(2, 1), ["F0 | | B0", " | F0 B0 | "]),
        (one_f_one_b(2, 4), ["F0 | F1 | F2 B0 | F3 B1 | B2 | B3", " | F0 B0 | F1 B1 | F2 B2 | F3 B3 | "]),
        (
            one_f_one_b(3, 2),
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
    assert set(at) == {(s, Action(k, j)) for s in range(p) for k in Kind for j in range(m)}
    for s, j in itertools.product(range(p), range(m)):
        assert at[s, Action(F, j)] < at[s, Action(B, j)]
        if s:
            # What a tick makes is there in the next, and the executor keeps it no longer.
            assert at[s, Action(F, j)][0] == at[s - 1, Action(F, j)][0] + 1
            assert at[s - 1, Action(B, j)][0] == at[s, Action(B, j)][0] + 1
    schedule.validate()
    transport(schedule)


@MAKERS
@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES)
def test_slots_and_in_flight(maker, p, m):
    schedule = maker(p, m)
    for s in range(p):
        begin, end, slots = schedule.when(s, F), schedule.when(s, B), schedule.slots(s)
        for i, j in itertools.combinations(range(m), 2):
            if slots[i] == slots[j]:
                assert end[i] < begin[j] or end[j] < begin[i]
        bound = m if maker is gpipe else min(m, 2 * (p - 1 - s) + 1)
        most = max(sum(begin[j] <= t <= end[j] for j in range(m)) for t in range(len(schedule.ticks)))
        assert schedule.in_flight(s) == most == len(set(slots.values()))
        assert most == bound or (maker is gpipe and most < bound)


def test_gpipe_holds_every_micro_batch():
    assert [gpipe(3, 5).in_flight(s) for s in range(3)] == [5, 5, 5]


@pytest.mark.core
@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 16, 57), (8, 32, 117)])
@MAKERS
def test_published_makespans(maker, p, m, makespan):
    assert simulate(maker(p, m), forward=[1] * p, backward=[2] * p).makespan == makespan


@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES, f=SECONDS, b=SECONDS)
def test_equal_stages_lose_only_the_fill(p, m, f, b):
    timeline = simulate(one_f_one_b(p, m), forward=[f] * p, backward=[b] * p)
    assert timeline.makespan == (m + p - 1) * (f + b)
    # Integer seconds, so both sides round once, in a division.
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
    assert timeline.peak_in_flight == tuple(min(m, 2 * (p - 1 - i) + 1) for i in range(p))


@settings(deadline=None)
@given(p=STAGES, m=MICROBATCHES, f=SECONDS, b=SECONDS)
def test_gpipe_closed_forms(p, m, f, b):
    timeline = simulate(gpipe(p, m), forward=[f] * p, backward=[b] * p)
    assert timeline.makespan == (m + p - 1) * (f + b)
    # Integer seconds, so both sides round once, in a division.
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)


@settings(deadline=None)
@given(data=st.data(), p=STAGES, m=MICROBATCHES, communication=st.integers(0, 5))
def test_unequal_stages_wait_for_the_slowest(data, p, m, communication):
    forward, backward = (data.draw(st.lists(SECONDS, min_size=p, max_size=p)) for _ in range(2))
    timeline = simulate(one_f_one_b(p, m), forward=forward, backward=backward, communication=communication)
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
        (["F0 | F1 | B0"], r"stage 0 does B of micro-batches \[0\]; it must do each of 0..1 once"),
        (["F0 B0 | F1 | B1 | F0"], r"stage 0 does F of micro-batches \[0, 0, 1\]; it must do each of 0..1 once"),
        (["F0 | B0", " | "], r"stage 1 does F of micro-batches \[\]"),
        (["B0 | F0"], r"B of stage 0 for micro-batch 0 is in tick 0, .* F of stage 0, which is in tick 1"),
        (["B0 F0"], r"stage 0 does B0 F0 in one tick; a tick holds at most one forward and then one backward"),
        (["F0 F1 | B0 | B1"], r"stage 0 does F0 F1 in one tick"),
        (["F0 | | B0", "F0 | B0 | "], r"F of stage 1 for micro-batch 0 is in tick 0, .* it may start in tick 1"),
        ([" | F0 | | B0", "F0 | | B0 | "], r"F of stage 1 .* needs F of stage 0, which is in tick 1"),
        (["F0 | B0 | ", " | F0 | B0"], r"B of stage 0 for micro-batch 0 is in tick 1, but it needs B of stage 1"),
    ],
)
def test_validate_names_the_broken_rule(rows, message):
    with pytest.raises(ScheduleError, match=message):
        drawn(*rows).validate()


def test_validate_counts_the_stages_of_a_tick():
    schedule = Schedule("odd", 2, 1, (((Action(F, 0),),),))
    with pytest.raises(ScheduleError, match="odd: a tick has 1 stages, expected 2"):
        schedule.validate()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            ["F0 | | | B0", " | | F0 B0 | "],
            r"stage 1 does F0 in tick 2, but what it needs of stage 0 is made in tick 0",
        ),
        (
            ["F0 | | | B0", " | F0 B0 | | "],
            r"stage 0 does B0 in tick 3, but what it needs of stage 1 is made in tick 1",
        ),
    ],
)
def test_the_executor_refuses_a_message_that_waits(rows, message):
    schedule = drawn(*rows)
    schedule.validate()
    with pytest.raises(ScheduleError, match=message + ".*the very next tick"):
        transport(schedule)


@pytest.mark.parametrize("maker", [one_f_one_b, gpipe, forward_only])
@pytest.mark.parametrize("size", [(0, 3), (3, 0), (-1, 1)])
def test_sizes_below_one(maker, size):
    with pytest.raises(ScheduleError, match=f"num_stages={size[0]}, num_microbatches={size[1]}; both must be at least"):
        maker(*size)
