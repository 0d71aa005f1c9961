"""Pictures of a partition: the cluster with the stages on it, and what each stage costs. They need matplotlib."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from jaxpipe.errors import NetworkError
from jaxpipe.network import Network
from jaxpipe.network_table import short
from jaxpipe.pictures import BLUE, COMPONENT_COLORS, ORANGE, VERMILION, WIDTH_INCHES, load_figure_class
from jaxpipe.units import bytes_text


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxpipe.planning.placed import Partition, StageCost

IDLE = "#D9D9D9"

#: Links belong to different levels (inside a node, between nodes) from this ratio of their bandwidths.
LEVEL_RATIO = 2.0

# Inches: a device, the distance between the middles of neighbors, and the edge of a group around its devices.
BOX_WIDTH, BOX_HEIGHT = 1.55, 0.52
COLUMN_PITCH, ROW_PITCH = 2.9, 0.98
MARGIN, TITLE_HEIGHT = 0.22, 0.32

#: Devices above each other in a group.
TALLEST = 4


def draw_cluster(partition: "Partition", network: Network | None = None) -> "Figure":
    """The devices with their stages, and what goes over the links between neighboring stages.

    Devices of one node stand together. Where they have other names than ``Network.from_nodes`` gives, those with fast
    links do: a maximum spanning tree is cut where the bandwidths of its links differ most, if they differ twofold.
    Each stage has a color. One arrow leads from each stage to the next, with the bytes that are sent for one
    micro-batch and the slowest link between devices of the two; the bottleneck's devices have a black edge, idle ones
    are grey.

    Args:
      partition: its stages are drawn.
      network: drawn in place of the one that the partition was made for, such as a measured one.

    Returns:
      A matplotlib figure; ``figure.savefig(path)`` writes it.

    Raises:
      ImportError: if matplotlib is not installed.
      NetworkError: if the network lacks a device of the partition.
    """
    figure_class = load_figure_class("draw_cluster")
    network = partition.network if network is None else network
    stage_of = {device: s for s, stage in enumerate(partition.stages) for device in stage.devices}
    if max(stage_of) >= network.num_devices:
        raise NetworkError(
            f"The partition places stage {stage_of[max(stage_of)]} on device {max(stage_of)}; the network has devices "
            f"0..{network.num_devices - 1}. Pass the network that the partition was made for."
        )
    groups = _groups(network, stage_of)
    places = _places([len(group) for group in groups])
    position = dict(zip(itertools.chain(*groups), itertools.chain(*places), strict=True))
    figure = figure_class()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for group, spots in zip(groups, places, strict=True):
        _draw_group(axes, network, group, spots)
    worst = _bottleneck(partition)
    for device, spot in position.items():
        _draw_device(axes, network, device, spot, stage_of.get(device), stage_of.get(device) == worst)
    labels = [_draw_link(axes, network, position, *pair) for pair in itertools.pairwise(partition.stages)]
    _set_inches(figure, axes, list(position.values()), labels)
    figure.suptitle(
        f"{len(partition.stages)} stages on {len(stage_of)} of {network.num_devices} devices\n"
        f"{_bottleneck_text(partition, worst)}, lower bound {_time_text(partition.lower_bound_seconds)}",
        y=1 - MARGIN / figure.get_figheight(),
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


def _groups(network: Network, stage_of: dict[int, int]) -> list[list[int]]:
    """Devices of one node, or with fast links between them; groups and their devices in the order of the stages."""
    owners = [_node_name(name) for name in network.names]
    label = np.unique(owners, return_inverse=True)[1] if all(owners) else _fast_together(network)

    def order(device: int) -> tuple[float, int]:
        return stage_of.get(device, math.inf), device

    groups = [sorted(map(int, np.flatnonzero(label == k)), key=order) for k in range(max(label) + 1)]
    return sorted(groups, key=lambda group: order(group[0]))


def _node_name(name: str) -> str:
    """The node in a device's name, as ``Network.from_nodes`` writes it: ``node/device``."""
    return name.rpartition("/")[0]


