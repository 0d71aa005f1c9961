"""Pictures of a partition: the cluster with the stages on it, and what each stage costs. They need matplotlib."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpipe.errors import PartitionError
from jaxpipe.network import Network
from jaxpipe.network_table import short
from jaxpipe.pictures import BLUE, COMPONENT_COLORS, ORANGE, VERMILION, WIDTH_INCHES, load_figure_class
from jaxpipe.units import bytes_text


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxpipe.planning.placed import Partition, StageCost

IDLE = "#D9D9D9"

#: Stages beside each other; the next ones are below, in the other direction.
MOST_BESIDE = 4

# Inches: a stage, and the distance between the middles of neighbors.
BOX_WIDTH, BOX_HEIGHT = 2.1, 0.62
COLUMN_PITCH, ROW_PITCH = 3.3, 1.3

#: Letters of a line in a box.
MOST_LETTERS = 30


def draw_cluster(partition: "Partition", network: Network | None = None) -> "Figure":
    """The stages in order, each with its devices, and what goes over the links between neighbors.

    One arrow leads from each stage to the next, with the bytes that are sent for one micro-batch and the slowest link
    between devices of the two. The bottleneck has a black edge; devices that stay idle stand behind the last stage.

    Args:
      partition: its stages are drawn.
      network: drawn in place of the one that the partition was made for, such as a measured one.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
      PartitionError: if the network lacks a device of the partition.
    """
    figure_class = load_figure_class("draw_cluster")
    network = partition.network if network is None else network
    stage_of = {device: s for s, stage in enumerate(partition.stages) for device in stage.devices}
    if max(stage_of) >= network.num_devices:
        raise PartitionError(
            f"The partition places stage {stage_of[max(stage_of)]} on device {max(stage_of)}; the network has devices "
            f"0..{network.num_devices - 1}. Pass the network that the partition was made for."
        )
    worst = _bottleneck(partition)
    idle = [device for device in range(network.num_devices) if device not in stage_of]
    count = len(partition.stages) + bool(idle)
    columns, rows = min(count, MOST_BESIDE), -(-count // MOST_BESIDE)
    size = max(5.0, columns * COLUMN_PITCH), rows * ROW_PITCH + 0.7
    figure = figure_class(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    middle, top = (columns - 1) * COLUMN_PITCH / 2, ROW_PITCH / 2 + 0.7
    axes.set_xlim(middle - size[0] / 2, middle + size[0] / 2)
    axes.set_ylim(top - size[1], top)
    for s, stage in enumerate(partition.stages):
        color = COMPONENT_COLORS[s % len(COMPONENT_COLORS)]
        _draw_box(axes, _spot(s), f"stage {s}", _devices_text(network, stage.devices), color, s == worst)
    if idle:
        _draw_box(axes, _spot(count - 1), "idle", _devices_text(network, idle), IDLE, False)
    for s, pair in enumerate(itertools.pairwise(partition.stages)):
        _draw_link(axes, network, s, *pair)
    figure.suptitle(
        f"{len(partition.stages)} stages on {len(stage_of)} of {network.num_devices} devices\n"
        f"{_bottleneck_text(partition, worst)}, lower bound {_time_text(partition.lower_bound_seconds)}",
        y=1 - 0.1 / size[1],
    )
    return figure


def draw_stages(partition: "Partition") -> "Figure":
    """Compute and communication of each stage, its bottleneck, and the bound below which no partition gets.

    The synchronous cost model has these two for a whole step, so they are not drawn beside times for one micro-batch
    but stand in the title.

    Args:
      partition: its predicted seconds for one micro-batch are drawn.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
    """
    figure_class = load_figure_class("draw_stages")
    stages, worst = partition.stages, _bottleneck(partition)
    limits = () if _is_step(partition) else (("bottleneck", partition.bottleneck_seconds, VERMILION, "-"),)
    limits += () if _is_step(partition) else (("lower bound", partition.lower_bound_seconds, "black", "--"),)
    times = [max(stage.compute_seconds, stage.communication_seconds) for stage in stages]
    longest = max([*times, *(seconds for _, seconds, _, _ in limits)])
    scale, unit = _time_unit(longest)
    figure = figure_class(figsize=(WIDTH_INCHES, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(worst - 0.5, worst + 0.5, color=VERMILION, alpha=0.12, linewidth=0, label="bottleneck stage")
    for shift, label, color, seconds in (
        (-0.2, "compute", BLUE, [stage.compute_seconds for stage in stages]),
        (0.2, "communication", ORANGE, [stage.communication_seconds for stage in stages]),
    ):
        places = [s + shift for s in range(len(stages))]
        axes.bar(places, [scale * value for value in seconds], width=0.4, color=color, label=label)
    for name, seconds, color, style in limits:
        label = f"{name}, {_time_text(seconds)}"
        axes.axhline(scale * seconds, color=color, linestyle=style, linewidth=1.5, label=label)
    axes.set_xticks(range(len(stages)), [_stage_label(s, stage.devices) for s, stage in enumerate(stages)])
    axes.set_xlim(-0.5, len(stages) - 0.5)
    axes.set_ylabel(f"{unit} for one micro-batch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    title = f"Cost of each stage ({partition.cost_model})"
    if _is_step(partition):
        step, bound = _time_text(partition.bottleneck_seconds), _time_text(partition.lower_bound_seconds)
        title += f"; all micro-batches of a step take {step}, at least {bound}"
    figure.suptitle(title)
    figure.legend(loc="outside lower right", ncols=5, frameon=False)
    return figure


def _is_step(partition: "Partition") -> bool:
    """Whether the bottleneck's seconds are those of a whole step."""
    return partition.cost_model == "synchronous"


