"""Stage programs dispatched by the host: their numbers beside one program's and plain training's, and bookkeeping."""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe.errors import BatchError, ModelError, PartitionError
from jaxpipe.runtime.mpmd.step_graph import Call, Send
from jaxpipe.runtime.mpmd.training_graph import training_graph
from jaxpipe.schedules import Kind, gpipe, interleaved, one_f_one_b, zero_bubble
from tests.support.compare import FUSION, arrays, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of
from tests.support.pipeline_models import CASES, case_of, pipeline_of, plain_gradients


pytestmark = pytest.mark.compiles
stages_of = functools.partial(pipeline_of, runtime="mpmd")
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble, "chunks": interleaved}


def results(name: str, runtime: str, stages: int, m: int, replicas: int | None, schedule) -> dict:
    """Gradients, parameters after 3 steps, metrics, and the loss of an evaluation."""
    case = case_of(name)
    # Products with powers of two are exact, so that it does not matter which sums a compiler contracts them with.
    optimizer = optax.sgd(2**-4, momentum=0.5)
    options = {"schedule": schedule, "evaluate": case.loss, "runtime": runtime, "optimizer": optimizer}
    pipeline = stages_of(name, stages, m, replicas, **options)
    assert pipeline.plan.runtime == runtime
    state = pipeline.init(jax.random.key(3))
    (loss, _), gradient = pipeline.value_and_grad(state, case.batch)
    losses = []
    for _ in range(3):
        state, metrics = pipeline.step(state, case.batch)
        losses.append(metrics["loss"])
    after = pipeline.evaluate(state, case.batch)["loss"]
    norm = float(metrics["gradient_norm"])
    numbers = [loss, *losses, after, arrays(gradient), arrays(pipeline.parameters(state))]
    return {"numbers": jax.tree.map(np.asarray, numbers), "norm": norm, "step": int(state.step)}


def check_runtimes(name: str, stages: int, m: int, replicas: int | None, schedule, exact: bool) -> None:
    ours, theirs = (results(name, runtime, stages, m, replicas, schedule) for runtime in ("mpmd", "spmd"))
    if exact:
        assert_same_bits(ours["numbers"], theirs["numbers"])
    assert relative_l2(ours["numbers"], theirs["numbers"]) < FUSION
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6)  # the one program sums squares over packed buffers
    assert ours["step"] == theirs["step"] == 3


@pytest.mark.parametrize(
    ("stages", "schedule", "replicas"),
    [
        pytest.param(2, "zero_bubble", None, marks=pytest.mark.core),
        (2, "1f1b", 2),
        *(
            pytest.param(*size, marks=pytest.mark.versions)
            for size in ((1, "1f1b", None), (4, "gpipe", None), (2, "chunks", None))
        ),
    ],
)
def test_stage_programs_give_the_bits_of_one_program(stages, schedule, replicas):
    check_runtimes("mlp", stages, 4, replicas, SCHEDULES[schedule], exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_agrees_with_one_program(name, stages, schedule, replicas):
    if (name, schedule, stages) == ("mlp", "chunks", 4):
        stages = 2  # it has operators for fewer than eight stages
    # XLA:CPU rounds a normalization as it fuses it. A cut through one changes that, as in the transformer; eight chunks
    # cut the softmax of the others' loss, which the last chunk computes forward and backward in one program.
    exact = name == "mlp" or (name != "transformer" and (stages, schedule) != (4, "chunks"))
    check_runtimes(name, stages, 4, replicas, SCHEDULES[schedule], exact=exact)


def list_of(name: str, stages: int, m: int, schedule):
    """The list of a training step, and where it is."""
    runtime = stages_of(name, stages, m, None, schedule=schedule)._runtime
    layout = runtime._layout
    return training_graph(layout), layout


def test_the_gradients_of_vectors_are_summed_in_one_array():
    scales = [jnp.full(8, 1.0 + k % 2) for k in range(6)]  # no product or sum is rounded
    model = jax.tree_util.Partial(lambda vs, x: functools.reduce(jnp.multiply, vs, x), scales)
    batch = jnp.arange(64.0).reshape(8, 8)
    pipeline = jaxpipe.partition(
        model, mesh_of(2, None), batch, loss=lambda f, x: f(x).mean(), optimizer=optax.sgd(0.1), num_microbatches=4,
        profile="analytic", schedule="zero_bubble", runtime="mpmd",
    )  # fmt: skip
    runtime = pipeline._runtime
    for task in training_graph(runtime._layout).tasks:
        assert sum(path[0] == "sums" for path in task.writes) <= 1
    (_, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(1)), batch)
    rows = batch.reshape(4, 2, 8)
    parts = [jax.grad(lambda vs, x: model.func(vs, x).mean())(scales, x) for x in rows]
    expected = jax.tree.map(lambda *gs: functools.reduce(jnp.add, gs, jnp.zeros(8)) / 4, *parts)
    assert_same_bits(jax.tree.leaves(gradients), jax.tree.leaves(expected))


