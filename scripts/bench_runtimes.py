"""Stage programs beside one program for all devices: time of a step, and of compiling it, in one process.

    python -m scripts.bench_runtimes --out docs/results/runtimes-cpu-jax0.12.json
    python -m scripts.bench_runtimes --only step --stages 2

Both runtimes with the schedule that ``schedule="auto"`` takes for each, on simulated devices that share the machine's
cores. Runtimes take turns of two steps, of which the second is timed: the first one pays for the memory and caches that
the other runtime left. A ratio is the median over the rounds of one runtime's time over the other's. Then the step
that a plan predicts from a profile measured in the same run, beside the measured step of two stages in two processes,
each of which has a core of its own, for several schedules whose steps take turns.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from examples.models.gpt2 import GPT2
from scripts.compare_peers import free_port, workers
from scripts.measuring import Batch, header


RUNTIMES = ("mpmd", "spmd")

#: Layers and width; rows and length of a micro-batch.
GPT, TOKENS = (8, 256), (4, 128)

#: Schedules that are compared with a core for each stage.
SCHEDULES = ("1f1b", "zero_bubble", "auto")


def pipelines(
    layers: int,
    width: int,
    stages: int,
    rows: int,
    length: int,
    runtimes: tuple[str, ...] = RUNTIMES,
    profile: Literal["measured", "analytic"] | jaxpipe.Profile = "analytic",
    schedule: str = "auto",
) -> tuple[dict[str, jaxpipe.Pipeline], dict[str, jax.Array]]:
    """Return the pipelines of some runtimes for a GPT, and a batch of 8 micro-batches."""
    model = GPT2(vocab=1024, num_layers=layers, width=width, num_heads=width // 64, max_length=length)
    drawn = np.random.default_rng(0).integers(0, 1024, (8 * rows, length + 1))
    batch = {"x": jnp.asarray(drawn[:, :-1], jnp.int32), "y": jnp.asarray(drawn[:, 1:], jnp.int32)}

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], train=True), batch["y"]).mean()

    mesh = jax.sharding.Mesh(jax.devices()[:stages], ("stage",))
    options = {"loss": loss, "optimizer": optax.sgd(1e-3), "num_microbatches": 8, "profile": profile}
    options["schedule"] = schedule
    return {r: jaxpipe.partition(model, mesh, batch, **options, runtime=r) for r in runtimes}, batch


def in_turns(pipelines: dict[str, jaxpipe.Pipeline], batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps of several pipelines, which take turns of two steps; the second is timed."""
    states = {name: pipeline.init(jax.random.key(0)) for name, pipeline in pipelines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for turn in range(rounds + 1):
        for name, pipeline in pipelines.items():
            for _ in range(2):
                begin = time.perf_counter()
                states[name], _ = pipeline.step(states[name], batch)
                jax.block_until_ready(states[name])
                took = time.perf_counter() - begin
            if turn:
                seconds[name].append(took)
    return seconds


def step_times(stages: int, rounds: int) -> dict[str, Any]:
    """Return seconds of a step of a GPT of 8 layers of 256, 8 micro-batches of 4 x 128 tokens."""
    by_runtime, batch = pipelines(*GPT, stages, *TOKENS)
    schedules = {f"{name} schedule": pipeline.plan.schedule for name, pipeline in by_runtime.items()}
    seconds = in_turns(by_runtime, batch, rounds)
    ratios = [a / b for a, b in zip(*(seconds[name] for name in RUNTIMES), strict=True)]
    medians = {f"{name} seconds": statistics.median(values) for name, values in seconds.items()}
    return {"stages": stages, **schedules, **medians, "mpmd / spmd, median": statistics.median(ratios)}


def predicted_times(rounds: int) -> dict[str, Any]:
    """Return the predicted and the measured step of the same GPT in two processes with a core each."""
    command = [sys.executable, "-m", "scripts.bench_runtimes", "--worker", "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:  # no profile of another day
        shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
        shared |= {"JAXPIPE_CACHE_DIR": folder}
        results = workers([command] * 2, [{**shared, "JAX_PROCESS_ID": str(k)} for k in range(2)])
    plans = results[0]["plans"]
    seconds = {name: np.max([worker["seconds"][name] for worker in results], axis=0) for name in SCHEDULES}
    rows = {}
    for name, plan in plans.items():
        measured = float(np.median(seconds[name]))
        rows[name] = {
            **plan,
            "measured seconds": measured,
            "predicted / measured": plan["predicted seconds"] / measured,
        }
        rows[name]["over 1F1B, median"] = float(np.median(seconds[name] / seconds[SCHEDULES[0]]))
    return rows


def work(rounds: int) -> None:
    """Run one of two processes, pinned to a core."""
    rank = int(os.environ["JAX_PROCESS_ID"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    jax.config.update("jax_num_cpu_devices", 1)
    jaxpipe.initialize_distributed()
    by_name = {}
    for name in SCHEDULES:
        pipeline, batch = pipelines(*GPT, 2, *TOKENS, runtimes=("mpmd",), profile="measured", schedule=name)
        by_name[name] = pipeline["mpmd"]
    batch = jax.tree.map(np.asarray, batch)
    seconds = in_turns(by_name, batch, rounds)
    plans = {
        name: {"schedule": pipeline.plan.schedule, "predicted seconds": pipeline.plan.step_seconds}
        for name, pipeline in by_name.items()
    }
    print(json.dumps({"rank": rank, "seconds": seconds, "plans": plans}), flush=True)


def compile_times(layers: int, stages: int) -> dict[str, Any]:
    """Seconds until the training step of a GPT of so many layers is compiled, from the plan on."""
    by_runtime, batch = pipelines(layers, 256, stages, 1, 64)
    row: dict[str, Any] = {"layers": layers, "stages": stages}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for name in RUNTIMES:
        jax.clear_caches()
        begin = time.perf_counter(), time.process_time()
        by_runtime[name]._runtime.prepare(shapes)
        row[f"{name} seconds"] = time.perf_counter() - begin[0]
        row[f"{name} processor seconds"] = time.process_time() - begin[1]
    row["mpmd / spmd"] = row["mpmd seconds"] / row["spmd seconds"]
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("step", "compile", "prediction"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if options.worker:
        work(options.rounds)
        return
    jax.config.update("jax_num_cpu_devices", 8)
    result: dict[str, Any] = {}
    if options.only in (None, "prediction"):
        result["prediction"] = predicted_times(options.rounds)
    if options.only in (None, "step"):
        result["steps"] = [step_times(stages, options.rounds) for stages in options.stages]
    if options.only in (None, "compile"):
        result["compile"] = compile_times(options.layers, 8)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps({**header(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
