"""Measure what an optimizer reserves beyond plain SGD, in units of the parameters: its state, or copies besides.

    python -m scripts.check_optimizer_bytes  # on CPU devices
    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.check_optimizer_bytes --absent

Dense layers of which no two are alike, so that most of what a device holds is packed into one buffer. With
``--absent`` for H100s that are not here (``jaxpipe.targets.absent``); nothing is run in either case.
"""

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.measuring import header


STAGES = (1, 4)
MICROBATCHES, ROWS = 4, 8
WIDTHS = (1000, 1100, 900, 1200, 800, 1300, 700, 1000, 10)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-3),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "lamb": optax.lamb(1e-3),
}


@dataclass(frozen=True)
class Row:
    """Bytes on each device.

    Attributes:
      parameters: of a stage's parameters.
      beyond_sgd: what is reserved more than with plain SGD, over that.
    """

    stages: int
    optimizer: str
    parameters: int
    predicted: int
    compiled: int
    beyond_sgd: float


def network(layers: list[Any], x: Any) -> Any:
    """Dense layers with ReLU."""
    for w, b in layers:
        x = jax.nn.relu(x @ w + b)
    return x


def measure(stages: int, devices: Any) -> list[Row]:
    """All optimizers."""
    mesh = jax.sharding.Mesh(np.asarray(devices[:stages]), ("stage",))
    cpu = jax.devices("cpu")[0]
    zeros = [
        (jnp.zeros((rows, columns), device=cpu), jnp.zeros((columns,), device=cpu))
        for rows, columns in itertools.pairwise(WIDTHS)
    ]
    batch = jax.ShapeDtypeStruct((MICROBATCHES * ROWS, WIDTHS[0]), jnp.float32)
    measured: list[Row] = []
    for name, optimizer in OPTIMIZERS.items():
        pipeline = jaxpipe.partition(
            jax.tree_util.Partial(network, zeros),
            mesh,
            batch,
            loss=lambda f, x: jnp.square(f(x)).mean(),
            optimizer=optimizer,
            num_microbatches=MICROBATCHES,
            profile="analytic",
            runtime="spmd",
        )
        report, parameters = pipeline.memory_report(), pipeline.plan.memory["parameters"]
        compiled = report.compiled_bytes[0]
        beyond = (compiled - (measured[0].compiled if measured else compiled)) / parameters
        measured.append(Row(stages, name, parameters, report.predicted_bytes[0], compiled, beyond))
    return measured


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--absent", action="store_true", help="compile for H100s that are not here")
    parser.add_argument("--out", type=Path, default=Path("out/optimizer-bytes.json"))
    options = parser.parse_args()
    if not options.absent:
        jax.config.update("jax_num_cpu_devices", max(STAGES))
    devices = absent_devices(target_named("H100"), max(STAGES)) if options.absent else jax.devices()
    rows = [row for stages in STAGES for row in measure(stages, devices)]
    for row in rows:
        print(
            f"{row.stages} stages, {row.optimizer}: {row.compiled} bytes (predicted {row.predicted}), "
            f"{row.beyond_sgd:.3f} times the parameters beyond plain SGD"
        )
    result = {**header(), "device": devices[0].device_kind, "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
