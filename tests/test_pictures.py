"""Pictures of plans, against literal tables."""

import sys
from dataclasses import replace

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.plan import Plan, StagePlan, StashPiece, short_modules
from jaxpipe.planning.memory_report import MemoryReport
from jaxpipe.runtime.spmd.pair_ticks import pair_ticks
from jaxpipe.schedules import Kind, gpipe, interleaved, one_f_one_b, zero_bubble
from jaxpipe.visualize.pictures import draw_memory, draw_timeline
from tests.support.texts import one_line


STASH_BYTES = (3072, 1024)
SCHEDULE = pair_ticks(2, 3)


def make_plan(away=0):
    stages = tuple(
        StagePlan(
            (s, s + 1),
            (s,),
            (f"dense{s}",),
            1e-3,
            2e-3,
            4096,
            STASH_BYTES[s],
            SCHEDULE.in_flight(s),
            512,
            away if s == 0 else 0,
            away if s == 0 else 0,
            (StashPiece(1, (1,), STASH_BYTES[0]),) if away and s == 0 else (),
        )
        for s in range(2)
    )
    memory = {"parameters": 4096, "stash": 9216, "temporaries": 1024}
    # Two stages in step: (3 + 2 - 1) * (1 + 2) ms, and 1 ms for the exchange after each of 5 ticks.
    return Plan(stages, 1, 3, 8, "1f1b", "analytic", 17e-3, 17e-3, 1 - 18 / 34, None, memory, "", runtime="spmd")


def make_other(schedule, weight_seconds=0.0):
    """A plan for any table, of stages that are alike: forward 1 ms, backward 2 ms."""
    stages = tuple(
        StagePlan((s, s + 1), (s % 2,), (f"dense{s}",), 1e-3, 2e-3, 64, 1024, 1, 64, weight_seconds=weight_seconds)
        for s in range(schedule.total_stages)
    )
    memory = {"stash": 4096}
    return Plan(
        stages,
        1,
        schedule.num_microbatches,
        8,
        schedule.name,
        "analytic",
        0.0,
        0.0,
        0.0,
        None,
        memory,
        "",
        runtime="spmd",
    )


def bars(axes):
    return {container.get_label(): list(container) for container in axes.containers}


def test_timeline_has_a_bar_for_every_action():
    (axes,) = draw_timeline(make_plan(), SCHEDULE).axes
    drawn = bars(axes)
    assert {name: len(drawn[name]) for name in drawn} == {"waits": 2, "forward": 6, "backward": 6}
    assert sorted(text.get_text() for text in axes.texts) == sorted([*"012" * 4, "53% busy", "53% busy"])


def test_timeline_is_the_plans_own():
    figure = draw_timeline(make_plan(), SCHEDULE)
    (axes,) = figure.axes
    drawn = bars(axes)
    assert axes.get_xlim() == pytest.approx((0, 17))
    # By hand: stage 0 does F0 | F1 | F2 B0 | B1 | B2, stage 1 nothing | F0 B0 | F1 B1 | F2 B2 | nothing.
    assert [bar.get_x() for bar in drawn["forward"]] == pytest.approx([0, 2, 2, 6, 6, 10])
    assert [bar.get_x() for bar in drawn["backward"]] == pytest.approx([3, 7, 7, 11, 11, 14])
    assert "ms" in axes.get_xlabel() and "analytic" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0\ndense0", "stage 1\ndense1"]
    assert "17.0 ms" in figure.get_suptitle() and "47.1%" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("paths", "prefix", "short"),
    [
        ((("Net/body/a", "Net/body/b"), ("Net/body/c/d",)), "Net/body", (("a", "b"), ("c",))),
        # Blocks that one stage has whole are named by their own paths, not by those of what is in them.
        (
            (("Net/in", "Net/b0/x", "Net/b0/y/z", "Net/b1/x"), ("Net/b1/y", "Net/out")),
            "Net",
            (("in", "b0", "b1/x"), ("b1/y", "out")),
        ),
        # The module itself, and names that begin alike.
        ((("Net/layer_1",), ("Net", "Net/layer_10")), "Net", (("layer_1",), ("Net", "layer_10"))),
        ((("dense0",), ("dense1",)), "", (("dense0",), ("dense1",))),
        ((("Net/dense",), ("Net/dense",)), "", (("Net/dense",), ("Net/dense",))),
        (((), ()), "", ((), ())),
    ],
)
def test_a_path_that_all_modules_share_is_said_once(paths, prefix, short):
    plan = make_plan()
    stages = tuple(replace(stage, modules=modules) for stage, modules in zip(plan.stages, paths, strict=True))
    plan = replace(plan, stages=stages)
    assert short_modules(plan) == (prefix, short)
    assert (f"modules are named inside {prefix}" in one_line(plan)) == bool(prefix)
    assert all(f" {name} " in one_line(plan).replace(",", " ") for names in short for name in names)