def _bottleneck_text(partition: "Partition", worst: int) -> str:
    time = _time_text(partition.bottleneck_seconds)
    return f"step {time}, longest in stage {worst}" if _is_step(partition) else f"bottleneck {time} in stage {worst}"


def _bottleneck(partition: "Partition") -> int:
    """The stage whose time is the bottleneck's, be it the sum or the larger of its parts, as the cost model has it.

    If the bottleneck is a whole step, the stage with most work.
    """
    if _is_step(partition):
        return max(range(len(partition.stages)), key=lambda s: partition.stages[s].compute_seconds)

    def distance(s: int) -> float:
        parts = partition.stages[s].compute_seconds, partition.stages[s].communication_seconds
        return min(abs(time - partition.bottleneck_seconds) for time in (sum(parts), max(parts)))

    return min(range(len(partition.stages)), key=distance)


def _spot(k: int) -> tuple[float, float]:
    """The middle of the ``k``-th box: along a row, and back along the next."""
    row, column = divmod(k, MOST_BESIDE)
    return COLUMN_PITCH * (MOST_BESIDE - 1 - column if row % 2 else column), -ROW_PITCH * row


def _devices_text(network: Network, devices: Sequence[int]) -> str:
    """The names of some devices, as many as fit, and the speed of the slowest if speeds differ."""
    speed = f", {short(min(network.speed[d] for d in devices))}x" if len(set(network.speed)) > 1 else ""
    names, end = ", ".join(network.names[d] for d in devices), speed
    for shown in range(len(devices) - 1, 0, -1):
        if len(names + end) <= MOST_LETTERS:
            break
        names, end = ", ".join(network.names[d] for d in devices[:shown]), f" + {len(devices) - shown}{speed}"
    return names[: MOST_LETTERS - len(end)] + end


def _draw_box(axes: "Axes", spot: tuple[float, float], title: str, text: str, color: str, is_worst: bool) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = spot
    box = FancyBboxPatch(
        (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2),
        BOX_WIDTH,
        BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=color,
        edgecolor="black" if is_worst else "white",
        linewidth=3 if is_worst else 1,
    )
    axes.add_patch(box)
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white" if _is_dark(color) else "black"}
    axes.text(x, y + 0.13, title, fontsize=9.5, fontweight="bold", **style)
    axes.text(x, y - 0.13, text, fontsize=8, **style)


def _draw_link(axes: "Axes", network: Network, s: int, stage: "StageCost", following: "StageCost") -> None:
    """Draw what goes from stage ``s`` to the next: text on both sides of an arrow, or beside one that leads down."""
    pairs = itertools.product(stage.devices, following.devices)
    slowest = min(float(network.bandwidth[a, b]) for a, b in pairs)
    size, rate = bytes_text(stage.sent_bytes), f"{short(slowest / 1e9)} GB/s" if slowest else "no link"
    (x0, y0), (x1, y1) = _spot(s), _spot(s + 1)
    across = math.copysign(BOX_WIDTH / 2, x1 - x0) if x0 != x1 else 0.0
    down = 0.0 if across else BOX_HEIGHT / 2
    arrow = {"arrowstyle": "-|>", "color": "#404040", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x1 - across, y1 + down), (x0 + across, y0 - down), arrowprops=arrow)
    spot = (x0 + x1) / 2 + (0.0 if across else 0.1), (y0 + y1) / 2
    text = f"{size}\n{rate}" if across else f"{size}, {rate}"
    axes.text(*spot, text, va="center", ha="center" if across else "left", fontsize=8, linespacing=1.9)


def _stage_label(stage: int, devices: Sequence[int]) -> str:
    shown = ", ".join(map(str, devices[:4])) + (", ..." if len(devices) > 4 else "")
    return f"stage {stage}\n{'device' if len(devices) == 1 else 'devices'} {shown}"


def _is_dark(color: str) -> bool:
    """Whether white reads better on a color than black: its luma, weights of ITU-R BT.601."""
    red, green, blue = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 128


def _time_unit(seconds: float) -> tuple[float, str]:
    """The largest unit of time in which a number is at least 1, and how many of it are a second."""
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    return next(((scale, unit) for scale, unit in units if seconds * scale >= 1), units[-1])


def _time_text(seconds: float) -> str:
    scale, unit = _time_unit(seconds)
    return f"{short(scale * seconds)} {unit}"
