"""A pipeline of two processes, one core each, against one process and against the bare transport.

    python -m scripts.bench_hosts
    python -m scripts.bench_hosts --widths 256 --rounds 10 --out out/some.json

Two processes of one CPU device, each pinned to a core of its own, are connected by Gloo over loopback, as hosts would
be. The model is a chain of dense layers of one width, half of them in each of S = 2 stages, and M micro-batches.

  single     the same pipeline with one stage in one pinned process: what a core does alone
  ideal      single (M + S - 1) / (S M): the bubble, and nothing for messages
  pipeline   a training step of two stages
  bare       per tick of the pipeline the same matrix products (forward x W, backward x^T g and g W^T) and the same two
             ppermutes where the schedule has them, one after the forward and one after the backward products, in a
             scan; no arena, no stash, no switch, no optimizer: what the transport allows
  messages   the ppermutes of the bare loop alone
  of bare    bare / pipeline: 1 is all that the transport allows
  of ideal   ideal / pipeline

All of two processes run in turn in one loop, so that what else the machine does falls on all. The loop of the one
process runs before it, alone.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxpipe
from jaxpipe.array_types import PyTree
from scripts.measuring import MALLOC, Quartiles, alternate, header, quartiles


STAGES = 2
LAYERS = 8
OPTIMIZER = optax.sgd(1e-3)


@dataclass(frozen=True)
class Row:
    """One width. Seconds of a step: quartiles over rounds."""

    width: int
    rows: int
    microbatches: int
    message_bytes: int
    single: Quartiles
    ideal: float
    pipeline: Quartiles
    bare: Quartiles
    messages: Quartiles
    of_bare: float
    of_ideal: float


def make_step(width: int, rows: int, microbatches: int) -> Callable[[], object]:
    """A training step over all devices there are."""

    def apply(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return x

    def loss(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jnp.square(model(x)).mean()

    weights = [jax.random.normal(k, (width, width)) / width**0.5 for k in jax.random.split(jax.random.key(0), LAYERS)]
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    batch = jax.ShapeDtypeStruct((rows * microbatches, width), jnp.float32)
    pipeline = jaxpipe.partition(
        jax.tree_util.Partial(apply, weights),
        mesh,
        batch,
        loss=loss,
        optimizer=OPTIMIZER,
        num_microbatches=microbatches,
        profile="analytic",
        runtime="spmd",
    )
    x = np.random.default_rng(0).standard_normal(batch.shape, np.float32)
    data = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda k: x[k])
    state = [pipeline.init(jax.random.key(0))]

    def step() -> object:
        state[0], metrics = pipeline.step(state[0], data)
        return metrics["loss"], state[0].parameters

    return step


def make_bare(width: int, rows: int, microbatches: int, products: bool) -> Callable[[], object]:
    """The products and messages of the pipeline's ticks, in their order, and nothing else.

    A device works in ``microbatches`` of the M + 2 (S - 1) pair ticks. What a layer gets stands in for what it got.
    """
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    layers_here = LAYERS // STAGES

    def forward(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        for w in weights:
            x = x @ w
        return x

    def backward(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        gradients = []
        for w in reversed(weights):
            gradients.append(x.T @ x)
            x = x @ w.T
        return x, gradients

    def device(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")

        def tick(carry: PyTree, t: jax.Array) -> tuple[PyTree, None]:
            activation, back, gradients = carry
            if products:
                j = t - stage
                active = (j >= 0) & (j < microbatches)
                activation = lax.cond(active, lambda x: forward(x, weights), lambda x: x, activation)
            back, activation = lax.optimization_barrier((back, lax.ppermute(activation, "stage", [(0, 1)])))
            if products:
                j = t - 2 * (STAGES - 1) + stage
                active = (j >= 0) & (j < microbatches)
                back, gradients = lax.cond(active, lambda x: backward(x, weights), lambda x: (x, gradients), back)
            back = lax.ppermute(back, "stage", [(1, 0)])
            return (activation, back, gradients), None

        ticks = jnp.arange(microbatches + 2 * (STAGES - 1))
        gradients = [jnp.zeros_like(w) for w in weights] if products else []
        return jax.tree.map(lambda x: x[None], lax.scan(tick, (x[0], x[0], gradients), ticks)[0])

    mapped = jax.shard_map(device, mesh=mesh, in_specs=(P(), P("stage")), out_specs=P("stage"), check_vma=False)
    shape = (STAGES, rows, width)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    weights = np.eye(width, dtype=np.float32)[::-1]
    place = jax.make_array_from_callback
    data = place(shape, NamedSharding(mesh, P("stage")), lambda k: x[k])
    held = [place(weights.shape, NamedSharding(mesh, P()), lambda k: weights[k]) for _ in range(layers_here)]
    compiled = jax.jit(mapped).lower(held, data).compile()
    return lambda: compiled(held, data)


def run(number: int, count: int, width: int, rows: int, microbatches: int, rounds: int) -> None:
    """One process: pinned, measuring; the first one prints the seconds."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    jax.config.update("jax_num_cpu_devices", 1)
    jaxpipe.initialize_distributed()
    steps = {"pipeline": make_step(width, rows, microbatches)}
    if count > 1:
        steps["bare"] = make_bare(width, rows, microbatches, products=True)
        steps["messages"] = make_bare(width, rows, microbatches, products=False)
    # The same number of rounds in all processes: nobody looks at a clock.
    times = alternate(steps, rounds, float("inf"))
    if number == 0:
        print(json.dumps({"seconds": times, "header": header()}))


