"""Stage programs beside one program for all devices: time of a step, and of compiling it, in one process.

    python -m scripts.bench_runtimes --out docs/results/runtimes-cpu-jax0.12.json
    python -m scripts.bench_runtimes --only step --stages 2

The same plan's cuts and schedule in both runtimes, on simulated devices that share the machine's cores. Steps take
turns; a ratio is the median over the rounds of one runtime's time over the other's.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from examples.models.gpt2 import GPT2
from scripts.measuring import header


RUNTIMES = ("mpmd", "spmd")


def pipelines(layers: int, width: int, stages: int, rows: int, length: int) -> tuple[dict[str, Any], Any]:
    """Both runtimes' pipelines for a GPT, and a batch of 8 micro-batches."""
    model = GPT2(vocab=1024, num_layers=layers, width=width, num_heads=width // 64, max_length=length)
    drawn = np.random.default_rng(0).integers(0, 1024, (8 * rows, length + 1))
    batch = {"x": jnp.asarray(drawn[:, :-1], jnp.int32), "y": jnp.asarray(drawn[:, 1:], jnp.int32)}

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], train=True), batch["y"]).mean()

    mesh = jax.sharding.Mesh(jax.devices()[:stages], ("stage",))
    options = {"loss": loss, "optimizer": optax.sgd(1e-3), "num_microbatches": 8, "profile": "analytic"}
    made = {r: jaxpipe.partition(model, mesh, batch, **options, schedule="1f1b", runtime=r) for r in RUNTIMES}
    return made, batch


def step_times(stages: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step of a GPT of 8 layers of 256, 8 micro-batches of 4 x 128 tokens."""
    made, batch = pipelines(8, 256, stages, 4, 128)
    states = {name: pipeline.init(jax.random.key(0)) for name, pipeline in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + 2):
        for name, pipeline in made.items():
            begin = time.perf_counter()
            states[name], _ = pipeline.step(states[name], batch)
            jax.block_until_ready(states[name])
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(*(seconds[name] for name in RUNTIMES), strict=True)]
    medians = {f"{name} seconds": statistics.median(values) for name, values in seconds.items()}
    return {"stages": stages, **medians, "mpmd / spmd, median": statistics.median(ratios)}


def compile_times(layers: int, stages: int) -> dict[str, Any]:
    """Seconds until the training step of a GPT of so many layers is compiled, from the plan on."""
    made, batch = pipelines(layers, 256, stages, 1, 64)
    found: dict[str, Any] = {"layers": layers, "stages": stages}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for name in RUNTIMES:
        jax.clear_caches()
        begin = time.perf_counter(), time.process_time()
        made[name]._runtime.prepare(shapes)
        found[f"{name} seconds"] = time.perf_counter() - begin[0]
        found[f"{name} processor seconds"] = time.process_time() - begin[1]
    found["mpmd / spmd"] = found["mpmd seconds"] / found["spmd seconds"]
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("step", "compile"))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    result: dict[str, Any] = {}
    if options.only != "compile":
        result["steps"] = [step_times(stages, options.rounds) for stages in options.stages]
    if options.only != "step":
        result["compile"] = compile_times(options.layers, 8)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps({**header(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
