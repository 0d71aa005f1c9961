"""A pipeline trains as plain training does with the same micro-batches: loss, gradients, parameters, state."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from examples import models as zoo
from jaxpipe.errors import PartitionError
from jaxpipe.schedules import gpipe, one_f_one_b
from tests.support.compare import FUSION, arrays, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import CASES, ROWS, case_of, entropy, images, pipeline_of, plain_gradients


#: Of these every gradient is the same bit for bit, on 1, 2 and 4 stages. One exception: one stage of the MLP with one
#: row in each micro-batch. A weight's gradient is then a single product, which XLA contracts with the sum it goes to.
#: (The U-Net is no such model on all processors: the sum for one bias is ordered by the width of their vectors.)
IDENTICAL = {"mlp"}


def check_training(name: str, stages: int, m: int, replicas: int | None) -> None:
    case, count = case_of(name), replicas or 1
    pipeline = pipeline_of(name, stages, m, replicas)
    state = pipeline.init(jax.random.key(3))
    params, variables = case.start(jax.random.key(3))
    optimizer = optax.sgd(0.05, momentum=0.9)
    slots = optimizer.init(params)

    def keys():
        return jnp.stack([pipeline.microbatch_key(state, j) for j in range(count * m)])

    (loss, _), gradient = pipeline.value_and_grad(state, case.batch)
    expected = plain_gradients(case, params, variables, keys(), count, m)
    if name in IDENTICAL and (name, stages, ROWS // (count * m)) != ("mlp", 1, 1):
        assert float(loss) == float(expected[0])
        assert_same_bits(arrays(gradient), arrays(expected[1]))
    assert relative_l2(arrays(gradient), arrays(expected[1])) < FUSION

    for _ in range(3):
        expected = plain_gradients(case, params, variables, keys(), count, m)
        updates, slots = jax.jit(optimizer.update)(expected[1], slots, params)
        params, variables = optax.apply_updates(params, updates), expected[2]
        state, metrics = pipeline.step(state, case.batch)
        assert float(metrics["loss"]) == pytest.approx(float(expected[0]), rel=FUSION)
    after = pipeline.parameters(state)
    wanted = case.variables(params, variables)
    if name == "cnn-nnx":
        after, wanted = (nnx.split_state(nnx.state(t), nnx.Param, nnx.BatchStat, ...)[:2] for t in (after, wanted))
    assert len(arrays(after)) == len(arrays(wanted))
    assert relative_l2(arrays(after), arrays(wanted)) < FUSION


@pytest.mark.parametrize(
    ("name", "stages"),
    [pytest.param("mlp", 1, marks=pytest.mark.slow)]
    + [pytest.param(name, 2, marks=pytest.mark.core) for name in ("mlp", "cnn-nnx")],
)
def test_a_pipeline_trains_as_plain_training_does(name, stages):
    check_training(name, stages, 4, None)


@pytest.mark.parametrize("name", [pytest.param("cnn-linen", marks=pytest.mark.slow), "mlp"])
def test_replicated_stages_train_as_plain_training_does(name):
    check_training(name, 2, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_size_trains_as_plain_training_does(name, stages, m, replicas):
    check_training(name, stages, m, replicas)


def test_gradients_do_not_depend_on_the_schedule():
    """All forwards first, or one of each in turn: the same micro-batches are summed in the same order."""
    results = []
    for schedule in (one_f_one_b, gpipe):
        pipeline = pipeline_of("mlp", 4, 8, None, schedule=schedule)
        state = pipeline.init(jax.random.key(3))
        results.append(pipeline.value_and_grad(state, case_of("mlp").batch)[1])
    assert_same_bits(*results)


def test_idle_ticks_do_not_reach_a_result():
    """One micro-batch in four stages: 3 of 4 forward slots are idle, and as many backward ones."""
    case, key = case_of("mlp"), jax.random.key(3)
    pipeline = pipeline_of("mlp", 4, 1, None)
    state = pipeline.init(key)
    keys = jnp.stack([pipeline.microbatch_key(state, 0)])
    (loss, _), gradient = pipeline.value_and_grad(state, case.batch)
    expected = plain_gradients(case, *case.start(key), keys, 1, 1)
    assert float(loss) == float(expected[0])
    assert_same_bits(arrays(gradient), arrays(expected[1]))
    state, _ = pipeline.step(state, case.batch)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(pipeline.parameters(state)))


class TokenLoss:
    """Sequences of unequal length: a sum and the number of tokens that count."""

    def __init__(self):
        self.params = zoo.init_mlp(jax.random.key(0), [6, 8, 8, 5])
        self.batch = {
            "x": jax.random.normal(jax.random.key(1), (8, 4, 6)),
            "y": jax.random.randint(jax.random.key(2), (8, 4), 0, 5),
            "mask": jnp.arange(4) < jnp.arange(8)[:, None] % 4 + 1,
        }

    def __call__(self, model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        correct = (model(batch["x"]).argmax(-1) == batch["y"]) & batch["mask"]
        return (losses * batch["mask"]).sum(), batch["mask"].sum(), {"accuracy": correct.sum()}


def test_weighted_loss_is_divided_by_the_total_weight():
    loss = TokenLoss()
    model = jax.tree_util.Partial(zoo.mlp, loss.params)
    pipeline = jaxpipe.partition(
        model,
        mesh_of(2, 2),
        loss.batch,
        loss=loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
    )
    (value, metrics), gradient = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), loss.batch)

    def whole(params):
        total, weight, metrics = loss(functools.partial(zoo.mlp, params), loss.batch)
        return total / weight, metrics["accuracy"] / weight

    (expected, accuracy), wanted = jax.jit(jax.value_and_grad(whole, has_aux=True))(loss.params)
    # Four sums of a quarter each, against one sum over all: float32 rounding.
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert float(metrics["accuracy"]) == pytest.approx(float(accuracy), rel=1e-6)
    assert relative_l2(jax.tree.leaves(gradient), jax.tree.leaves(wanted)) < 1e-6


def test_evaluate_and_predict_run_on_the_same_placement():
    case = case_of("cnn-linen")
    pipeline = pipeline_of(
        "cnn-linen",
        4,
        4,
        None,
        evaluate=lambda model, batch: {"accuracy": (model(batch["x"], train=False).argmax(-1) == batch["y"]).mean()},
        predict=lambda model, batch: {"logits": model(batch["x"], train=False)},
    )
    state = pipeline.init(jax.random.key(3))
    state, _ = pipeline.step(state, case.batch)
    variables = pipeline.parameters(state)
    batch = images(8, 8, 1, rows=12)  # not the size of a training batch
    logits = jax.jit(lambda v, x: case.model.apply(v, x, train=False))(variables, batch["x"])
    predicted = pipeline.predict(state, {"x": batch["x"]})["logits"]
    assert predicted.shape == logits.shape
    # The plain logits are those of one batch of 12, the pipeline's of micro-batches: other blocks in the products.
    assert relative_l2(predicted, logits) < FUSION
    metrics = pipeline.evaluate(state, batch)
    assert set(metrics) == {"accuracy"}
    assert float(metrics["accuracy"]) == pytest.approx(float((logits.argmax(-1) == batch["y"]).mean()))


def test_linen_variables_are_those_of_plain_init_and_given_ones_are_kept(key):
    case = case_of("cnn-linen")
    pipeline = pipeline_of("cnn-linen", 4, 4, None)
    plain = case.model.init(key, case.batch["x"][:1], train=True)
    assert_same_bits(pipeline.parameters(pipeline.init(key)), jax.tree.map(np.asarray, plain))
    other = jax.tree.map(lambda x: x + 1, plain)
    assert_same_bits(pipeline.parameters(pipeline.init(key, variables=other)), jax.tree.map(np.asarray, other))


def test_nnx_class_is_initialized_as_the_class_itself_would(key):
    batch = images(8, 8, 1, rows=8)
    factory = functools.partial(zoo.NNXDigitsCNN, width=4, dropout_rate=0.1)
    pipeline = jaxpipe.partition(
        factory,
        mesh_of(2, None),
        batch,
        loss=lambda model, batch: entropy(model(batch["x"]), batch["y"]),
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
    )
    state = pipeline.init(key)
    expected = nnx.state(factory(rngs=nnx.Rngs(key)), nnx.Any(nnx.Param, nnx.BatchStat))
    assert_same_bits(arrays(pipeline.parameters(state)), arrays(expected))


def test_no_device_holds_the_whole_tree(key):
    pipeline = pipeline_of("cnn-linen", 4, 4, None)
    state = pipeline.init(key)
    whole = sum(x.nbytes for x in jax.tree.leaves(pipeline.parameters(state)["params"]))
    for device in pipeline.mesh.devices.flat:
        held = sum(s.data.nbytes for x in state.parameters for s in x.addressable_shards if s.device == device)
        assert 0 < held < whole


def test_function_of_variables_is_planned_at_init(key):
    params = zoo.init_mlp(key, [6, 8, 5])
    batch = images(6, rows=8, classes=5)
    pipeline = jaxpipe.partition(
        zoo.mlp,
        mesh_of(2, None),
        loss=lambda model, batch: entropy(model(batch["x"]), batch["y"]),
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
    )
    state = pipeline.init(key, batch, variables=params)
    assert_same_bits(pipeline.parameters(state), jax.tree.map(np.asarray, params))
    _, metrics = pipeline.step(state, batch)
    rows = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
    halves = [entropy(zoo.mlp(params, rows["x"][j]), rows["y"][j]) for j in range(2)]
    assert float(metrics["loss"]) == pytest.approx(float(sum(halves)) / 2, rel=1e-6)


class Penalised(nn.Module):
    """A network whose loss looks at all of its parameters at the end."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(5)(x)


