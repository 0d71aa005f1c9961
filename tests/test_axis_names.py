"""Code written for ``jax.pmap``: axis names of collectives are bound, with size 1 or over the replicas."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import jaxpipe
from jaxpipe.errors import PartitionError
from tests.support.compare import assert_same_bits, relative_l2
from tests.support.meshes import named_mesh


# A few float32 roundings (6e-8): devices that share a micro-batch add up parts of it.
ORDER = 2e-6
X = jax.random.normal(jax.random.key(0), (16, 4, 4, 3))


class Block(nn.Module):
    """A residual block of flax's imagenet example."""

    axis: str | None = "batch"

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.Conv(3, (3, 3), use_bias=False)(x)
        h = nn.relu(nn.BatchNorm(use_running_average=not train, axis_name=self.axis)(h))
        h = nn.Conv(3, (3, 3), use_bias=False)(h)
        x = nn.relu(x + nn.BatchNorm(use_running_average=not train, axis_name=self.axis)(h))
        return nn.Dense(3)(nn.max_pool(x, (2, 2), (2, 2)).mean((1, 2)))


class NNXBlock(nnx.Module):
    def __init__(self, rngs, axis="batch"):
        self.first, self.norm = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, axis_name=axis, rngs=rngs)
        self.second = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x)))).mean((1, 2))


@jax.custom_vjp
def wave(x):
    return jnp.sin(x)


wave.defvjp(lambda x: (lax.pmean(wave(x), "batch"), x), lambda x, ct: (lax.pmean(ct * jnp.cos(x), "batch"),))


def named_loss(model, x):
    """A loss that names the axis in all the ways that there are."""
    y = model(x)
    every = lax.all_gather(y, "batch", tiled=True) + lax.all_gather(y, ("batch",))[0]
    every = every + lax.psum_scatter(y[None], "batch") + lax.ppermute(y, "batch", [(0, 0)])
    swapped = lax.all_to_all(y[None], "batch", 0, 0)[0]
    loss = lax.pmean(jnp.square(wave(y)).mean(), "batch")
    metrics = {"all": every.mean(), "most": lax.pmax(y.max(), "batch"), "swapped": swapped.mean()}
    number = lax.axis_index("batch") + lax.psum(1, "batch") - 1
    return loss + 0 * number, metrics


def plain_loss(model, x):
    y = model(x)
    metrics = {"all": (y + y + y + y).mean(), "most": y.max(), "swapped": y.mean()}
    return jnp.square(jnp.sin(y)).mean(), metrics


def cuts(plan):
    return [(stage.modules, stage.stash_bytes, stage.sent_bytes) for stage in plan.stages]


def results(model, loss, stages, runtime):
    pipeline = jaxpipe.partition(
        model,
        named_mesh(stage=stages),
        X,
        loss=loss,
        evaluate=loss,
        predict=lambda model, x: model(x),
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
        runtime=runtime,
    )
    state = pipeline.init(jax.random.key(1))
    values = [pipeline.value_and_grad(state, X), pipeline.evaluate(state, X), pipeline.predict(state, X)]
    state, metrics = pipeline.step(state, X)
    return pipeline.plan, jax.tree.leaves([values, metrics, pipeline.parameters(state)])


OTHER_CASES = set(itertools.product(["linen", "nnx"], [1, 2, 4], ["mpmd", "spmd"]))
OTHER_CASES -= {("linen", 4, "mpmd"), ("nnx", 1, "spmd")}


@pytest.mark.optimized
@pytest.mark.filterwarnings("ignore::UserWarning")  # predictions with statistics of their own
@pytest.mark.parametrize(
    ("kind", "stages", "runtime"),
    [
        pytest.param("linen", 4, "mpmd", marks=pytest.mark.core),
        pytest.param("nnx", 1, "spmd", marks=pytest.mark.versions),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in sorted(OTHER_CASES)),
    ],
)
def test_unbound_names_are_axes_of_size_1(kind, stages, runtime):
    """Bit for bit the same model and loss without the names; where stages are cut elsewhere, but for roundings.

    A mean over the axis is divided by 1 there, and all operators count in cuts. One program for all stages is fused
    anew where an operator is more.
    """
    named, plain = (Block(), Block(None)) if kind == "linen" else (NNXBlock(nnx.Rngs(0)), NNXBlock(nnx.Rngs(0), None))
    plan, actual = results(named, named_loss, stages, runtime)
    assert plan.notes[-1:] == ("collectives over 'batch' are those of one micro-batch: an axis of size 1",)
    plain_plan, expected = results(plain, plain_loss, stages, runtime)
    assert not any("collectives" in note for note in plain_plan.notes)
    if stages == 1 or (runtime == "mpmd" and cuts(plan) == cuts(plain_plan)):
        assert_same_bits(actual, expected)
    assert relative_l2(actual, expected) < ORDER


