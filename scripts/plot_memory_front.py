"""Plot what ``scripts.bench_memory_front`` measured: bytes against operations run again, and against step time.

From the root of the repository, with matplotlib installed:

    python -m scripts.plot_memory_front
    python -m scripts.plot_memory_front --json docs/results/memory-front-h100-jax0.12.json --out some.png
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plotting import plot


#: By family: color, marker, and its name in the legend.
FAMILIES = {
    "plain": ("black", "s", "plain"),
    "whole": ("#f0883e", "^", "jax.checkpoint of the model"),
    "blocks": ("#a63603", "D", "nn.remat of blocks, all or every second"),
    "jaxpipe": ("#1f6fb4", "o", "jaxpipe: encoded, and budgets"),
}
MIB = 2**20
COLUMNS = 4

Row = Mapping[str, Any]


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points than which no other is better in both coordinates, by the first.

    Example:
      >>> front([(1, 5), (2, 6), (3, 2), (4, 2)])
      [(1, 5), (3, 2)]
    """
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def draw_model(axes: Axes, rows: Sequence[Row], height: Mapping[int, float], name: str, label: str) -> None:
    """Draw one model; ``height`` of a row is its second coordinate."""
    measured = [k for k, row in enumerate(rows) if "bytes" in row and row["family"] in FAMILIES]
    place = {k: (rows[k]["bytes"] / MIB, height[k]) for k in measured}
    lines = {"jaxpipe": "-", "whole": "--"}
    for family, (color, marker, text) in FAMILIES.items():
        x, y = np.array([place[k] for k in measured if rows[k]["family"] == family]).reshape(-1, 2).T
        axes.scatter(x, y, color=color, marker=marker, s=28, label=text, zorder=3)
        if family in lines:
            others = ("plain", "whole", "blocks") if family == "whole" else ("plain", "jaxpipe")
            x, y = np.array(front([place[k] for k in measured if rows[k]["family"] in others])).T
            axes.step(x, y, where="post", color=color, linestyle=lines[family], linewidth=1)
    for k in measured:
        axes.annotate(rows[k]["variant"], place[k], textcoords="offset points", xytext=(3, 3), fontsize=5)
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("MiB of the step", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    axes.grid(alpha=0.3)


def draw(result: Mapping[str, Any]) -> Figure:
    """A panel for each model, from the content of the JSON file, and one of times below it if there are any."""
    models: Mapping[str, Sequence[Row]] = result["models"]
    timed = any(row["time_ratio"] is not None for rows in models.values() for row in rows)
    columns, each = min(COLUMNS, len(models)), 1 + timed
    lines = -(-len(models) // columns) * each
    figure = Figure(figsize=(4.2 * columns, 0.6 + 3.6 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for unused in range(len(models), columns * lines // each):
        for line in range(each):
            grid[unused // columns * each + line, unused % columns].set_axis_off()
    for number, (name, rows) in enumerate(models.items()):
        line, column = number // columns * each, number % columns
        first = rows[0]["flops"] or 1.0
        again = {k: 100 * (row["flops"] / first - 1) for k, row in enumerate(rows) if "bytes" in row}
        draw_model(grid[line, column], rows, again, name, "operations of products run again, % of plain")
        if timed:
            times = {k: row["time_ratio"] for k, row in enumerate(rows) if "bytes" in row}
            draw_model(grid[line + 1, column], rows, times, name, "step time, of plain")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(f"Bytes of a training step and their price (jax {result['versions']['jax']}, {result['device']})")
    return figure


if __name__ == "__main__":
    plot(draw, "memory_front", __doc__)
