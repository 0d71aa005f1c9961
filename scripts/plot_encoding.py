"""Plot what ``scripts.bench_encoding`` measured: stored bytes and time ratio of each model.

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


PLAIN, ENCODED = "#9aa5b1", "#1f6fb4"

Row = Mapping[str, Any]


def draw_stored(axes: Axes, rows: Sequence[Row]) -> None:
    """Bars of stored bytes, with the saving next to them."""
    positions = np.arange(len(rows))
    plain = np.array([row["plain"]["stored"] for row in rows]) / 2**20
    encoded = np.array([row["encoded"]["stored"] for row in rows]) / 2**20
    axes.barh(positions - 0.2, plain, 0.4, color=PLAIN, label="plain jax.grad")
    axes.barh(positions + 0.2, encoded, 0.4, color=ENCODED, label="memory_encoded")
    for y, before, after in zip(positions, plain, encoded, strict=True):
        axes.text(1.1 * max(before, after), y, f"÷ {before / after:.2f}", va="center")
    axes.set_xscale("log")
    axes.set_xlim(right=3 * max(plain.max(), encoded.max()))
    axes.set_xlabel("MiB (logarithmic)")
    axes.set_title("Stored for the backward pass")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)


def draw_times(axes: Axes, rows: Sequence[Row], mean: float) -> None:
    """Time ratios as dots, with whiskers from the first to the third quartile."""
    positions = np.arange(len(rows))
    low, median, high = np.array([row["time_ratio"] for row in rows]).T
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(mean, color=ENCODED, linewidth=1, linestyle="--", label=f"geometric mean {mean:.3f}")
    whiskers = np.array([median - low, high - median])
    axes.errorbar(median, positions, xerr=whiskers, fmt="o", color=ENCODED, capsize=3, label="median and quartiles")
    axes.set_xlabel("encoded / plain (below 1: faster)")
    axes.set_title("Time of a training step")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)


def draw(result: Mapping[str, Any]) -> Figure:
    """Both panels, from the content of the JSON file."""
    rows = result["rows"]
    figure = Figure(figsize=(11, 2 + 0.35 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    draw_stored(left, rows)
    draw_times(right, rows, result["geometric_mean_time_ratio"])
    left.set_yticks(range(len(rows)), [row["name"] for row in rows])
    left.invert_yaxis()
    versions, machine = result["versions"], result["machine"]
    where = f"{machine['device']}, {machine['cpus']} cores" if machine["backend"] == "cpu" else machine["device"]
    figure.suptitle(f"jaxpipe.memory_encoded against plain jax.grad (jax {versions['jax']}, {where})")
    return figure


if __name__ == "__main__":
    plot(draw, "encoding", __doc__)
