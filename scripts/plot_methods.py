"""Draw the diagrams of README.md and docs/methods.md from what the library computes and docs/results/ holds.

python -m scripts.plot_methods
"""

import json
from pathlib import Path

import jax
import matplotlib as mpl
import matplotlib.patches
import numpy as np
import optax
from flax import linen as nn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpipe import Network, Node, Profile, partition, topology
from jaxpipe.planning import partition_layers
from jaxpipe.schedules import Kind, Schedule, gpipe, interleaved, one_f_one_b, zero_bubble
from jaxpipe.schedules.swap_points import swap_points
from jaxpipe.schedules.table import KIND_NAMES
from jaxpipe.visualize.pictures import BLUE, GREEN, GREY, KIND_COLORS, ORANGE, SKY, draw_stages, draw_timeline


OUT = Path(__file__).parents[1] / "docs" / "pictures"
STAGE_PROGRAMS = OUT.parent / "results" / "stage-programs-h100-jax0.12.json"

STAGES, MICROBATCHES = 4, 8


def overview() -> Figure:
    """Draw the two ideas: fewer bits for the backward pass, and a device that holds its own stage alone."""
    figure = Figure(figsize=(10, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_bits(left)
    left.set_title(
        "saved for each element of a convolution's map\nbetween ReLU and a 2x2 max-pool", loc="left", fontsize=10
    )

    gpt2 = json.loads(STAGE_PROGRAMS.read_text())["models"]["gpt2"]
    bottoms = [0.0] * len(gpt2["devices"])
    for part, color in (
        ("parameters", BLUE),
        ("gradients", SKY),
        ("stash", GREEN),
        ("messages", GREY),
        ("temporaries", ORANGE),
    ):
        heights = [device["split"][part] / 2**20 for device in gpt2["devices"]]
        right.bar(range(len(heights)), heights, bottom=bottoms, color=color, label=part, edgecolor="white", width=0.7)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    one_program = gpt2["one_program"]["compiled"] / 2**20
    right.axhline(one_program, color="black", linestyle="--", linewidth=1)
    label = f"one program: {one_program:,.0f} MiB"
    right.annotate(label, (3.4, one_program), (0, 4), textcoords="offset points", ha="right", va="bottom", fontsize=9)
    for k, device in enumerate(gpt2["devices"]):
        right.text(k, bottoms[k], f"{device['compiled'] / 2**20:,.0f}", ha="center", va="bottom", fontsize=9)
    right.set_title("GPT-2 small in four stages, MiB on each H100", loc="left", fontsize=10)
    right.set_xticks(range(len(bottoms)), [f"stage {k}" for k in range(len(bottoms))])
    right.set_ylim(0, one_program * 1.15)
    right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    right.spines[["top", "right"]].set_visible(False)
    return figure


def schedules() -> Figure:
    """One step of four schedules, every device running free."""
    tables = [gpipe(STAGES, MICROBATCHES), one_f_one_b(STAGES, MICROBATCHES)]
    tables += [interleaved(STAGES, MICROBATCHES), zero_bubble(STAGES, MICROBATCHES)]
    figure = Figure(figsize=(10, 8), layout="constrained")
    longest = 0.0
    rows = figure.subplots(len(tables), 1, sharex=True)
    for axes, table in zip(rows, tables, strict=True):
        unit = 1 / table.num_chunks  # two stages on a device have half the work each
        timeline = table.simulate(forward=unit, backward_input=unit, backward_weight=unit)
        longest = max(longest, timeline.makespan)
        axes.barh(range(STAGES), [timeline.makespan] * STAGES, color="#E8E8E8", height=0.85)
        for span in timeline.spans:
            color, ink = KIND_COLORS[span.action.kind]
            shade = 0.65 if span.action.chunk else 1.0
            width = span.end - span.start
            axes.barh(span.stage, width, left=span.start, height=0.85, color=color, alpha=shade, edgecolor="white")
            middle = (span.start + span.end) / 2
            label = str(span.action.microbatch)
            axes.text(middle, span.stage, label, ha="center", va="center", color=ink, fontsize=7)
        held = ", ".join(map(str, timeline.peak_in_flight))
        title = (
            f"{table.name}: {timeline.makespan:g} units, bubble {timeline.bubble_fraction:.0%}; kept at most: {held}"
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(STAGES), [f"device {d}" for d in range(STAGES)])
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
    rows[-1].set_xlabel("units of a forward pass")
    rows[-1].set_xlim(0, longest)
    handles = [mpl.patches.Patch(color=KIND_COLORS[kind][0], label=KIND_NAMES[kind]) for kind in Kind]
    figure.legend(handles=handles, loc="outside lower right", ncols=4, frameon=False)
    return figure


def encoding() -> Figure:
    """Draw the bits that each element of a feature map takes between ReLU and a 2x2 max-pool."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    _draw_bits(figure.subplots())
    return figure


def _draw_bits(axes: Axes) -> None:
    # Plain: ReLU's output and a byte of its mask; the pool's output, a quarter of the elements.
    rows = {
        "jax.grad": (("map", 32, BLUE), ("mask", 8, SKY), ("pooled map", 32 / 4, ORANGE)),
        "jaxpipe": (("mask", 1 / 4, SKY), ("positions", 2 / 4, GREEN), ("pooled map", 32 / 4, ORANGE)),
    }
    shown = set()
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for name, bits, color in parts:
            label = None if color in shown else name
            shown.add(color)
            axes.barh(y, bits, left=left, color=color, edgecolor="white", height=0.6, label=label)
            left += bits
        axes.text(left + 0.5, y, f"{left:g}", va="center")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0, 56)
    axes.invert_yaxis()
    axes.set_xlabel("bits, float32")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def swaps() -> Figure:
    """Stashes that each device holds with and without swaps to peers."""
    table = one_f_one_b(STAGES, MICROBATCHES)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, shares, title in zip(
        figure.subplots(1, 2, sharey=True),
        ({}, {3: 2 / 3, 2: 1 / 3}),
        ("each device keeps its own", "devices 3 and 2 keep slices of stashes for 0"),
        strict=True,
    ):
        away = _away(table, 0) if shares else [0] * len(table.ticks)
        for d, style in enumerate(("-", "--", "-.", ":")):
            held = _held(table, d)
            kept = held if d else [n - gone for n, gone in zip(held, away, strict=True)]
            total = [n + gone * shares.get(d, 0.0) for n, gone in zip(kept, away, strict=True)]
            label = f"device {d}: at most {max(total):g}"
            axes.step(range(len(total)), total, style, where="mid", label=label, linewidth=2)
        axes.set_title(title)
        axes.set_xlabel("tick of 1F1B")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("stashes held")
    return figure


def _away(table: Schedule, device: int) -> list[int]:
    """Stashes of a device that are not on it, by tick."""
    ticks = [t for t, tick in enumerate(table.ticks) for _ in tick[device]]
    points = swap_points(table, device)
    gone = [(ticks[span.start], ticks[span.stop - 1]) for span in map(points.missing, points.leaves)]
    return [sum(first <= t <= last for first, last in gone) for t in range(len(table.ticks))]


def _held(table: Schedule, device: int) -> list[int]:
    starts, ends = table.when(device, Kind.FORWARD), table.when(device, Kind.BACKWARD)
    return [sum(starts[j] <= t <= ends[j] for j in ends) for t in range(len(table.ticks))]


def blocks() -> Figure:
    """A gradient as blocks, the two best of which are sent; the rest is kept."""
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=(12, 24)) * rng.gamma(0.5, 1.0, size=(12, 1))
    norms = np.abs(gradient).sum(1)
    best = np.argsort(norms)[-2:]
    sent = np.zeros_like(gradient)
    sent[best] = gradient[best]
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, middle, right, rest = figure.subplots(1, 4, width_ratios=(3, 1.6, 3, 3))
    limit = np.abs(gradient).max()
    for axes, values, title in (
        (left, gradient, "gradient + residual"),
        (right, sent, "sent"),
        (rest, gradient - sent, "kept as residual"),
    ):
        axes.imshow(values, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    left.set_ylabel("a row: one output neuron")
    middle.barh(range(len(norms)), norms, color=[ORANGE if k in best else GREY for k in range(len(norms))])
    middle.invert_yaxis()
    middle.set_yticks([])
    middle.set_title("L1 norm", fontsize=10)
    middle.spines[["top", "right"]].set_visible(False)
    return figure


def placement() -> Figure:
    """Twenty-four layers on two nodes, of which one is twice as fast."""
    count = 24
    sizes = np.geomspace(16e6, 1e6, count)  # early layers send much
    profile = Profile.chain(
        [f"layer {k}" for k in range(count)],
        [2e-3] * count,
        [4e-3] * count,
        [8e6] * count,
        sizes.tolist(),
        sizes.tolist(),
    )
    new = Node(4, topology.NVLINK_A100, speed=2.0, name="new")
    old = Node(4, topology.PCIE_3_X16, links={(0, 1): 50e9, (2, 3): 50e9}, name="old")
    network = Network.from_nodes([old, new], topology.ETHERNET_25G, latency_seconds=1e-5)
    return draw_stages(partition_layers(profile, network, replicate=False, num_stages=8, num_microbatches=64))


def timeline() -> Figure:
    """A step on four devices, on paper."""
    jax.config.update("jax_num_cpu_devices", STAGES)

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2 * STAGES):
                x = nn.relu(nn.Dense(1024)(x))
            return x

    pipeline = partition(
        Layers(),
        jax.make_mesh((STAGES,), ("stage",)),
        jax.ShapeDtypeStruct((512, 1024), np.float32),
        loss=lambda model, batch: (model(batch) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        num_microbatches=MICROBATCHES,
        profile="analytic",
    )
    return draw_timeline(pipeline.plan, pipeline.schedule, pipeline.timeline())


def main() -> None:
    """Write all of them."""
    OUT.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "jaxpipe"}):
        for draw in (overview, schedules, encoding, swaps, blocks, placement, timeline):
            draw().savefig(OUT / f"{draw.__name__}.svg", metadata={"Date": None}, bbox_inches="tight")
            print(f"wrote {OUT / draw.__name__}.svg")


if __name__ == "__main__":
    main()
