"""Random numbers: the streams of a model, of any shape and in any mode, and those of a loss."""

import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.models.bind_nnx import reseed
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.plain_training import gradient_of_batch


KEY = jax.random.key(0)
M = 4
BATCH = {"x": jax.random.normal(jax.random.key(1), (16, 8))}


def partition(model, loss, stages, **kwargs):
    settings = {"loss": loss, "optimizer": optax.sgd(0.1), "num_microbatches": M, "profile": "analytic"} | kwargs
    return jaxpipe.partition(model, mesh_of(stages), BATCH, **settings)


def check_gradients(pipeline, state, params, plain):
    """``plain(params, microbatch, key) -> loss`` with the keys of micro-batches."""
    keys = [pipeline.microbatch_key(state, j) for j in range(M)]

    def of_microbatch(params, _, batch, j):
        return plain(params, batch, keys[j]), None

    loss, gradient, _ = gradient_of_batch(of_microbatch, params, None, BATCH, M)
    (value, _), gradients = pipeline.value_and_grad(state, BATCH)
    np.testing.assert_allclose(value, loss, rtol=FUSION)
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(gradient)) < 2 * FUSION


class Switched(nn.Module):
    """Drops out where there is a stream for it."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.relu(nn.Dense(8)(x)))
        if self.has_rng("noise"):
            x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(5)(x)


@pytest.mark.parametrize(
    "stages", [pytest.param(2, marks=pytest.mark.core), *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_every_stream_is_there_for_has_rng(stages):
    pipeline = partition(Switched(), lambda model, batch: jnp.square(model(batch["x"])).mean(), stages)
    state = pipeline.init(KEY)
    params = Switched().init(KEY, BATCH["x"])["params"]
    assert_same_bits(pipeline.parameters(state)["params"], jax.tree.map(np.asarray, params))

    def plain(params, batch, key):
        # Streams that are not named are made of "params", one draw after the other.
        class Named(Switched):
            def has_rng(self, name):
                return True

        return jnp.square(Named().apply({"params": params}, batch["x"], rngs={"params": key})).mean()

    check_gradients(pipeline, state, params, plain)
    assert not nn.Dropout(0.5).bind({}).has_rng("dropout")  # as ever, outside of a pipeline


def test_a_stream_that_a_lifted_transformation_splits_by_name():
    class Split(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            drop = nn.vmap(nn.Dropout, variable_axes={}, split_rngs={"dropout": True})(0.5, deterministic=False)
            return nn.Dense(5)(drop(x))

    params = Split().init({"params": KEY, "dropout": KEY}, BATCH["x"])["params"]
    pipeline = partition(Split(), lambda model, batch: jnp.square(model(batch["x"])).mean(), 2)
    state = pipeline.init(KEY, variables={"params": params})

    def plain(params, batch, key):
        return jnp.square(Split().apply({"params": params}, batch["x"], rngs={"dropout": key})).mean()

    check_gradients(pipeline, state, params, plain)


def test_a_stream_that_initialization_does_not_name():
    class Late(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            if not self.is_initializing():
                x = nn.vmap(nn.Dropout, variable_axes={}, split_rngs={"dropout": True})(0.5, deterministic=False)(x)
            return nn.Dense(5)(x)

    params = Late().init(KEY, BATCH["x"])["params"]
    pipeline = partition(Late(), lambda model, batch: jnp.square(model(batch["x"])).mean(), 2)
    state = pipeline.init(KEY)
    assert_same_bits(pipeline.parameters(state)["params"], jax.tree.map(np.asarray, params))

    def plain(params, batch, key):
        return jnp.square(Late().apply({"params": params}, batch["x"], rngs={"dropout": key})).mean()

    check_gradients(pipeline, state, params, plain)


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        mean, spread = jnp.split(nn.Dense(8)(nn.relu(nn.Dense(16)(x))), 2, -1)
        return nn.Dense(8)(nn.relu(nn.Dense(16)(mean + jnp.exp(spread) * jax.random.normal(key, mean.shape))))


@pytest.mark.parametrize(
    ("stages", "runtime"), [(1, "mpmd"), pytest.param(2, "mpmd", marks=pytest.mark.core), (2, "spmd")]
)
def test_a_loss_draws_for_a_linen_model(stages, runtime):
    def value(model, batch, first, second):
        return jnp.square(model(batch["x"] + jax.random.normal(second, batch["x"].shape), first) - batch["x"]).mean()

    def loss(model, batch):
        return value(model, batch, model.make_rng("z"), model.make_rng("z"))

    params = VAE().init(KEY, BATCH["x"], KEY)["params"]
    pipeline = partition(VAE(), loss, stages, runtime=runtime)
    state = pipeline.init(KEY, variables={"params": params})

    def plain(params, batch, key):
        stream = jax.random.fold_in(key, zlib.crc32(b"z"))
        keys = [jax.random.fold_in(stream, n) for n in range(2)]
        return value(lambda *args: VAE().apply({"params": params}, *args), batch, *keys)

    check_gradients(pipeline, state, params, plain)


def test_a_loss_that_takes_rngs():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.b(self.dropout(nnx.relu(self.a(x)), rngs=rngs))

    def loss(model, batch, rngs):
        return jnp.square(model(batch["x"], rngs)).mean()

    model = Model(nnx.Rngs(0))
    structure, params, rest = nnx.split(model, nnx.Param, ...)
    pipeline = partition(model, loss, 2, evaluate=loss)
    state = pipeline.init(KEY)

    def plain(params, batch, key):
        model = nnx.merge(structure, params, rest, copy=True)
        return loss(model, batch, nnx.Rngs(jax.random.fold_in(key, zlib.crc32(b"rngs"))))

    check_gradients(pipeline, state, params, plain)
    assert np.isfinite(pipeline.evaluate(state, BATCH)["loss"])
    # And for a function of variables.
    tree = {"w": jnp.ones((8, 5))}
    pipeline = partition(
        jax.tree_util.Partial(lambda v, x: x @ v["w"], tree),
        lambda f, batch, rngs: jnp.square(f(batch["x"]) + rngs.noise.normal((4, 5))).mean(),
        1,
    )
    assert np.isfinite(pipeline.value_and_grad(pipeline.init(KEY), BATCH)[0][0])


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.linear(x)))


class Stack(nnx.Module):
    """Layers as one scan, with a key for each."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(axis_size=4)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(x, self.layers))