def _fast_together(network: Network) -> np.ndarray:
    """A number for each device: the same where links are fast."""
    fastest = np.where(np.isfinite(network.bandwidth), network.bandwidth, 0).max()
    with np.errstate(divide="ignore"):
        tree = minimum_spanning_tree(fastest / network.bandwidth).toarray()  # infinite, and left out: no link
    cost = np.sort(tree[tree > 0])
    ratio = cost[1:] / cost[:-1]
    if len(ratio) and ratio.max() >= LEVEL_RATIO:
        tree[tree > cost[ratio.argmax()]] = 0
    return connected_components(tree, directed=False)[1]


def _places(sizes: Sequence[int]) -> list[list[tuple[float, float]]]:
    """The middle of every device of every group: down one column and up the next, row by row of groups."""
    widths = [math.ceil(size / TALLEST) for size in sizes]
    # Three columns end at the bottom, beside the next row.
    most = 4 if sum(widths) <= 4 else 3
    places, column, row, top, lowest = [], 0, 0, 0.0, 0.0
    for size, width in zip(sizes, widths, strict=True):
        width = min(width, most)
        if column + width > most:
            column, row, top = 0, row + 1, lowest - 2 * MARGIN - TITLE_HEIGHT - ROW_PITCH
        height = math.ceil(size / width)
        spots = []
        for k in range(size):
            along, step = divmod(k, height)
            across = column + along
            down = height - 1 - step if across % 2 else step
            x = across if row % 2 == 0 else most - 1 - across
            spots.append((x * COLUMN_PITCH, top - down * ROW_PITCH))
        lowest = min(lowest, *(y for _, y in spots))
        places.append(spots)
        column += width
    return places


def _draw_group(axes: "Axes", network: Network, group: Sequence[int], spots: Sequence[tuple[float, float]]) -> None:
    from matplotlib.patches import FancyBboxPatch

    xs, ys = np.array(spots).T
    left, low = xs.min() - BOX_WIDTH / 2 - MARGIN, ys.min() - BOX_HEIGHT / 2 - MARGIN
    width, height = np.ptp(xs) + BOX_WIDTH + 2 * MARGIN, np.ptp(ys) + BOX_HEIGHT + 2 * MARGIN + TITLE_HEIGHT
    style = "round,pad=0,rounding_size=0.1"
    axes.add_patch(FancyBboxPatch((left, low), width, height, boxstyle=style, facecolor="#F5F5F5", edgecolor="#BFBFBF"))
    owner = _node_name(network.names[group[0]])
    rates = [
        float(network.bandwidth[a, b]) / 1e9 for a, b in itertools.combinations(group, 2) if network.bandwidth[a, b]
    ]
    words = [owner] if all(_node_name(network.names[device]) == owner != "" for device in group) else []
    if rates:
        words.append(" to ".join(dict.fromkeys((short(min(rates)), short(max(rates))))) + " GB/s")
    y = low + height - TITLE_HEIGHT / 2 - MARGIN / 3
    axes.text(left + MARGIN, y, ": ".join(words), va="center", fontsize=9, color="#404040")


def _draw_device(
    axes: "Axes", network: Network, device: int, spot: tuple[float, float], stage: int | None, is_worst: bool
) -> None:
    from matplotlib.patches import FancyBboxPatch

    color = IDLE if stage is None else COMPONENT_COLORS[stage % len(COMPONENT_COLORS)]
    x, y = spot
    box = FancyBboxPatch(
        (x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2),
        BOX_WIDTH,
        BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=color,
        edgecolor="black" if is_worst else "white",
        linewidth=3 if is_worst else 1,
        zorder=3,
    )
    axes.add_patch(box)
    ink = "white" if _is_dark(color) else "black"
    axes.text(
        x,
        y + 0.11,
        "idle" if stage is None else f"stage {stage}",
        ha="center",
        va="center",
        color=ink,
        fontsize=9.5,
        fontweight="bold",
        zorder=4,
    )
    name = network.names[device]
    speed = f", {short(network.speed[device])}x" if len(set(network.speed)) > 1 else ""
    axes.text(x, y - 0.12, f"{name[:20]}{speed}", ha="center", va="center", color=ink, fontsize=8, zorder=4)


