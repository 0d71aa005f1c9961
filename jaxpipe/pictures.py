"""Pictures of a plan: who computes what when, and what each device holds. They need matplotlib."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxpipe.errors import ScheduleError
from jaxpipe.pipeline.pipeline import MemoryReport
from jaxpipe.planning.plan import Plan, shorten
from jaxpipe.schedules import Kind, Schedule, Timeline, simulate
from jaxpipe.schedules.swaps import Slice, swap_table
from jaxpipe.units import bytes_text


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After M. Okabe and K. Ito, "Color universal design", 2002: distinct for colour-blind readers too.
BLUE, ORANGE, GREEN, YELLOW = "#0072B2", "#E69F00", "#009E73", "#F0E442"
SKY, VERMILION, PURPLE, GREY = "#56B4E9", "#D55E00", "#CC79A7", "#999999"

#: Neighbours differ in brightness as well.
COMPONENT_COLOURS = (BLUE, SKY, GREEN, YELLOW, VERMILION, ORANGE, PURPLE, GREY)

#: Stashes of other stages, one colour after the other.
GUEST_COLOURS = (ORANGE, SKY, PURPLE, YELLOW)

KIND_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
KIND_COLOURS = {Kind.FORWARD: (BLUE, "white"), Kind.BACKWARD: (ORANGE, "black")}

WIDTH_INCHES = 12.0


def draw_timeline(plan: Plan, schedule: Schedule) -> "Figure":
    """Who computes what when in one training step: a row for each stage, a bar with its micro-batch for each action.

    Args:
      plan: its seconds are predicted for one micro-batch; the axis is in milliseconds from the start of the step.
      schedule: the table that the plan was made with.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
      ScheduleError: if the schedule is not of the plan's size.
    """
    figure_class = load_figure_class("draw_timeline")
    _check_size(plan, schedule)
    timeline = _timeline(plan, schedule)
    figure = figure_class(figsize=(WIDTH_INCHES, 1.9 + 0.6 * schedule.num_stages), layout="constrained")
    axes = figure.subplots()
    _draw_spans(axes, timeline)
    axes.set_yticks(range(schedule.num_stages), [_stage_label(plan, s) for s in range(schedule.num_stages)])
    axes.set_ylim(schedule.num_stages - 0.4, -0.6)
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_xlabel(f"ms from the start of the step ({plan.profile} profile)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(
        f"One step: {1e3 * timeline.makespan:.1f} ms, bubble {timeline.bubble_fraction:.1%} "
        f"({len(plan.stages)} stages, {plan.num_microbatches} micro-batches of {plan.microbatch_size}, {plan.schedule})"
    )
    figure.legend(loc="outside lower right", ncols=3, frameon=False)
    return figure


def draw_memory(plan: Plan, schedule: Schedule, report: MemoryReport | None = None) -> "Figure":
    """What each device holds: predicted bytes by component beside the compiled bytes, and every stage's stash by tick.

    Args:
      plan: its bytes are drawn.
      schedule: the table that the plan was made with.
      report: of ``Pipeline.memory_report()``; left out: no compiled bytes are drawn.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
      ScheduleError: if the schedule is not of the plan's size.
    """
    figure_class = load_figure_class("draw_memory")
    _check_size(plan, schedule)
    figure = figure_class(figsize=(WIDTH_INCHES, max(4.8, 1.6 + 0.9 * schedule.num_stages)), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    _draw_components(left.subplots(), plan, report)
    rows = right.subplots(schedule.num_stages, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    _draw_stash(rows, plan, schedule)
    right.suptitle("Stash of each stage, micro-batches in flight")
    title = f"Bytes on each device: {bytes_text(plan.predicted_bytes)} predicted"
    if report is not None:
        title += f", {bytes_text(max(report.compiled_bytes))} compiled"
    figure.suptitle(title)
    return figure


def load_figure_class(name: str) -> Any:
    """``matplotlib.figure.Figure``, for the picture of that name."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{name} draws with matplotlib, which is not installed: pip install matplotlib") from error
    return Figure


def _check_size(plan: Plan, schedule: Schedule) -> None:
    planned = len(plan.stages), plan.num_microbatches
    if planned != (schedule.num_stages, schedule.num_microbatches):
        raise ScheduleError(
            f"The schedule {schedule.name} has {schedule.num_stages} stages and {schedule.num_microbatches} "
            f"micro-batches, the plan has {planned[0]} and {planned[1]}. Pass the schedule of this plan: "
            f"schedule({planned[0]}, {planned[1]})."
        )


def _timeline(plan: Plan, schedule: Schedule) -> Timeline:
    """The plan's own timeline: what its step takes beyond the work is the exchange after each tick."""
    forward = [stage.forward_seconds for stage in plan.stages]
    backward = [stage.backward_seconds for stage in plan.stages]
    work = simulate(schedule, forward=forward, backward=backward).makespan
    communication = max(0.0, plan.step_seconds - work) / len(schedule.ticks)
    return simulate(schedule, forward=forward, backward=backward, communication=communication)