def test_memory_stacks_the_components_beside_the_compiled_bytes():
    figure = draw_memory(make_plan(), SCHEDULE, MemoryReport((14336, 14336), (15360, 15360), (2048, 2048)))
    parts, *_ = figure.axes
    assert [bar.get_height() for bar in parts.patches] == [4, 9, 1, 15]  # KiB
    assert [bar.get_y() for bar in parts.patches] == [0, 4, 13, 0]
    assert parts.get_ylabel() == "KiB on each device"
    assert "14.00 KiB predicted, 15.00 KiB compiled" in figure.get_suptitle()


def test_memory_shows_the_stash_of_each_stage_by_tick():
    _, first, second = draw_memory(make_plan(), SCHEDULE).axes
    # By hand: stage 0 keeps a micro-batch for three ticks, stage 1 only within the tick.
    assert [bar.get_height() for bar in first.patches] == [3, 6, 9, 6, 3]
    assert [bar.get_height() for bar in second.patches] == [0, 1, 1, 1, 0]
    assert [axes.get_ylabel() for axes in (first, second)] == ["KiB", "KiB"]
    assert second.get_xlabel() == "tick of the schedule"


def test_memory_shows_what_is_in_a_peers_memory():
    plan = replace(make_plan(away=1), num_microbatches=4)
    _, first, second = draw_memory(plan, gpipe(2, 4)).axes
    # By hand: stage 0 works on F0 to F3, two ticks later on B0 to B3. Each stash leaves while the next work runs, and
    # returns while the work before its own runs. From when it leaves until it is read it is in the peer's memory.
    assert [bar.get_height() for bar in first.patches] == [3, 6, 6, 9, 12, 12, 9, 6, 6, 3]
    own, lent = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0], [0, 3, 6, 9, 9, 9, 12, 9, 6, 3]
    assert [bar.get_height() for bar in second.patches] == [*own, *lent]
    assert [bar.get_y() for bar in second.patches[10:]] == own
    assert second.get_legend().get_texts()[0].get_text() == "of stage 0"


def test_split_backward_is_drawn_in_two_kinds():
    schedule = zero_bubble(2, 4)
    plan = make_other(schedule, weight_seconds=1e-3)
    (axes,) = draw_timeline(plan, schedule).axes
    drawn = {name: len(drawn_bars) for name, drawn_bars in bars(axes).items()}
    assert drawn == {"waits": 2, "forward": 8, "backward, inputs": 8, "backward, weights": 8}
    assert [bar.get_width() for bar in bars(axes)["backward, weights"]] == pytest.approx([1.0] * 8)
    _, first, _ = draw_memory(plan, schedule).axes
    # A stash lives until its weight part: by the table of stage 0, in each tick.
    held = [bar.get_height() for bar in first.patches]
    assert max(held) == schedule.in_flight(0) == 2 and held[0] == 1 and held[-1] == 1


def test_chunks_are_told_apart():
    schedule = interleaved(2, 2)
    figure = draw_timeline(make_other(schedule), schedule)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["device 0\nstages 0, 2", "device 1\nstages 1, 3"]
    texts = sorted(text.get_text() for text in axes.texts if "busy" not in text.get_text())
    assert texts == sorted(["0", "1", "0'1", "1'1"] * 4)
    *_, second = draw_memory(make_other(schedule), schedule).axes
    assert [text.get_text() for text in second.get_legend().get_texts()] == ["stage 1", "stage 3"]
    # By hand: stage 3 is the last; its stash lives from F to B of the same micro-batch.
    count = len(schedule.ticks)
    last = [bar.get_height() for bar in second.patches][count:]
    start, end = schedule.when(1, Kind.FORWARD, 1), schedule.when(1, Kind.BACKWARD, 1)
    assert last == [sum(start[j] <= t <= end[j] for j in (0, 1)) for t in range(count)]


@pytest.mark.parametrize("draw", [draw_timeline, draw_memory])
def test_schedule_of_another_size_is_refused(draw):
    with pytest.raises(ScheduleError, match=r"4 micro-batches, the plan has 2 and 3.*schedule\(2, 3\)"):
        draw(make_plan(), one_f_one_b(2, 4))


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_timeline(make_plan(), SCHEDULE)
