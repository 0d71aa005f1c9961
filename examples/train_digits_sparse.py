"""Train on handwritten digits with four replicas that send each other only the best blocks of their gradients.

    python examples/train_digits_sparse.py
    python examples/train_digits_sparse.py --blocks 1 4 --epochs 60 --mode consensus

Each setting trains the same network: densely, then with the k best filters or neurons of every layer. At the end: a
table and a picture of test accuracy against the bytes that a replica has handed to the network. The data are the 1,797
digits that ship with scikit-learn. Without enough accelerators the replicas are simulated CPU devices.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxpipe
from jaxpipe.gradients import block_sparse
from jaxpipe.text.units import bytes_text


@dataclass(frozen=True)
class Options:
    """Training options."""

    blocks: tuple[int, ...] = (1, 2, 4)
    """Blocks sent of each layer, one run for each number, after a dense one."""
    replicas: int = 4
    epochs: int = 120
    batch_size: int = 96
    learning_rate: float = 0.02
    mode: Literal["own", "consensus"] = "own"
    seed: int = 0
    out: Path = Path("out")
    """Folder for the picture."""


@dataclass(frozen=True)
class Result:
    """One training run."""

    setting: str
    accuracy: float
    sent: int
    dense: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Return the bytes of a dense exchange, as a multiple of those sent."""
        return self.dense / self.sent


@jaxpipe.memory_encoded
class DigitsNet(nn.Module):
    """Two convolutions and two dense layers: images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of a batch of images."""
        x = nn.max_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


Data = dict[str, np.ndarray]


def loss(model: DigitsNet, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def evaluate(model: DigitsNet, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The share of images that are classified correctly."""
    return {"accuracy": (model(batch["image"]).argmax(-1) == batch["label"]).mean()}


def load(seed: int) -> tuple[Data, Data]:
    """The digits, scaled to [0, 1] and split into training data and 360 for the test."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=seed)
    return {"image": split[0], "label": split[2]}, {"image": split[1], "label": split[3]}


def plan(options: Options, k: int | None) -> jaxpipe.Pipeline:
    """One stage on all replicas; dense for ``k=None``."""
    devices = jax.devices()[: options.replicas]
    mesh = jax.make_mesh((len(devices), 1), ("data", "stage"), devices=devices)
    steps = options.epochs * (1437 // options.batch_size)
    batch = {
        "image": jax.ShapeDtypeStruct((options.batch_size, 8, 8, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((options.batch_size,), jnp.int32),
    }
    return jaxpipe.partition(
        DigitsNet(),
        mesh,
        batch,
        loss=loss,
        optimizer=optax.sgd(optax.cosine_decay_schedule(options.learning_rate, steps), momentum=0.9),
        evaluate=evaluate,
        num_microbatches=1,
        profile="analytic",
        gradient_exchange="dense" if k is None else block_sparse(k=k, mode=options.mode),
    )


def train(pipeline: jaxpipe.Pipeline, setting: str, options: Options, seed: int) -> Result:
    """Train for all epochs."""
    start = time.perf_counter()
    data, test = load(seed)
    order = np.random.default_rng(seed)
    state = pipeline.init(jax.random.key(seed))
    steps = 0
    for _ in range(options.epochs):
        rows = order.permutation(len(data["label"]))
        for first in range(0, len(rows) - options.batch_size + 1, options.batch_size):
            chosen = rows[first : first + options.batch_size]
            state, _ = pipeline.step(state, {name: x[chosen] for name, x in data.items()})
            steps += 1
    accuracy = float(pipeline.evaluate(state, test)["accuracy"])
    dense = pipeline.plan.memory["parameters"]  # gradients are as large
    sent = dense if pipeline.plan.exchange_bytes is None else pipeline.plan.exchange_bytes
    return Result(setting, accuracy, steps * sent, steps * dense, time.perf_counter() - start)


def picture(results: list[Result]) -> Figure:
    """Accuracy against bytes."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogx([r.sent / 2**20 for r in results], [100 * r.accuracy for r in results], "o-", color="#0072b2")
    for r in results:
        axes.annotate(r.setting, (r.sent / 2**20, 100 * r.accuracy), textcoords="offset points", xytext=(4, 6))
    axes.set_xlabel("MiB that one replica has handed to the collectives")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    return figure


def main(options: Options) -> list[Result]:
    """Train densely and with each number of blocks."""
    console = Console()
    results = []
    for k in (None, *options.blocks):
        setting = "dense" if k is None else f"k = {k}"
        with console.status(f"training, {setting}"):
            results.append(train(plan(options, k), setting, options, options.seed))
    table = Table(title=f"{options.replicas} replicas, {options.epochs} epochs, {options.mode}", title_justify="left")
    for column in ("exchange", "test accuracy", "sent by a replica", "fewer bytes", "seconds"):
        table.add_column(column, justify="left" if column == "exchange" else "right")
    for r in results:
        row = r.setting, f"{r.accuracy:.2%}", bytes_text(r.sent), f"{r.ratio:.0f}x", f"{r.seconds:.0f}"
        table.add_row(*row)
    console.print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    picture(results).savefig(options.out / "sparse.png", dpi=150)
    print(f"wrote {options.out / 'sparse.png'}")
    return results


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", chosen.replicas)
    main(chosen)
