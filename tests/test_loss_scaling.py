"""Losses and metrics of a batch that are not the mean of those of its micro-batches are told, and no others.

Whether one is follows from its values, for the whole batch and for its parts.
"""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxpipe
from jaxpipe.errors import LossWarning
from tests.support.meshes import mesh_of


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Dense(8)(x)))
        return nn.Dense(8)(x)


X = jax.random.normal(jax.random.key(0), (32, 8))
BATCH = {"x": X, "y": jnp.arange(32) % 8, "w": jax.random.uniform(jax.random.key(1), (32,)), "scale": jnp.float32(3.0)}


def losses(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def penalty(model):
    return 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(model.variables["params"]))


MEANS = {
    "mean": lambda model, batch: losses(model, batch).mean(),
    "of all elements": lambda model, batch: (model(batch["x"]) ** 2).mean(),
    "sum over features": lambda model, batch: (model(batch["x"]) ** 2).sum(-1).mean(),
    "flattened": lambda model, batch: jnp.abs(model(batch["x"]).reshape(-1)).mean(),
    "by their number": lambda model, batch: losses(model, batch).sum() / len(batch["x"]),
    "divided first": lambda model, batch: (losses(model, batch) / len(batch["x"])).sum(),
    "product": lambda model, batch: losses(model, batch) @ jnp.full(len(batch["x"]), 1 / len(batch["x"])),
    "weighted terms": lambda model, batch: (losses(model, batch) * batch["w"]).mean() * 0.5 + penalty(model),
    "scaled": lambda model, batch: losses(model, batch).mean() * batch["scale"],
    "two": lambda model, batch: losses(model, batch).mean() - 0.1 * jnp.mean(model(batch["x"])),
    "mapped": lambda model, batch: jax.vmap(lambda x: jnp.tanh(x).mean())(model(batch["x"])).mean(),
    "in a scan": lambda model, batch: (
        jax.lax.scan(lambda c, x: (c + x, None), 0.0, losses(model, batch))[0] / len(X) * 4
    ),
    "rows normalized": lambda model, batch: jnp.mean(
        (model(batch["x"]) * batch["x"]).sum(-1) / (1.0 + jnp.abs(batch["x"]).sum(-1))
    ),
}
SUMS = {
    "sum": lambda model, batch: losses(model, batch).sum(),
    "by a constant": lambda model, batch: losses(model, batch).sum() / 32,
    "with a penalty": lambda model, batch: losses(model, batch).sum() + penalty(model),
    "mean of features": lambda model, batch: (model(batch["x"]) ** 2).sum(0).mean(),
    "product": lambda model, batch: losses(model, batch) @ batch["w"],
}
WEIGHTED = {
    "masked": lambda model, batch: jnp.mean(losses(model, batch), where=batch["w"] < 0.3),
    "average": lambda model, batch: jnp.average(losses(model, batch), weights=batch["w"]),
    "at least 1": lambda model, batch: (
        (losses(model, batch) * batch["w"]).sum() / jnp.maximum(batch["w"].sum(), 1.0) + penalty(model)
    ),
    "weights normalized": lambda model, batch: (losses(model, batch) * (batch["w"] / batch["w"].sum())).sum(),
}
BENT = {
    "root": lambda model, batch: jnp.sqrt((model(batch["x"]) ** 2).mean()),
    "largest": lambda model, batch: losses(model, batch).max(),
    "normalized": lambda model, batch: with_advantages(
        model, batch, jax.nn.standardize(losses(model, batch), axis=0) * batch["w"]
    ),
    "product of means": lambda model, batch: losses(model, batch).mean() * model(batch["x"]).mean(),
}


@contextlib.contextmanager
def loss_warnings():
    """The texts of the warnings of losses."""
    texts = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", LossWarning)
        yield texts
    texts += [str(x.message) for x in given if x.category is LossWarning]


def partition_of(loss, num_microbatches=4, model=None, **options):
    options = {"loss": loss, "optimizer": optax.sgd(0.1), "profile": "analytic"} | options
    return jaxpipe.partition(model or Net(), mesh_of(1), BATCH, num_microbatches=num_microbatches, **options)


def partitioned(loss, num_microbatches=4, **options):
    """Return the warnings and the notes on the loss of a pipeline."""
    with loss_warnings() as texts:
        pipeline = partition_of(loss, num_microbatches, **options)
    notes = [note for note in pipeline.plan.notes if "no mean over examples" in note]
    return texts, notes