def _draw_link(
    axes: "Axes",
    network: Network,
    position: dict[int, tuple[float, float]],
    stage: "StageCost",
    following: "StageCost",
) -> tuple[float, float]:
    """Draw what goes from one stage to the next; returns where it is written."""
    from matplotlib.patches import FancyArrowPatch

    pairs = list(itertools.product(stage.devices, following.devices))
    source, target = min(pairs, key=lambda pair: math.dist(position[pair[0]], position[pair[1]]))
    (x0, y0), (x1, y1) = position[source], position[target]
    slowest = min(float(network.bandwidth[a, b]) for a, b in pairs)
    size, rate = bytes_text(stage.sent_bytes), f"{short(slowest / 1e9)} GB/s" if slowest else "no link"
    right = math.copysign(BOX_WIDTH / 2, x1 - x0)
    label: dict[str, Any] = {"ha": "center", "linespacing": 1.7}
    bend = 0.0
    if x0 == x1 and abs(y1 - y0) < 1.5 * ROW_PITCH:  # above each other: the text beside the arrow
        x, edge = x0 - 0.42 * BOX_WIDTH, math.copysign(BOX_HEIGHT / 2, y1 - y0)
        start, end = (x, y0 + edge), (x, y1 - edge)
        spot, text, label = (x + 0.1, (y0 + y1) / 2), f"{size}, {rate}", {"ha": "left"}
    elif x0 == x1:  # around the devices between
        start, end = (x0 + BOX_WIDTH / 2, y0), (x1 + BOX_WIDTH / 2, y1)
        bend = 1.2 / (y1 - y0)
        spot, text = (start[0] + 0.6, (y0 + y1) / 2), f"{size}\n{rate}"
    elif abs(x1 - x0) < 1.5 * COLUMN_PITCH:  # beside each other: a line of text on each side of the arrow
        start, end = (x0 + right, y0), (x1 - right, y1)
        spot, text = ((x0 + x1) / 2, y0), f"{size}\n{rate}"
        if y0 != y1:  # slanting arrows meet in the middle, but not at their starts
            spot = start[0] + math.copysign(0.4, x1 - x0), y0 + 0.2 * (y1 - y0)
    else:  # below the row; the text at the start, where no other arrow leaves
        start, end = (x0, y0 - BOX_HEIGHT / 2), (x1, y1 - BOX_HEIGHT / 2)
        bend = ROW_PITCH / 2 / (x1 - x0)
        spot, text = (x0, y0 - ROW_PITCH / 2), f"{size}, {rate}"
    if y0 != y1 or bend:
        label["bbox"] = {"boxstyle": "square,pad=0.1", "facecolor": "#F5F5F5", "edgecolor": "none", "alpha": 0.85}
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=12,
            shrinkA=0,
            shrinkB=0,
            color="#404040",
            linewidth=1.3,
            zorder=2,
        )
    )
    axes.text(*spot, text, va="center", fontsize=8, zorder=5, **label)
    return spot


def _set_inches(
    figure: "Figure", axes: "Axes", spots: Sequence[tuple[float, float]], labels: Sequence[tuple[float, float]]
) -> None:
    """Make a unit of the axes an inch, with room for all devices and labels and for two lines of title."""
    xs, ys = np.array(spots).T
    left, right = xs.min() - BOX_WIDTH / 2 - 2 * MARGIN, xs.max() + BOX_WIDTH / 2 + 2 * MARGIN
    low, high = ys.min() - BOX_HEIGHT / 2 - 2 * MARGIN, ys.max() + BOX_HEIGHT / 2 + 2 * MARGIN + TITLE_HEIGHT + 0.6
    right = max([right, *(x + 0.6 for x, _ in labels)])
    spare = max(0.0, 5.0 - (right - left))
    figure.set_size_inches(right - left + spare, high - low)
    axes.set_xlim(left - spare / 2, right + spare / 2)
    axes.set_ylim(low, high)


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
