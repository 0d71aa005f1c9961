"""Train on handwritten digits in one process or in several, on one machine or many: the script is the same.

    python examples/train_hosts.py
    scripts/launch_local 2 -- python examples/train_hosts.py
    scripts/launch_local 4 -- python examples/train_hosts.py --replicas 2
    srun python examples/train_hosts.py            # SLURM; likewise under mpirun, or in Kubernetes

Stages lie next to each other in the list of devices, replicas apart: so of two processes each has a replica, if there
are two, and else half of the stages. Each passes the rows of its own replicas. Without accelerators each process
simulates CPU devices, enough for the pipeline. The data are the 1,797 digits that ship with scikit-learn. A run that is
stopped, or of which a process dies, goes on from its last checkpoint when it is started again, in any number of
processes; all of them must see its folder.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from sklearn.datasets import load_digits

import jaxpipe


@dataclass(frozen=True)
class Options:
    """Training options."""

    stages: int = 4
    replicas: int = 1
    steps: int = 300
    batch_size: int = 96
    every: int = 50
    """Steps between two checkpoints."""
    checkpoints: Path = Path("out/hosts")


class DigitsNet(nn.Module):
    """Four dense layers: pixels ``[batch, 64]`` to logits ``[batch, 10]``."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        for _ in range(3):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def loss(model: DigitsNet, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["pixels"]), batch["label"]).mean()


def evaluate(model: DigitsNet, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The share of images that are classified correctly."""
    return {"accuracy": (model(batch["pixels"]).argmax(-1) == batch["label"]).mean()}


def main(options: Options) -> float:
    """Train what is left to train; returns the accuracy on test data."""
    digits = load_digits()
    data = {"pixels": (digits.data / 16).astype(np.float32), "label": digits.target.astype(np.int32)}
    order = np.random.default_rng(0)  # the same in every process
    shuffled = order.permutation(len(digits.target))
    test, train = shuffled[:352], shuffled[352:]

    devices = jax.devices()[: options.replicas * options.stages]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(options.replicas, -1), ("data", "stage"))
    pipeline = jaxpipe.partition(
        DigitsNet(),
        mesh,
        {
            "pixels": jax.ShapeDtypeStruct((options.batch_size, 64), jnp.float32),
            "label": jax.ShapeDtypeStruct((options.batch_size,), jnp.int32),
        },
        loss=loss,
        evaluate=evaluate,
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
    )
    first = jax.process_index() == 0
    if first:
        print(f"{jax.process_count()} processes, {len(devices)} devices")
        print(pipeline.plan)

    local_rows = pipeline.local_rows(options.batch_size)
    with jaxpipe.Checkpointer(pipeline, options.checkpoints, every=options.every, keep=2) as checkpointer:
        restored = checkpointer.restore()
        if restored is None:
            state = pipeline.init(jax.random.key(0))
        else:
            state, order.bit_generator.state = restored
        for step in range(int(state.step) + 1, options.steps + 1):
            chosen = order.choice(train, options.batch_size, replace=False)[local_rows]
            state, metrics = pipeline.step(state, {name: x[chosen] for name, x in data.items()})
            checkpointer.after_step(state, data=order.bit_generator.state)
            if first and step % options.every == 0:
                print(f"step {step}: loss {metrics['loss']:.4f}")
    rows = test[pipeline.local_rows(len(test))]
    accuracy = float(pipeline.evaluate(state, {name: x[rows] for name, x in data.items()})["accuracy"])
    if first:
        print(f"test accuracy {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    chosen_options = tyro.cli(Options)
    processes = jaxpipe.initialize_distributed()
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", -(-chosen_options.stages * chosen_options.replicas // processes))
    sys.exit(0 if main(chosen_options) >= 0.9 else "test accuracy is below 90 %")
