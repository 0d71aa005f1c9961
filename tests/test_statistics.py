"""Statistics over the examples of a micro-batch: found in any program, and warned of where examples are few."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe import FewExamplesWarning, TrainingModeWarning
from jaxpipe.models.batch_statistics import Statistics, find_statistics
from jaxpipe.models.bind import bind
from jaxpipe.models.microbatch_program import trace_loss
from tests.support.compare import FUSION, relative_l2


pytestmark = pytest.mark.filterwarnings("error")


class Net(nn.Module):
    norm: type[nn.Module] = nn.BatchNorm
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=True):
        options = {"use_running_average": not train} if self.norm is nn.BatchNorm else {}
        x = nn.relu(self.norm(name="norm", **options)(nn.Dense(8)(x)))
        return nn.Dense(2)(nn.Dropout(self.dropout)(x, deterministic=not train))


class Group(nn.GroupNorm):
    num_groups: int = 4


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.BatchNorm(False)(nn.Dense(4)(x))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(Layer, **options)()(nn.Dense(4)(x), None)[0]


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Layer)()(x, None)[0]


class Instance(nn.Module):
    """A norm of each channel of each example, over its positions."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4)(x.reshape(len(x), 2, -1))
        return (y - y.mean(1, keepdims=True)) / (1 + y.std(1, keepdims=True))


def centered(w, x):
    return jax.vmap(lambda v: v @ w - jax.lax.pmean(v @ w, "batch"), axis_name="batch")(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def mean(model, x):
    return jnp.square(model(x)).mean()


def masked(model, x):
    """A weight for each example by a sum over the batch, but not by what the model makes of it."""
    weight = (x[:, 0] > 0).astype(jnp.float32)
    return (model(x).mean(1) * (weight / weight.sum())).sum()


def contrastive(model, x):
    z = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def by_class(model, x):
    y = model(x)
    return y.mean(), {"mean": y.mean(0), "spread": y.std(0)}


def statistics_of(model, loss, rows):
    microbatch = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    return find_statistics(trace_loss(bind(model, loss, microbatch), loss, microbatch))


@pytest.mark.core
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("model", "loss", "expected"),
    [
        (Net(), mean, "Net/norm"),
        (Net(), by_class, "Net/norm"),
        (NNXNet, mean, "NNXNet/norm"),
        (Scanned(), mean, "BatchNorm_0"),
        (Remat(), mean, "BatchNorm_0"),
        (nn.Sequential([nn.BatchNorm(False), nn.Dense(2)]), mean, "layers_0"),
        (jax.tree_util.Partial(centered, jnp.ones((4, 2))), mean, ""),
    ],
    ids=["linen", "metrics-by-class", "nnx", "scan", "remat", "of-the-input", "vmap"],
)
def test_normalization_over_examples_is_found(model, loss, expected, rows):
    (path, *others) = statistics_of(model, loss, rows).modules
    assert path.endswith(expected) and not others


@pytest.mark.core
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Net(nn.LayerNorm), mean),
        (Net(Group), mean),
        (Instance(), mean),
        (Net(nn.LayerNorm), masked),
        (Net(nn.LayerNorm), by_class),
        (Net(), lambda model, x: jnp.square(model(x, train=False)).mean()),
        (jax.tree_util.Partial(lambda w, x: x @ (w / w.sum(0)), jnp.ones((4, 2))), mean),
    ],
    ids=["layer-norm", "group-norm", "instance-norm", "masked-mean", "metrics", "running-average", "weight-norm"],
)
def test_other_sums_are_no_normalization_over_examples(model, loss, rows):
    assert statistics_of(model, loss, rows) == Statistics(outside=loss is masked)


class Attention(nn.Module):
    """Products of tokens with one another and with a table of embeddings, within an example."""

    @nn.compact
    def __call__(self, x):
        table = nn.Embed(6, 8)
        y = table(jnp.argsort(x, -1))
        return table.attend(nn.MultiHeadDotProductAttention(2)(y))


