"""Measure the compile time of the training step of a pipeline of 8 stages, against its stages' own programs.

    python -m scripts.bench_compile
    python -m scripts.bench_compile --models MLP --stages 4 --rounds 1 --out out/some.json

One program runs on all devices, so it holds the work of every stage. What it is compared with is the forward and the
backward work of each stage, each traced, lowered and compiled alone, added up: equal stages count once for each. The
step has besides the schedule, transport, arena and optimizer. Everything is on one core, in turn, and nothing is
kept from round to round.

  step     seconds to trace, lower and compile the training step: quartiles
  stages   the same for the stages' own programs, added up
  ratio    step / stages within a round, by the clock and by what the processor has worked: medians
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.runtime.spmd.lockstep_program import LockstepProgram
from jaxpipe.runtime.spmd.predictions import stage_programs
from scripts.bench_pipeline import CASES, MICROBATCHES, OPTIMIZER
from scripts.measuring import Quartiles, header, quartiles


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    stages: int
    schedule: str
    step: Quartiles
    stage_sum: Quartiles
    ratio: float
    processor_ratio: float
    rounds: int


def compile_step(pipeline: jaxpipe.Pipeline) -> None:
    """The training step, from the start."""
    pipeline._runtime.lower_step().compile()


def compile_stages(pipeline: jaxpipe.Pipeline) -> None:
    """Each stage's own programs, from the start."""
    program = LockstepProgram.of(pipeline._planned.program)
    for s in program.stage_numbers:
        for function, given in stage_programs(program, s):
            jax.jit(function).lower(given).compile()


def timed(function: Callable[[jaxpipe.Pipeline], None], pipeline: jaxpipe.Pipeline) -> tuple[float, float]:
    """Seconds by the clock, and of work."""
    jax.clear_caches()
    begin = time.perf_counter(), time.process_time()
    function(pipeline)
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def measure(name: str, stages: int, rounds: int) -> Row:
    """One model."""
    problem = CASES[name]()
    mesh = jax.sharding.Mesh(jax.devices()[:stages], ("stage",))
    options: dict[str, Any] = {"num_microbatches": MICROBATCHES, "profile": "analytic", "runtime": "spmd"}
    pipeline = jaxpipe.partition(problem.model, mesh, problem.batch, loss=problem.loss, optimizer=OPTIMIZER, **options)
    pairs = [(timed(compile_step, pipeline), timed(compile_stages, pipeline)) for _ in range(rounds)]
    step, alone = ([pair[k][0] for pair in pairs] for k in (0, 1))
    by_clock, by_work = ([a[k] / b[k] for a, b in pairs] for k in (0, 1))
    schedule = pipeline.schedule.name
    ratios = quartiles(by_clock)[1], quartiles(by_work)[1]
    return Row(name, stages, schedule, quartiles(step), quartiles(alone), *ratios, rounds)


def table(rows: list[Row]) -> Table:
    """The results to read."""
    result = Table(title="compiling a training step / its stages' own programs, on one core", title_justify="left")
    for column in ("model", "stages", "schedule"):
        result.add_column(column)
    for column in ("step s", "stages s", "ratio", "ratio of work"):
        result.add_column(column, justify="right")
    for row in rows:
        seconds = f"{row.step[1]:.1f}", f"{row.stage_sum[1]:.1f}"
        ratios = f"{row.ratio:.2f}", f"{row.processor_ratio:.2f}"
        result.add_row(row.model, str(row.stages), row.schedule, *seconds, *ratios)
    return result


def main() -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/bench_compile.json"))
    options = parser.parse_args()
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", options.stages)
    rows = []
    for name in options.models:
        rows.append(measure(name, options.stages, options.rounds))
        print(f"{name}: {rows[-1].ratio:.2f}", file=sys.stderr)
    result = {**header(), "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
