"""Train a character language model on the Python standard library's own sources, as a pipeline over several devices.

    python -m examples.train_language
    python -m examples.train_language --stages 2 --steps 1000 --width 128 --layers 6

A decoder-only transformer whose output layer is its token embedding: that parameter is used in the first stage and in
the last, lives in the first, and is sent to the last once a step. Without enough accelerators the stages are
simulated CPU devices. At the end: bits per character on files that were not trained on, against those of counting how
often each character occurs, and each pair of characters, in the training files.
"""

import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxpipe
from examples.models.transformer import Transformer


#: ASCII; whatever else occurs is read as character 0.
VOCABULARY = 128


@dataclass(frozen=True)
class Options:
    """Training options."""

    stages: int = 4
    steps: int = 400
    batch_size: int = 32
    num_microbatches: int = 8
    length: int = 64
    """Characters of an example."""
    width: int = 64
    layers: int = 4
    memory: str | None = None
    """Most bytes on a device, such as 10MiB."""
    learning_rate: float = 3e-3
    seed: int = 0


def sources() -> tuple[np.ndarray, np.ndarray]:
    """Characters of the standard library's modules, the first megabytes of them; every tenth file is for the test."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    parts = [b"".join(t for k, t in enumerate(texts) if (k % 10 == 9) == held_out) for held_out in (False, True)]
    characters = [np.frombuffer(part, np.uint8).astype(np.int32) for part in parts]
    return tuple(np.where(x < VOCABULARY, x, 0) for x in characters)  # type: ignore[return-value]


def loss(model: Transformer, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy of each next character, in nats."""
    logits = model(batch["text"][:, :-1], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"][:, 1:]).mean()


def evaluate(model: Transformer, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the loss without dropout."""
    logits = model(batch["text"][:, :-1], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"][:, 1:]).mean()


def counted_bits(train: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Bits per character of the test text by how often characters, and pairs of them, occur in the other."""
    # Everything counts once more than it occurs: nothing is impossible.
    single = np.bincount(train, minlength=VOCABULARY) + 1
    single = single / single.sum()
    pairs = np.ones((VOCABULARY, VOCABULARY))
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    after = pairs / pairs.sum(1, keepdims=True)
    return float(-np.log2(single[test[1:]]).mean()), float(-np.log2(after[test[:-1], test[1:]]).mean())


def main(options: Options) -> tuple[float, float, float]:
    """Train; returns bits per character of the model, of single characters, and of pairs."""
    console = Console()
    train, test = sources()
    rows, length = options.batch_size, options.length
    devices = jax.devices()[: options.stages]
    mesh = jax.make_mesh((len(devices),), ("stage",), devices=devices)
    model = Transformer(
        vocab=VOCABULARY,
        num_layers=options.layers,
        width=options.width,
        num_heads=4,
        max_length=length,
        dropout_rate=0.0,
    )
    decay = optax.warmup_cosine_decay_schedule(0, options.learning_rate, options.steps // 10, options.steps)
    pipeline = jaxpipe.partition(
        model,
        mesh,
        {"text": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)},
        loss=loss,
        evaluate=evaluate,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(decay)),
        num_microbatches=options.num_microbatches,
        memory=options.memory,
    )
    print(pipeline.plan)

    start = time.perf_counter()
    state = pipeline.init(jax.random.key(options.seed))
    rng = np.random.default_rng(options.seed)
    with console.status("training") as status:
        for step in range(1, options.steps + 1):
            starts = rng.integers(0, len(train) - length, rows)
            state, metrics = pipeline.step(state, {"text": train[starts[:, None] + np.arange(length + 1)]})
            if step % 10 == 0:
                bits = float(metrics["loss"]) / np.log(2)
                status.update(f"step {step} of {options.steps}: {bits:.2f} bits per character")
    print(f"trained {options.steps} steps in {time.perf_counter() - start:.0f} s, compilation included")

    count = min(512, (len(test) - 1) // length // rows * rows)
    starts = np.linspace(0, len(test) - length - 1, count).astype(int)
    measured = pipeline.evaluate(state, {"text": test[starts[:, None] + np.arange(length + 1)]})
    bits = float(measured["loss"]) / np.log(2)
    single, pairs = counted_bits(train, test)
    print(f"{bits:.2f} bits per character; knowing single characters takes {single:.2f}, knowing pairs {pairs:.2f}")
    return bits, single, pairs


if __name__ == "__main__":
    chosen_options = tyro.cli(Options, description=__doc__)
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", chosen_options.stages)
    reached, _, from_pairs = main(chosen_options)
    sys.exit(0 if reached < from_pairs else "the model predicts no better than counts of pairs")
