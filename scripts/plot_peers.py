"""Plot what ``scripts.compare_peers`` measured: steps against each tool's own single device, and memory.

python -m scripts.plot_peers
python -m scripts.plot_peers --json out/bench_peers.json --out docs/results/peers.png
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plotting import plot


COLORS = {"jaxpipe": "#0072b2", "torch.distributed.pipelining": "#e69f00", "torchgpipe": "#9aa5b1"}


def draw_bars(axes: Axes, rows: list[Mapping[str, Any]], of: str, scale: float = 1.0) -> None:
    """One group of bars for each model, one bar for each tool."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    tools = [tool for tool in COLORS if any(row["tool"] == tool for row in rows)]
    for k, tool in enumerate(tools):
        values = {row["model"]: scale * row[of] for row in rows if row["tool"] == tool}
        places = np.arange(len(models)) + (k - (len(tools) - 1) / 2) * 0.25
        bars = axes.bar(places, [values.get(model, np.nan) for model in models], 0.23, color=COLORS[tool], label=tool)
        axes.bar_label(bars, fmt="%.2f" if of == "of_ideal" else "%.0f", fontsize=8)
    axes.set_xticks(range(len(models)), [model.upper() for model in models])
    axes.spines[["top", "right"]].set_visible(False)


def draw(result: Mapping[str, Any]) -> Figure:
    """Both plots."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_bars(left, result["rows"], "of_ideal")
    left.axhline(1, color="#52606d", linewidth=0.8, linestyle="--")
    left.set_title("Two stages on two cores: share of the ideal step rate")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    draw_bars(right, result["rows"], "pipeline_bytes", 1 / 2**20)
    right.set_title("MiB of the process that has most")
    versions, machine = result["versions"], result["machine"]
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    figure.suptitle(f"jax {versions['jax']}{torch}, {machine['cpus']} x {machine['processor']}", fontsize=9)
    return figure


if __name__ == "__main__":
    plot(draw, "peers", __doc__)
