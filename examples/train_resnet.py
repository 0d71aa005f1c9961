"""Train a residual network with BatchNorm on handwritten digits, as a pipeline over several devices.

    python -m examples.train_resnet
    python -m examples.train_resnet --stages 2 --epochs 20 --memory 4MiB

BatchNorm normalizes each micro-batch by itself, and its running statistics follow from one micro-batch to the next; the
test runs with these, through the same pipeline. The data are the 1,797 digits that ship with scikit-learn. Without
enough accelerators the stages are simulated CPU devices. At the end: test accuracy, against that of a linear
classifier (scikit-learn's logistic regression) on the same split.
"""

import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import jaxpipe
from examples.models.resnet import ResNet18


@dataclass(frozen=True)
class Options:
    """Training options."""

    stages: int = 4
    epochs: int = 8
    batch_size: int = 96
    num_microbatches: int = 4
    width: int = 16
    """Channels of the first blocks."""
    memory: str | None = None
    """Most bytes on a device, such as 4MiB."""
    learning_rate: float = 0.1
    seed: int = 0


Data = dict[str, np.ndarray]


def loss(model: ResNet18, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of a batch."""
    logits = model(batch["image"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def evaluate(model: ResNet18, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The share of images that are classified correctly, with the running statistics."""
    return {"accuracy": (model(batch["image"], train=False).argmax(-1) == batch["label"]).mean()}


def load(seed: int) -> tuple[Data, Data]:
    """The digits, scaled to [0, 1] and split into training data and 360 for the test."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=seed)
    return {"image": split[0], "label": split[2]}, {"image": split[1], "label": split[3]}


def linear_accuracy(data: Data, test: Data) -> float:
    """Return the accuracy of a classifier without hidden layers."""
    flat = [part["image"].reshape(len(part["label"]), -1) for part in (data, test)]
    return float(LogisticRegression(max_iter=1000).fit(flat[0], data["label"]).score(flat[1], test["label"]))


def main(options: Options) -> tuple[float, float]:
    """Train; returns the test accuracy and that of the baseline."""
    console = Console()
    data, test = load(options.seed)
    rows = options.batch_size
    steps = len(data["label"]) // rows
    devices = jax.devices()[: options.stages]
    mesh = jax.make_mesh((len(devices),), ("stage",), devices=devices)
    schedule = optax.warmup_cosine_decay_schedule(0, options.learning_rate, steps, options.epochs * steps)
    pipeline = jaxpipe.partition(
        ResNet18(width=options.width, stage_sizes=(1, 1, 1)),
        mesh,
        {
            "image": jax.ShapeDtypeStruct((rows, 8, 8, 1), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        },
        loss=loss,
        evaluate=evaluate,
        optimizer=optax.sgd(schedule, momentum=0.9, nesterov=True),
        num_microbatches=options.num_microbatches,
        memory=options.memory,
    )
    print(pipeline.plan)

    start = time.perf_counter()
    state = pipeline.init(jax.random.key(options.seed))
    order = np.random.default_rng(options.seed)
    with console.status("training") as status:
        for epoch in range(options.epochs):
            shuffled = order.permutation(len(data["label"]))
            for first in range(0, steps * rows, rows):
                chosen = shuffled[first : first + rows]
                state, metrics = pipeline.step(state, {name: x[chosen] for name, x in data.items()})
            status.update(f"epoch {epoch + 1} of {options.epochs}: loss {metrics['loss']:.4f}")
    print(f"trained {options.epochs} epochs in {time.perf_counter() - start:.0f} s, compilation included")
    accuracy, baseline = float(pipeline.evaluate(state, test)["accuracy"]), linear_accuracy(data, test)
    print(f"test accuracy {accuracy:.2%}; a linear classifier reaches {baseline:.2%}")
    return accuracy, baseline


if __name__ == "__main__":
    chosen_options = tyro.cli(Options, description=__doc__)
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", chosen_options.stages)
    reached, linear = main(chosen_options)
    sys.exit(0 if reached > linear else "test accuracy is not above that of a linear classifier")
