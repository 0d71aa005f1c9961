"""Plot what ``scripts.bench_encoding`` measured: stored bytes, temporaries and step time of each model and variant.

From the root of the repository, with matplotlib installed:

    python -m scripts.plot_encoding
    python -m scripts.plot_encoding --json out/bench_encoding.json --out docs/results/encoding.png
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plotting import plot


JAXPIPE = {"encoded": "#9ecae1", "fast": "#1f6fb4", "smallest": "#08306b"}
CHECKPOINT = {"nothing": "#fdd0a2", "dots": "#f0883e", "dots-no-batch": "#a63603"}
COLORS = JAXPIPE | CHECKPOINT | {"barrier": "#999999"}

#: Logarithmic axes end here; what is smaller has no bar.
SMALLEST_RATIO = 0.02

Row = Mapping[str, Any]


def label(variant: str, mean: float) -> str:
    """A variant in the legend, with its geometric mean."""
    return f"{f'checkpoint {variant}' if variant in CHECKPOINT else variant} ({mean:.2f})"


def draw_bars(axes: Axes, rows: Sequence[Row], means: Mapping[str, Row], key: str, title: str) -> None:
    """Bars of a number of bytes, relative to plain."""
    height = 0.8 / len(means)
    for k, (variant, mean) in enumerate(means.items()):
        ratios = [row["variants"][variant][key] / row["variants"]["plain"][key] for row in rows]
        positions = np.arange(len(rows)) - 0.4 + height * (k + 0.5)
        axes.barh(positions, ratios, height, color=COLORS[variant], label=label(variant, mean[key]))
    axes.set_xscale("log")
    axes.set_xlim(left=SMALLEST_RATIO)
    finish(axes, "relative to plain (logarithmic)", title)


def draw_times(axes: Axes, rows: Sequence[Row], means: Mapping[str, Row]) -> None:
    """Time ratios as dots, with whiskers from the first to the third quartile."""
    height = 0.8 / len(means)
    for k, (variant, mean) in enumerate(means.items()):
        low, median, high = np.array([row["variants"][variant]["time_ratio"] for row in rows]).T
        positions = np.arange(len(rows)) - 0.4 + height * (k + 0.5)
        style = {"fmt": "o", "markersize": 4, "capsize": 2, "color": COLORS[variant]}
        whiskers = np.array([median - low, high - median])
        axes.errorbar(median, positions, xerr=whiskers, label=label(variant, mean["time"]), **style)
    finish(axes, "relative to plain (below 1: faster)", "Time of a training step: median and quartiles")


def finish(axes: Axes, unit: str, title: str) -> None:
    """Set up what the panels have in common."""
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    legend = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 2, "frameon": False}
    axes.legend(title="geometric means in brackets", **legend)


def draw(result: Mapping[str, Any]) -> Figure:
    """Three panels, from the content of the JSON file."""
    rows = result["rows"]
    means = {variant: mean for variant, mean in result["geometric_means"].items() if variant != "plain"}
    figure = Figure(figsize=(16, 3 + 0.15 * len(rows) * max(3, len(means))), layout="constrained")
    stored, temporaries, times = figure.subplots(1, 3, sharey=True)
    draw_bars(stored, rows, means, "stored", "Stored for the backward pass")
    draw_bars(temporaries, rows, means, "temporaries", "Compiled temporaries")
    draw_times(times, rows, means)
    stored.set_yticks(range(len(rows)), [row["name"] for row in rows])
    stored.invert_yaxis()
    versions, machine = result["versions"], result["machine"]
    where = f"{machine['device']}, {machine['cpus']} cores" if machine["backend"] == "cpu" else machine["device"]
    figure.suptitle(f"memory_encoded and jax.checkpoint against plain jax.grad (jax {versions['jax']}, {where})")
    return figure


if __name__ == "__main__":
    plot(draw, "encoding", __doc__)
