"""Measure how many times as long as tracing planning takes.

    python -m scripts.bench_planning --out docs/results/planning-cpu-jax0.12.json

Processor seconds of ``partition`` with estimated seconds and without compiling, against those in which JAX traces loss
and gradient of the same model. Each row is a fresh process. A model of other shapes is traced and planned there first,
so that modules are loaded and nothing that is counted has been traced before.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpipe
from examples import models as zoo
from scripts.measuring import header


#: Layers, stages, and the share of the bytes of the plan without a budget that is the budget; 0 for none.
ROWS = ((12, 4, 0.0), (12, 4, 0.7), *((layers, stages, 0.0) for layers in (24, 48, 96) for stages in (4, 16, 32)))

#: What ``--quick`` measures.
QUICK = ROWS[:1]

#: How often loss and gradient are traced; the median counts.
TRACES = 3


class Blocks(nn.Module):
    """Equal residual blocks of two dense layers, which take JAX little time to trace."""

    num_layers: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the mean of the last layer of each example."""
        for _ in range(self.num_layers):
            y = nn.gelu(nn.Dense(2 * self.width)(x))
            x = x + nn.Dense(self.width)(y)
        return x.mean(-1)


def transformer(layers: int, width: int) -> tuple[nn.Module, Any, Callable[..., jax.Array]]:
    """Return a language model with dropout, shapes of a batch for it, and its loss."""
    model = zoo.Transformer(vocab=256, num_layers=layers, width=width, num_heads=4, max_length=32, tied=False)
    batch = {key: jax.ShapeDtypeStruct((128, 32), jnp.int32) for key in ("tokens", "targets")}

    def loss(model: Any, batch: Any) -> jax.Array:
        logits = model(batch["tokens"], train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return model, batch, loss


def blocks(layers: int, width: int) -> tuple[nn.Module, Any, Callable[..., jax.Array]]:
    """Return residual blocks, shapes of a batch for them, and their loss."""
    batch = {"x": jax.ShapeDtypeStruct((128, width), jnp.float32), "y": jax.ShapeDtypeStruct((128,), jnp.float32)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    return Blocks(layers, width), batch, loss


MODELS = {"transformer": transformer, "blocks": blocks}


def trace_seconds(model: nn.Module, batch: Any, loss: Callable[..., jax.Array]) -> float:
    """Return the processor seconds in which JAX traces loss and gradient."""
    argument = batch["tokens"] if "tokens" in batch else batch["x"]
    options: dict[str, Any] = {"train": False} if "tokens" in batch else {}
    variables = jax.eval_shape(lambda key, x: model.init(key, x, **options), jax.random.key(0), argument)
    times = []
    for _ in range(TRACES):

        def plain(params: Any, batch: Any, key: jax.Array) -> jax.Array:
            return loss(lambda x, **kwargs: model.apply(params, x, **kwargs, rngs={"dropout": key}), batch)

        begin = time.process_time()
        jax.make_jaxpr(jax.value_and_grad(plain))(variables, batch, jax.random.key(0))
        times.append(time.process_time() - begin)
    return statistics.median(times)


def plan(name: str, layers: int, width: int, stages: int, memory: int | None = None) -> tuple[float, jaxpipe.Pipeline]:
    """Return the processor seconds in which a model is planned, and its pipeline."""
    model, batch, loss = MODELS[name](layers, width)
    mesh = Mesh(np.array(jax.devices()[:stages]), ("stage",))
    begin = time.process_time()
    pipeline = jaxpipe.partition(
        model,
        mesh,
        batch,
        loss=loss,
        optimizer=optax.adamw(1e-3),
        memory=memory,
        profile="analytic",
        options=jaxpipe.PlanOptions(compile=False),
    )
    return time.process_time() - begin, pipeline


def measure(name: str, layers: int, stages: int, share: float) -> dict[str, Any]:
    """Return the row of one model, in this process."""
    trace_seconds(*MODELS[name](2, 32))
    small = plan(name, 2, 32, 2)[1].plan
    if share:
        plan(name, 2, 32, 2, int(0.9 * small.predicted_bytes))
    traced = trace_seconds(*MODELS[name](layers, 64))
    memory = int(share * plan(name, layers, 64, stages)[1].plan.predicted_bytes) if share else None
    phases: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: phases.append(record.getMessage())
    logger = logging.getLogger("jaxpipe")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    planned, pipeline = plan(name, layers, 64, stages, memory)
    begin = time.process_time()
    result = pipeline.plan
    predicted = time.process_time() - begin
    return {
        "model": name,
        "layers": layers,
        "stages": stages,
        "budget_share": share,
        "trace_seconds": round(traced, 3),
        "plan_seconds": round(planned, 3),
        "bytes_seconds": round(predicted, 3),  # when the plan's bytes are first asked for
        "ratio": round(planned / traced, 2),
        "schedule": result.schedule,
        "log": phases,
    }


def in_a_process(row: Sequence[Any]) -> dict[str, Any]:
    """Return a row that was measured in a fresh process."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={row[2]}"}
    command = [sys.executable, "-m", "scripts.bench_planning", "--row", json.dumps(row)]
    output = subprocess.run(command, env={**os.environ, **flags}, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Measure rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="12 layers on 4 stages only")
    parser.add_argument("--most-layers", type=int, default=96, help="no row of more layers")
    parser.add_argument("--model", choices=list(MODELS), help="of one model only")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(measure(*json.loads(arguments.row))))
        return
    rows = []
    for name in MODELS if arguments.model is None else (arguments.model,):
        for layers, stages, share in QUICK if arguments.quick else ROWS:
            if layers > arguments.most_layers:
                continue
            row = in_a_process((name, layers, stages, share))
            rows.append(row)
            print(
                f"{name:12s} {layers:3d} layers on {stages:2d} stages"
                f"{f', {share:.0%} of the bytes' if share else '':18s}: traced in {row['trace_seconds']:6.2f} s, "
                f"planned in {row['plan_seconds']:6.2f} s, {row['ratio']:.1f} times as long",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps({**header(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
