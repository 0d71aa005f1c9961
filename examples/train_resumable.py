"""Train on handwritten digits so that the run may end at any moment, and goes on where it was, on other devices too.

    python examples/train_resumable.py --stages 4      # stop it with Ctrl-C, kill or kill -9
    python examples/train_resumable.py --stages 2      # goes on from the last checkpoint, in two stages

The data are the 1,797 digits that ship with scikit-learn. Without enough accelerators the stages are simulated CPU
devices. A batch whose loss or gradient is not finite is left out. At the end the checkpoint is read into plain Flax.
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
    steps: int = 400
    batch_size: int = 96
    every: int = 50
    """Steps between two checkpoints."""
    checkpoints: Path = Path("out/checkpoints")


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


def plan(options: Options) -> jaxpipe.Pipeline:
    """A pipeline over as many devices as there are, up to the number of stages."""
    devices = jax.devices()[: options.stages]
    batch = {
        "pixels": jax.ShapeDtypeStruct((options.batch_size, 64), jnp.float32),
        "label": jax.ShapeDtypeStruct((options.batch_size,), jnp.int32),
    }
    return jaxpipe.partition(
        DigitsNet(),
        jax.make_mesh((len(devices),), ("stage",), devices=devices),
        batch,
        loss=loss,
        optimizer=optax.adam(1e-3),
        num_microbatches=8,
        options=jaxpipe.PlanOptions(on_nonfinite="skip"),
    )


def main(options: Options) -> float:
    """Train what is left to train; returns the accuracy on test data of the checkpoint in plain Flax."""
    digits = load_digits()
    pixels, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0)
    shuffled = order.permutation(len(labels))
    test, rows = shuffled[:360], shuffled[360:]

    pipeline = plan(options)
    with jaxpipe.Checkpointer(pipeline, options.checkpoints, every=options.every, keep=2) as checkpointer:
        restored = checkpointer.restore()
        if restored is None:
            state = pipeline.init(jax.random.key(0))
        else:
            state, order.bit_generator.state = restored
            print(f"goes on from step {state.step}")
        for step in range(int(state.step), options.steps):
            chosen = order.choice(rows, options.batch_size, replace=False)
            state, metrics = pipeline.step(state, {"pixels": pixels[chosen], "label": labels[chosen]})
            checkpointer.after_step(state, data=order.bit_generator.state)
            if (step + 1) % options.every == 0:
                print(f"step {step + 1}: loss {metrics['loss']:.4f}, {metrics['skipped']} steps skipped")
        if int(state.step) not in checkpointer.steps:
            checkpointer.save(state, data=order.bit_generator.state)

    checkpoint = jaxpipe.checkpoint.load(options.checkpoints)
    logits = DigitsNet().apply(checkpoint.variables, pixels[test])
    accuracy = float((logits.argmax(-1) == labels[test]).mean())
    print(f"plain Flax, from the checkpoint of step {checkpoint.step}: test accuracy {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    chosen_options = tyro.cli(Options)
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", chosen_options.stages)
    sys.exit(0 if main(chosen_options) >= 0.95 else "test accuracy is below 95 %")
