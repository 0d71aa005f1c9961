"""Bytes of a training step against what is computed again for them, and the time that takes: budgets and checkpoints.

    JAX_PLATFORMS=cuda,cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m scripts.bench_memory_front
    python -m scripts.bench_memory_front --cpu --models GPT-2 ResNet50 --out docs/results/memory-front-cpu-jax0.12.json
    python -m scripts.plot_memory_front

Compiled for an H100 that is not here (``jaxpipe.targets.absent``), or with ``--cpu`` for this machine, where steps are
also timed: each alternates with the plain one. Of each model of ``scripts.encoding_cases``:

  plain    ``jit(value_and_grad(loss))``
  whole    ``jax.checkpoint`` of the model: everything again, and with the policies ``dots_saveable`` and
           ``dots_with_no_batch_dims_saveable``
  blocks   ``nn.remat`` around every block, or every second one, likewise
  jit      ``jaxpipe.jit`` of the plain step with a decorated loss; ``memory=`` is a share of the plain step's bytes
  jaxpipe  ``memory_encoded`` of the model ("fast"), of the loss ("fast-step"), and pipelines of one stage and one
           micro-batch, whose ``memory=`` is a share of the plain step's bytes; where that is refused though parameters
           and gradients leave room, of two or four micro-batches

``bytes`` are those of arguments, results and temporaries, ``flops`` those of the matrix products and convolutions of
the traced step. What these are more than plain's is computed again. Pipelines also update the parameters.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import jaxpipe
from jaxpipe.array_types import Device
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import target_named
from scripts.bench_encoding import BLOCKS, PLAIN, VARIANTS, Variant, build, step_summary, summary
from scripts.check_target_encoding import compiled, on_device
from scripts.encoding_cases import CASES, CASES_BY_NAME, GPU_CASES, WITH_BLOCKS, Case, Problem
from scripts.measuring import alternate, header, keep_freed_memory
from scripts.one_stage import batch_of, one_stage, stage_summary


SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2)
FAMILIES = {
    "whole": ("nothing", "dots", "dots-no-batch"),
    "blocks": BLOCKS,
    "jit": (),
    "jaxpipe": ("fast", "fast-step"),
}
MICROBATCHES = (1, 2, 4)
MIB = 2**20

Row = dict[str, Any]
Step = Callable[[], object]


def variant_point(problem: Problem, variant: Variant, device: Device, timed: bool) -> tuple[Row, Step | None]:
    """Compile a variant; returns what is known of it, and the step if it can be run."""
    if not timed:
        return compiled(problem, variant, None, device), None
    built = build(problem, variant, None)
    return summary(built), lambda: built.step(*problem.arguments)


def budget_point(
    problem: Problem, memory: int, device: Device, timed: bool, num_microbatches: int = 1
) -> tuple[Row, Step | None]:
    """Plan and compile within a budget; a row that says so if it is refused."""
    try:
        pipeline = one_stage(problem, device, memory, num_microbatches=num_microbatches)
        row = stage_summary(pipeline) | {"memory": memory}
    except jaxpipe.MemoryBudgetError as error:
        return {"refused": str(error), "smallest": error.smallest, "microbatches": num_microbatches}, None
    if not timed:
        return row, None
    _, x, _, labels, _ = problem.arguments
    batch, states = batch_of(x, labels), [pipeline.init(jax.random.key(0))]

    def step() -> object:
        states[0], metrics = pipeline.step(states[0], batch)
        return states[0], metrics

    return row, step


def jit_point(problem: Problem, memory: int, device: Device, timed: bool) -> tuple[Row, Step | None]:
    """Compile the step of ``variant_point`` within a budget; a row that says so if it is refused."""
    arguments = problem.arguments if timed else on_device(problem.arguments, device)
    step = jax.value_and_grad(VARIANTS["fast-step"].loss(problem), has_aux=True)
    budgeted = jaxpipe.jit(step, memory=memory)
    start = time.process_time()
    try:
        lowered = budgeted.lower(*arguments)
    except jaxpipe.MemoryBudgetError as error:
        return {"refused": str(error), "smallest": error.smallest, "microbatches": 1}, None
    row = step_summary(lowered.compile(), lowered.jaxpr) | asdict(lowered.plan) | {"memory": memory}
    row |= {"processor_seconds": time.process_time() - start}
    return row, (lambda: budgeted(*arguments)) if timed else None


def points(
    case: Case, families: Sequence[str], shares: Sequence[float], device: Device, timed: bool, rounds: int
) -> Iterator[Row]:
    """Measure one model."""
    with jax.default_device(jax.devices("cpu")[0]):
        problem = case.make(case.batch)
    plain, plain_step = variant_point(problem, PLAIN, device, timed)
    yield {"family": "plain", "variant": "plain", **plain, "time_ratio": 1.0 if timed else None}
    for family in families:
        names = FAMILIES[family]
        if family != "blocks" or case.name.startswith(WITH_BLOCKS):
            for name in names:
                row, step = variant_point(problem, VARIANTS[name], device, timed)
                yield {"family": family, "variant": name, **row, "time_ratio": time_ratio(plain_step, step, rounds)}
    for share in shares if "jit" in families else ():
        row, step = jit_point(problem, int(share * plain["bytes"]), device, timed)
        ratio = time_ratio(plain_step, step, rounds)
        yield {"family": "jit", "variant": f"{100 * share:g}%", "share": share, **row, "time_ratio": ratio}
    for share in shares if "jaxpipe" in families else ():
        memory = int(share * plain["bytes"])
        for count in MICROBATCHES:
            if count > 1 and (case.batch % count or memory < plain["bytes"] - plain["temporaries"]):
                break
            row, step = budget_point(problem, memory, device, timed, count)
            ratio = time_ratio(plain_step, step, rounds)
            yield {"family": "jaxpipe", "variant": f"{100 * share:g}%", "share": share, **row, "time_ratio": ratio}
            if "refused" not in row:
                break


def time_ratio(plain: Step | None, step: Step | None, rounds: int) -> float | None:
    """Return the median of a step over plain in the same round; None for what is not run."""
    if plain is None or step is None:
        return None
    times = alternate({"plain": plain, "other": step}, rounds, seconds=120)
    return statistics.median(b / a for a, b in zip(times["plain"], times["other"], strict=True))


def text_of(name: str, row: Row, plain: Row) -> str:
    """A line to read."""
    head = f"{name} {row['family']} {row['variant']}: "
    if "refused" in row:
        return f"{head}{row['microbatches']} micro-batches refused, smallest {row['smallest'] / MIB:.1f} MiB"
    again = row["flops"] / plain["flops"] - 1 if plain["flops"] else 0.0
    ratio = "" if row["time_ratio"] is None else f", {row['time_ratio']:.3f} of the time"
    return (
        f"{head}{row['bytes'] / MIB:.1f} MiB, of these temporaries {row['temporaries'] / MIB:.1f}; {row['products']} "
        f"products, {again:+.1%} operations{ratio}"
    )


def save(path: Path, device: Device, name: str, rows: Sequence[Row]) -> None:
    """Write a model's rows into the JSON file; those of other models stay."""
    models = json.loads(path.read_text())["models"] if path.exists() else {}
    result = {**header(), "device": device.device_kind, "models": models | {name: rows}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Compile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=CASES_BY_NAME, metavar="NAME", help="default: GPU sizes; with --cpu, the nine"
    )
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES, help="budgets, of the plain step's bytes")
    parser.add_argument(
        "--families",
        nargs="*",
        choices=FAMILIES,
        default=list(FAMILIES),
        help="variants beside the budgets (default: all)",
    )
    parser.add_argument("--cpu", action="store_true", help="compile for this machine, and time the steps")
    parser.add_argument("--rounds", type=int, default=10, help="most rounds of a timing (default 10)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_memory_front.json"))
    options = parser.parse_args()
    if options.cpu:
        keep_freed_memory()
    device = jax.devices("cpu")[0] if options.cpu else absent_devices(target_named("H100"), 1)[0]
    names = options.models or [case.name for case in (CASES if options.cpu else GPU_CASES)]
    for name in names:
        rows: list[Row] = []
        for row in points(CASES_BY_NAME[name], options.families, options.shares, device, options.cpu, options.rounds):
            rows.append(row)
            save(options.out, device, name, rows)
            print(text_of(name, row, rows[0]), flush=True)
            gc.collect()
        jax.clear_caches()


if __name__ == "__main__":
    main()
