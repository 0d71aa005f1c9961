"""Plot what ``scripts.bench_learning`` measured: test losses of late gradients, and of sparse ones by their bytes.

python -m scripts.plot_learning
python -m scripts.plot_learning --json docs/results/learning-cpu-jax0.12.json --out docs/results/learning.png
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.bench_learning import losses
from scripts.plotting import plot


COLORS = {"adamw": "#0072b2", "muon": "#e69f00"}


def draw_late(axes: Axes, variants: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A point for each seed; synchronous, late, and late with error feedback."""
    names = [name for name, runs in variants.items() if "sent_bytes" not in runs[0]]
    for x, name in enumerate(names):
        color = COLORS[name.split()[0]]
        y = [run["test_loss"] for run in variants[name]]
        axes.plot([x] * len(y), y, "o", color=color, alpha=0.6)
        axes.hlines(sum(y) / len(y), x - 0.3, x + 0.3, color=color)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
    axes.set_ylabel("test loss, nats per byte")
    axes.set_title("Late gradients")
    axes.grid(alpha=0.3, axis="y")


def draw_sparse(axes: Axes, variants: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Mean loss over that of the dense runs with the same seeds, against bytes."""
    for name, runs in variants.items():
        if "sent_bytes" in runs[0]:
            base = {run["seed"]: run["test_loss"] for run in variants[name.split()[0]]}
            ratio = runs[0]["dense_bytes"] / runs[0]["sent_bytes"]
            shares = [100 * (run["test_loss"] / base[run["seed"]] - 1) for run in runs]
            axes.plot([ratio] * len(shares), shares, "o", color=COLORS[name.split()[0]], alpha=0.6)
            label = name.split(" ", 1)[1]
            axes.annotate(label, (ratio, max(shares)), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.axhline(0.5, color="#9aa5b1", linestyle="--")
    axes.set_xscale("log")
    axes.margins(x=0.3)
    axes.set_xlabel("times fewer bytes than a dense exchange")
    axes.set_ylabel("test loss above the dense run's, %")
    axes.set_title("Sparse gradients and outer loops")
    axes.grid(alpha=0.3)


def draw(result: Mapping[str, Any]) -> Figure:
    """Both plots."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    variants = losses(result)
    draw_late(left, variants)
    draw_sparse(right, variants)
    versions, machine, size = result["versions"], result["machine"], result["size"]
    tokens = size["rows"] * size["context"] * size["steps"]
    figure.suptitle(
        f"GPT {size['layers']} x {size['width']}, {tokens:,} tokens; jax {versions['jax']}, "
        f"{machine['cpus']} x {machine['processor']}",
        fontsize=9,
    )
    return figure


if __name__ == "__main__":
    plot(draw, "learning", __doc__)
