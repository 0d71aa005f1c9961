"""The models that ``scripts.bench_encoding`` measures, each as a training loss with its arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from examples import models
from jaxpipe.array_types import PyTree


Wrap = Callable[[Callable], Callable]  # of a module class or a function
Apply = Callable[
    [PyTree, jax.Array, PyTree, jax.Array], tuple[jax.Array, PyTree]
]  # params, x, state, key: logits, state

TRAIN = {"train": True}


@dataclass(frozen=True)
class Problem:
    """A model, for which ``apply(wrap)`` makes a fresh function, and the arguments of its loss.

    ``model`` is the same for ``jaxpipe.partition``, which calls it with ``call``.
    """

    apply: Callable[[Wrap], Apply]
    arguments: tuple[PyTree, ...]
    model: nn.Module | nnx.Module | Callable[..., jax.Array]
    call: Mapping[str, Any] = field(default_factory=dict)

    def loss(
        self, wrap: Wrap, wrap_apply: Wrap, wrap_loss: Wrap = lambda loss: loss
    ) -> Callable[..., tuple[jax.Array, PyTree]]:
        """A fresh, wrapped loss of the wrapped model, whose ``apply`` is wrapped as well."""
        apply = wrap_apply(self.apply(wrap))

        def loss(
            params: PyTree, x: jax.Array, state: PyTree, labels: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, PyTree]:
            logits, new_state = apply(params, x, state, key)
            return cross_entropy(logits, labels), new_state

        return wrap_loss(loss)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over all labels."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1).mean()


@dataclass(frozen=True)
class Case:
    """A model at the size at which it is measured: ``make(batch)``."""

    name: str
    batch: int
    make: Callable[[int], Problem]


def normal(*shape: int) -> jax.Array:
    """A batch of noise."""
    return jax.random.normal(jax.random.key(1), shape)


def problem(
    apply: Callable[[Wrap], Apply],
    params: PyTree,
    x: jax.Array,
    state: PyTree,
    model: nn.Module | nnx.Module | Callable[..., jax.Array],
    call: Mapping[str, Any],
) -> Problem:
    """With random labels in the shape of the model's logits."""
    key = jax.random.key(2)
    logits, _ = jax.eval_shape(apply(lambda target: target), params, x, state, key)
    labels = jax.random.randint(jax.random.key(3), logits.shape[:-1], 0, logits.shape[-1])
    return Problem(apply, (params, x, state, labels, key), model, call)


def linen(cls: type[nn.Module], x: jax.Array, call: Mapping[str, Any], **fields: Any) -> Problem:
    """``cls(**fields)(x, **call)``."""
    state = dict(jax.jit(lambda x: cls(**fields).init(jax.random.key(0), x, **call))(x))
    params = state.pop("params")

    def apply(wrap: Wrap) -> Apply:
        model = wrap(cls)(**fields)

        def run(params: PyTree, x: jax.Array, state: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
            variables = {"params": params, **state}
            return model.apply(variables, x, **call, rngs={"dropout": key}, mutable=list(state))

        return run

    return problem(apply, params, x, state, cls(**fields), call)


def nnx_module(cls: type[nnx.Module], x: jax.Array, **fields: Any) -> Problem:
    """``cls(rngs, **fields)(x)``."""
    _, params, state = nnx.split(cls(nnx.Rngs(0), **fields), nnx.Param, ...)

    def apply(wrap: Wrap) -> Apply:
        definition = nnx.graphdef(wrap(cls)(nnx.Rngs(0), **fields))

        def run(params: PyTree, x: jax.Array, state: PyTree, _: jax.Array) -> tuple[jax.Array, PyTree]:
            model = nnx.merge(definition, params, state, copy=True)
            return model(x), nnx.state(model, nnx.Not(nnx.Param))

        return run

    return problem(apply, params, x, state, cls(nnx.Rngs(0), **fields), {})


def mlp(x: jax.Array, sizes: Sequence[int]) -> Problem:
    """The plain function ``mlp(params, x)``."""

    def apply(wrap: Wrap) -> Apply:
        function = wrap(models.mlp)
        return lambda params, x, state, _: (function(params, x), state)

    params = models.init_mlp(jax.random.key(0), sizes)
    return problem(apply, params, x, {}, jax.tree_util.Partial(models.mlp, params), {})


def language(cls: type[nn.Module], batch: int, length: int, vocab: int, **fields: Any) -> Problem:
    """A language model on random tokens."""
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, vocab)
    return linen(cls, tokens, TRAIN, vocab=vocab, max_length=length, **fields)