def _draw_spans(axes: "Axes", timeline: Timeline) -> None:
    stages = range(len(timeline.peak_in_flight))
    axes.barh(stages, [1e3 * timeline.makespan] * len(stages), height=0.8, color="#E8E8E8", label="waits")
    for kind, (colour, text_colour) in KIND_COLOURS.items():
        spans = [span for span in timeline.spans if span.action.kind is kind]
        axes.barh(
            [span.stage for span in spans],
            [1e3 * (span.end - span.start) for span in spans],
            left=[1e3 * span.start for span in spans],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=KIND_NAMES[kind],
        )
        for span in spans:
            text = str(span.action.microbatch)
            size = _text_points(text, (span.end - span.start) / timeline.makespan)
            if size >= 5:
                middle = 1e3 * (span.start + span.end) / 2
                axes.text(middle, span.stage, text, ha="center", va="center", color=text_colour, fontsize=size)
    for s in stages:
        busy = sum(span.end - span.start for span in timeline.spans if span.stage == s) / timeline.makespan
        axes.text(1.01, s, f"{busy:.0%} busy", transform=axes.get_yaxis_transform(), va="center")


def _text_points(text: str, share: float) -> float:
    """The font size, at most 9 points, that fits into a share of the axes' width; a digit is 0.65 of its size wide."""
    axes_points = 72 * 0.75 * WIDTH_INCHES  # beside them stand the stages' names
    return min(9.0, 0.9 * share * axes_points / (0.65 * len(text)))


def _stage_label(plan: Plan, stage: int) -> str:
    """The stage and its modules, without the path that all modules of the plan share."""
    parents = [path.split("/")[:-1] for s in plan.stages for path in s.modules]
    levels = [set(level) for level in zip(*parents, strict=False)]
    shared = next((k for k, level in enumerate(levels) if len(level) > 1), len(levels))
    modules = tuple("/".join(path.split("/")[shared:]) for path in plan.stages[stage].modules)
    return "\n".join([f"stage {stage}", *textwrap.wrap(shorten(modules, 3), 32)[:2]])


def _draw_components(axes: "Axes", plan: Plan, report: MemoryReport | None) -> None:
    compiled = max(report.compiled_bytes) if report else 0
    scale, unit = _unit(max(plan.predicted_bytes, compiled))
    below = 0
    for k, (name, count) in enumerate(plan.memory.items()):
        colour = COMPONENT_COLOURS[k % len(COMPONENT_COLOURS)]
        label = f"{name} {bytes_text(count)}"
        axes.bar(0, count / scale, bottom=below / scale, color=colour, edgecolor="white", linewidth=0.5, label=label)
        below += count
    bars = [("predicted", plan.predicted_bytes)]
    if report:
        axes.bar(1, compiled / scale, color="#404040")
        bars.append(("compiled", compiled))
    for k, (_, count) in enumerate(bars):
        axes.annotate(bytes_text(count), (k, count / scale), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylabel(f"{unit} on each device")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.08)
    # As the parts of the bar: the last on top.
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_stash(rows: Iterable["Axes"], plan: Plan, schedule: Schedule) -> None:
    """One row for each stage; the arena is as large on all devices, because one program runs on all."""
    arena = plan.memory.get("arena", 0)
    slices = [[Slice(piece.stage) for piece in stage.pieces] for stage in plan.stages]
    swaps = swap_table(schedule, [stage.away_ticks for stage in plan.stages], slices)
    scale, unit = _unit(max(arena, *(stage.in_flight * stage.stash_bytes for stage in plan.stages)))
    ticks = range(len(schedule.ticks))
    last = schedule.num_stages - 1
    for s, (axes, stage) in enumerate(zip(rows, plan.stages, strict=True)):
        away = [swaps.away_in(s, t) for t in ticks]
        held = [(n - m) * stage.stash_bytes / scale for n, m in zip(_held(schedule, s), away, strict=True)]
        axes.bar(ticks, held, width=0.9, color=BLUE)
        lenders = [(other, piece) for other, one in enumerate(plan.stages) for piece in one.pieces if piece.stage == s]
        for k, (other, piece) in enumerate(lenders):
            sizes = [swaps.away_in(other, t) * piece.bytes / scale for t in ticks]
            colour = GUEST_COLOURS[k % len(GUEST_COLOURS)]
            axes.bar(ticks, sizes, bottom=held, width=0.9, color=colour, label=f"of stage {other}")
            axes.legend(loc="upper left", frameon=False)
            held = [below + size for below, size in zip(held, sizes, strict=True)]
        axes.axhline(arena / scale, color=VERMILION, linestyle="--", label=f"arena reserved, {bytes_text(arena)}")
        axes.set_title(
            f"stage {s}: {stage.in_flight} x {bytes_text(stage.stash_bytes)} = "
            f"{bytes_text(stage.in_flight * stage.stash_bytes)}",
            loc="left",
            fontsize=10,
        )
        axes.set_ylabel(unit)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        if s == 0:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, borderaxespad=0)
        if s == last:
            axes.set_xlabel("tick of the schedule")
            axes.locator_params(axis="x", integer=True)


def _held(schedule: Schedule, stage: int) -> list[int]:
    """How many micro-batches' stash a stage holds in each tick."""
    starts, ends = schedule.when(stage, Kind.FORWARD), schedule.when(stage, Kind.BACKWARD)
    return [sum(starts[j] <= t <= ends[j] for j in ends) for t in range(len(schedule.ticks))]


def _unit(most: float) -> tuple[int, str]:
    """The largest unit of bytes in which a number is at least 1."""
    units = [(1024**k, name) for k, name in enumerate(("B", "KiB", "MiB", "GiB"))]
    return next(((scale, name) for scale, name in reversed(units) if most >= scale), units[0])
