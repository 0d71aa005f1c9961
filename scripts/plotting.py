"""Code that all plot scripts share: read a benchmark's JSON file, write an image."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot(draw: Callable[[Mapping[str, Any]], Figure], name: str, description: str | None) -> None:
    """Draw ``out/bench_NAME.json`` to ``docs/results/NAME.png``, or what ``--json`` and ``--out`` say."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(f"out/bench_{name}.json"))
    parser.add_argument("--out", type=Path, default=Path(f"docs/results/{name}.png"))
    options = parser.parse_args()
    figure = draw(json.loads(options.json.read_text()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out, dpi=150)
