"""Plot what ``scripts.bench_pipeline`` measured: step time and memory of each variant.

python -m scripts.plot_pipeline
python -m scripts.plot_pipeline --json out/bench_pipeline.json --out docs/results/pipeline.png
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plotting import plot


COLORS = ("#9aa5b1", "#e69f00", "#56b4e9", "#0072b2", "#003f5c")


def draw_ratios(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    """Step time of each variant over plain accumulation, with quartiles."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    variants = [v for v in dict.fromkeys(row["variant"] for row in rows) if v != "plain"]
    for k, variant in enumerate(variants):
        low, median, high = np.array([r["ratio"] for r in rows if r["variant"] == variant]).T
        places = np.arange(len(models)) + (k - (len(variants) - 1) / 2) * 0.15
        error = np.array([median - low, high - median])
        axes.errorbar(places, median, yerr=error, fmt="o", color=COLORS[k + 1], capsize=3, label=variant)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel("step time / plain accumulation")
    axes.set_title("What the executor costs, on one core")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, ncols=2)


def draw_memory(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    """Predicted beside compiled bytes on each device."""
    chosen = [row for row in rows if row["compiled_bytes"]]
    places = np.arange(len(chosen))
    for shift, key, color in ((-0.2, "predicted_bytes", COLORS[1]), (0.2, "compiled_bytes", COLORS[3])):
        sizes = np.array([row[key] for row in chosen]) / 2**20
        axes.bar(places + shift, sizes, 0.4, color=color, label=key.split("_")[0])
    labels = [f"{row['model']}\n{row['variant']}" for row in chosen]
    axes.set_xticks(places, labels, rotation=45, ha="right")
    axes.set_ylabel("MiB on each device")
    axes.set_title("Predicted before compiling, and compiled")
    axes.legend(frameon=False)


def draw(result: Mapping[str, Any]) -> Figure:
    """Both panels, from the content of the JSON file."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_ratios(left, result["rows"])
    draw_memory(right, result["rows"])
    figure.suptitle(f"jaxpipe.partition (jax {result['versions']['jax']}, {result['machine']['device']})")
    return figure


if __name__ == "__main__":
    plot(draw, "pipeline", __doc__)