def measured(count: int, *arguments: int) -> dict[str, Any]:
    """Return the output of ``run`` in so many processes."""
    command = [sys.executable, "-m", "scripts.bench_hosts", "--run", *map(str, arguments)]
    if count > 1:
        command = [sys.executable, "scripts/launch_local", str(count), "--", *command]
    environment = {**os.environ, **MALLOC, "JAX_PLATFORMS": "cpu"}
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(next(line for line in text.splitlines() if '"seconds"' in line).removeprefix("[0] "))


def measure(width: int, rows: int, microbatches: int, rounds: int) -> tuple[Row, dict[str, Any]]:
    """One width, and where it was measured."""
    alone = measured(1, width, rows, microbatches, rounds)
    timings = measured(STAGES, width, rows, microbatches, rounds)
    single = quartiles(alone["seconds"]["pipeline"])
    pipeline, bare, messages = (quartiles(timings["seconds"][name]) for name in ("pipeline", "bare", "messages"))
    ideal = single[1] * (microbatches + STAGES - 1) / (STAGES * microbatches)
    row = Row(
        width=width,
        rows=rows,
        microbatches=microbatches,
        message_bytes=4 * rows * width,
        single=single,
        ideal=ideal,
        pipeline=pipeline,
        bare=bare,
        messages=messages,
        of_bare=bare[1] / pipeline[1],
        of_ideal=ideal / pipeline[1],
    )
    return row, timings["header"]


def table(rows: list[Row]) -> Table:
    """The results to read."""
    result = Table(title="two processes, one core each, Gloo over loopback; ms of a step", title_justify="left")
    names = ("width", "rows", "message KiB", "single", "ideal", "pipeline", "bare", "messages", "of bare", "of ideal")
    for name in names:
        result.add_column(name, justify="right")
    for row in rows:
        seconds = (row.single[1], row.ideal, row.pipeline[1], row.bare[1], row.messages[1])
        result.add_row(
            str(row.width),
            str(row.rows),
            f"{row.message_bytes / 1024:.0f}",
            *(f"{1e3 * n:.1f}" for n in seconds),
            f"{row.of_bare:.2f}",
            f"{row.of_ideal:.2f}",
        )
    return result


def main() -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512, 1024])
    parser.add_argument("--rows", type=int, default=256, help="of a micro-batch (default 256)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=50, help="per width (default 50)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_hosts.json"))
    parser.add_argument("--run", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        number, count = (int(os.environ.get(f"JAX_{name}", k)) for name, k in (("PROCESS_ID", 0), ("NUM_PROCESSES", 1)))
        run(number, count, *options.run)
        return
    if len(os.sched_getaffinity(0)) < STAGES:
        sys.exit(f"this needs {STAGES} cores, one for each process")
    rows: list[Row] = []
    where: dict[str, Any] = {}
    for width in options.widths:
        row, where = measure(width, options.rows, options.microbatches, options.rounds)
        rows.append(row)
        print(f"{width}: {row.of_bare:.2f} of bare, {row.of_ideal:.2f} of ideal", file=sys.stderr)
    result = {**where, "command": sys.orig_argv[1:], "stages": STAGES, "layers": LAYERS}
    result["rows"] = [asdict(row) for row in rows]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
