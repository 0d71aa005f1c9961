"""Pictures of a plan: who computes what when, what each device holds, what each stage costs; by matplotlib."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpipe.plan import Plan, short_modules
from jaxpipe.planning.cuts.placed_stages import Partition
from jaxpipe.planning.memory_report import MemoryReport
from jaxpipe.planning.plan_timeline import check_size, plan_timeline
from jaxpipe.schedules import Kind, Schedule, Timeline
from jaxpipe.schedules.swap_points import swap_points
from jaxpipe.schedules.table import KIND_NAMES
from jaxpipe.text.short_names import number_ranges, shorten
from jaxpipe.text.units import byte_unit, bytes_text, seconds_text


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After M. Okabe and K. Ito, "Color universal design", 2002: distinct for color-blind readers too.
BLUE, ORANGE, GREEN, YELLOW = "#0072B2", "#E69F00", "#009E73", "#F0E442"
SKY, VERMILION, PURPLE, GREY = "#56B4E9", "#D55E00", "#CC79A7", "#999999"

#: Neighbors differ in brightness as well.
COMPONENT_COLORS = (BLUE, SKY, GREEN, YELLOW, VERMILION, ORANGE, PURPLE, GREY)

#: Stashes of other stages, one color after the other.
GUEST_COLORS = (ORANGE, SKY, PURPLE, YELLOW)

#: Of a bar, and of the text on it.
KIND_COLORS = {
    Kind.FORWARD: (BLUE, "white"),
    Kind.BACKWARD: (ORANGE, "black"),
    Kind.BACKWARD_INPUT: (ORANGE, "black"),
    Kind.BACKWARD_WEIGHT: (GREEN, "white"),
}

WIDTH_INCHES = 12.0


def draw_timeline(plan: Plan, schedule: Schedule, timeline: Timeline | None = None, *, source: str = "") -> "Figure":
    """Draw the timeline of one training step: a row for each device, a bar with its micro-batch for each action.

    Where a device has several stages, the number of the chunk stands behind that of the micro-batch: ``3'1``.

    Args:
      plan: its seconds are predicted for one micro-batch; the axis is in milliseconds from the start of the step.
      schedule: the table that the plan was made with.
      timeline: ``Pipeline.timeline()``, or with ``source`` one that is not the plan's own, such as
        ``Pipeline.timeline(measured=True)``.
      source: where its seconds come from; left out: the plan's profile.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
      ScheduleError: if the schedule is not of the plan's size.
    """
    rows = schedule.num_devices
    figure = _figure("draw_timeline", 1.9 + 0.6 * rows)
    check_size(plan, schedule)
    timeline = plan_timeline(plan, schedule) if timeline is None else timeline
    axes = figure.subplots()
    _draw_spans(axes, timeline)
    axes.set_yticks(range(rows), [_row_label(plan, schedule, d) for d in range(rows)])
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, 1e3 * timeline.makespan)
    axes.set_xlabel(f"ms from the start of the step ({source or plan.profile + ' profile'})")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    step, bubble = (
        (timeline.makespan, timeline.bubble_fraction) if source else (plan.step_seconds, plan.bubble_fraction)
    )
    figure.suptitle(
        f"One step: {1e3 * step:.1f} ms, bubble {bubble:.1%} "
        f"({len(plan.stages)} stages, {plan.num_microbatches} micro-batches of {plan.microbatch_size}, {plan.schedule})"
    )
    figure.legend(loc="outside lower right", ncols=4, frameon=False)
    return figure


def draw_memory(plan: Plan, schedule: Schedule, report: MemoryReport | None = None) -> "Figure":
    """Draw predicted bytes by component beside the compiled bytes, and the stash of every device by tick.

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
    figure = _figure("draw_memory", max(4.8, 1.6 + 0.9 * schedule.num_devices))
    check_size(plan, schedule)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(2, 3))[0]
    _draw_components(left.subplots(), plan, report)
    rows = right.subplots(schedule.num_devices, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    _draw_stash(rows, plan, schedule)
    reserved = _reserved_stash(plan)
    dashed = f"; dashed: {bytes_text(reserved)} reserved for them" if reserved else ""
    right.suptitle(f"Stashes in flight{dashed}")
    title = f"Bytes {plan.where}: {bytes_text(plan.predicted_bytes)} predicted"
    if report is not None:
        title += f", {bytes_text(max(report.compiled_bytes))} compiled"
    figure.suptitle(title)
    return figure


def draw_stages(partition: Partition) -> "Figure":
    """Draw compute and communication of each stage, the bottleneck, and the bound below which no partition gets.

    The synchronous cost model has these two for a whole step, so they are not drawn beside times for one micro-batch
    but stand in the title.

    Args:
      partition: its predicted seconds for one micro-batch are drawn.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    figure = _figure("draw_stages", 4.8)
    stages, worst, whole = partition.stages, _bottleneck(partition), partition.cost_model == "synchronous"
    axes = figure.subplots()
    axes.axvspan(worst - 0.5, worst + 0.5, color=VERMILION, alpha=0.12, linewidth=0, label="bottleneck stage")
    for shift, label, color, seconds in (
        (-0.2, "compute", BLUE, [stage.compute_seconds for stage in stages]),
        (0.2, "communication", ORANGE, [stage.communication_seconds for stage in stages]),
    ):
        places = [s + shift for s in range(len(stages))]
        axes.bar(places, [1e3 * value for value in seconds], width=0.4, color=color, label=label)
    limits = partition.bottleneck_seconds, partition.lower_bound_seconds
    title = f"Cost of each stage ({partition.cost_model})"
    if whole:
        title += f"; all micro-batches of a step take {seconds_text(limits[0])}, at least {seconds_text(limits[1])}"
    else:
        for name, seconds, color, style in zip(
            ("bottleneck", "lower bound"), limits, (VERMILION, "black"), ("-", "--"), strict=True
        ):
            axes.axhline(1e3 * seconds, color=color, linestyle=style, label=f"{name}, {seconds_text(seconds)}")
    labels = [f"stage {s}\n{number_ranges(stage.devices)}" for s, stage in enumerate(stages)]
    axes.set_xticks(range(len(stages)), labels)
    axes.set_xlim(-0.5, len(stages) - 0.5)
    axes.set_xlabel("devices")
    axes.set_ylabel("ms for one micro-batch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    figure.suptitle(title)
    figure.legend(loc="outside lower right", ncols=5, frameon=False)
    return figure


def load_figure_class(name: str) -> "type[Figure]":
    """``matplotlib.figure.Figure``, for the picture of that name."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{name} draws with matplotlib, which is not installed: pip install matplotlib") from error
    return Figure