class Bound:
    def __init__(self, variables):
        self.variables = variables

    def __call__(self, x):
        return Net().apply(self.variables, x)


def with_variables(pipeline, key):
    return Bound(pipeline.parameters(pipeline.init(key)))


PARTS = [{k: x if x.ndim == 0 else x[n : n + 8] for k, x in BATCH.items()} for n in range(0, 32, 8)]


def is_mean_of_parts(loss):
    """Return whether a loss of the batch is the mean of those of its quarters."""
    model = Bound(Net().init(jax.random.key(2), X))
    mean = np.mean([loss(model, part) for part in PARTS])
    return bool(np.isclose(mean, loss(model, BATCH), rtol=1e-5))  # sums of 32 numbers in another order


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_left_alone(name):
    assert name == "in a scan" or is_mean_of_parts(MEANS[name])
    assert partitioned(MEANS[name]) == ([], [])


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_told(name):
    assert not is_mean_of_parts(SUMS[name])
    given, _ = partitioned(SUMS[name])
    assert len(given) == 1 and "is a sum over examples, and a batch of 32" in given[0] and "it is 1/4 of " in given[0]
    assert partitioned(SUMS[name], num_microbatches=1) == ([], [])


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_mean_of_weighted_means_is_told(name):
    assert not is_mean_of_parts(WEIGHTED[name])
    given, _ = partitioned(WEIGHTED[name])
    assert len(given) == 1 and "is divided by a sum over examples" in given[0] and "(sum, weight, metrics)" in given[0]


def with_advantages(model, batch, advantages):
    ratio = jnp.exp(-losses(model, batch))
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()


def frequencies(classes):
    """The share of each example's class."""
    numbers = classes.astype(int)
    return jax.nn.one_hot(numbers, 2).mean(0)[numbers]


NORMALIZED = {
    "advantages": lambda model, batch: with_advantages(
        model, batch, (batch["w"] - batch["w"].mean()) / (batch["w"].std() + 1e-8)
    ),
    "less their mean": lambda model, batch: with_advantages(model, batch, batch["w"] - batch["w"].mean()),
    "softmax": lambda model, batch: (losses(model, batch) * jax.nn.softmax(batch["w"]) * len(batch["w"])).mean(),
    "by frequency": lambda model, batch: (losses(model, batch) / frequencies(batch["w"] > 0.4)).mean(),
    "inputs": lambda model, batch: losses(model, batch | {"x": batch["x"] - batch["x"].mean(0)}).mean(),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_values_that_each_micro_batch_normalizes_are_told(name):
    assert not is_mean_of_parts(NORMALIZED[name])
    given, _ = partitioned(NORMALIZED[name])
    assert len(given) == 1 and "normalized, or weighted, by sums over all of a micro-batch" in given[0]
    assert partitioned(NORMALIZED[name], num_microbatches=1) == ([], [])
    assert len(partitioned(NORMALIZED[name], num_microbatches=32)[0]) == 1


def test_models_may_normalize():
    """Statistics of a micro-batch are what batch normalization is; those of no parameters, too, of inputs."""

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.BatchNorm(use_running_average=False)(x))

    assert partitioned(MEANS["mean"], model=Normed()) == ([], [])

    def normalized_before(model, batch):
        return with_advantages(model, batch, batch["w"] - batch["scale"])

    assert partitioned(normalized_before) == ([], [])


@pytest.mark.parametrize("name", BENT)
def test_what_is_not_linear_in_the_examples_is_noted(name):
    assert not is_mean_of_parts(BENT[name])
    given, notes = partitioned(BENT[name])
    assert not given and len(notes) == 1


def test_what_a_warning_offers_is_the_gradient_of_the_whole_batch(key):
    total, weighted = SUMS["sum"], WEIGHTED["average"]
    offered = [
        (total, lambda model, batch: (total(model, batch), 1 / 4, {})),
        (weighted, lambda model, batch: ((losses(model, batch) * batch["w"]).sum(), batch["w"].sum(), {})),
    ]
    for plain, loss in offered:
        assert partitioned(loss) == ([], [])
        pipeline = partition_of(loss)
        state = pipeline.init(key)
        variables = pipeline.parameters(state)

        def of_parameters(params, variables=variables, plain=plain):
            return plain(lambda x: Net().apply({**variables, "params": params}, x), BATCH)

        (value, _), gradients = pipeline.value_and_grad(state, BATCH)
        expected, of_plain = jax.value_and_grad(of_parameters)(variables["params"])
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_plain), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # sums over examples in four parts