class Experts(nn.Module):
    """Tokens in the order of their experts, of which each takes half: the places of tokens grow with their number."""

    @nn.compact
    def __call__(self, x):
        gate = nn.softmax(nn.Dense(2)(x))
        chosen = jax.nn.one_hot(gate.argmax(-1), 2)
        number = (chosen.cumsum(0) * chosen).sum(-1).astype(int) - 1
        place = jax.nn.one_hot(number, max(1, len(x) // 2))
        sent = jnp.einsum("te,tc,td->ecd", chosen, place, x)
        y = jnp.einsum("ecd,edf->ecf", sent, self.param("kernel", nn.initializers.ones, (2, 4, 4)))
        return jnp.einsum("te,tc,ecf->tf", chosen * gate, place, y)


def sigmoid(model, x):
    """Without a statistic: each pair counts by itself."""
    z = model(x)
    return -jnp.mean(jax.nn.log_sigmoid((2 * jnp.eye(len(z)) - 1) * (z @ z.T)))


def two_views(model, x):
    z = jnp.concatenate([model(x), model(x + 0.1)])
    return jax.nn.logsumexp(jnp.einsum("id,jd->ij", z, z), 1).mean()


def covariance(model, x):
    z = model(x)
    return jnp.square(z.T @ z / len(z)).mean()


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("loss", [contrastive, sigmoid, two_views])
def test_comparisons_of_examples_are_found(loss, rows):
    statistics = statistics_of(Net(nn.LayerNorm), loss, rows)
    assert statistics.similarities and not statistics.modules
    with pytest.warns(FewExamplesWarning, match=rf"other {rows - 1} of its micro-batch, not the other {2 * rows - 1}"):
        partition(Net(nn.LayerNorm), rows=2 * rows, num_microbatches=2, loss=loss)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize(
    ("model", "loss"), [(Attention(), mean), (Experts(), mean), (Net(nn.LayerNorm), covariance)], ids=type
)
def test_other_products_compare_no_examples(model, loss, rows):
    assert statistics_of(model, loss, rows).similarities == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewExamplesWarning)
        partition(model, rows=8, num_microbatches=2, loss=loss)


def test_all_negatives_are_those_of_one_micro_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewExamplesWarning)
        partition(Net(nn.LayerNorm), rows=8, num_microbatches=1, loss=contrastive)


def test_two_passes_have_all_negatives_of_the_batch():
    """As the warning and the guide on training say."""
    model, x = Net(nn.LayerNorm), jax.random.normal(jax.random.key(1), (8, 4))
    variables = model.init(jax.random.key(2), x)

    def loss(model, batch):  # the derivative of the whole loss, by the derivatives with respect to the embeddings
        return jnp.vdot(model(batch["x"]), batch["cotangent"]), len(batch["x"]) / len(x), {}

    batch = {"x": x, "cotangent": jnp.zeros((8, 2))}
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh, batch, loss=loss, predict=lambda m, batch: m(batch["x"]), **options)
    state = pipeline.init(jax.random.key(0), variables=variables)

    embeddings = jax.device_get(pipeline.predict(state, batch))
    cotangent = jax.grad(lambda z: contrastive(lambda _: z, x))(embeddings)
    _, gradients = pipeline.value_and_grad(state, {"x": x, "cotangent": cotangent})

    expected = jax.grad(lambda v: contrastive(lambda x: model.apply(v, x), x))(variables)
    assert relative_l2(gradients, expected) < 1e-5  # sums over micro-batches are rounded in another order


def partition(model=None, *, rows, stages=2, replicas=None, **options):
    shape, axes = ((stages,), ("stage",)) if replicas is None else ((replicas, stages), ("data", "stage"))
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: stages * (replicas or 1)])
    options = {"loss": mean, "optimizer": optax.sgd(0.1), "profile": "analytic", **options}
    return jaxpipe.partition(Net() if model is None else model, mesh, jnp.ones((rows, 4)), **options)