def test_a_penalty_on_all_parameters_does_not_tie_them_to_one_stage(key):
    batch = images(6, rows=8, classes=5)
    model = Penalised()

    def loss(model, batch):
        value = entropy(model(batch["x"]), batch["y"])
        return value + 1e-2 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(model.variables["params"]))

    pipeline = jaxpipe.partition(
        model,
        mesh_of(4, None),
        batch,
        loss=loss,
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
    )
    assert all(stage.parameter_bytes for stage in pipeline.plan.stages)
    state = pipeline.init(key)
    variables = pipeline.parameters(state)
    _, gradient = pipeline.value_and_grad(state, batch)

    def plain(params):
        logits = model.apply({"params": params}, batch["x"])
        penalty = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return entropy(logits, batch["y"]) + 1e-2 * penalty

    # The mean of two halves against the whole: float32 rounding.
    wanted = jax.jit(jax.grad(plain))(variables["params"])
    assert relative_l2(jax.tree.leaves(gradient), jax.tree.leaves(wanted)) < FUSION


@pytest.mark.parametrize(
    "schedule",
    ["one_f_one_b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero_bubble", "interleaved"))],
)
def test_a_tied_embedding_is_shared_with_the_last_stage(key, schedule):
    """Its two gradients are summed; update and evaluation see one parameter."""
    model = zoo.Transformer(vocab=11, num_layers=1, width=8, num_heads=2, max_length=4, dropout_rate=0.0, tied=True)
    tokens = jax.random.randint(key, (8, 4), 0, 11)

    def loss(model, tokens):
        logits = model(tokens, train=False)
        return entropy(logits[:, :-1], tokens[:, 1:])

    options = {"loss": loss, "evaluate": loss, "optimizer": optax.sgd(0.1), "schedule": schedule}
    options["runtime"] = "spmd"  # whose plan tells the bytes of what stages share
    mesh = mesh_of(2, None)
    pipeline = jaxpipe.partition(model, mesh, tokens, num_microbatches=4, profile="analytic", **options)
    state = pipeline.init(key)
    params = pipeline.parameters(state)["params"]
    embedding = max(jax.tree.leaves(params), key=lambda x: x.shape[0] == 11)
    home = pipeline.plan.stages[0].parameter_bytes, sum(x.parameter_bytes for x in pipeline.plan.stages)
    assert home[0] >= embedding.nbytes and home[1] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert pipeline.plan.memory["shared"] == 4 * embedding.nbytes

    def plain(params):
        return loss(lambda x, **kw: model.apply({"params": params}, x, **kw), tokens)

    gradient = pipeline.value_and_grad(state, tokens)[1]
    wanted = jax.jit(jax.grad(plain))(params)
    assert relative_l2(jax.tree.leaves(gradient), jax.tree.leaves(wanted)) < FUSION
    state, _ = pipeline.step(state, tokens)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, params, wanted)
    trained = pipeline.parameters(state)["params"]
    assert relative_l2(jax.tree.leaves(trained), jax.tree.leaves(after)) < FUSION
    # Losses of micro-batches are added up: float32 rounding.
    assert float(pipeline.evaluate(state, tokens)["loss"]) == pytest.approx(float(jax.jit(plain)(after)), rel=1e-6)


