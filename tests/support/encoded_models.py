"""The models that transparency is tested on, small."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from examples import models as zoo
from jaxpipe.array_types import PyTree


@dataclass(frozen=True)
class LinenCase:
    """A Linen model with one batch of inputs."""

    cls: type[nn.Module]
    shape: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None

    def batch(self) -> jax.Array:
        if self.tokens is not None:
            return jax.random.randint(jax.random.key(1), self.shape, 0, self.tokens)
        return jax.random.normal(jax.random.key(1), self.shape)

    def losses(
        self, decorate: Callable[[type], type]
    ) -> tuple[Callable[..., tuple[jax.Array, PyTree]], tuple[PyTree, ...]]:
        """``loss(params, rest, x) -> (loss, new state)`` of the decorated model, and its arguments."""
        model = decorate(self.cls)(**self.fields)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(2)}
        variables = jax.jit(lambda: self.cls(**self.fields).init(keys, self.batch(), **self.kwargs))()
        rest = {name: tree for name, tree in variables.items() if name != "params"}

        def loss(params: PyTree, rest: PyTree, x: jax.Array) -> tuple[jax.Array, PyTree]:
            logits, state = model.apply(
                {"params": params, **rest}, x, mutable=list(rest), rngs={"dropout": keys["dropout"]}, **self.kwargs
            )
            return -jax.nn.log_softmax(logits.astype(jnp.float32))[..., 0].mean(), state

        return loss, (variables["params"], rest, self.batch())


TRAIN = {"train": True}
LINEN = {
    "cnn": LinenCase(zoo.LinenDigitsCNN, (4, 8, 8, 1), {"width": 4}, TRAIN),
    "resnet18": LinenCase(zoo.ResNet18, (2, 16, 16, 3), {"width": 4}, TRAIN),
    "unet": LinenCase(zoo.UNet, (2, 8, 8, 3), {"width": 4, "depth": 2}),
    "unet_norm": LinenCase(zoo.UNet, (4, 8, 8, 3), {"width": 4, "depth": 2, "norm": True}, TRAIN),
    "resnet50": LinenCase(zoo.ResNet50, (4, 32, 32, 3), {"width": 4, "stage_sizes": (1, 2), "num_classes": 10}, TRAIN),
    "inception": LinenCase(zoo.Inception, (2, 16, 16, 3), {"width": 8, "stages": (((64, 96, 128, 16, 32, 32),),) * 2}),
    "alexnet": LinenCase(zoo.AlexNet, (2, 32, 32, 3), {"width": 2}, TRAIN),
    "nin": LinenCase(zoo.NiN, (2, 16, 16, 3), {"width": 4}, TRAIN),
    "overfeat": LinenCase(zoo.OverFeat, (2, 71, 71, 3), {"width": 1, "num_classes": 10}, TRAIN),
    "vit": LinenCase(
        zoo.ViT, (2, 16, 16, 3), {"num_classes": 10, "patch": 8, "num_layers": 2, "width": 16, "num_heads": 2}, TRAIN
    ),
    "gpt2": LinenCase(
        zoo.GPT2,
        (2, 8),
        {"vocab": 20, "num_layers": 2, "width": 16, "num_heads": 2, "max_length": 8, "dropout_rate": 0.2},
        TRAIN,
        tokens=20,
    ),
    "transformer": LinenCase(
        zoo.Transformer,
        (2, 8),
        {"vocab": 20, "num_layers": 2, "width": 16, "num_heads": 2, "max_length": 8, "dropout_rate": 0.2},
        TRAIN,
        tokens=20,
    ),
    "scan": LinenCase(zoo.ScannedMLP, (4, 12), {"num_layers": 3, "width": 8}),
    "remat": LinenCase(zoo.RematCNN, (2, 8, 8, 3), {"width": 4, "depth": 2}),
    "custom_vjp": LinenCase(zoo.SoftplusMLP, (4, 12), {"width": 8}),
}