def test_a_stage_holds_as_many_stashes_as_the_schedule_has_in_flight():
    weights = [jnp.eye(8) for _ in range(8)]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    pipeline = jaxpipe.partition(
        model, mesh_of(4, None), jnp.ones((16, 8)), loss=lambda f, x: (f(x).sum(), 1.0, {}), optimizer=optax.sgd(0.1),
        num_microbatches=8, profile="analytic", schedule=one_f_one_b, runtime="mpmd",
    )  # fmt: skip
    runtime = pipeline._runtime
    calls = training_graph(runtime._layout)
    stashes: dict[int, int] = {}  # by register, its stage: what a stage makes and its backward pass reads
    held, most = [set() for _ in range(4)], [0] * 4
    for instruction in calls.instructions:
        if isinstance(instruction, Call):
            groups = [path[0] for path in calls.tasks[instruction.task].reads]
            reads = dict(zip(instruction.reads, groups, strict=True))
            kept = {r for r, group in reads.items() if group == "stash"}
            if "cotangents" in groups:
                stashes |= dict.fromkeys(kept, instruction.place.stage)
    for instruction, dropped in zip(calls.instructions, calls.drops, strict=True):
        if isinstance(instruction, Call):
            s = instruction.place.stage
            held[s] |= {r for r in instruction.writes if stashes.get(r) == s}
            most[s] = max(most[s], len(held[s]))
            held[s] -= set(dropped)
    each = [len([r for r, s in stashes.items() if s == k and r in _written(calls)]) / 8 for k in range(4)]
    # Textbook 1F1B has 4, 3, 2 and 1 in flight; the last stage's stash never leaves its program.
    assert [n / k for n, k in zip(most[:3], each[:3], strict=True)] == [4, 3, 2]
    assert most[3] == 0


def _written(calls) -> set[int]:
    return {r for instruction in calls.instructions if isinstance(instruction, Call) for r in instruction.writes}


def test_the_last_stage_goes_on_with_the_backward_pass_where_nothing_is_between():
    fused = [(Kind.FORWARD, Kind.BACKWARD)]
    assert one_f_one_b(4, 8).program_kinds[3] == fused
    assert one_f_one_b(1, 4).program_kinds[0] == fused
    assert one_f_one_b(4, 8).program_kinds[0] == [(Kind.FORWARD,), (Kind.BACKWARD,)]
    assert gpipe(2, 4).program_kinds[1] == [(Kind.FORWARD,), (Kind.BACKWARD,)]
    split = zero_bubble(2, 4).program_kinds[1]
    assert split == [(Kind.FORWARD, Kind.BACKWARD_INPUT), (Kind.BACKWARD_WEIGHT,)]


def test_nothing_is_copied_within_a_device():
    calls, layout = list_of("mlp", 2, 4, interleaved)
    assert len(layout.devices.rows) == 4  # stages on two devices
    sends = [instruction for instruction in calls.instructions if isinstance(instruction, Send)]
    assert len(sends) >= 2 * 3 * 4  # forward and back over three cuts, for each of four micro-batches
    for send in sends:
        assert layout.devices.at(send.source) != layout.devices.at(send.target)


def test_equal_stages_are_compiled_once(monkeypatch):
    from jaxpipe.runtime.mpmd import compile_tasks as compiling

    counts, compiled = [], []
    lower, build = compiling._lower, compiling._compile

    def count(jobs, lowered, rows):
        program = SimpleNamespace(compile=lambda **options: compiled.append(options) or lowered.compile(**options))
        return build(jobs, program, rows)

    monkeypatch.setattr(compiling, "_lower", lambda jobs, platform: counts.append(len(jobs)) or lower(jobs, platform))
    monkeypatch.setattr(compiling, "_compile", count)
    weights = [jnp.eye(8) for _ in range(6)]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    pipeline = jaxpipe.partition(
        model, mesh_of(4, None), jnp.ones((8, 8)), loss=lambda f, x: (f(x).sum(), 1.0, {}), optimizer=optax.sgd(0.1),
        num_microbatches=4, profile="analytic", schedule="1f1b", runtime="mpmd",
    )  # fmt: skip
    pipeline.step(pipeline.init(jax.random.key(0)), jnp.ones((8, 8)))
    assert any(n > 1 for n in counts), "no two stages of six equal layers were lowered together"
    assert len(compiled) == len(counts)