def _figure(name: str, height: float) -> "Figure":
    return load_figure_class(name)(figsize=(WIDTH_INCHES, height), layout="constrained")


def _bottleneck(partition: Partition) -> int:
    """Return the stage whose time is the bottleneck's, be it the sum or the larger of its parts, by the cost model.

    If the bottleneck is a whole step, the stage with most work.
    """
    stages = range(len(partition.stages))
    parts = [(stage.compute_seconds, stage.communication_seconds) for stage in partition.stages]
    if partition.cost_model == "synchronous":
        return max(stages, key=lambda s: parts[s][0])
    target = partition.bottleneck_seconds
    return min(stages, key=lambda s: min(abs(time - target) for time in (sum(parts[s]), max(parts[s]))))


def _draw_spans(axes: "Axes", timeline: Timeline) -> None:
    stages = range(len(timeline.peak_in_flight))
    axes.barh(stages, [1e3 * timeline.makespan] * len(stages), height=0.8, color="#E8E8E8", label="waits")
    for kind, (color, text_color) in KIND_COLORS.items():
        spans = [span for span in timeline.spans if span.action.kind is kind]
        if not spans:
            continue
        axes.barh(
            [span.stage for span in spans],
            [1e3 * (span.end - span.start) for span in spans],
            left=[1e3 * span.start for span in spans],
            height=0.8,
            color=color,
            edgecolor="white",
            linewidth=0.5,
            label=KIND_NAMES[kind],
        )
        for span in spans:
            text = str(span.action).removeprefix(kind.value)
            size = _text_points(text, (span.end - span.start) / timeline.makespan)
            if size >= 5:
                middle = 1e3 * (span.start + span.end) / 2
                axes.text(middle, span.stage, text, ha="center", va="center", color=text_color, fontsize=size)
    for s in stages:
        busy = sum(span.end - span.start for span in timeline.spans if span.stage == s) / timeline.makespan
        axes.text(1.01, s, f"{busy:.0%} busy", transform=axes.get_yaxis_transform(), va="center")


def _text_points(text: str, share: float) -> float:
    """The font size, at most 9 points, that fits into a share of the axes' width; a digit is 0.65 of its size wide."""
    axes_points = 72 * 0.75 * WIDTH_INCHES  # beside them stand the stages' names
    return min(9.0, 0.9 * share * axes_points / (0.65 * len(text)))


def _row_label(plan: Plan, schedule: Schedule, device: int) -> str:
    """The stage of a device with its modules, without the path that all share, or the numbers of its stages."""
    stages = schedule.stage_of[device]
    name, text = f"device {device}", f"stages {', '.join(map(str, stages))}"
    if len(stages) == 1:
        name, text = f"stage {stages[0]}", shorten(short_modules(plan)[1][stages[0]], 3)
    return "\n".join([name, *textwrap.wrap(text, 32)[:2]])


