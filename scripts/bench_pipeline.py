"""Pipelines of 1, 2 and 4 stages against plain gradient accumulation of the same micro-batches, on one core.

    python -m scripts.bench_pipeline
    python -m scripts.bench_pipeline --models MLP --stages 1 4 --seconds 30 --out out/some.json

All simulated devices of a CPU share one core here, so that the figures show what the executor itself costs: packing,
arena, switch, transport, encoding. Nothing runs at the same time as anything else, hence no speed-up can be seen, and
1.0 is the best there is. With several cores the devices would share XLA's threads, which measures those.

Plain is the fastest plain JAX loop that we know of: one compiled gradient of a micro-batch, called for each, one
compiled addition into donated sums, one compiled optimizer step. (A scan over the micro-batches is up to 100 times
slower for convolutions on the CPU.) ``encoded`` is the same loop with ``memory_encoded``: what the smaller stash costs
without an executor.

  ratio      pipeline / plain within a round: median and quartiles; all variants of a model run in turn in one loop
  predicted  bytes on each device in the plan, made before the first compile
  compiled   argument + result + temporary - donated bytes of the compiled step
  temp.      temporaries of the compiled step
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

import jaxpipe
from examples import models
from jaxpipe.array_types import PyTree
from scripts.measuring import Batch, Loss, Model, Quartiles, alternate, header, keep_freed_memory, quartiles


MICROBATCHES = 8
OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Problem:
    """A model for ``partition``, its loss and batch, and the same loss of plain variables."""

    model: nn.Module | Model
    loss: Loss
    batch: Batch
    init: Callable[[], tuple[PyTree, PyTree]]
    plain: Callable[[PyTree, PyTree, jax.Array, Batch], tuple[jax.Array, PyTree]]


@dataclass(frozen=True)
class Row:
    """One variant of one model."""

    model: str
    variant: str
    step: Quartiles
    ratio: Quartiles
    rounds: int
    predicted_bytes: int | None = None
    compiled_bytes: int | None = None
    temporaries: int | None = None
    bubble_fraction: float | None = None


def linen(module: nn.Module, batch: Batch, call: Loss) -> Problem:
    """``call(apply, batch)`` is the mean loss."""

    def init() -> tuple[PyTree, PyTree]:
        collections: dict[str, PyTree] = {}

        def initialize(*args: jax.Array, **kwargs: Any) -> jax.Array:
            result, variables = module.init_with_output(jax.random.key(0), *args, **kwargs)
            collections.update(variables)
            return result

        call(initialize, batch)
        return collections.pop("params"), collections

    def plain(params: PyTree, state: PyTree, key: jax.Array, batch: Batch) -> tuple[jax.Array, PyTree]:
        new = state

        def apply(*args: jax.Array, **kwargs: Any) -> jax.Array:
            nonlocal new
            variables = {"params": params, **state}
            result, new = module.apply(variables, *args, rngs={"dropout": key}, mutable=list(state), **kwargs)
            return result

        return call(apply, batch), new

    return Problem(module, call, batch, lambda: jax.jit(init)(), plain)


def entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def mlp() -> Problem:
    """Eight layers of 768 on 128 rows a micro-batch."""
    params = models.init_mlp(jax.random.key(0), [768] * 8 + [10])
    rows = MICROBATCHES * 128
    batch = {"x": jax.random.normal(jax.random.key(1), (rows, 768)), "y": jnp.arange(rows) % 10}

    def plain(params: PyTree, state: PyTree, key: jax.Array, batch: Batch) -> tuple[jax.Array, PyTree]:
        return entropy(models.mlp(params, batch["x"]), batch["y"]), state

    return Problem(
        jax.tree_util.Partial(models.mlp, params),
        lambda model, batch: entropy(model(batch["x"]), batch["y"]),
        batch,
        lambda: (params, {}),
        plain,
    )


def cnn() -> Problem:
    """A ResNet with BatchNorm, one block for each width from 16 to 128, on 8 images of 32x32 a micro-batch."""
    rows = MICROBATCHES * 8
    batch = {"x": jax.random.normal(jax.random.key(1), (rows, 32, 32, 3)), "y": jnp.arange(rows) % 10}
    module = models.ResNet18(width=16, stage_sizes=(1, 1, 1, 1))
    return linen(module, batch, lambda model, batch: entropy(model(batch["x"], train=True), batch["y"]))


def transformer() -> Problem:
    """Four blocks of width 128 with dropout, on 8 sequences of 64 a micro-batch."""
    tokens = jax.random.randint(jax.random.key(1), (MICROBATCHES * 8, 64), 0, 256)
    module = models.Transformer(vocab=256, num_layers=4, width=128, num_heads=4, max_length=64, tied=False)

    def loss(model: Model, batch: Batch) -> jax.Array:
        return entropy(model(batch["tokens"], train=True)[:, :-1], batch["tokens"][:, 1:])

    return linen(module, {"tokens": tokens}, loss)


CASES = {"MLP": mlp, "CNN": cnn, "Transformer": transformer}


def plain_step(problem: Problem, wrap: Callable[[Callable], Callable]) -> Callable[[], object]:
    """One training step as a loop over micro-batches; keeps its own state from call to call."""
    params, state = problem.init()
    gradient = jax.jit(jax.value_and_grad(wrap(problem.plain), has_aux=True))
    add = jax.jit(lambda total, new: jax.tree.map(jnp.add, total, new), donate_argnums=0)

    def update(gradients: PyTree, optimizer: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        mean = jax.tree.map(lambda g: g / MICROBATCHES, gradients)
        updates, optimizer = OPTIMIZER.update(mean, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    apply = jax.jit(update, donate_argnums=(1, 2))
    rows = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), problem.batch)
    pieces = [jax.tree.map(lambda x, j=j: x[j], rows) for j in range(MICROBATCHES)]
    keys = list(jax.random.split(jax.random.key(4), MICROBATCHES))
    now = [jax.tree.map(jnp.copy, params), state, jax.jit(OPTIMIZER.init)(params)]

    def step() -> object:
        params, state, optimizer = now
        total: PyTree = None
        for key, piece in zip(keys, pieces, strict=True):
            (loss, state), gradients = gradient(params, state, key, piece)
            total = (loss, gradients) if total is None else add(total, (loss, gradients))
        params, optimizer = apply(total[1], optimizer, params)
        now[:] = params, state, optimizer
        return params, total[0]

    return step


def pipeline_step(problem: Problem, stages: int) -> tuple[Callable[[], object], jaxpipe.Pipeline]:
    """One training step of a pipeline; keeps its own state from call to call."""
    mesh = jax.sharding.Mesh(jax.devices()[:stages], ("stage",))
    pipeline = jaxpipe.partition(
        problem.model,
        mesh,
        problem.batch,
        loss=problem.loss,
        optimizer=OPTIMIZER,
        num_microbatches=MICROBATCHES,
        runtime="spmd",
    )
    params, state = problem.init()
    variables = {"params": params, **state} if isinstance(problem.model, nn.Module) else None
    now = [pipeline.init(jax.random.key(0), variables=variables)]

    def step() -> object:
        now[0], metrics = pipeline.step(now[0], problem.batch)
        return metrics

    return step, pipeline


def measure(name: str, stages: list[int], rounds: int, seconds: float) -> list[Row]:
    """All variants of one model."""
    problem = CASES[name]()
    steps = {"plain": plain_step(problem, lambda f: f), "encoded": plain_step(problem, jaxpipe.memory_encoded)}
    pipelines = {}
    for count in stages:
        label = f"{count} stage{'s' if count > 1 else ''}"
        steps[label], pipelines[label] = pipeline_step(problem, count)
    times = alternate(steps, rounds, seconds)
    rows = []
    for variant, values in times.items():
        ratio = quartiles([b / a for a, b in zip(times["plain"], values, strict=True)])
        row = Row(name, variant, quartiles(values), ratio, len(values))
        if variant in pipelines:
            pipeline = pipelines[variant]
            memory = pipeline.memory_report()
            row = Row(
                **{
                    **asdict(row),
                    "predicted_bytes": memory.predicted_bytes[0],
                    "compiled_bytes": memory.compiled_bytes[0],
                    "temporaries": memory.temporary_bytes[0],
                    "bubble_fraction": pipeline.plan.bubble_fraction,
                }
            )
        rows.append(row)
    return rows


def table(rows: list[Row]) -> Table:
    """The results to read."""
    result = Table(title="pipeline / plain gradient accumulation, on one core", title_justify="left")
    for column in ("model", "variant"):
        result.add_column(column)
    for column in ("step ms", "ratio", "predicted MiB", "compiled MiB", "temp. MiB"):
        result.add_column(column, justify="right")
    for row in rows:
        low, median, high = row.ratio
        sizes = [row.predicted_bytes, row.compiled_bytes, row.temporaries]
        result.add_row(
            row.model,
            row.variant,
            f"{1e3 * row.step[1]:.1f}",
            f"{median:.3f} ({low:.3f}-{high:.3f})",
            *("" if n is None else f"{n / 2**20:.2f}" for n in sizes),
        )
    return result


def main() -> None:
    """Measure, write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=100, help="most rounds per model (default 100)")
    parser.add_argument("--seconds", type=float, default=60, help="most seconds of rounds per model (default 60)")
    parser.add_argument("--out", type=Path, default=Path("out/bench_pipeline.json"))
    options = parser.parse_args()
    keep_freed_memory()
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", max(options.stages))
    rows = []
    for name in options.models:
        rows += measure(name, options.stages, options.rounds, options.seconds)
        print(f"{name}: {', '.join(f'{r.variant} {r.ratio[1]:.3f}' for r in rows if r.model == name)}", file=sys.stderr)
    result = {**header(), "microbatches": MICROBATCHES, "rows": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table(rows))


if __name__ == "__main__":
    main()
