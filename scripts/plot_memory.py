"""Plot what ``scripts.bench_memory`` measured: bytes against step time, and predicted against compiled bytes.

python -m scripts.plot_memory
python -m scripts.plot_memory --json out/bench_memory.json --out docs/results/memory.png
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plotting import plot


#: Panels beside each other.
COLUMNS = 4

COLORS = ("#9aa5b1", "#e69f00", "#0072b2", "#cc79a7")


def draw_front(axes: Axes, rows: list[Mapping[str, Any]], title: str) -> None:
    """Step time of every variant over its bytes."""

    def points(chosen: list[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        return [r["compiled"] / 2**20 for r in chosen], [r["ratio"][1] for r in chosen]

    ours = sorted((r for r in rows if r["budget"] is not None), key=lambda r: r["compiled"])
    axes.plot(*points(ours), "o-", color=COLORS[2], label="budget")
    for variant, color in (("plain", COLORS[0]), ("default", COLORS[1])):
        axes.plot(*points([r for r in rows if r["variant"] == variant]), "s", color=color, label=variant)
    for r in rows:
        if r["budget"] is None and r["variant"] not in ("plain", "default"):
            axes.plot(*points([r]), "x", color=COLORS[3])
            axes.annotate(r["variant"], (r["compiled"] / 2**20, r["ratio"][1]), fontsize=7)
    axes.set_title(title)
    axes.set_xlabel("MiB on each device, compiled")
    axes.set_ylabel("step time / plain pipeline")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_prediction(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    """Compiled over predicted bytes, of the plans that were kept."""
    places = np.arange(len(rows))
    axes.bar(places, [r["compiled"] / r["settled"] for r in rows], color=COLORS[2])
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(places, [f"{r['model']} {r['stages']} {r['variant']}" for r in rows], rotation=90, fontsize=6)
    axes.set_ylabel("compiled / predicted")


def draw(result: Mapping[str, Any]) -> Figure:
    """A panel for each model and number of stages, and one for predictions, from the content of the JSON file."""
    met = [row for row in result["rows"] if row["compiled"] is not None and row["ratio"] is not None]
    planned = [row for row in result["rows"] if row["compiled"] is not None and row["settled"] is not None]
    cases = list(dict.fromkeys((row["model"], row["stages"]) for row in met))
    rows = -(-len(cases) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.5 * (rows + 1)), layout="constrained")
    grid = figure.add_gridspec(rows + 1, COLUMNS)
    for number, (model, stages) in enumerate(cases):
        here = [row for row in met if (row["model"], row["stages"]) == (model, stages)]
        axes = figure.add_subplot(grid[divmod(number, COLUMNS)])
        draw_front(axes, here, f"{model}, {stages} stage{'s' * (stages > 1)}")
    draw_prediction(figure.add_subplot(grid[-1, :]), planned)
    figure.suptitle(f"Memory budgets (jax {result['versions']['jax']}, {result['machine']['device']})")
    return figure


if __name__ == "__main__":
    plot(draw, "memory", __doc__)