def test_a_name_that_is_no_axis_is_the_callers_error():
    def loss(model, x):
        return undefined(model(x))  # noqa: F821

    with pytest.raises(NameError, match="'undefined' is not defined"):
        results(Block(), loss, 1, "mpmd")


# Over replicas

REPLICAS, M = 2, 2


def mixing_loss(model, x):
    """Each replica's loss depends on the outputs of all, and on its number."""
    y = model(x)
    every = lax.all_gather(y, "batch").sum(0)
    loss = (jnp.square(jnp.sin(y)) + 0.1 * y * every).mean() * (1 + lax.axis_index("batch"))
    metrics = {"mean": lax.pmean(y.mean(), "batch"), "own": y.mean(), "count": jaxpipe.Sum((y > 0).sum())}
    return loss, metrics


def weighted_loss(model, x):
    y = model(x)
    weight = 1.0 + (x > 0).sum()
    return weight * (jnp.square(y) * lax.pmean(y, "batch")).mean(), weight, {"own": weight * y.mean()}


def plain_replicas(loss, parameters, statistics):
    """``jax.grad`` of ``vmap`` over the replicas, micro-batch by micro-batch."""
    parts = X.reshape(REPLICAS, M, -1, *X.shape[1:])

    def of_one(parameters, statistics, x):
        new = statistics

        def model(x):
            nonlocal new
            y, new = Block().apply({"params": parameters, "batch_stats": statistics}, x, mutable=["batch_stats"])
            return y

        value = loss(model, x)
        value, weight = value[:2] if len(value) == 3 else (value[0], jnp.float32(1))
        return value, (weight, new if new is statistics else new["batch_stats"])

    def total(parameters, statistics, x):
        mapped = jax.vmap(of_one, (None, 0, 0), axis_name="batch")
        values, (weights, new) = mapped(parameters, statistics, x)
        return values.sum(), (weights.sum(), new)

    statistics = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), statistics)
    sums = []
    for j in range(M):
        (value, (weight, statistics)), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
            parameters, statistics, parts[:, j]
        )
        sums.append((value, gradient, weight))
    value, gradient, weight = jax.tree.map(lambda *xs: sum(xs), *sums)
    mean = jax.tree.map(lambda x: x / weight, (value, gradient))
    return *mean, jax.tree.map(lambda x: x.mean(0), statistics)


def joined(loss=mixing_loss, stages=2, **options):
    return jaxpipe.partition(
        Block(),
        named_mesh(batch=REPLICAS, stage=stages),
        X,
        loss=loss,
        evaluate=loss,
        predict=lambda model, x: model(x, train=False),
        optimizer=optax.sgd(0.1),
        num_microbatches=M,
        profile="analytic",
        options=jaxpipe.PlanOptions(axis_name="batch"),
        **options,
    )


@pytest.mark.parametrize(
    ("loss", "stages"),
    [
        pytest.param(mixing_loss, 2, marks=pytest.mark.core),
        pytest.param(weighted_loss, 2, marks=pytest.mark.versions),
        pytest.param(mixing_loss, 1, marks=pytest.mark.slow),
    ],
)
def test_replicas_that_a_name_mixes(loss, stages):
    pipeline = joined(loss, stages)
    state = pipeline.init(jax.random.key(1))
    variables = Block().init(jax.random.key(1), X[:1])
    value, gradient, statistics = plain_replicas(loss, variables["params"], variables["batch_stats"])
    (actual, metrics), gradients = pipeline.value_and_grad(state, X)
    assert relative_l2([actual], [value]) < ORDER
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(gradient)) < ORDER
    predicted = pipeline.predict(state, X)
    assert relative_l2([predicted], [Block().apply(variables, X, train=False)]) < ORDER
    assert relative_l2([pipeline.evaluate(state, X)["loss"]], [value]) < ORDER
    state, _ = pipeline.step(state, X)
    after = pipeline.parameters(state)
    assert relative_l2(jax.tree.leaves(after["batch_stats"]), jax.tree.leaves(statistics)) < ORDER
    if loss is mixing_loss:
        assert int(metrics["count"]) > 0 and relative_l2([metrics["mean"]], [metrics["own"]]) < ORDER


def test_what_does_not_go_with_a_name_of_replicas_is_refused():
    with pytest.raises(PartitionError, match=r"runtime='spmd' with PlanOptions\(axis_name='batch'\).*runtime='mpmd'"):
        joined(runtime="spmd")
    exchange = jaxpipe.gradients.block_sparse()
    with pytest.raises(PartitionError, match=r"axis_name='batch'\) with gradient_exchange=block_sparse"):
        joined(gradient_exchange=exchange)
    with pytest.raises(PartitionError, match=r"axis_name=3\).*must be an axis. name"):
        jaxpipe.partition(
            Block(), named_mesh(stage=1), X, loss=plain_loss, optimizer=optax.sgd(0.1),
            options=jaxpipe.PlanOptions(axis_name=3),
        )  # fmt: skip