class Tagger(nn.Module):
    """A tied embedding, a layer with dropout, a head: sequences of any length up to 12."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(20, 16)
        x = embed(tokens) + nn.Embed(12, 16)(jnp.arange(tokens.shape[1]))
        x = x + nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(16)(x)))
        return embed.attend(nn.LayerNorm()(x))


def token_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def tokens(rows: int, length: int) -> dict:
    drawn = np.random.default_rng(length)
    return {name: drawn.integers(0, 20, (rows, length), np.int32) for name in "xy"}


def test_other_lengths_and_a_smaller_last_batch_train_as_plain_training_does():
    batches = [tokens(8, 6), tokens(8, 10), tokens(6, 6), tokens(8, 6)]
    model, optimizer = Tagger(), optax.sgd(0.1)
    options = {
        "loss": token_loss,
        "optimizer": optimizer,
        "num_microbatches": 4,
        "profile": "analytic",
        "runtime": "mpmd",
    }
    pipeline = jaxpipe.partition(model, mesh_of(2, None), batches[0], **options, schedule="1f1b")
    state = pipeline.init(jax.random.key(0))
    params = pipeline.parameters(state)["params"]

    def plain(params, key, rows):
        run = lambda x: model.apply({"params": params}, x, rngs={"dropout": key})  # noqa: E731
        return token_loss(run, rows)

    gradient_of = jax.jit(jax.value_and_grad(plain))
    for batch in batches:
        m = len(batch["x"]) // 2  # micro-batches keep their two rows
        rows = [jax.tree.map(lambda x, j=j: x[2 * j : 2 * j + 2], batch) for j in range(m)]
        pairs = [gradient_of(params, pipeline.microbatch_key(state, j), rows[j]) for j in range(m)]
        loss, gradient = jax.tree.map(lambda *xs: functools.reduce(jnp.add, xs) / len(xs), *pairs)
        (value, _), trained_gradient = pipeline.value_and_grad(state, batch)
        assert relative_l2(arrays(trained_gradient), arrays(gradient)) < FUSION
        assert float(value) == pytest.approx(float(loss), rel=1e-6)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        state, metrics = pipeline.step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert relative_l2(arrays(pipeline.parameters(state)["params"]), arrays(params)) < FUSION


def test_the_bits_of_other_batch_sizes_are_those_of_plain_accumulation():
    case = case_of("mlp")
    pipeline = stages_of("mlp", 2, 4, None)  # 16 rows: micro-batches of 4
    state = pipeline.init(jax.random.key(3))
    params, variables = case.start(jax.random.key(3))
    for rows, m in ((32, 8), (8, 2), (16, 4)):
        smaller = CASES["mlp"](rows)
        keys = jnp.stack([pipeline.microbatch_key(state, j) for j in range(m)])
        _, wanted, _ = plain_gradients(smaller, params, variables, keys, 1, m)
        assert_same_bits(arrays(pipeline.value_and_grad(state, smaller.batch)[1]), arrays(wanted))


def test_a_batch_of_another_form_is_refused():
    pipeline = stages_of("mlp", 2, 4, None)
    state, batch = pipeline.init(jax.random.key(3)), case_of("mlp").batch
    with pytest.raises(BatchError, match=r"batch\['x'\] is float32\[16, 12, 1\].*cast or reshape"):
        pipeline.step(state, {**batch, "x": batch["x"][..., None]})
    with pytest.raises(BatchError, match="another structure"):
        pipeline.step(state, {"x": batch["x"]})


def test_a_state_moves_into_a_pipeline_with_other_cuts():
    case = case_of("mlp")
    # Not Adam: XLA:CPU rounds a division by a scalar otherwise where more leaves share the scalar.
    optimizer = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.1 / (1 + count)))
    options = {"optimizer": optimizer}
    first = stages_of("mlp", 4, 4, None, **options)
    state, _ = first.step(first.init(jax.random.key(3)), case.batch)
    expected, _ = first.step(first.adopt(state), case.batch)
    other = stages_of("mlp", 2, 4, None, schedule=gpipe, **options)
    moved, _ = other.step(other.adopt(state), case.batch)
    assert int(moved.step) == 2
    assert_same_bits(arrays(other.parameters(moved)), arrays(first.parameters(expected)))
    after, _ = first.step(state, case.batch)  # it was copied
    assert_same_bits(arrays(first.parameters(after)), arrays(first.parameters(expected)))


def test_a_state_of_another_optimizer_or_runtime_is_refused():
    first = stages_of("mlp", 2, 4, None, optimizer=optax.adam(1e-2))
    state = first.init(jax.random.key(3))
    with pytest.raises(ModelError, match="optimizer"):
        stages_of("mlp", 2, 4, None, optimizer=optax.sgd(0.1)).adopt(state)
    with pytest.raises(PartitionError, match="runtime"):
        stages_of("mlp", 2, 4, None, optimizer=optax.adam(1e-2), runtime="spmd").adopt(state)


def test_a_checkpoint_of_either_runtime_restores_into_the_other(tmp_path):
    case, restored = case_of("mlp"), {}
    for runtime, other in (("mpmd", "spmd"), ("spmd", "mpmd")):
        pipeline = stages_of("mlp", 2, 4, None, runtime=runtime)
        state, _ = pipeline.step(pipeline.init(jax.random.key(3)), case.batch)
        pipeline.save(state, tmp_path / runtime)
        second = stages_of("mlp", 4, 4, None, runtime=other)
        state, _ = second.step(second.restore(tmp_path / runtime), case.batch)
        restored[runtime] = arrays(second.parameters(state))
    assert_same_bits(restored["mpmd"], restored["spmd"])


def test_an_error_before_the_updates_leaves_the_state_usable(monkeypatch):
    case, pipeline = case_of("cnn-nnx"), stages_of("cnn-nnx", 2, 4, None)
    state = pipeline.init(jax.random.key(3))
    expected, _ = pipeline.step(pipeline.adopt(state), case.batch)
    dispatch = pipeline._runtime._compiled_for(pipeline._planned.batch).dispatch
    tasks = [getattr(instruction, "task", None) for instruction in dispatch.graph.instructions]
    labels = ["" if k is None else dispatch.graph.tasks[k].label for k in tasks]
    update = next(k for k, label in enumerate(labels) if label.endswith("update"))
    broken = [*dispatch.steps]

    def fail(*_):
        raise RuntimeError("out of memory")

    broken[update] = (fail, *dispatch.steps[update][1:])
    with monkeypatch.context() as patch:
        patch.setitem(dispatch.__dict__, "steps", tuple(broken))
        with pytest.raises(RuntimeError, match="out of memory"):
            pipeline.step(state, case.batch)
    after, _ = pipeline.step(state, case.batch)
    assert_same_bits(arrays(pipeline.parameters(after)), arrays(pipeline.parameters(expected)))


def test_each_device_reports_its_own_bytes():
    weights = [jnp.ones((8, 64)), jnp.ones((64, 64)), jnp.ones((64, 64)), jnp.ones((64, 8))]
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    pipeline = jaxpipe.partition(
        model, mesh_of(2, None), jnp.ones((8, 8)), loss=lambda f, x: (f(x).sum(), 1.0, {}), optimizer=optax.sgd(0.1),
        num_microbatches=4, profile="analytic", runtime="mpmd",
    )  # fmt: skip
    report = pipeline.memory_report()
    assert len(report.compiled_bytes) == len(report.predicted_bytes) == 2
    parameter_bytes = [4 * sum(int(np.prod(weights[k].shape)) for k in stage) for stage in ((0, 1), (2, 3))]
    # Parameters and their gradients at least.
    assert all(size >= 2 * least for size, least in zip(report.compiled_bytes, parameter_bytes, strict=True))


def test_an_unknown_runtime_is_refused():
    with pytest.raises(PartitionError, match="runtime='fast'; it must be 'mpmd'"):
        stages_of("mlp", 2, 4, None, runtime="fast")


class Counting(nn.Module):
    """Counts in whole numbers what it has seen, and computes with the count."""

    @nn.compact
    def __call__(self, x):
        seen = self.variable("counts", "positive", lambda: jnp.int32(0))
        if not self.is_initializing():
            seen.value += (x > 0).sum(dtype=jnp.int32)
        return nn.Dense(5)(x) * (1 + seen.value / 64)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_every_replica_goes_on_from_the_counts_of_the_first_one(runtime):
    module, key, replicas, m = Counting(), jax.random.key(0), 2, 2
    batch = jax.random.normal(jax.random.key(1), (16, 8))
    options = {"optimizer": optax.sgd(0.0), "num_microbatches": m, "profile": "analytic", "runtime": runtime}
    pipeline = jaxpipe.partition(
        module, mesh_of(2, replicas), batch, loss=lambda model, x: jnp.square(model(x)).mean(), **options
    )
    variables, state = module.init(key, batch), pipeline.init(key)
    for _ in range(2):
        losses, ends = [], []
        for rows in batch.reshape(replicas, m, -1, 8):
            now = variables
            for x in rows:
                y, counts = module.apply(now, x, mutable=["counts"])
                losses.append(float(jnp.square(y).mean()))
                now = {**now, **counts}
            ends.append(now)
        variables = ends[0]
        state, metrics = pipeline.step(state, batch)
        np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=FUSION)
        assert pipeline.parameters(state)["counts"]["positive"] == variables["counts"]["positive"]


def test_one_program_refuses_a_random_key_among_the_variables():
    model = jax.tree_util.Partial(lambda tree, x: x @ tree["w"], {"w": jnp.ones((3, 1)), "key": jax.random.key(0)})
    options = {"loss": lambda model, x: model(x).mean(), "optimizer": optax.sgd(0.1), "profile": "analytic"}
    with pytest.raises(PartitionError, match=r"key: it is a typed random key .*only stage programs"):
        jaxpipe.partition(model, mesh_of(1), jnp.ones((4, 3)), **options, runtime="spmd")


def test_several_sizes_choose_stage_programs():
    batches, options = [tokens(8, 6), tokens(8, 10)], {"loss": token_loss, "optimizer": optax.sgd(0.1)}
    pipeline = jaxpipe.partition(Tagger(), mesh_of(2, None), batches, **options, profile="analytic")
    assert pipeline.plan.runtime == "mpmd"
    with pytest.raises(PartitionError, match="runtime='spmd' with batches of several sizes: one program has one size"):
        jaxpipe.partition(Tagger(), mesh_of(2, None), batches, **options, profile="analytic", runtime="spmd")


def test_several_sizes_are_compiled_ahead(caplog):
    batches = [tokens(8, 6), tokens(8, 10)]
    options = {
        "loss": token_loss,
        "optimizer": optax.sgd(0.1),
        "num_microbatches": 4,
        "profile": "analytic",
        "runtime": "mpmd",
    }
    pipeline = jaxpipe.partition(Tagger(), mesh_of(2, None), batches, **options, schedule="1f1b")
    state = pipeline.init(jax.random.key(0))
    with caplog.at_level("INFO", "jaxpipe"):
        state, _ = pipeline.step(state, batches[0])
        assert "other shapes than were planned for: [8, 10], [8, 10]" in caplog.text
        caplog.clear()
        pipeline.step(state, batches[1])
        assert "Compiling" not in caplog.text


def on_the_host(x):
    return jax.pure_callback(lambda x: np.maximum(np.asarray(x), 0), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def host_relu(x):
    return on_the_host(x)


host_relu.defvjp(lambda x: (on_the_host(x), x), lambda x, cotangent: (cotangent * (x > 0),))


@pytest.mark.core
@pytest.mark.parametrize("replicas", [None, 2])
def test_layers_may_call_python(replicas):
    """Equal stages too: what calls Python is compiled for each device."""

    def loss(model, x):
        return jnp.square(model(x)).mean()

    def apply(weights, x):
        for w in weights:
            x = host_relu(x @ w)
        return x

    weights = list(jax.random.normal(jax.random.key(0), (4, 8, 8)))
    batch = jax.random.normal(jax.random.key(1), (16, 8))
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": 4, "profile": "analytic", "runtime": "mpmd"}
    model = jax.tree_util.Partial(apply, weights)
    pipeline = jaxpipe.partition(model, mesh_of(4, replicas), batch, loss=loss, **options)
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(2)), batch)
    # The same with JAX's own function.
    plain = jax.value_and_grad(
        lambda weights: loss(lambda x: functools.reduce(lambda x, w: jax.nn.relu(x @ w), weights, x), batch)
    )
    assert relative_l2([value, *jax.tree.leaves(gradients)], list(jax.tree.leaves(plain(weights)))) < FUSION


@pytest.mark.parametrize("m", [1, 2])
def test_gradients_of_a_single_micro_batch_are_not_added_to_zeros(m):
    pipeline = stages_of("mlp", 2, m, None, schedule=one_f_one_b)
    zeros = [task for task in pipeline._runtime.graph.tasks if task.label.endswith("zeros")]
    groups = {path[0] for task in zeros for path in task.writes}
    assert groups == ({"totals"} if m == 1 else {"totals", "sums"})
    case, state = case_of("mlp"), pipeline.init(jax.random.key(3))
    _, gradients = pipeline.value_and_grad(state, case.batch)
    keys = jnp.stack([pipeline.microbatch_key(state, j) for j in range(m)])
    _, wanted, _ = plain_gradients(case, *case.start(jax.random.key(3)), keys, 1, m)
    assert_same_bits(arrays(gradients), arrays(wanted))