@pytest.mark.parametrize(("rows", "count"), [(6, 1), (8, 2), (13, 1), (64, 8)])
def test_by_default_micro_batches_are_left_enough_examples_to_normalize_over(rows, count):
    plan = partition(rows=rows).plan
    assert (plan.num_microbatches, plan.microbatch_size) == (count, rows // count)


def test_by_default_replicas_are_left_enough_examples():
    assert partition(rows=16, replicas=2).plan.num_microbatches == 2


@pytest.mark.parametrize(("rows", "count"), [(6, 6), (8, 8), (13, 13)])
def test_without_normalization_over_examples_the_bubble_decides(rows, count):
    assert partition(Net(nn.LayerNorm), rows=rows).plan.num_microbatches == count


def test_a_number_that_was_asked_for_stays_with_a_warning():
    message = (
        r"Net/norm normalize\(s\) over the examples of a micro-batch, and a batch of 8 in num_microbatches=4 .* leaves "
        r"2 to each\. .* Use num_microbatches=2, of 4 each, or a batch of at least 16 examples"
    )
    with pytest.warns(FewExamplesWarning, match=message) as given:
        assert partition(rows=8, num_microbatches=4).plan.num_microbatches == 4
    assert [w.filename for w in given] == [__file__]


def test_a_batch_of_too_few_is_warned_of():
    with pytest.warns(FewExamplesWarning, match=r"leaves 3 to each.*noise \(.*\)\. Use a batch of at least 4 examples"):
        assert partition(rows=3).plan.num_microbatches == 1


# The mode


def test_training_mode_in_evaluation_and_prediction_is_warned_of():
    functions = {"evaluate": mean, "predict": lambda model, x: model(x)}
    pipeline = partition(Net(dropout=0.5), rows=8, stages=1, num_microbatches=2, **functions)
    state = pipeline.init(jax.random.key(0))
    for name in functions:
        message = (
            rf"{name} draws random numbers in Net/Dropout_0 and computes new batch statistics for "
            rf"batch_stats/norm/mean, batch_stats/norm/var, .* Switch the mode in {name}: model\.eval\(\) for NNX, "
            r".*train=False"
        )
        with pytest.warns(TrainingModeWarning, match=message) as given:
            getattr(pipeline, name)(state, jnp.ones((8, 4)))
        assert [w.filename for w in given] == [__file__]
    pipeline.predict(state, jnp.ones((4, 4)))  # of another size: it has been said


def evaluated(model, x):
    model.eval()
    return mean(model, x)


@pytest.mark.parametrize(
    ("model", "evaluate"),
    [
        (Net(dropout=0.5), lambda model, x: jnp.square(model(x, train=False)).mean()),
        (NNXNet, evaluated),
        (Net(nn.LayerNorm), mean),
    ],
    ids=["linen", "nnx", "nothing-to-switch"],
)
def test_evaluation_mode_is_not_warned_of(model, evaluate):
    pipeline = partition(model, rows=8, stages=1, num_microbatches=2, evaluate=evaluate)
    assert jnp.isfinite(pipeline.evaluate(pipeline.init(jax.random.key(0)), jnp.ones((8, 4)))["loss"])


def test_the_mode_that_evaluation_sets_is_its_own():
    """The module that was given, and training, keep theirs: dropout goes on."""
    module = NNXNet(nnx.Rngs(0))
    pipeline = partition(module, rows=8, stages=1, num_microbatches=2, evaluate=evaluated)
    state, x = pipeline.init(jax.random.key(0)), jnp.ones((8, 4))
    (before, _), _ = pipeline.value_and_grad(state, x)
    quiet = [float(pipeline.evaluate(state, x)["loss"]) for _ in range(2)]
    (after, _), _ = pipeline.value_and_grad(state, x)
    assert quiet[0] == quiet[1] != float(before) == float(after)
    assert not module.dropout.deterministic


TABLE = jax.random.normal(jax.random.key(3), (8, 4))
ROWS_OF_ALL = {
    "constant": lambda v, x: (x + TABLE) @ v["w"],
    "parameter": lambda v, x: (x + v["table"]) @ v["w"],
    "carry": lambda v, x: jax.lax.scan(lambda h, _: (jnp.tanh((h + x) @ v["w"]), None), TABLE, None, length=3)[0],
}


@pytest.mark.parametrize("kind", ROWS_OF_ALL)
def test_one_example_is_not_put_beside_the_rows_of_all(kind):
    """By default the batch is one micro-batch then, with the gradients of plain code; else there is a warning."""
    variables = {"w": jax.random.normal(jax.random.key(4), (4, 4)), "table": TABLE if kind == "parameter" else None}
    model = jax.tree_util.Partial(ROWS_OF_ALL[kind], variables)
    batch = jax.random.normal(jax.random.key(5), (8, 4))
    pipeline = partition(model, rows=8)
    expected = jax.grad(lambda variables: jnp.square(ROWS_OF_ALL[kind](variables, batch)).mean())(variables)
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), batch)
    assert relative_l2(gradients, expected) < FUSION
    with pytest.warns(FewExamplesWarning, match="puts each example beside every row of these"):
        partition(model, rows=8, num_microbatches=8)


def test_a_loss_of_one_example_stays_that_beside_weights_as_long_as_the_batch():
    """It has an array of as many rows by chance, and does not run for the whole batch."""
    model = jax.tree_util.Partial(lambda w, x: x @ w, jax.random.normal(jax.random.key(4), (4, 4)))
    pipeline = partition(model, rows=4, loss=lambda model, x: jnp.square(model(jnp.squeeze(x, 0))).mean())
    assert pipeline.plan.num_microbatches == 4
