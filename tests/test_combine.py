"""Metrics of micro-batches become those of a batch: averages, sums where ``Sum`` says so, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import PartitionError, Sum
from tests.support.meshes import mesh_of


DATA = np.random.default_rng(0)
X, Y = DATA.standard_normal((16, 6)).astype(np.float32), DATA.integers(0, 3, 16).astype(np.int32)
BATCH = {"x": X, "y": Y}
WEIGHTS = {"a": DATA.standard_normal((6, 5)).astype(np.float32), "b": DATA.standard_normal((5, 3)).astype(np.float32)}
MODEL = jax.tree_util.Partial(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], jax.tree.map(jnp.asarray, WEIGHTS))


def counts(model, batch):
    logits = model(batch["x"])
    right = logits.argmax(-1) == batch["y"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    by_class = {"right": jnp.zeros(3, jnp.int32).at[batch["y"]].add(right), "all": jnp.bincount(batch["y"], length=3)}
    metrics = {"accuracy": right.mean(), "right": Sum(right.sum()), "by_class": Sum(by_class)}
    return losses, {**metrics, "half": Sum(jnp.ones(len(right), jnp.bfloat16).sum())}


def mean(model, batch):
    losses, metrics = counts(model, batch)
    return losses.mean(), metrics


def weighted(model, batch):
    losses, metrics = counts(model, batch)
    weight = (batch["y"] > 0).astype(jnp.float32)
    hits = ((model(batch["x"]).argmax(-1) == batch["y"]) & (batch["y"] > 0)).sum()
    return (losses * weight).sum(), weight.sum(), {"right": metrics["right"], "share": hits}


def partition(loss=mean, mesh=None, **options):
    options = {"num_microbatches": 4, "profile": "analytic", "optimizer": optax.sgd(0.1), **options}
    mesh = mesh_of(2) if mesh is None else mesh
    return jaxpipe.partition(MODEL, mesh, BATCH, loss=loss, evaluate=loss, **options)


#: In NumPy, of the whole batch.
RIGHT = (np.tanh(X @ WEIGHTS["a"]) @ WEIGHTS["b"]).argmax(-1) == Y


@pytest.mark.versions
@pytest.mark.parametrize("mesh", [(2, None), (2, 2)], ids=["one-replica", "two-replicas"])
def test_sums_are_totals_of_the_batch_and_the_rest_are_means(mesh):
    pipeline = partition(mesh=mesh_of(*mesh), num_microbatches=4 if mesh[1] is None else 2)
    state = pipeline.init(jax.random.key(0))
    (_, of_gradient), _ = pipeline.value_and_grad(state, BATCH)
    of_evaluation = pipeline.evaluate(state, BATCH)
    _, of_step = pipeline.step(state, BATCH)
    for metrics in (of_gradient, of_evaluation, of_step):
        assert int(metrics["right"]) == RIGHT.sum() and metrics["right"].dtype == jnp.int32
        np.testing.assert_array_equal(metrics["by_class"]["right"], np.bincount(Y[RIGHT], minlength=3))
        np.testing.assert_array_equal(metrics["by_class"]["all"], np.bincount(Y, minlength=3))
        assert float(metrics["accuracy"]) == RIGHT.mean()  # quarters of quarters: exact
        assert float(metrics["half"]) == 16 and metrics["half"].dtype == jnp.float32


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_metrics_may_be_numbers_of_python(runtime):
    def loss(model, batch):
        return mean(model, batch)[0], {"examples": Sum(len(batch["y"])), "rate": 0.25}

    pipeline = partition(loss, mesh_of(2, 2), num_microbatches=2, runtime=runtime)
    _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    assert (int(metrics["examples"]), metrics["examples"].dtype, float(metrics["rate"])) == (16, jnp.int32, 0.25)


def test_sums_of_stages_on_several_devices():
    pipeline = partition(mesh=mesh_of(3), options=jaxpipe.PlanOptions(devices_per_stage=(2, 1)))
    _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    assert int(metrics["right"]) == RIGHT.sum() and float(metrics["accuracy"]) == RIGHT.mean()


def test_with_a_weighted_loss_sums_are_totals_and_the_rest_is_divided_by_the_weight():
    pipeline = partition(weighted)
    (_, metrics), _ = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), BATCH)
    assert int(metrics["right"]) == RIGHT.sum()
    assert float(metrics["share"]) == np.float32((RIGHT & (Y > 0)).sum()) / np.float32((Y > 0).sum())


def test_a_weight_is_a_constant_and_may_not_depend_on_parameters():
    def loss(gate):
        return lambda model, batch: ((y := model(batch["x"])).sum() ** 2, gate(y), {})

    with pytest.raises(PartitionError, match=r"a weight that depends on .* Return jax\.lax\.stop_gradient\(weight\)"):
        partition(loss(lambda y: jax.nn.sigmoid(y).sum()))

    def counted(y):  # a sum and a number of examples, row by row
        return jax.lax.scan(lambda carry, row: ((carry[0] + row, carry[1] + 1.0), None), (0.0, 0.0), y.sum(1))[0][1]

    for gate in (
        lambda y: jax.lax.stop_gradient(jax.nn.sigmoid(y)).sum(),
        lambda y: (y > 0).astype(jnp.float32).sum(),
        lambda y: (jnp.sign(y) ** 2).sum(),
        counted,
    ):
        pipeline = partition(loss(gate))
        _, gradient = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), BATCH)

        def plain(weights, gate=gate):
            y = jnp.tanh(X.reshape(4, 4, 6) @ weights["a"]) @ weights["b"]
            return (y.sum((1, 2)) ** 2).sum() / jax.lax.stop_gradient(sum(map(gate, y)))

        expected = jax.grad(plain)(WEIGHTS)
        for name in WEIGHTS:  # Sums over 16 examples in another order, of terms that cancel.
            np.testing.assert_allclose(gradient.args[0][name], expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_a_metric_with_the_name_of_one_of_the_step_stands_in_its_place(runtime):
    def loss(model, batch):
        value = model(batch["x"]).mean()
        return value, {"loss": 0 * value + 1, "gradient_norm": 0 * value + 2, "learning_rate": 0 * value + 3}

    pipeline = partition(loss, runtime=runtime, optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), BATCH)
    assert {k: float(x) for k, x in metrics.items()} == {"loss": 1, "gradient_norm": 2, "learning_rate": 3}


@pytest.mark.core
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (lambda y, b: {"n": (y > 0).sum()}, r"the metric \['n'\] of dtype int32\. .*Return jaxpipe\.Sum\(value\)"),
        (lambda y, b: {"any": (y > 0).any()}, r"\['any'\] of dtype bool"),
        (lambda y, b: {"rows": len(y)}, r"\['rows'\] of dtype int32"),
        (
            lambda y, b: y,
            r"loss returned as its metrics an array of shape \(4, 3\) for a micro-batch of 4 examples, and",
        ),
        (lambda y, b: {"logits": y}, r"\['logits'\] of shape \(4, 3\) for .* and \(8, 3\) for 8.* use predict"),
        (lambda y, b: {"a": {"flat": y.reshape(-1)}}, r"\['a'\]\['flat'\] of shape \(12,\) for"),
        (lambda y, b: {"turned": y.T}, r"\['turned'\] of shape \(3, 4\) for"),
        (lambda y, b: {"logits": Sum(y)}, r"\['logits'\] of shape \(4, 3\) for"),
    ],
)
def test_metrics_that_would_be_averaged_wrongly_are_refused(metrics, message):
    def loss(model, batch):
        y = model(batch["x"])
        return y.mean(), metrics(y, batch)

    with pytest.raises(PartitionError, match=message):
        partition(loss)


@pytest.mark.optimized
def test_an_array_as_long_as_the_micro_batch_that_is_reduced_is_a_metric():
    """Four micro-batches of four examples, and the mean of four by four numbers, by class."""

    def loss(model, batch):
        y = model(batch["x"])
        return y.mean(), {"gram": jnp.eye(4) * y.mean()}

    (value, metrics), _ = partition(loss).value_and_grad(partition(loss).init(jax.random.key(0)), BATCH)
    # The same sums in the same order.
    np.testing.assert_array_equal(metrics["gram"], np.eye(4, dtype=np.float32) * np.float32(value))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda y: (y.mean(), {"logits": y}), r"\['logits'\] of shape \(3, 3\) for"),
        (lambda y: (y.sum(), y.var(), {}), "a weight that depends on the model's parameters"),
        (lambda y: jnp.ones(()), "depends on none of the model's 2 parameters"),
    ],
    ids=["metric", "weight", "loss"],
)
def test_what_is_refused_is_refused_of_a_batch_of_another_size(returned, message):
    """A function may branch on shapes."""

    def loss(model, batch):
        y = model(batch["x"])
        return returned(y) if len(y) == 3 else (y.mean(), {"logits": y.mean(0)})

    pipeline = partition(loss)
    with pytest.raises(PartitionError, match=message):
        pipeline.step(pipeline.init(jax.random.key(0)), jax.tree.map(lambda x: x[:6], BATCH))


def test_evaluation_refuses_logits():
    pipeline = jaxpipe.partition(
        MODEL,
        mesh_of(2),
        BATCH,
        loss=mean,
        optimizer=optax.sgd(0.1),
        evaluate=lambda model, batch: {"logits": model(batch["x"])},
        num_microbatches=4,
        profile="analytic",
    )
    with pytest.raises(PartitionError, match=r"evaluate returned the metric \['logits'\] of shape \(4, 3\)"):
        pipeline.evaluate(pipeline.init(jax.random.key(0)), BATCH)


def test_a_loss_that_uses_no_parameter_is_refused():
    with pytest.raises(PartitionError, match=r"depends on none of the model's 2 parameters \(.*loss\(model, batch\)"):
        partition(lambda model, batch: (MODEL(batch["x"]).mean(), {}))


def test_a_model_without_parameters_is_refused():
    model = jax.tree_util.Partial(lambda n, x: x * n, jnp.int32(2))
    with pytest.raises(PartitionError, match="The model has no parameters, so there is nothing to train"):
        jaxpipe.partition(model, mesh_of(1), X, loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.1))
