"""Seconds of pipeline stages as a profile predicts them, against the stages' own programs on two CPU devices.

    python -m scripts.bench_profile
    python -m scripts.bench_profile --models MLP --seconds 5 --out out/some.json

Each device is a process of its own, pinned to one core: simulated devices of one process would share XLA's threads. One
of the two profiles the model and cuts it into two stages. Then both run at the same time, each the forward and the
backward program of its stage, as ``stage.forward`` and ``stage.backward`` give them to the executor: recomputing and
decoding included, packing for the arena and transport not.

  predicted  the sum of the profile over the stage's operators, and the spreads added up
  measured   median and quartiles of runs of the program
  error      |predicted - measured| / measured
"""

import argparse
import functools
import json
import multiprocessing
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import Queue
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpipe
from examples import models
from jaxpipe.costs.measured_seconds import group_programs
from jaxpipe.costs.timing import examples, on_device
from scripts.bench_pipeline import MICROBATCHES, Problem, cnn, linen, transformer
from scripts.measuring import Batch, Model, Quartiles, alternate, header, keep_freed_memory, quartiles


STAGES = 2


def unet() -> Problem:
    """A U-Net, three levels deep from width 16, on 4 images of 64x64 a micro-batch: skips cross the cut."""
    batch = {"x": jax.random.normal(jax.random.key(1), (MICROBATCHES * 4, 64, 64, 3))}

    def loss(model: Model, batch: Batch) -> jax.Array:
        return jnp.square(model(batch["x"])[..., 0] - batch["x"][..., 0]).mean()

    return linen(models.UNet(width=16, depth=3), batch, loss)


CASES: dict[str, Callable[[], Problem]] = {"CNN": cnn, "Transformer": transformer, "UNet": unet}


@dataclass(frozen=True)
class Row:
    """One program of one stage; seconds."""

    model: str
    stage: int
    program: str
    operators: int
    predicted: float
    spread: float
    measured: Quartiles
    rounds: int

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return abs(self.predicted - self.measured[1]) / self.measured[1]


def run_device(
    stage: int, core: int, options: argparse.Namespace, both: Barrier, other: Connection, results: Queue
) -> None:
    """Run the process of one stage: the first one profiles, and each runs its stage while the other does.

    Args:
      stage: which.
      core: where it is pinned.
      options: of the command line.
      both: barrier of the two processes.
      other: connection between them, for the profiles.
      results: queue of lists of rows.
    """
    os.sched_setaffinity(0, {core})
    jax.config.update("jax_num_cpu_devices", STAGES)
    device = jax.devices()[0]
    for name in options.models:
        problem = CASES[name]()
        if stage == 0:
            began = time.perf_counter()
            profile = jaxpipe.profile_model(
                problem.model, problem.batch, loss=problem.loss, num_microbatches=MICROBATCHES, cache=False
            )
            print(f"{name}: profiled in {time.perf_counter() - began:.1f} s", file=sys.stderr)
            other.send(profile.to_json())
        else:
            profile = jaxpipe.Profile.from_json(other.recv())
        pipeline = partitioned(problem, profile)
        steps = {}
        built = pipeline._planned.program.stages[stage].vjp
        for label, program in zip(("forward", "backward"), group_programs(built), strict=True):
            arguments = on_device(program.arguments, device)
            compiled = jax.jit(program.function).lower(*arguments).compile()
            steps[label] = functools.partial(compiled, *examples(arguments, device))
        both.wait()
        times = alternate(steps, options.rounds, options.seconds)
        both.wait()
        operators = slice(*pipeline.plan.stages[stage].operators)
        rows = []
        for label, values in times.items():
            predicted, spread = (sum(getattr(profile, f"{label}_{x}")[operators]) for x in ("seconds", "spread"))
            count = operators.stop - operators.start
            rows.append(Row(name, stage, label, count, predicted, spread, quartiles(values), len(values)))
        results.put(rows)


def partitioned(problem: Problem, profile: jaxpipe.Profile) -> jaxpipe.Pipeline:
    """The pipeline of two stages that a profile leads to; nothing is compiled."""
    mesh = jax.sharding.Mesh(jax.devices()[:STAGES], ("stage",))
    return jaxpipe.partition(
        problem.model,
        mesh,
        problem.batch,
        loss=problem.loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=MICROBATCHES,
        profile=profile,
    )


def table(rows: list[Row]) -> Table:
    """The results to read."""
    result = Table(title="predicted and measured seconds of stages, two CPU cores", title_justify="left")
    for column in ("model", "stage", "program"):
        result.add_column(column)
    for column in ("operators", "predicted ms", "measured ms", "error"):
        result.add_column(column, justify="right")
    for row in rows:
        low, median, high = (1e3 * x for x in row.measured)
        result.add_row(
            row.model,
            str(row.stage),
            row.program,
            str(row.operators),
            f"{1e3 * row.predicted:.2f} ± {1e3 * row.spread:.2f}",
            f"{median:.2f} ({low:.2f}-{high:.2f})",
            f"{row.error:.1%}",
        )
    return result


def main() -> None:
    """Measure, write the JSON file and print the table and the median error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=200, help="most runs of each program (default 200)")
    parser.add_argument("--seconds", type=float, default=20, help="most seconds of runs for a model (default 20)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_profile.json"))
    options = parser.parse_args()
    keep_freed_memory()
    cores = sorted(os.sched_getaffinity(0))[:STAGES]
    if len(cores) < STAGES:
        parser.error(f"two devices need two cores, and there is {len(cores)}.")
    context = multiprocessing.get_context("spawn")
    both, results = context.Barrier(STAGES), context.Queue()
    ends = context.Pipe()
    processes = [
        context.Process(target=run_device, args=(s, core, options, both, ends[s], results), daemon=True)
        for s, core in enumerate(cores)
    ]
    for process in processes:
        process.start()
    rows = []
    while len(rows) < 2 * STAGES * len(options.models):
        try:
            rows += results.get(timeout=5)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                sys.exit("a device has failed; see above.")
    order = list(options.models)
    rows.sort(key=lambda row: (order.index(row.model), row.stage, row.program == "backward"))
    error = statistics.median(row.error for row in rows)
    result = {**header(), "median_error": error, "rows": [asdict(row) | {"error": row.error} for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table(rows))
    print(f"median error {error:.1%}, largest {max(row.error for row in rows):.1%}")


if __name__ == "__main__":
    main()