class Ensemble(nnx.Module):
    """Members with keys of their own, beside forked streams of two shapes."""

    def __init__(self, rngs):
        self.members = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(rngs.params(), 3))
        self.head = nnx.Linear(8, 5, rngs=rngs)
        self.heads = rngs.params.split((2, 3))
        self.shared = nnx.Rngs(noise=7).noise.broadcast((2,))

    def __call__(self, x):
        x = nnx.vmap(lambda member, x: member(x), in_axes=(0, None))(self.members, x).mean(0)

        @nnx.vmap
        def draw(stream):
            return stream.normal((8,))

        same = draw(self.shared)
        noise = nnx.vmap(draw)(self.heads).sum((0, 1)) + same[0] * same[1]
        return self.head(x + 0.1 * noise)


def nnx_loss(model, batch):
    return jnp.square(model(batch["x"])).mean()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("cls", "stages", "unroll"),
    [
        pytest.param(Stack, 1, False, marks=pytest.mark.slow),
        pytest.param(Stack, 2, False, marks=pytest.mark.core),
        pytest.param(Stack, 4, True, marks=pytest.mark.slow),
        (Ensemble, 2, False),
    ],
)
def test_nnx_streams_of_any_shape(cls, stages, unroll, training):
    model = cls(nnx.Rngs(0, dropout=1))
    model.train() if training else model.eval()
    structure, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    options = jaxpipe.PlanOptions(unroll_scans=unroll)
    pipeline = partition(model, nnx_loss, stages, options=options)
    state = pipeline.init(KEY)

    def plain(params, batch, key):
        return nnx_loss(nnx.merge(structure, params, reseed(streams, key), rest, copy=True), batch)

    check_gradients(pipeline, state, params, plain)


def test_keys_of_a_stream_have_its_shape():
    _, streams, _ = nnx.split(Ensemble(nnx.Rngs(0)), nnx.RngState, ...)
    flat = dict(nnx.to_flat_state(reseed(streams, KEY)))
    keys = {path: x.get_value() for path, x in flat.items() if isinstance(x, nnx.RngKey)}
    before = {path: x.get_value() for path, x in nnx.to_flat_state(streams) if isinstance(x, nnx.RngKey)}
    assert {path: x.shape for path, x in keys.items()} == {path: x.shape for path, x in before.items()}
    for number, (path, value) in enumerate(keys.items()):
        fresh = jax.random.fold_in(KEY, number)
        if path[0] == "shared":  # one key for all, and still one
            expected = jnp.broadcast_to(jax.random.split(fresh, (1,)), value.shape)
        else:
            expected = jax.random.split(fresh, value.shape) if value.shape else fresh
        assert_same_bits(jax.random.key_data(value), jax.random.key_data(expected))
    counts = [x.get_value() for x in flat.values() if isinstance(x, nnx.RngCount)]
    assert counts and not any(np.any(x) for x in counts)


@pytest.mark.parametrize(("params", "dropout"), [(True, True), (True, False), (False, True), (False, False)])
def test_streams_that_a_scan_splits_or_shares(params, dropout):
    """Whether iterations have masks of their own follows from the stream's own flag, not from that of "params"."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dropout(0.5, deterministic=False)(nn.tanh(nn.Dense(8)(x))), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = {"variable_axes": {"params": 0}} if params else {"variable_broadcast": "params"}
            flags = {"params": params, "dropout": dropout}
            return nn.scan(Layer, split_rngs=flags, length=3, **shared)()(x, None)[0]

    variables = Layers().init(KEY, BATCH["x"])
    pipeline = partition(Layers(), lambda model, batch: jnp.square(model(batch["x"])).mean(), 1)
    state = pipeline.init(KEY)
    assert_same_bits(pipeline.parameters(state), jax.tree.map(np.asarray, variables))

    def plain(params, batch, key):
        return jnp.square(Layers().apply({"params": params}, batch["x"], rngs={"dropout": key})).mean()

    check_gradients(pipeline, state, variables["params"], plain)
