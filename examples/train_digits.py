"""Train a small convolutional network on handwritten digits, with an encoded backward pass.

    python examples/train_digits.py
    python examples/train_digits.py --epochs 5 --batch-size 64

The data are the 1,797 digits that ship with scikit-learn, so nothing is downloaded. The model is plain Flax; the
one line that concerns memory is the decorator. At the end: test accuracy, and what the backward pass stored for
whom, against what plain ``jax.grad`` would have stored.
"""

import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxpipe


@dataclass(frozen=True)
class Options:
    """Training options."""

    epochs: int = 15
    batch_size: int = 96
    learning_rate: float = 2e-3
    seed: int = 0


@jaxpipe.memory_encoded
class DigitsCNN(nnx.Module):
    """Two convolution blocks and two dense layers: images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        self.dense1 = nnx.Linear(2 * 2 * 64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        x = nnx.relu(self.dense1(x.reshape(x.shape[0], -1)))
        return self.dense2(self.dropout(x))


def loss(model: DigitsCNN, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@nnx.jit
def train_step(model: DigitsCNN, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    """One update of the model in place; returns the loss."""
    value, gradients = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, gradients)
    return value


@nnx.jit
def correct(model: DigitsCNN, batch: dict[str, jax.Array]) -> jax.Array:
    """How many images of a batch are classified correctly."""
    return (model(batch["image"]).argmax(-1) == batch["label"]).sum()


def load(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The digits, scaled to [0, 1] and split four to one into training and test data."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    return {"image": split[0], "label": split[2]}, {"image": split[1], "label": split[3]}


def main(options: Options) -> float:
    """Train and report; returns the test accuracy."""
    console = Console()
    train, test = load(options.seed)
    steps = len(train["label"]) // options.batch_size
    model = DigitsCNN(nnx.Rngs(options.seed))
    schedule = optax.cosine_decay_schedule(options.learning_rate, steps * options.epochs)
    optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)
    order = np.random.default_rng(options.seed)

    started = time.perf_counter()
    columns = (TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("train", total=options.epochs, loss=float("nan"))
        for _ in range(options.epochs):
            rows = order.permutation(len(train["label"]))
            losses = []
            for step in range(steps):
                chosen = rows[step * options.batch_size : (step + 1) * options.batch_size]
                batch = {name: jnp.asarray(values[chosen]) for name, values in train.items()}
                losses.append(train_step(model, optimizer, batch))
            progress.update(task, advance=1, loss=float(jnp.stack(losses).mean()))
    seconds = time.perf_counter() - started

    model.eval()
    accuracy = int(correct(model, test)) / len(test["label"])
    model.train()
    batch = {name: jax.ShapeDtypeStruct((options.batch_size, *x.shape[1:]), x.dtype) for name, x in train.items()}
    report = jaxpipe.residual_report(loss, model, batch)
    print(report)
    ratio = report.plain_bytes / report.total_bytes
    console.print(f"one step stores {report.total_bytes:,} bytes; plain jax.grad stores {ratio:.1f} times as many")
    console.print(f"trained {options.epochs} epochs in {seconds:.1f} s")
    console.print(f"test accuracy {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    sys.exit(0 if main(tyro.cli(Options)) >= 0.97 else "test accuracy is below 97 %")
