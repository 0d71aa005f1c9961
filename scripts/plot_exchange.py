"""Plot what ``scripts.bench_exchange`` measured: accuracy against bytes, and the cost of choosing blocks by size.

python -m scripts.plot_exchange
python -m scripts.plot_exchange --json out/bench_exchange.json --out docs/results/exchange.png
"""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.plotting import plot


COLORS = {"dense": "#9aa5b1", "own": "#0072b2", "consensus": "#e69f00", "choosing": "#003f5c"}


def draw_frontier(axes: Axes, points: list[Mapping[str, Any]]) -> None:
    """Mean accuracy of each setting, and its range over the seeds."""
    for mode in dict.fromkeys(p["mode"] for p in points):
        here = [p for p in points if p["mode"] == mode]
        x, y = [p["ratio"] for p in here], [100 * p["mean"] for p in here]
        low = [100 * (p["mean"] - min(p["accuracies"])) for p in here]
        high = [100 * (max(p["accuracies"]) - p["mean"]) for p in here]
        axes.errorbar(x, y, yerr=[low, high], fmt="o-", capsize=3, color=COLORS[mode], label=mode)
        for p, height in zip(here, y, strict=True):
            shift = (4, 6) if mode != "consensus" else (-6, -12)
            axes.annotate(p["setting"], (p["ratio"], height), textcoords="offset points", xytext=shift, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("times fewer bytes than a dense exchange")
    axes.set_ylabel("test accuracy, %")
    axes.set_title("Digits, four replicas")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw_costs(axes: Axes, costs: list[Mapping[str, Any]]) -> None:
    """Milliseconds of each program by the size of the gradient."""
    for name, color in COLORS.items():
        axes.loglog(
            [c["elements"] for c in costs], [1e3 * c["seconds"][name][1] for c in costs], "o-", color=color, label=name
        )
    axes.set_xlabel("elements of the gradient")
    axes.set_ylabel("ms")
    axes.set_title("One kernel, k = 1, simulated replicas")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def draw(result: Mapping[str, Any]) -> Figure:
    """Both plots."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_frontier(left, result["frontier"])
    draw_costs(right, result["costs"])
    versions, machine = result["versions"], result["machine"]
    figure.suptitle(f"jax {versions['jax']}, {machine['cpus']} x {machine['processor']}", fontsize=9)
    return figure


if __name__ == "__main__":
    plot(draw, "exchange", __doc__)