def _draw_components(axes: "Axes", plan: Plan, report: MemoryReport | None) -> None:
    compiled = max(report.compiled_bytes) if report else 0
    scale, unit = byte_unit(max(plan.predicted_bytes, compiled))
    below = 0
    for k, (name, count) in enumerate(plan.memory.items()):
        color = COMPONENT_COLORS[k % len(COMPONENT_COLORS)]
        label = f"{name} {bytes_text(count)}"
        axes.bar(0, count / scale, bottom=below / scale, color=color, edgecolor="white", linewidth=0.5, label=label)
        below += count
    bars = [("predicted", plan.predicted_bytes)]
    if report:
        axes.bar(1, compiled / scale, color="#404040")
        bars.append(("compiled", compiled))
    for k, (_, count) in enumerate(bars):
        axes.annotate(bytes_text(count), (k, count / scale), (0, 3), textcoords="offset points", ha="center")
    if plan.budget is not None:
        label = f"budget {bytes_text(plan.budget)}"
        axes.axhline(plan.budget / scale, color=VERMILION, linestyle="--", label=label)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylabel(f"{unit} {plan.where}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.08)
    # As the parts of the bar: the last on top.
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_stash(rows: Sequence["Axes"], plan: Plan, schedule: Schedule) -> None:
    """Draw a row for each device; one program reserves room for stashes, as much on all."""
    reserved = _reserved_stash(plan)
    bars_of = [_stash_bars(plan, schedule, d) for d in range(schedule.num_devices)]
    totals = [sum(column) for bars in bars_of for column in zip(*(held for _, held in bars), strict=True)]
    scale, unit = byte_unit(max(reserved, *totals))
    ticks = range(len(schedule.ticks))
    for d, axes in enumerate(rows):
        below = [0.0] * len(ticks)
        for k, (label, held) in enumerate(bars_of[d]):
            color = BLUE if not k else GUEST_COLORS[(k - 1) % len(GUEST_COLORS)]
            sizes = [size / scale for size in held]
            axes.bar(ticks, sizes, bottom=below, width=0.9, color=color, label=label)
            below = [low + size for low, size in zip(below, sizes, strict=True)]
            if label is not None:
                axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        if reserved:
            axes.axhline(reserved / scale, color=VERMILION, linestyle="--")
        axes.set_title(_stash_title(plan, schedule, d), loc="left", fontsize=10)
        axes.set_ylabel(unit)
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("tick of the schedule")
    rows[-1].locator_params(axis="x", integer=True)


def _reserved_stash(plan: Plan) -> int:
    return plan.memory.get("stash", 0) if plan.runtime == "spmd" else 0


def _stash_bars(plan: Plan, schedule: Schedule, device: int) -> list[tuple[str | None, list[int]]]:
    """Return the bytes that a device keeps in each tick of its own stages and for others, with names where needed."""
    bars: list[tuple[str | None, list[int]]] = []
    for chunk in range(schedule.num_chunks):
        stage = schedule.stage(device, chunk)
        label = f"stage {stage}" if schedule.num_chunks > 1 else None
        each = plan.stage_replicas.per_device(device) * plan.stages[stage].stash_bytes
        held, moved = _held(schedule, device, chunk), sum(piece.bytes for piece in plan.stages[stage].pieces)
        away = _away(schedule, stage, False) if moved else [0] * len(held)
        bars.append((label, [n * each - gone * moved for n, gone in zip(held, away, strict=True)]))
    for other, lender in enumerate(plan.stages):
        kept = [piece.bytes for piece in lender.pieces if piece.stage == device]
        bars += [(f"of stage {other}", [n * size for n in _away(schedule, other, True)]) for size in kept]
    return bars


def _away(schedule: Schedule, stage: int, elsewhere: bool) -> list[int]:
    """Stashes of a stage that are in other memory in each tick, or that are not on its device."""
    device = schedule.device(stage)
    ticks = [t for t, tick in enumerate(schedule.ticks) for _ in tick[device]]  # of each action, in order
    points = swap_points(schedule, stage)
    spans = [(points.elsewhere if elsewhere else points.missing)(j) for j in points.leaves]
    gone = [(ticks[span.start], ticks[span.stop - 1]) for span in spans]
    return [sum(first <= t <= last for first, last in gone) for t in range(len(schedule.ticks))]


def _stash_title(plan: Plan, schedule: Schedule, device: int) -> str:
    stages = schedule.stage_of[device]
    parts = [f"{plan.stages[s].in_flight} x {bytes_text(plan.stages[s].stash_bytes)}" for s in stages]
    if len(parts) > 1:
        return f"device {device}: {' + '.join(parts)}"
    stage = plan.stages[stages[0]]
    away = f", {stage.away} of them elsewhere" if stage.away else ""
    return f"stage {stages[0]}: {parts[0]} = {bytes_text(stage.in_flight * stage.stash_bytes)}{away}"


def _held(schedule: Schedule, device: int, chunk: int) -> list[int]:
    """Return how many stashes of a chunk a device holds in each tick, of micro-batches or of rounds."""
    starts, ends = (schedule.when(device, kind, chunk) for kind in (Kind.FORWARD, schedule.kinds[-1]))
    return [sum(starts[j] <= t <= ends[j] for j in ends) for t in range(len(schedule.ticks))]