#: Networks at their own widths and depths; images and batches such that a step takes seconds on two CPU cores.
CASES = (
    Case("AlexNet", 32, lambda n: linen(models.AlexNet, normal(n, 32, 32, 3), TRAIN)),
    Case("NiN", 32, lambda n: linen(models.NiN, normal(n, 32, 32, 3), TRAIN)),
    Case("OverFeat", 8, lambda n: linen(models.OverFeat, normal(n, 231, 231, 3), TRAIN)),
    Case("VGG16", 32, lambda n: linen(models.VGG16, normal(n, 32, 32, 3), {})),
    Case("GoogLeNet", 16, lambda n: linen(models.Inception, normal(n, 32, 32, 3), {})),
    Case("ResNet50", 8, lambda n: linen(models.ResNet50, normal(n, 128, 128, 3), TRAIN)),
    Case("UNet", 4, lambda n: linen(models.UNet, normal(n, 64, 64, 3), TRAIN, norm=True)),
    Case("ViT-B", 2, lambda n: linen(models.ViT, normal(n, 224, 224, 3), TRAIN)),
    Case("GPT-2", 1, lambda n: language(models.GPT2, n, 256, 50257)),
)

#: Networks at sizes that keep a GPU busy, only compiled on other machines. Nothing was tuned to Llama, BERT, Hawk and
#: Mixer.
GPU_CASES = (
    Case("GPT-2 8x512", 8, lambda n: language(models.GPT2, n, 512, 50257)),
    Case("Scanned GPT-2 8x512", 8, lambda n: language(models.GPT2, n, 512, 50257, scanned=True)),
    Case("Llama 8x512", 8, lambda n: language(models.Llama, n, 512, 32000)),
    Case("Llama bf16 8x512", 8, lambda n: language(models.Llama, n, 512, 32000, dtype=jnp.bfloat16)),
    Case("BERT 8x512", 8, lambda n: language(models.Bert, n, 512, 30522)),
    Case("Hawk 8x512", 8, lambda n: language(models.Hawk, n, 512, 32000)),
    Case("Mixer 32x224", 32, lambda n: linen(models.Mixer, normal(n, 224, 224, 3), TRAIN)),
    Case("ViT-B 16x224", 16, lambda n: linen(models.ViT, normal(n, 224, 224, 3), TRAIN)),
    Case("ResNet50 32x224", 32, lambda n: linen(models.ResNet50, normal(n, 224, 224, 3), TRAIN)),
    Case("GroupNorm 32x128", 32, lambda n: linen(models.GroupNormCNN, normal(n, 128, 128, 3), {})),
)

#: The models that take ``remat=True``.
WITH_BLOCKS = ("GPT-2", "Scanned GPT-2", "Llama", "BERT", "Hawk", "Mixer", "ViT-B", "ResNet50", "GroupNorm")

#: Small ones, which differ in how they are written.
SMALL_CASES = (
    Case("VGG16-64", 64, lambda n: linen(models.VGG16, normal(n, 32, 32, 3), {})),
    Case("ResNet18", 32, lambda n: linen(models.ResNet18, normal(n, 32, 32, 3), TRAIN)),
    Case("UNet-small", 8, lambda n: linen(models.UNet, normal(n, 64, 64, 3), {}, width=32, depth=3)),
    Case("Inception-small", 16, lambda n: linen(models.Inception, normal(n, 32, 32, 3), {}, width=32)),
    Case("Transformer", 8, lambda n: language(models.Transformer, n, 64, 256, num_layers=4, width=128, num_heads=4)),
    Case("GPT-2 tiny", 2, lambda n: language(models.GPT2, n, 16, 64, num_layers=2, width=32, num_heads=2)),
    Case("DigitsCNN-Linen", 128, lambda n: linen(models.LinenDigitsCNN, normal(n, 8, 8, 1), TRAIN, width=64)),
    Case("DigitsCNN-NNX", 128, lambda n: nnx_module(models.NNXDigitsCNN, normal(n, 8, 8, 1), width=64)),
    Case("MLP", 256, lambda n: mlp(normal(n, 1024), [1024] * 5 + [10])),
    Case("ScannedMLP", 256, lambda n: linen(models.ScannedMLP, normal(n, 256), {}, num_layers=12, width=256)),
    Case("RematCNN", 16, lambda n: linen(models.RematCNN, normal(n, 32, 32, 3), {}, width=32)),
    Case("SoftplusMLP", 1024, lambda n: linen(models.SoftplusMLP, normal(n, 512), {}, width=512)),
)

CASES_BY_NAME = {case.name: case for case in CASES + GPU_CASES + SMALL_CASES}