def is_right(model, batch):
    return model(batch["x"]).argmax(-1) == batch["y"]


METRICS = {
    "accuracy": (lambda model, batch: is_right(model, batch).mean(), ""),
    "per cent": (lambda model, batch: 100 * is_right(model, batch).sum() / len(batch["x"]), ""),
    "by class": (lambda model, batch: jax.nn.one_hot(model(batch["x"]).argmax(-1), 8).mean(0).max(), ""),
    "number": (lambda model, batch: is_right(model, batch).sum().astype(jnp.float32), "is a sum over examples"),
    "confusion": (
        lambda model, batch: (jax.nn.one_hot(model(batch["x"]).argmax(-1), 8).T @ jax.nn.one_hot(batch["y"], 8)).sum(0)[
            0
        ],
        "is a sum over examples",
    ),
    "of a class": (
        lambda model, batch: (is_right(model, batch) & (batch["y"] == 1)).sum() / (batch["y"] == 1).sum(),
        "is divided by a sum over examples",
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_told_as_losses_are(name):
    metric, told = METRICS[name]
    assert name in ("by class", "of a class") or is_mean_of_parts(metric) == (not told)
    mean = MEANS["mean"]
    texts, notes = partitioned(lambda model, batch: (mean(model, batch), {name: metric(model, batch)}))
    assert len(texts) == bool(told) and not notes
    assert not told or (told in texts[0] and f"loss returned the metric ['{name}']" in texts[0])
    added = partitioned(lambda model, batch: (mean(model, batch), {name: jaxpipe.Sum(metric(model, batch))}))
    assert added == ([], [])


def test_a_mean_beside_a_weight_is_told(key):
    def loss(of_batch, metric):
        def function(model, batch):
            total = (losses(model, batch) * batch["w"]).sum()
            return of_batch(total, losses(model, batch)), batch["w"].sum(), {"right": metric(model, batch)}

        return function

    right = lambda model, batch: (is_right(model, batch) * batch["w"]).sum()  # noqa: E731
    assert partitioned(loss(lambda total, _: total, right)) == ([], [])
    texts, _ = partitioned(loss(lambda _, each: each.mean(), right))
    assert len(texts) == 1 and "loss returned a scalar that is a mean over examples, beside a weight" in texts[0]
    texts, _ = partitioned(loss(lambda total, _: total, METRICS["accuracy"][0]))
    assert len(texts) == 1 and "the metric ['right'] that is a mean over examples, beside a weight" in texts[0]
    number = lambda model, batch: (losses(model, batch).mean(), len(batch["x"]), {})  # noqa: E731
    texts, _ = partitioned(number)
    assert len(texts) == 1 and "is a mean over examples, beside a weight" in texts[0]
    with loss_warnings():
        pipeline = partition_of(number)
    (value, _), _ = pipeline.value_and_grad(pipeline.init(key), BATCH)
    np.testing.assert_allclose(value * 8, MEANS["mean"](with_variables(pipeline, key), BATCH), rtol=1e-5)


def test_evaluations_are_told_when_they_are_traced(key):
    def evaluate(model, batch):
        return {"right": is_right(model, batch).sum().astype(jnp.float32), "mean": is_right(model, batch).mean()}

    with loss_warnings() as texts:
        pipeline = partition_of(MEANS["mean"], evaluate=evaluate)
        state = pipeline.init(key)
        for _ in range(2):
            metrics = pipeline.evaluate(state, BATCH)
    assert len(texts) == 1 and "evaluate returned the metric ['right'] that is a sum over examples" in texts[0]
    assert "Return jaxpipe.Sum(value)" in texts[0]
    right = is_right(with_variables(pipeline, key), BATCH)
    assert (metrics["right"], metrics["mean"]) == (right.sum() / 4, right.mean())


def test_examples_one_by_one():
    assert partitioned(MEANS["mean"], num_microbatches=32) == ([], [])
    assert "it is 1/32 of" in partitioned(SUMS["sum"], num_microbatches=32)[0][0]
    assert "is divided by a sum" in partitioned(WEIGHTED["average"], num_microbatches=32)[0][0]
