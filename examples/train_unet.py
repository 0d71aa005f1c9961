"""Train a U-Net to find shapes in noisy images, as a pipeline over several devices.

    python -m examples.train_unet
    python -m examples.train_unet --stages 2 --steps 600 --memory 10MiB

Its skip connections lead from the first stages to the last, through those between. Images are drawn here: one to three
discs and squares of different brightness under a gradient and noise; each pixel is background, disc or square. Without
enough accelerators the stages are simulated CPU devices. At the end: the mean over the two shapes of intersection over
union on new images, against that of the best threshold on brightness, which can find shapes but not tell them apart.
"""

import sys
import time
from dataclasses import dataclass

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

import jaxpipe
from examples.models.unet import UNet


@dataclass(frozen=True)
class Options:
    """Training options."""

    stages: int = 4
    steps: int = 300
    batch_size: int = 32
    num_microbatches: int = 8
    side: int = 32
    """Height and width of the images."""
    width: int = 8
    """Channels of the first level."""
    memory: str | None = None
    """Most bytes on a device, such as 10MiB."""
    learning_rate: float = 1e-2
    seed: int = 0


Data = dict[str, np.ndarray]


def draw(rng: np.random.Generator, count: int, side: int) -> Data:
    """Images ``[count, side, side, 1]`` and classes ``[count, side, side]``: 0 background, 1 disc, 2 square."""
    y, x = np.mgrid[:side, :side]
    images = rng.normal(0, 0.15, (count, side, side))
    classes = np.zeros((count, side, side), np.int32)
    for image, labels in zip(images, classes, strict=True):
        slope = rng.uniform(-0.5, 0.5, 2) / side
        image += slope[0] * x + slope[1] * y
        for _ in range(rng.integers(1, 4)):
            kind, radius = rng.integers(1, 3), rng.uniform(0.15, 0.25) * side
            dx, dy = (np.abs(axis - rng.uniform(radius, side - radius)) for axis in (x, y))
            inside = np.hypot(dx, dy) < radius if kind == 1 else np.maximum(dx, dy) < 0.9 * radius
            image[inside] += rng.uniform(0.5, 1.0)
            labels[inside] = kind
    return {"image": images[..., None].astype(np.float32), "class": classes}


def loss(model: UNet, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy over all pixels."""
    logits = model(batch["image"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["class"]).mean()


def predict(model: UNet, batch: dict[str, jax.Array]) -> jax.Array:
    """The class of every pixel, with running statistics of BatchNorm."""
    return model(batch["image"], train=False).argmax(-1)


def mean_iou(found: np.ndarray, classes: np.ndarray) -> float:
    """Intersection over union of each shape, over all images together; their mean."""
    pairs = [(found == kind, classes == kind) for kind in (1, 2)]
    return float(np.mean([(a & b).sum() / max(1, (a | b).sum()) for a, b in pairs]))


def threshold_iou(data: Data, test: Data) -> float:
    """Return the score of a brightness threshold for squares and discs, the best one on the training data."""

    def iou(data: Data, limit: float, kind: int) -> float:
        return mean_iou(np.where(data["image"][..., 0] > limit, kind, 0), data["class"])

    limits = np.linspace(-1, 2, 61)
    limit, kind = max(((x, kind) for x in limits for kind in (1, 2)), key=lambda chosen: iou(data, *chosen))
    return iou(test, limit, kind)


def main(options: Options) -> tuple[float, float]:
    """Train; returns the intersection over union on new images, and that of the baseline."""
    console = Console()
    rng = np.random.default_rng(options.seed)
    test = draw(rng, 128, options.side)
    devices = jax.devices()[: options.stages]
    mesh = jax.make_mesh((len(devices),), ("stage",), devices=devices)
    pipeline = jaxpipe.partition(
        UNet(num_classes=3, width=options.width, depth=2, norm=True),
        mesh,
        draw(rng, options.batch_size, options.side),
        loss=loss,
        predict=predict,
        optimizer=optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps)),
        num_microbatches=options.num_microbatches,
        memory=options.memory,
    )
    print(pipeline.plan)

    start = time.perf_counter()
    state = pipeline.init(jax.random.key(options.seed))
    with console.status("training") as status:
        for step in range(1, options.steps + 1):
            data = draw(rng, options.batch_size, options.side)
            state, metrics = pipeline.step(state, data)
            if step % 10 == 0:
                status.update(f"step {step} of {options.steps}: loss {metrics['loss']:.4f}")
    print(f"trained {options.steps} steps in {time.perf_counter() - start:.0f} s, compilation included")
    predicted = np.asarray(pipeline.predict(state, test))
    reached, baseline = mean_iou(predicted, test["class"]), threshold_iou(draw(rng, 128, options.side), test)
    print(f"intersection over union {reached:.3f}; a threshold on brightness reaches {baseline:.3f}")
    return reached, baseline


if __name__ == "__main__":
    chosen_options = tyro.cli(Options, description=__doc__)
    # Counts only where JAX finds no accelerator, and only before it has looked for devices.
    jax.config.update("jax_num_cpu_devices", chosen_options.stages)
    iou, simple = main(chosen_options)
    sys.exit(0 if iou > simple + 0.2 else "the shapes are not found")
