"""Training steps of published Flax programs: model, layers and loss are the sources' own, sizes those of a GPU.

What is written here is glue: the configuration, random data, and the step around the loss in the program's own style, a
``TrainState`` or ``nnx.Optimizer`` with the optimizer that the program uses. Depths are cut to what compiles quickly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from jaxpipe.array_types import PyTree
from scripts.encoding_cases import cross_entropy
from scripts.published_sources import BELOW, Edit, Sources


#: ``loss(params, stats, batch, key)`` gives a scalar and new statistics; ``loss(model, batch, rngs)`` a scalar.
Loss = Callable[..., Any]


class TrainState(train_state.TrainState):
    """The state of a step of Linen modules."""

    batch_stats: PyTree


@dataclass(frozen=True)
class Training:
    """A loss and what makes the arguments of its step.

    Attributes:
      loss: of a Linen or an NNX model.
      make: returns the arguments; may be traced for their shapes.
      is_nnx: whether they are NNX modules.
    """

    loss: Loss
    make: Callable[[], tuple[PyTree, ...]]
    is_nnx: bool

    @property
    def donated(self) -> tuple[int, ...]:
        """The places of the state among the arguments."""
        return (0, 1) if self.is_nnx else (0,)

    def step(self, wrap: Callable[[Loss], Loss] = lambda loss: loss) -> Callable[..., PyTree]:
        """Return the training step, with a wrapped loss."""
        return (nnx_step if self.is_nnx else linen_step)(wrap(self.loss))

    def gradients(self, wrap: Callable[[Loss], Loss] = lambda loss: loss) -> Callable[..., PyTree]:
        """Return the function of the same arguments that gives loss and gradients."""
        return (nnx_gradients if self.is_nnx else linen_gradients)(wrap(self.loss))

    def shapes(self) -> tuple[PyTree, ...]:
        """Return the arguments as shapes."""
        return (nnx.eval_shape if self.is_nnx else jax.eval_shape)(self.make)


def linen_step(loss: Loss) -> Callable[..., PyTree]:
    """Return a step of a ``TrainState``."""
    gradients = linen_gradients(loss)

    def train_step(state: TrainState, batch: PyTree, key: jax.Array) -> tuple[TrainState, jax.Array]:
        (value, stats), grads = gradients(state, batch, key)
        return state.apply_gradients(grads=grads, batch_stats=stats), value

    return train_step


def linen_gradients(loss: Loss) -> Callable[..., PyTree]:
    """Return the gradients of a loss at a state."""

    def gradients(state: TrainState, batch: PyTree, key: jax.Array) -> PyTree:
        return jax.value_and_grad(loss, has_aux=True)(state.params, state.batch_stats, batch, key)

    return gradients


def nnx_step(loss: Loss) -> Callable[..., PyTree]:
    """Return a step that updates a module."""

    def train_step(model: Any, optimizer: Any, batch: PyTree, rngs: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, batch, rngs)
        optimizer.update(model, grads)
        return value

    return train_step


def nnx_gradients(loss: Loss) -> Callable[..., PyTree]:
    """Return the gradients of a loss of a module; arguments are those of its step."""

    def gradients(model: Any, optimizer: Any, batch: PyTree, rngs: Any) -> PyTree:
        return nnx.value_and_grad(loss)(model, batch, rngs)

    return gradients


def linen(
    model: nn.Module, loss: Loss, tx: Any, batch: Callable[[], PyTree], inputs: Sequence[str], **call: Any
) -> Training:
    """Return a program whose model is called with some arrays of the batch."""

    def make() -> tuple[PyTree, ...]:
        data = batch()
        variables = nn.meta.unbox(
            model.init({"params": key(0), "dropout": key(1)}, *(data[name] for name in inputs), **call)
        )
        stats = variables.get("batch_stats", {})
        return (
            TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=stats),
            data,
            key(2),
        )

    return Training(loss, make, is_nnx=False)


def modules(model: Callable[[nnx.Rngs], Any], loss: Loss, tx: Any, batch: Callable[[], PyTree]) -> Training:
    """Return a program of NNX modules."""

    def make() -> tuple[PyTree, ...]:
        net = model(nnx.Rngs(0))
        return net, nnx.Optimizer(net, tx, wrt=nnx.Param), batch(), nnx.Rngs(1)

    return Training(loss, make, is_nnx=True)


def key(number: int) -> jax.Array:
    """Return a random key."""
    return jax.random.key(number)


def images(count: int, size: int, channels: int = 3, classes: int = 1000) -> dict[str, jax.Array]:
    """Return noise with labels."""
    image = jax.random.normal(key(3), (count, size, size, channels))
    return {"image": image, "label": jax.random.randint(key(4), (count,), 0, classes)}


def tokens(count: int, length: int, vocab: int, *names: str) -> dict[str, jax.Array]:
    """Return random tokens, none of which is padding, by name."""
    return {name: jax.random.randint(key(5 + k), (count, length), 1, vocab) for k, name in enumerate(names)}


def imagenet(load: Sources, tiny: bool) -> Training:
    """Return ResNet-50; the axis of ``pmap``, over which its batch norm takes means, is that of a ``vmap`` of one."""
    models, train = load("models"), load("train")
    model, size = models.ResNet50(num_classes=train.NUM_CLASSES), 32 if tiny else 224
    bound = partial(jax.vmap, axis_name="batch", in_axes=(None, 0))

    def loss(params: PyTree, stats: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        apply = bound(lambda variables, x: model.apply(variables, x, mutable=["batch_stats"]))
        logits, new = jax.tree.map(
            lambda x: x[0], apply({"params": params, "batch_stats": stats}, batch["image"][None])
        )
        penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return train.cross_entropy_loss(logits, batch["label"]) + 0.5e-4 * penalty, new["batch_stats"]

    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    return linen(model, loss, tx, lambda: images(2 if tiny else 32, size), ["image"], train=False)


def lm1b(load: Sources, tiny: bool) -> Training:
    """Return the decoder-only transformer."""
    models, train = load("models"), load("train")
    count, length, vocab = (2, 16, 64) if tiny else (16, 256, 30_000)
    config = models.TransformerConfig(vocab, vocab, num_layers=4, max_len=length, **transformer_sizes(tiny))

    def loss(params: PyTree, stats: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        inputs, rngs = batch["inputs"], {"dropout": key}
        logits = models.TransformerLM(config).apply({"params": params}, inputs, rngs=rngs)
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        total, count = train.compute_weighted_cross_entropy(logits, inputs, weights)
        return total / count, stats

    model, batch = models.TransformerLM(config), partial(tokens, count, length, vocab, "inputs")
    return linen(model, loss, optax.adamw(1e-3, b2=0.98), batch, ["inputs"])


def wmt(load: Sources, tiny: bool) -> Training:
    """Return the transformer of encoder and decoder."""
    models, train = load("models"), load("train")
    count, length, vocab = (2, 16, 64) if tiny else (32, 128, 16_000)
    sizes = transformer_sizes(tiny)
    config = models.TransformerConfig(
        vocab, vocab, share_embeddings=True, logits_via_embedding=True, num_layers=2, max_len=length, **sizes
    )

    def loss(params: PyTree, stats: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        inputs, targets, rngs = batch["inputs"], batch["targets"], {"dropout": key}
        logits = models.Transformer(config).apply({"params": params}, inputs, targets, rngs=rngs)
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
        total, count = train.compute_weighted_cross_entropy(logits, targets, weights, 0.1)
        return total / count, stats

    model, names = models.Transformer(config), ("inputs", "targets")
    return linen(model, loss, optax.adamw(1e-3, b2=0.98), partial(tokens, count, length, vocab, *names), names)


def transformer_sizes(tiny: bool) -> dict[str, int]:
    """Return the widths of the transformers of ``flax/examples``."""
    return {"emb_dim": 32, "num_heads": 2, "qkv_dim": 32, "mlp_dim": 64} if tiny else {}


def mnist(load: Sources, tiny: bool) -> Training:
    """Return the convolutional network of ``flax/examples/mnist``."""
    train = load("train")
    batch = partial(images, 4 if tiny else 1024, 28, 1, 10)
    return modules(lambda rngs: train.CNN(rngs), lambda *args: train.loss_fn(*args)[0], optax.sgd(0.1, 0.9), batch)


def gemma(load: Sources, tiny: bool) -> Training:
    """Return a small Gemma 3."""
    transformer, train, cfg = load("transformer"), load("train"), load("transformer_cfg")
    count, length, vocab = (2, 16, 64) if tiny else (8, 512, 16_384)
    sizes = {"embed_dim": 32, "hidden_dim": 64, "num_heads": 2, "head_dim": 16} if tiny else {}
    config = cfg.TransformerConfig(
        num_layers=4,
        num_embed=vocab,
        **({"embed_dim": 640, "hidden_dim": 2048, "num_heads": 4, "head_dim": 256} | sizes),
        num_kv_heads=1,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(cfg.AttentionType.LOCAL_SLIDING, cfg.AttentionType.GLOBAL) * 2,
        sliding_window_size=length // 2,
        use_qk_norm=True,
    )

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        inputs, mask = batch["inputs"], batch["inputs"] > 0
        attention_mask = transformer.make_causal_attn_mask(mask)
        positions = transformer.build_positions_from_mask(mask)
        logits, _ = model(inputs, positions=positions, attention_mask=attention_mask, cache=None, rngs=rngs)
        return train.compute_weighted_cross_entropy(logits, batch["targets"], mask.astype(jnp.float32)).mean()

    batch = partial(tokens, count, length, vocab, "inputs", "targets")
    return modules(lambda rngs: transformer.Transformer(config, rngs=rngs), loss, optax.adamw(1e-3), batch)


def bonsai_vit(load: Sources, tiny: bool) -> Training:
    """Return ViT-B/16 of 4 layers."""
    modeling = load("bonsai.models.vit.modeling")
    size, sizes = (32, {"hidden_dim": 32, "num_heads": 2, "mlp_dim": 64}) if tiny else (224, {})
    fields = vars(modeling.ModelConfig.vit_p16_224()) | {"num_layers": 4, "image_size": (size, size)} | sizes
    config = modeling.ModelConfig(**fields)

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        return cross_entropy(model(batch["image"], rngs=rngs), batch["label"])

    batch = partial(images, 2 if tiny else 32, size)
    return modules(lambda rngs: modeling.ViTClassificationModel(config, rngs=rngs), loss, optax.adamw(1e-3), batch)


def convnext(load: Sources, tiny: bool) -> Training:
    """Return ConvNeXt-T with two blocks in each stage, and drop path."""
    modeling = load("bonsai.models.convnext.modeling")
    dims, count, size = ((8, 16, 32, 64), 2, 64) if tiny else ((96, 192, 384, 768), 32, 224)
    config = modeling.ModelConfig((2, 2, 2, 2), dims, drop_path_rate=0.1, num_classes=1000)

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        return cross_entropy(model(batch["image"], rngs=rngs.dropout(), train=True), batch["label"])

    return modules(
        lambda rngs: modeling.ConvNeXt(config, rngs=rngs), loss, optax.adamw(1e-3), partial(images, count, size)
    )


def unet(load: Sources, tiny: bool) -> Training:
    """Return U-Net for two classes of pixels."""
    modeling = load("bonsai.models.unet.modeling")
    count, size, features = (1, 32, (4, 8, 8, 16, 16)) if tiny else (8, 192, (64, 128, 256, 512, 1024))
    config = modeling.ModelConfig(features=features)

    def batch() -> PyTree:
        return {**images(count, size, 1), "label": jax.random.randint(key(4), (count, size, size), 0, 2)}

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        return cross_entropy(model(batch["image"]), batch["label"])

    return modules(lambda rngs: modeling.UNet(config, rngs=rngs), loss, optax.adamw(1e-3), batch)


def efficientnet(load: Sources, tiny: bool) -> Training:
    """Return EfficientNet-B0."""
    modeling = load("bonsai.models.efficientnet.modeling")
    count, size = (2, 32) if tiny else (32, 160)

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        return cross_entropy(model(batch["image"], training=True), batch["label"])

    def model(rngs: nnx.Rngs) -> Any:  # without dropout, for which the published model takes no random stream
        return modeling.EfficientNet(
            modeling.ModelConfig(**vars(modeling.ModelConfig.b0()) | {"dropout_rate": 0.0}), rngs=rngs
        )

    return modules(model, loss, optax.adamw(1e-3), partial(images, count, size))


def mamba2(load: Sources, tiny: bool) -> Training:
    """Return Mamba-2 of 4 layers."""
    modeling = load("bonsai.models.mamba2.modeling")
    sizes = {"hidden_size": 32, "state_size": 16, "head_dim": 16, "chunk_size": 8} if tiny else {"hidden_size": 512}
    count, length, vocab = (2, 16, 64) if tiny else (8, 512, 16_384)
    config = modeling.ModelConfig(vocab_size=vocab, num_hidden_layers=4, **sizes)

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        return model(batch["inputs"], labels=batch["inputs"])["loss"]

    batch = partial(tokens, count, length, vocab, "inputs")
    return modules(lambda rngs: modeling.Mamba2ForCausalLM(config, rngs=rngs), loss, optax.adamw(1e-3), batch)


def qwen3(load: Sources, tiny: bool) -> Training:
    """Return Qwen3 of 4 layers."""
    modeling = load("bonsai.models.qwen3.modeling")
    count, length, vocab = (2, 16, 64) if tiny else (8, 512, 16_384)
    sizes = (
        {"emb_dim": 32, "mlp_dim": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
        if tiny
        else {"emb_dim": 512, "mlp_dim": 1536, "num_heads": 8, "num_kv_heads": 4}
    )
    fields = dict(num_layers=4, vocab_size=vocab, **sizes)
    base = modeling.ModelConfig.qwen3_0_6b()
    config = modeling.dataclasses.replace(base, **fields)

    def loss(model: Any, batch: PyTree, rngs: nnx.Rngs) -> jax.Array:
        inputs = batch["inputs"]
        cache = modeling.init_cache(config, count, length, 0, jnp.float32)
        logits = model(inputs, cache=cache, segment_ids=1 * (inputs != 0))
        return cross_entropy(logits[:, :-1], inputs[:, 1:])

    batch = partial(tokens, count, length, vocab, "inputs")
    return modules(lambda rngs: modeling.Qwen3(config, rngs=rngs), loss, optax.adamw(1e-3), batch)


def big_vision_vit(load: Sources, tiny: bool) -> Training:
    """Return ViT-S/16 of 4 layers with attention pooling."""
    vit, utils = load("big_vision.models.vit"), load("big_vision.utils")
    variant, size = ("mu/16", 32) if tiny else ("S/16", 224)
    model = vit.Model(1000, variant=variant, depth=2 if tiny else 4, pool_type="map")

    def loss(params: PyTree, stats: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        logits, _ = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": key})
        return utils.softmax_xent(logits=logits, labels=jax.nn.one_hot(batch["label"], 1000)), stats

    return linen(model, loss, optax.adamw(1e-3), partial(images, 2 if tiny else 64, size), ["image"])


def siglip(load: Sources, tiny: bool) -> Training:
    """Return SigLIP: towers of 3 layers for images and text, and the sigmoid loss as its trainer has it."""
    two_towers = load("big_vision.models.proj.image_text.two_towers")
    count, size, length, vocab, width = (2, 32, 8, 64, 32) if tiny else (64, 224, 64, 16_000, 384)
    variant, depth = ("mu", 2) if tiny else ("S", 3)
    model = two_towers.Model(
        image={"variant": f"{variant}/16", "depth": depth, "pool_type": "map"},
        text={"variant": variant, "depth": depth, "vocab_size": vocab},
        out_dim=(width, width),
        bias_init=-10.0,
        temperature_init=10.0,
    )

    def batch() -> PyTree:
        return {**images(count, size), **tokens(count, length, vocab, "text")}

    def loss(params: PyTree, stats: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        images, texts, extras = model.apply(
            {"params": params}, batch["image"], batch["text"], train=True, rngs={"dropout": key}
        )
        logits = jnp.dot(images, texts.T) * extras["t"] + extras["b"]
        signs = -jnp.ones_like(logits) + 2 * jnp.eye(images.shape[0])
        return jnp.mean(-jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=-1)), stats

    return linen(model, loss, optax.adamw(1e-3), batch, ["image", "text"])


def group_norm(load: Sources, tiny: bool) -> Training:
    """Return six blocks of a convolution, group norm and gelu, of widths 64 to 256."""
    model = load("group_norm").GroupNormCNN()
    count, size = (2, 16) if tiny else (32, 128)

    def loss(params: PyTree, stats: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        return cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"]), stats

    return linen(model, loss, optax.adamw(1e-3), partial(images, count, size, 3, 10), ["image"])


@dataclass(frozen=True)
class Program:
    """A published program.

    Attributes:
      clone: the repository; empty for a network that is this project's own.
      folder: where its modules are, in the clone.
      build: makes its step of the modules, or one of tiny sizes.
      blocks: names of the classes of which it has several, one after the other.
      remat: how such a class is decorated by hand; the text is formatted with ``cls``, ``policy`` and ``every``.
    """

    clone: str
    folder: str
    build: Callable[[Sources, bool], Training]
    blocks: tuple[str, ...] = ()
    remat: str = "linen_remat({cls}, {policy}, {every})"

    def load(self, sources: Path, edits: Sequence[Edit] = ()) -> Sources:
        """Return its modules, with lines written into them."""
        root = sources / self.clone if self.clone else Path(__file__).parents[1]
        return Sources((root / self.folder).resolve(), edits)

    def placed(self, policy: str, every: int) -> list[Edit]:
        """Return the lines that put every block, or every so many, under ``remat``."""
        texts = [self.remat.format(cls=cls, policy=policy, every=every) for cls in self.blocks]
        return [Edit(cls, BELOW, f"{cls} = {text}") for cls, text in zip(self.blocks, texts, strict=True)]


_NNX, _STATIC = "nnx_remat({cls}, {policy}, {every})", "linen_remat({cls}, {policy}, {every}, static=(2,))"

PROGRAMS = {
    "imagenet ResNet-50": Program("flax", "examples/imagenet", imagenet, ("BottleneckResNetBlock",)),
    "lm1b": Program("flax", "examples/lm1b", lm1b, ("EncoderDecoder1DBlock",)),
    "wmt": Program("flax", "examples/wmt", wmt, ("Encoder1DBlock", "EncoderDecoder1DBlock")),
    "mnist": Program("flax", "examples/mnist", mnist),
    "gemma": Program("flax", "examples/gemma", gemma, ("Block",), _NNX),
    "bonsai ViT": Program("bonsai", "", bonsai_vit, ("TransformerEncoder",), _NNX),
    "ConvNeXt": Program("bonsai", "", convnext, ("Block",), _NNX),
    "U-Net": Program("bonsai", "", unet, ("DoubleConv",), _NNX),
    "EfficientNet": Program("bonsai", "", efficientnet, ("MBConv",), _NNX),
    "Mamba-2": Program("bonsai", "", mamba2, ("Mamba2Block",), _NNX),
    "Qwen3": Program("bonsai", "", qwen3, ("DecoderLayer",), _NNX),
    "big_vision ViT": Program("big_vision", "", big_vision_vit, ("Encoder1DBlock",), _STATIC),
    "SigLIP": Program("big_vision", "", siglip, ("Encoder1DBlock",), _STATIC),
    "GroupNorm 32x128": Program("", "examples/models", group_norm, ("NormalizedConv",)),
}
