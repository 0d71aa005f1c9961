"""State with a row for each example: every example goes on from its own, whatever micro-batch it is in."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import FUSION, relative_l2
from tests.support.meshes import mesh_of


KEY = jax.random.key(0)
N, M = 16, 4
BATCH = {"x": jax.random.normal(jax.random.key(1), (N, 8)), "y": jax.random.normal(jax.random.key(2), (N, 5))}


class Recurrent(nn.Module):
    """A carry for each example and a cache of layers beside it, behind running statistics of as many features."""

    rows: int | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(N)(x))
        carry = self.variable("carry", "h", jnp.zeros, (self.rows or len(x), 8))
        cache = self.variable("cache", "last", jnp.zeros, (2, self.rows or len(x), 8))
        h = jnp.tanh(nn.Dense(8)(x) + nn.Dense(8)(carry.value) + cache.value.sum(0))
        if not self.is_initializing():
            cache.value = jnp.stack([cache.value[1], jax.lax.stop_gradient(h)])
            carry.value = jax.lax.stop_gradient(h)
        return nn.Dense(5)(nn.relu(nn.Dense(16)(h)))


class RecurrentNNX(nnx.Module):
    def __init__(self, rngs, rows=N):
        self.a, self.b, self.c = (nnx.Linear(8, n, rngs=rngs) for n in (8, 8, 5))
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.h = nnx.Cache(jnp.zeros((rows, 8)))

    def __call__(self, x):
        h = jnp.tanh(self.norm(self.a(x)) + self.b(self.h[...]))
        self.h[...] = jax.lax.stop_gradient(h)
        return self.c(h)


def loss(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def partition(model, stages, replicas=None, batch=None, **kwargs):
    settings = {"loss": loss, "optimizer": optax.sgd(0.1), "num_microbatches": M, "profile": "analytic"} | kwargs
    return jaxpipe.partition(model, mesh_of(stages, replicas), BATCH if batch is None else batch, **settings)


def plain_linen(variables, count, steps, per_replica):
    """Train with the rows of each micro-batch; statistics go from one to the next, and are averaged over replicas."""
    rows = N // count

    def cut(tree, j):
        own = slice(j * rows, (j + 1) * rows)
        return {"carry": {"h": tree["carry"]["h"][own]}, "cache": {"last": tree["cache"]["last"][:, own]}}

    def of(params, state, batch):
        out, new = Recurrent().apply({"params": params, **state}, batch["x"], mutable=list(state))
        return jnp.square(out - batch["y"]).mean(), new

    step = jax.jit(jax.value_and_grad(of, has_aux=True))
    params, stats = variables["params"], variables["batch_stats"]
    state = {"carry": variables["carry"], "cache": variables["cache"]}
    losses = []
    for _ in range(steps):
        gradients, values, new, ends = [], [], [], []
        now = stats
        for j in range(count):
            now = stats if j % per_replica == 0 else now
            batch = jax.tree.map(lambda x, j=j: x[j * rows : (j + 1) * rows], BATCH)
            (value, after), gradient = step(params, {"batch_stats": now, **cut(state, j)}, batch)
            now = after.pop("batch_stats")
            ends += [now] if j % per_replica == per_replica - 1 else []
            new.append(after)
            gradients.append(gradient)
            values.append(value)
        stats = jax.tree.map(lambda *x: sum(x) / len(x), *ends)
        state = {
            "carry": {"h": jnp.concatenate([x["carry"]["h"] for x in new])},
            "cache": {"last": jnp.concatenate([x["cache"]["last"] for x in new], 1)},
        }
        params = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / count, params, *gradients)
        losses.append(float(sum(values) / count))
    return losses, {"params": params, "batch_stats": stats, **state}


@pytest.mark.parametrize(
    ("stages", "replicas", "m", "given", "rows"),
    [
        (1, None, 4, False, None),
        pytest.param(2, None, 4, False, None, marks=pytest.mark.core),
        (4, None, 2, False, None),
        (2, 2, 2, False, None),
        (2, None, 16, False, None),
        (2, None, 4, True, None),
        (2, None, 16, True, None),
        (2, None, 4, False, N),  # a size that the module itself has, that of the batch
        (2, None, 16, False, N),
    ],
)
def test_linen(stages, replicas, m, given, rows):
    variables = Recurrent().init(KEY, BATCH["x"])
    pipeline = partition(Recurrent(rows), stages, replicas, num_microbatches=m)
    state = pipeline.init(KEY, variables=variables) if given else pipeline.init(KEY)
    shapes = jax.tree.map(jnp.shape, pipeline.parameters(state))
    assert shapes == jax.tree.map(jnp.shape, variables)
    losses = []
    for _ in range(3):
        state, metrics = pipeline.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    expected, after = plain_linen(variables, m * (replicas or 1), 3, m)
    np.testing.assert_allclose(losses, expected, rtol=3 * FUSION)
    assert relative_l2(pipeline.parameters(state), after) < 5 * FUSION


@pytest.mark.parametrize("stages", [1, 2])
def test_nnx(stages):
    model = RecurrentNNX(nnx.Rngs(0))
    structure, params, h, rest = nnx.split(model, nnx.Param, nnx.Cache, ...)
    pipeline = partition(model, stages)
    state = pipeline.init(KEY)
    rows = N // M
    for _ in range(2):
        state, metrics = pipeline.step(state, BATCH)
    losses = []
    for _ in range(2):
        gradients, values, new = [], [], []
        for j in range(M):

            def cut(x, j=j):
                return x[j * rows : (j + 1) * rows]

            def of(params, rest, h, batch):
                model = nnx.merge(structure, params, h, rest, copy=True)
                value = loss(model, batch)
                _, h, rest = nnx.state(model, nnx.Param, nnx.Cache, ...)
                return value, (h, rest)

            step = jax.jit(jax.value_and_grad(of, has_aux=True))
            (value, (after, rest)), gradient = step(params, rest, jax.tree.map(cut, h), jax.tree.map(cut, BATCH))
            gradients.append(gradient)
            values.append(value)
            new.append(after)
        h = jax.tree.map(lambda *x: jnp.concatenate(x), *new)
        params = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / M, params, *gradients)
        losses.append(float(sum(values) / M))
    np.testing.assert_allclose(float(metrics["loss"]), losses[-1], rtol=3 * FUSION)
    got = nnx.to_flat_state(nnx.filter_state(pipeline.parameters(state), nnx.Cache))
    assert relative_l2([x.get_value() for _, x in got], jax.tree.leaves(h)) < 3 * FUSION


def test_rows_of_micro_batches_are_refused_by_name():
    with pytest.raises(jaxpipe.ModelError, match=r"h of shape \[4, 8\] has a row for each of the 4 exam"):
        partition(RecurrentNNX(nnx.Rngs(0), rows=4), 2)
    wrong = Recurrent().init(KEY, BATCH["x"][:4])
    with pytest.raises(jaxpipe.ModelError, match=r"carry/h is float32\[4, 8\], the model's is float32\[16, 8\]"):
        partition(Recurrent(), 2).init(KEY, variables=wrong)


def test_features_as_many_as_examples_are_no_examples():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5)(nn.BatchNorm(use_running_average=False)(nn.Dense(N)(x)))

    variables = Plain().init(KEY, BATCH["x"])
    for model in (Plain(), jax.tree_util.Partial(lambda v, x: x @ v["w"], {"w": jnp.ones((8, 5)), "n": jnp.arange(N)})):
        pipeline = partition(model, 1)
        state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    pipeline = partition(Plain(), 1)
    state, _ = pipeline.step(pipeline.init(KEY, variables=variables), BATCH)
    assert pipeline.parameters(state)["batch_stats"]["BatchNorm_0"]["mean"].shape == (N,)


def test_what_such_state_cannot_have_is_refused_by_name():
    with pytest.raises(jaxpipe.PartitionError, match="runtime='spmd' with the variable cache/last: it has a row"):
        partition(Recurrent(), 2, runtime="spmd")
    pipeline = partition(Recurrent(), 1, evaluate=loss)
    state = pipeline.init(KEY)
    small = jax.tree.map(lambda x: x[:8], BATCH)
    for method in (pipeline.step, pipeline.evaluate):
        with pytest.raises(jaxpipe.BatchError, match=r"8 examples.*cache/last.*batch of 16"):
            method(state, small)
    with pytest.raises(jaxpipe.PartitionError, match="several sizes with the state variable cache/last"):
        partition(Recurrent(), 1, batch=[BATCH, small])


def test_several_rows_for_an_example_are_refused_by_name():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.tanh(nn.Dense(8)(x))
            h = jnp.concatenate([h, -h])
            carry = self.variable("carry", "h", jnp.zeros, h.shape)
            out = h + carry.value
            if not self.is_initializing():
                carry.value = jax.lax.stop_gradient(out)
            return nn.Dense(5)(out[: len(x)] + out[len(x) :] ** 2)

    rule = r"h of shape .* grows with their number.*num_microbatches=1"
    with pytest.raises(jaxpipe.ModelError, match=rule):
        partition(Twice(), 1)
    for rows in (2 * N, 2 * N // M):

        class TwiceNNX(RecurrentNNX):
            def __call__(self, x):
                h = jnp.tanh(self.a(x))
                out = jnp.concatenate([h, -h]) + self.h[...]
                self.h[...] = jax.lax.stop_gradient(out)
                return self.c(out[: len(x)] + out[len(x) :])

        with pytest.raises(jaxpipe.ModelError, match=rule):
            partition(TwiceNNX(nnx.Rngs(0), rows=rows), 1)


class Remembering(nnx.Module):
    """A carry for each example, beside as many rows that all of them read, as features, and as lengths."""

    def __init__(self, rngs):
        self.a, self.b, self.c = (nnx.Linear(k, n, rngs=rngs) for k, n in ((8, N), (N, 8), (8, 5)))
        self.norm = nnx.BatchNorm(N, rngs=rngs)
        self.h = nnx.Cache(jnp.zeros((N, 8)))
        self.mean, self.calls = nnx.Cache(jnp.zeros(N)), nnx.Cache(jnp.zeros(N))
        self.bank = nnx.Variable(jax.random.normal(jax.random.key(3), (N, 8)))
        self.table = nnx.Variable(jax.random.normal(jax.random.key(4), (N, 8)))

    def __call__(self, x):
        x = jnp.tanh(self.norm(self.a(x)))
        self.mean[...] = 0.9 * self.mean[...] + jax.lax.stop_gradient(x.mean(1))
        self.calls[...] += 1
        h = jnp.tanh(self.b(x * (1 + self.mean[...][:, None])) + self.h[: len(x)]) + 0.1 * self.calls[...][:, None]
        self.h[...] = self.h[...].at[: len(x)].set(jax.lax.stop_gradient(h))
        places = jnp.argmax(jax.lax.stop_gradient(x), axis=1)
        return self.c(h + nnx.softmax(h @ self.bank[...].T) @ self.bank[...] + self.table[...][places])


def test_only_what_is_paired_with_examples_has_a_row_for_each():
    pipeline = partition(Remembering(nnx.Rngs(0)), 2)
    state = pipeline.init(KEY)
    structure, params, rows, rest = nnx.split(Remembering(nnx.Rngs(0)), nnx.Param, nnx.Cache, ...)

    @jax.jit
    def of(params, rows, rest, batch):
        model = nnx.merge(structure, params, rows, rest, copy=True)
        return loss(model, batch), nnx.state(model, nnx.Param, nnx.Cache, ...)[1:]

    step = jax.value_and_grad(of, has_aux=True)

    def part(tree, j):
        return jax.tree.map(lambda x: x[j * N // M : (j + 1) * N // M], tree)

    for _ in range(2):
        value, gradients = pipeline.value_and_grad(state, BATCH)[0][0], None
        expected, news = [], []
        for j in range(M):
            (share, (new, rest)), gradient = step(params, part(rows, j), rest, part(BATCH, j))
            expected.append(share)
            news.append(new)
            gradients = gradient if gradients is None else jax.tree.map(jnp.add, gradients, gradient)
        rows = jax.tree.map(lambda *x: jnp.concatenate(x), *news)
        params = jax.tree.map(lambda p, g: p - 0.1 * g / M, params, gradients)
        np.testing.assert_allclose(value, sum(expected) / M, rtol=3 * FUSION)
        state, _ = pipeline.step(state, BATCH)
    after = pipeline.parameters(state)
    for kind, values in ((nnx.Cache, rows), (nnx.Param, params)):
        got = nnx.to_flat_state(nnx.filter_state(after, kind))
        assert relative_l2([x.get_value() for _, x in got], jax.tree.leaves(values)) < 5 * FUSION


class Cached(nn.Module):
    """Flax's own cache, with an index that all examples share."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2, decode=True)(x, x)
        return nn.Dense(5)(x)[:, 0]


