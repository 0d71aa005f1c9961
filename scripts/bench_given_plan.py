"""Processor seconds to plan anew, to take a saved plan, and of JAX to trace loss and gradient.

``python -m scripts.bench_given_plan``; each is the first call in a process of its own, as in a job that starts again.
"""

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxpipe
from examples import models as zoo


LAYERS, WIDTH, LENGTH, WORDS = 12, 256, 128, 5000


def loss(model, batch):
    """Return the mean cross-entropy of the next words."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], train=False), batch["y"]).mean()


def measure(what: str, path: Path) -> float:
    """Return the processor seconds of one call."""
    jax.config.update("jax_num_cpu_devices", 4)
    module = zoo.Transformer(vocab=WORDS, num_layers=LAYERS, width=WIDTH, num_heads=8, max_length=LENGTH)
    batch = {name: jax.ShapeDtypeStruct((32, LENGTH), jnp.int32) for name in ("x", "y")}
    mesh = jax.make_mesh((4,), ("stage",))
    given = {"loss": loss, "optimizer": optax.adam(1e-3)}
    _ = jax.devices(), jaxpipe.partition  # which imports what planning needs
    start = time.process_time()
    if what == "trace":
        rows = {name: jax.ShapeDtypeStruct((2, LENGTH), jnp.int32) for name in batch}
        variables = jax.eval_shape(functools.partial(module.init, train=False), jax.random.key(0), rows["x"])
        start = time.process_time()

        def value(variables, rows):
            return loss(lambda x, train: module.apply(variables, x, train=train), rows)

        jax.make_jaxpr(jax.value_and_grad(value))(variables, rows)
    elif what == "plan":
        pipeline = jaxpipe.partition(module, mesh, batch, **given, profile="analytic")
        seconds = time.process_time() - start
        path.write_text(pipeline.plan.to_json())
        return seconds
    else:
        jaxpipe.partition(module, mesh, batch, **given, plan=path.read_text())
    return time.process_time() - start


def main() -> None:
    """Measure each in a process of its own, and print a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        seconds = {}
        for what in ("trace", "plan", "given"):
            command = [sys.executable, "-m", "scripts.bench_given_plan", what, str(path)]
            seconds[what] = float(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
            )
        size = path.stat().st_size
    print(json.dumps({"processor_seconds": seconds, "plan_bytes": size}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(sys.argv[1], Path(sys.argv[2])))
    else:
        main()