def test_complex_numbers_cross_stages(key):
    """Spectra are stored, sent and averaged as anything else is."""
    keys = jax.random.split(key, 6)
    dense = [jax.random.normal(k, (6, 6)) for k in keys[:2]]
    filters = [jax.lax.complex(*jax.random.normal(k, (2, 4))) for k in keys[2:5]]

    def apply(params, x):
        dense, filters = params
        z = jnp.fft.rfft(x @ dense[0])
        for w in filters:
            z = z * w / (1 + jnp.abs(z))
        return jnp.fft.irfft(z) @ dense[1]

    def loss(model, x):
        y = model(x)
        return jnp.square(y - x).mean(), {"spectrum": jnp.fft.rfft(y).mean(0)}

    x = jax.random.normal(keys[5], (8, 6))
    model = jax.tree_util.Partial(apply, (dense, filters))
    options = {"loss": loss, "optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh_of(4, None), x, **options)
    assert 2 * 4 * 8 in {stage.sent_bytes for stage in pipeline.plan.stages}  # two rows of four numbers
    state = pipeline.init(key)
    (value, metrics), gradient = pipeline.value_and_grad(state, x)
    plain = jax.value_and_grad(lambda params: loss(lambda x: apply(params, x), x), has_aux=True)
    (expected, wanted_metrics), wanted = plain((dense, filters))
    # The mean of four micro-batches against the whole: float32 rounding.
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    assert relative_l2(metrics["spectrum"], wanted_metrics["spectrum"]) < FUSION
    assert relative_l2(jax.tree.leaves(gradient), jax.tree.leaves(wanted)) < FUSION
    state, _ = pipeline.step(state, x)
    after = jax.tree.map(lambda p, g: p - 0.1 * g, jax.tree.leaves((dense, filters)), jax.tree.leaves(wanted))
    assert relative_l2(jax.tree.leaves(pipeline.parameters(state)), after) < FUSION


class HalfPrecision(nn.Module):
    """Parameters of 32 bits, activations of 16, logits of 32."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.LayerNorm(dtype=jnp.bfloat16)(nn.Dense(16, dtype=jnp.bfloat16)(x)))
        return nn.Dense(10)(x.astype(jnp.float32))


def test_mixed_precision_and_accumulation_over_steps(key):
    """Gradients bit for bit; parameters move in every second step, by the mean of both gradients."""
    model, batch = HalfPrecision(), images(8, rows=16)

    def loss(model, batch):
        return entropy(model(batch["x"]), batch["y"])

    def plain(params, part):
        return loss(lambda x: model.apply({"params": params}, x), part)

    optimizer = optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2).gradient_transformation()
    options = {"loss": loss, "optimizer": optimizer, "num_microbatches": 4, "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh_of(2, None), batch, **options)
    state = pipeline.init(key)
    params = pipeline.parameters(state)["params"]
    parts = [jax.tree.map(lambda x, j=j: x[4 * j : 4 * j + 4], batch) for j in range(4)]
    gradients = [jax.jit(jax.grad(plain))(params, part) for part in parts]
    wanted = jax.tree.map(lambda *g: functools.reduce(jnp.add, g) / 4, *gradients)
    assert_same_bits(arrays(pipeline.value_and_grad(state, batch)[1]), arrays(wanted))
    state, _ = pipeline.step(state, batch)
    assert_same_bits(arrays(pipeline.parameters(state)["params"]), arrays(params))
    state, _ = pipeline.step(state, batch)
    after = jax.tree.map(lambda p, g: p - 0.5 * g, params, wanted)
    assert relative_l2(arrays(pipeline.parameters(state)["params"]), arrays(after)) < FUSION


@pytest.mark.core
def test_metrics_carry_gradient_norm_and_injected_learning_rate(key):
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    pipeline = pipeline_of("mlp", 2, 4, None, optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=schedule))
    state = pipeline.init(key)
    for step in range(3):
        gradient = pipeline.value_and_grad(state, case_of("mlp").batch)[1]
        state, metrics = pipeline.step(state, case_of("mlp").batch)
        assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(step)))
        # Sums of squares buffer by buffer and then over stages, against leaf by leaf: float32 rounding.
        assert float(metrics["gradient_norm"]) == pytest.approx(float(optax.global_norm(gradient)), rel=1e-6)


class Counting(nnx.Module):
    """A count of calls in the first layer."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.last(jnp.tanh(self.first(x)))


def counted(model, x):
    before = model.calls.get_value()
    return model(x).mean(), {"calls": before, "weight": model.first.kernel.get_value()}


def test_metrics_may_be_variables_as_they_are(key):
    """The metrics are an early stage's parameter and its state before a call: 0, 1, 2, 3 for four micro-batches."""
    model, batch = Counting(nnx.Rngs(0)), jnp.ones((8, 3))
    options = {"loss": counted, "evaluate": counted, "optimizer": optax.sgd(0.1), "profile": "analytic"}
    pipeline = jaxpipe.partition(model, mesh_of(2, None), batch, num_microbatches=4, **options)
    state = pipeline.init(key)
    (_, metrics), _ = pipeline.value_and_grad(state, batch)
    assert float(metrics["calls"]) == 1.5
    assert_same_bits(np.asarray(metrics["weight"]), np.asarray(model.first.kernel.get_value()))
    assert float(pipeline.evaluate(state, batch)["calls"]) == 1.5
    with pytest.raises(PartitionError, match=r"on 2 devices .* what the loss returns depends on .*calls"):
        jaxpipe.partition(
            model,
            mesh_of(2, None),
            batch,
            num_microbatches=4,
            options=jaxpipe.PlanOptions(devices_per_stage=2),
            **options,
        )


def test_numpy_batches_of_64_bits_are_those_of_32(key):
    """As in JAX, which has no 64 bits unless they are enabled; scikit-learn's labels are int64."""
    data = np.random.default_rng(0)
    wide = {"x": data.standard_normal((8, 12)), "y": data.integers(0, 10, 8)}
    assert {x.dtype.itemsize for x in wide.values()} == {8}
    narrow = {"x": wide["x"].astype(np.float32), "y": wide["y"].astype(np.int32)}
    case = case_of("mlp")
    functions = {"loss": case.loss, "evaluate": case.loss, "predict": lambda model, batch: model(batch["x"])}
    options = {"optimizer": optax.sgd(0.1), "profile": "analytic", "num_microbatches": 2, **functions}
    results = []
    for planned in (wide, narrow):
        pipeline = jaxpipe.partition(case.model, mesh_of(2, None), planned, **options)
        for batch in (wide, narrow):
            state = pipeline.init(key)
            answers = [pipeline.value_and_grad(state, batch), pipeline.evaluate(state, batch)]
            answers += [pipeline.predict(state, batch), pipeline.step(state, batch)[1]]
            results.append(jax.tree.leaves(answers))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_settings_that_change_after_planning_are_refused(key):
    """``jax.jit`` traces a step again under other settings; the programs of a pipeline stay."""
    case = case_of("mlp")
    functions = {"loss": case.loss, "evaluate": case.loss, "predict": lambda model, batch: model(batch["x"])}
    options = {"optimizer": optax.sgd(0.1), "profile": "analytic", "num_microbatches": 2, **functions}
    with jax.default_matmul_precision("float32"):
        pipeline = jaxpipe.partition(case.model, mesh_of(2, None), case.batch, **options)
        state = pipeline.init(key)
        state, _ = pipeline.step(state, case.batch)
    for name in ("step", "value_and_grad", "evaluate", "predict"):
        with pytest.raises(jaxpipe.ModelError, match="jax_default_matmul_precision was float32 and is None"):
            getattr(pipeline, name)(state, case.batch)
    with jax.default_matmul_precision("float32"):
        pipeline.step(state, case.batch)


def test_states_and_pipelines_print_in_a_line(key):
    options = {"loss": case_of("mlp").loss, "optimizer": optax.adam(0.1), "profile": "analytic", "num_microbatches": 4}
    pipeline = jaxpipe.partition(case_of("mlp").model, mesh_of(2, 2), **options)
    assert repr(pipeline) == "Pipeline(mesh: data=2, stage=2; no plan yet)"
    state = pipeline.init(key, case_of("mlp").batch)
    plan = pipeline.plan
    start = f"Pipeline(mesh: data=2, stage=2; 2 stages, 4 micro-batches of 2, schedule {plan.schedule}, "
    assert repr(pipeline).startswith(start) and plan.identity in repr(pipeline)
    sizes = [sum(x.nbytes for x in buffers) for buffers in (state.parameters, state.optimizer)]
    expected = [f"{name}={size / 1024:.2f} KiB" for name, size in zip(("parameters", "optimizer"), sizes, strict=True)]
    assert repr(state) == f"TrainState(step=0, skipped=0, {', '.join(expected)} on all devices, plan={plan.identity!r})"
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state)), state)
    assert "float32" not in seen[0] and "step=" in seen[0]
    assert "step=True" in repr(jax.tree.map(lambda _: True, state))
    state.step.delete()
    assert "step=donated" in repr(state)