def test_rows_that_follow_from_a_count_of_calls_are_refused_by_name():
    batch = {"x": jax.random.normal(KEY, (8, 1, 6)), "y": jnp.ones((8, 5))}
    variables = Cached().init(KEY, jnp.zeros((8, 4, 6)))
    losses, cache = [], variables["cache"]
    for _ in range(2):
        given = {"params": variables["params"], "cache": cache}
        out, new = Cached().apply(given, batch["x"], mutable=["cache"])
        losses.append(float(jnp.square(out - batch["y"]).mean()))
        cache = new["cache"]
    options = {"loss": loss, "optimizer": optax.sgd(0.0), "profile": "analytic"}
    for replicas in (None, 2):
        pipeline = jaxpipe.partition(Cached(), mesh_of(1, replicas), num_microbatches=1, **options)
        state, got = pipeline.init(KEY, batch, variables=variables), []
        for _ in range(2):
            state, metrics = pipeline.step(state, batch)
            got.append(float(metrics["loss"]))
        np.testing.assert_allclose(got, losses, rtol=3 * FUSION)
    with pytest.raises(jaxpipe.ModelError, match=r"cache_index changes with each call.*cached_.*num_microbatches=1"):
        jaxpipe.partition(Cached(), mesh_of(1), num_microbatches=4, **options).init(KEY, batch, variables=variables)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_predictions_begin_with_the_state_in_every_micro_batch(runtime):
    """A decoder counts the tokens that it has read; what one micro-batch counts is no matter of the next one."""

    class Decoder(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.head = nnx.Linear(2, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
            self.position = nnx.Cache(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            position = self.position[...]
            self.position[...] = position + 1
            return self.head(jnp.sin(self.embed(x) + position))

    def predict(model, batch):
        return jnp.stack([model(batch["x"][:, 2 * t : 2 * t + 2]) for t in range(3)], 1)

    def loss(model, batch):
        return jnp.square(model(batch["x"][:, :2]) - batch["y"]).mean()

    pipeline = partition(Decoder(nnx.Rngs(0)), 2, loss=loss, predict=predict, runtime=runtime)
    state = pipeline.init(KEY)
    expected = predict(Decoder(nnx.Rngs(0)), BATCH)
    assert relative_l2(pipeline.predict(state, BATCH), expected) < FUSION


def test_a_prediction_reads_the_cache_that_it_makes():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x, decode=False):
            h = nn.Dense(8)(x)
            if decode:
                is_there = self.has_variable("cache", "total")
                total = self.variable("cache", "total", jnp.zeros, h.shape)
                if is_there:
                    h = total.value = total.value + h
            return nn.Dense(5)(nn.tanh(h))

    def predict(model, batch):
        model(batch["x"], decode=True)
        return jnp.stack([model(batch["x"] + k, decode=True) for k in range(2)], 1)

    pipeline = partition(Decoder(), 2, predict=predict)
    state = pipeline.init(KEY)
    cached, rows = pipeline.parameters(state), []
    for k in (0, 0, 1):
        row, new = Decoder().apply(cached, BATCH["x"] + k, decode=True, mutable=["cache"])
        cached = {**cached, **new}
        rows.append(row)
    assert relative_l2(pipeline.predict(state, BATCH), jnp.stack(rows[1:], 1)) < FUSION


class Perturbed(nn.Module):
    """A module that is made to ask for gradients of values inside: ``perturb`` adds zeros to them."""

    @nn.compact
    def __call__(self, x):
        for k in range(3):
            x = self.perturb(f"layer{k}", nn.relu(nn.Dense(8)(x)))
        return nn.Dense(5)(x)


@pytest.mark.parametrize("given", ["all variables", "parameters"])
@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_perturbations_of_values_inside_are_no_state(runtime, given):
    variables = Perturbed().init(KEY, BATCH["x"])
    params = {"params": variables["params"]}
    pipeline = partition(Perturbed(), 2, runtime=runtime)
    state = pipeline.init(KEY, variables=variables if given == "all variables" else params)
    (value, _), gradients = pipeline.value_and_grad(state, BATCH)
    plain = jax.value_and_grad(lambda params: loss(lambda x: Perturbed().apply(params, x), BATCH))(params)
    np.testing.assert_allclose(value, plain[0], rtol=FUSION)
    assert relative_l2(gradients, plain[1]["params"]) < 3 * FUSION
    assert set(pipeline.parameters(state)) == {"params"}


class Queue(nn.Module):
    """Keys of the examples before, in a queue that may be as long as the batch or a micro-batch."""

    length: int

    @nn.compact
    def __call__(self, x):
        query = nn.Dense(8)(nn.relu(nn.Dense(12)(x)))
        queue = self.variable("queue", "keys", lambda: jnp.ones((self.length, 8)))
        place = self.variable("queue", "place", lambda: jnp.zeros((), jnp.int32))
        before = queue.value
        if not self.is_initializing():
            queue.value = jax.lax.dynamic_update_slice(before, jax.lax.stop_gradient(query), (place.value, 0))
            place.value = (place.value + len(x)) % self.length
        return query @ before.T


@pytest.mark.parametrize(("length", "m"), [(N, 4), (N, N), (N // 4, 4)])
def test_a_queue_as_long_as_a_batch_has_no_row_for_each_example(length, m):
    def loss(model, batch):
        return jax.nn.logsumexp(model(batch["x"]), axis=-1).mean()

    def of(params, queue, x):
        out, new = Queue(length).apply({"params": params, **queue}, x, mutable=["queue"])
        return loss(lambda _: out, {"x": x}), new

    pipeline = partition(Queue(length), 2, loss=loss, num_microbatches=m)
    state = pipeline.init(KEY)
    params, queue = (pipeline.parameters(state)[name] for name in ("params", "queue"))
    queue, gradients = {"queue": queue}, []
    for x in jnp.split(BATCH["x"], m):
        gradient, queue = jax.grad(of, has_aux=True)(params, queue, x)
        gradients.append(gradient)
    expected = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / m, params, *gradients)
    state, _ = pipeline.step(state, BATCH)
    assert relative_l2(pipeline.parameters(state)["params"], expected) < 5 * FUSION
    assert relative_l2(pipeline.parameters(state)["queue"], queue["queue"]) < 5 * FUSION
