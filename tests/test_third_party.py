"""Models made of Flax's own modules, as anybody would write them: decorated, they give the same gradients for less."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe import memory_encoded, residual_report
from tests.support.compare import FUSION, relative_l2


class EncoderBlock(nn.Module):
    """Attention over everything, after layer normalization; then a GELU network."""

    @nn.compact
    def __call__(self, x, *, train):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.1, deterministic=not train)(y, y)
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        y = nn.Dense(64)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Encoder(nn.Module):
    """One block, and a classifier over the mean of the sequence."""

    @nn.compact
    def __call__(self, x, *, train):
        x = EncoderBlock()(x, train=train)
        return nn.Dense(5)(nn.LayerNorm()(x).mean(1))


class Decoder(nn.Module):
    """A causal language model with padding, whose output layer is its embedding."""

    @nn.compact
    def __call__(self, tokens, *, train):
        embed = nn.Embed(23, 32)
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], 32))
        mask = nn.combine_masks(nn.make_causal_mask(tokens), nn.make_attention_mask(tokens > 0, tokens > 0))
        for _ in range(2):
            y = nn.RMSNorm()(x)
            x = x + nn.SelfAttention(num_heads=4, decode=False, deterministic=not train)(y, mask=mask)
            gate, value = jnp.split(nn.Dense(128, use_bias=False)(nn.RMSNorm()(x)), 2, axis=-1)
            x = x + nn.Dense(32, use_bias=False)(nn.silu(gate) * value)
        return embed.attend(nn.RMSNorm()(x))


class Layer(nn.Module):
    """One layer of a scanned network."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.relu(nn.Dense(64)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.2, deterministic=False)(nn.Dense(x.shape[-1])(y)), None


def scanned(layer):
    """A network whose layers are one ``nn.scan`` over a module."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
            return nn.Dense(5)(layers()(x, None)[0])

    return Scanned


class Recurrent(nn.Module):
    """Convolution up and down with group and batch normalization, and an LSTM over the columns."""

    @nn.compact
    def __call__(self, x, *, train):
        y = nn.relu(nn.GroupNorm(num_groups=2)(nn.Conv(8, (3, 3), strides=(2, 2))(x)))
        y = nn.BatchNorm(use_running_average=not train)(nn.ConvTranspose(8, (3, 3), strides=(2, 2))(y))
        x = nn.max_pool(nn.relu(y + nn.Conv(8, (1, 1))(x)), (2, 2), strides=(2, 2))
        x = nn.RNN(nn.OptimizedLSTMCell(16))(x.reshape(*x.shape[:2], -1))
        return nn.Dense(5)(nn.relu6(x[:, -1]))


def normal(*shape):
    return jax.random.normal(jax.random.key(1), shape)


def tokens():
    return jax.random.randint(jax.random.key(1), (2, 16), 0, 23)


#: Name -> (model of a decoration, inputs).
MODELS = {
    "encoder": (lambda decorate: decorate(Encoder), lambda: normal(2, 12, 32)),
    "decoder": (lambda decorate: decorate(Decoder), tokens),
    "scan": (lambda decorate: scanned(decorate(Layer)), lambda: normal(8, 32)),
    "recurrent": (lambda decorate: decorate(Recurrent), lambda: normal(2, 12, 12, 3)),
}


MARKS = {"scan": pytest.mark.core, "decoder": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in MODELS])
def test_third_party_linen_layers_keep_their_gradients(name):
    make, inputs = MODELS[name]
    plain, encoded = make(lambda cls: cls)(), make(memory_encoded)()
    x, dropout = inputs(), jax.random.key(2)
    shapes = jax.eval_shape(lambda: plain.init({"params": dropout, "dropout": dropout}, x, train=True))
    rng = np.random.default_rng(0)  # quicker than to compile the model's initialization
    variables = jax.tree.map(lambda a: jnp.asarray(rng.normal(0.2, 0.2, a.shape), a.dtype), shapes)
    rest = {collection: tree for collection, tree in variables.items() if collection != "params"}

    def derivative(model):
        def loss(params):
            outputs, state = model.apply(
                {"params": params, **rest}, x, train=True, mutable=list(rest), rngs={"dropout": dropout}
            )
            return -jax.nn.log_softmax(outputs)[..., 0].mean(), state

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"]), residual_report(
            loss, variables["params"]
        )

    (expected, _), (actual, report) = derivative(plain), derivative(encoded)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert relative_l2(actual, expected) < FUSION
    assert 0 < report.total_bytes < report.plain_bytes


class Residual(nnx.Module):
    """An NNX network of the layers that have state of their own: running statistics, random numbers."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8 * 4 * 4, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.leaky_relu(x + self.norm2(self.conv2(x)))
        x = nnx.max_pool(self.dropout(x), (3, 3), strides=(2, 2), padding="SAME")
        return self.head(x.reshape(x.shape[0], -1))


def test_nnx():
    x = normal(4, 8, 8, 3)

    def loss(model, x):
        return -jax.nn.log_softmax(model(x))[..., 0].mean()

    def derivative(cls):
        model = cls(nnx.Rngs(0))
        report = residual_report(loss, model, x)
        value, gradients = nnx.jit(nnx.value_and_grad(loss))(model, x)
        running = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
        return (value, jax.tree.leaves(gradients), running), report

    (expected, _), (actual, report) = derivative(Residual), derivative(memory_encoded(Residual))
    assert relative_l2(actual, expected) < FUSION
    assert 0 < report.total_bytes < report.plain_bytes
