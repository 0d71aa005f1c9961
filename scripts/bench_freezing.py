"""A training step whose optimizer leaves the first half of the layers as they are, against one that trains them all.

    python -m scripts.bench_freezing
    python -m scripts.bench_freezing --rounds 5 --out out/some.json

16 dense layers of 512 in 4 stages, 8 micro-batches of 1,024 rows, SGD with momentum; ``optax.set_to_zero`` for the
first 8 layers. All simulated devices share one core, so that a step takes as long as its work, whatever the schedule.

  work       of all stages for all micro-batches: as the plan predicts it, and the measured step on one core
  step       on four devices: as the plan predicts it, and the schedule with stages as they are measured by themselves
  bytes      on each device: in the plan, and of the compiled step
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpipe
from examples import models
from jaxpipe.array_types import PyTree
from scripts.measuring import Quartiles, alternate, header, keep_freed_memory, quartiles


LAYERS, WIDTH, STAGES, MICROBATCHES, ROWS = 16, 512, 4, 8, 1024


@dataclass(frozen=True)
class Row:
    """Seconds and bytes of a step."""

    variant: str
    frozen_stages: int
    predicted_work: float
    measured_work: Quartiles
    predicted_step: float
    measured_step: float
    predicted_bytes: int
    compiled_bytes: int


def freeze_half(optimizer: optax.GradientTransformation, params: PyTree) -> optax.GradientTransformation:
    """Return the optimizer for the second half of the leaves only."""
    count = len(jax.tree.leaves(params))
    labels = ["frozen" if k < count // 2 else "trained" for k in range(count)]
    transforms = {"frozen": optax.set_to_zero(), "trained": optimizer}
    return optax.multi_transform(transforms, lambda given: jax.tree.unflatten(jax.tree.structure(given), labels))


def variants() -> dict[str, jaxpipe.Pipeline]:
    """Return both pipelines, by what they train."""
    model = jax.tree_util.Partial(models.mlp, models.init_mlp(jax.random.key(0), [WIDTH] * (LAYERS + 1)))
    mesh = jax.sharding.Mesh(jax.devices()[:STAGES], ("stage",))
    momentum = optax.sgd(0.1, momentum=0.9)
    optimizers = {"all layers": momentum, "last half": freeze_half(momentum, model)}
    return {
        name: jaxpipe.partition(
            model,
            mesh,
            batch(),
            loss=lambda f, x: jnp.square(f(x)).mean(),
            optimizer=optimizer,
            num_microbatches=MICROBATCHES,
            runtime="spmd",
        )
        for name, optimizer in optimizers.items()
    }


def batch() -> jax.Array:
    """Return rows of noise."""
    return jax.random.normal(jax.random.key(1), (MICROBATCHES * ROWS, WIDTH))


def training_step(pipeline: jaxpipe.Pipeline, rows: jax.Array) -> Callable[[], object]:
    """Return one training step, which keeps its own state from call to call."""
    now = [pipeline.init(jax.random.key(0))]

    def step() -> object:
        now[0], metrics = pipeline.step(now[0], rows)
        return metrics

    return step


def measure(rounds: int, seconds: float) -> list[Row]:
    """Run both in turn; the stages by themselves afterwards."""
    pipelines, rows = variants(), batch()
    times = alternate({name: training_step(p, rows) for name, p in pipelines.items()}, rounds, seconds)
    results = []
    for name, pipeline in pipelines.items():
        plan, report = pipeline.plan, pipeline.memory_report()
        work = MICROBATCHES * sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
        frozen = len(plan.frozen.stages) if plan.frozen else 0
        step = pipeline.timeline(measured=True).makespan
        sizes = report.predicted_bytes[0], report.compiled_bytes[0]
        results.append(Row(name, frozen, work, quartiles(times[name]), plan.step_seconds, step, *sizes))
    return results


def table(rows: list[Row]) -> Table:
    """Return the results to read."""
    result = Table(title=f"{LAYERS} layers of {WIDTH} in {STAGES} stages", title_justify="left")
    columns = ("work, predicted ms", "measured", "step, predicted ms", "measured", "predicted MiB", "compiled MiB")
    result.add_column("trained")
    for column in columns:
        result.add_column(column, justify="right")
    for row in rows:
        seconds = row.predicted_work, row.measured_work[1], row.predicted_step, row.measured_step
        sizes = row.predicted_bytes, row.compiled_bytes
        result.add_row(row.variant, *(f"{1e3 * x:.1f}" for x in seconds), *(f"{n / 2**20:.2f}" for n in sizes))
    return result


def main() -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="most rounds (default 30)")
    parser.add_argument("--seconds", type=float, default=120, help="most seconds of rounds (default 120)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_freezing.json"))
    options = parser.parse_args()
    keep_freed_memory()
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", STAGES)
    rows = measure(options.rounds, options.seconds)
    result = {**header(), "microbatches": MICROBATCHES, "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