@pytest.mark.core
@pytest.mark.filterwarnings("error")
def test_planning_and_compiling_give_no_warning():
    """Nor does JAX deprecate how it is called."""
    apply = jaxpipe.memory_encoded(lambda w, x: jax.nn.relu(x @ w) @ w)
    model = jax.tree_util.Partial(apply, jnp.eye(5))
    options = {"loss": lambda f, x: f(x).mean(), "optimizer": optax.adam(1e-3), "num_microbatches": 2}
    pipeline = jaxpipe.partition(model, mesh_of(1, None), jnp.ones((8, 5)), memory="1MB", **options)
    assert pipeline.memory_report().predicted_bytes == (pipeline.plan.predicted_bytes,)


class Tower(nn.Module):
    """Layers with statistics, of which an evaluation reads the running ones."""

    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(3):
            x = nn.BatchNorm(use_running_average=not train)(nn.tanh(nn.Dense(12)(x)))
        return x


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_evaluations_and_predictions_may_call_the_model_several_times(runtime, key):
    """The same examples seen in two ways, against plain Flax; a call on another call's results is refused by name."""

    def two_views(apply, x):
        first, second = apply(x, train=False), apply(-x[:, ::-1], train=False)
        return jnp.square(first - second).mean(), {"size": jnp.abs(second).mean()}

    def both(apply, x):
        return apply(x, train=False), apply(x + 1, train=False)

    x = np.random.default_rng(0).standard_normal((8, 12), np.float32)
    given = {
        "loss": lambda model, x: jnp.square(model(x) - x).mean(),
        "optimizer": optax.adam(1e-2),
        "num_microbatches": 1,
        "profile": "analytic",
        "runtime": runtime,
    }
    pipeline = jaxpipe.partition(Tower(), mesh_of(2), x, evaluate=two_views, predict=both, **given)
    state, _ = pipeline.step(pipeline.init(key), x)
    variables = pipeline.parameters(state)
    expected = jax.jit(lambda x: two_views(lambda *a, **k: Tower().apply(variables, *a, **k), x))(x)
    told = pipeline.evaluate(state, x)
    assert relative_l2((told["loss"], {"size": told["size"]}), expected) < FUSION
    expected = jax.jit(lambda x: both(lambda *a, **k: Tower().apply(variables, *a, **k), x))(x)
    assert relative_l2(pipeline.predict(state, x), expected) < FUSION

    twice = jaxpipe.partition(
        Tower(),
        mesh_of(2),
        x,
        evaluate=lambda model, x: model(model(x, train=False), train=False).mean(),
        **given,
    )
    with pytest.raises(PartitionError, match=r"evaluate uses Dense_0/kernel.*and none on the results of later ones"):
        twice.evaluate(twice.init(key), x)


def test_programs_of_the_sizes_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("jaxpipe.runtime.recent.MOST_KEPT", 2)
    model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
    pipeline = jaxpipe.partition(
        model,
        jax.make_mesh((1,), ("stage",), devices=jax.devices()[:1]),
        jnp.ones((4, 3)),
        loss=lambda f, x: f(x).mean(),
        evaluate=lambda f, x: f(x).mean(),
        optimizer=optax.sgd(0.5),
        profile="analytic",
    )
    state = pipeline.init(jax.random.key(0))
    for size in (1, 2, 1, 3, 2):
        assert pipeline.evaluate(state, jnp.ones((size, 3)))["loss"] == 3
        state, metrics = pipeline.step(state, jnp.zeros((size, 3)))
        assert metrics["loss"] == 0
    assert len(pipeline._forwards) == len(pipeline._runtime._compiled_steps) == 2
