"""Draw the terminal of ``scripts/demo`` for the README.

    python -m scripts.picture_demo

The picture is an SVG that loads no font from elsewhere.
"""

import argparse
import contextlib
import io
import re
import tempfile
from pathlib import Path

import jax
from rich.console import Console
from rich.terminal_theme import MONOKAI

from examples.train_digits import Options
from examples.train_digits import main as train


def main() -> None:
    """Train, and write what the terminal shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/demo.svg"))
    options = parser.parse_args()
    path = options.out.absolute()
    jax.config.update("jax_num_cpu_devices", Options.stages)
    console = Console(record=True, width=80, file=io.StringIO(), highlight=False)
    console.print("$ scripts/demo", markup=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        train(Options(), console)
    picture = console.export_svg(title="jaxpipe", theme=MONOKAI, unique_id="demo")
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
