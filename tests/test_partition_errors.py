"""Errors for what does not fit: the numbers, the rule and the fix, if possible before tracing."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe import BatchError, MemoryBudgetError, ModelError, PartitionError, ScheduleError
from jaxpipe.schedules import Action, Kind, Schedule
from jaxpipe.text.units import parse_bytes
from tests.support.meshes import mesh_of, named_mesh
from tests.support.two_layers import mean, two_layers, untouched


KEY = jax.random.key(0)


def weights(width=4):
    return {"a": jnp.ones((3, width)), "b": jnp.ones((width, 2))}


MODEL = jax.tree_util.Partial(two_layers, weights())


def timed(seconds):
    nothing = [0.0] * len(seconds)
    return jaxpipe.Profile.chain(list(map(str, seconds)), seconds, nothing, nothing, nothing, nothing)


def partition(model=MODEL, mesh=None, batch=None, *, rows=8, loss=mean, **kwargs):
    mesh = mesh_of(2) if mesh is None else mesh
    batch = jnp.ones((rows, 3)) if batch is None else batch
    kwargs = {"profile": "analytic", "num_microbatches": 2, **kwargs}
    return jaxpipe.partition(model, mesh, batch, loss=loss, optimizer=optax.sgd(0.1), **kwargs)


@pytest.fixture(scope="module")
def pipeline():
    return partition(runtime="spmd")  # takes batches of one size only


@pytest.fixture(scope="module")
def state(pipeline):
    return pipeline.init(KEY)


# The mesh


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (named_mesh(tp=2), r"the axes \('tp',\)\. A pipeline uses 'stage' \(required\); 'data' makes replicas"),
        (named_mesh(pp=2, pipe=2), r"the axes \('pp', 'pipe'\).*taken for them: 'stages', 'pipe', .*; 'dp'"),
        (named_mesh(data=2), r"the axes \('data',\)\. .*make_mesh\(\(2, 4\), \('data', 'stage'\)\)"),
        (named_mesh(stage=2, pp=2), r"'stage' and 'pp' are both taken for 'stage'"),
        (4, r"mesh is int; .*jax\.make_mesh\(\(4,\), \('stage',\)\)"),
    ],
)
def test_meshes_without_the_right_axes_are_refused(mesh, message):
    with pytest.raises(PartitionError, match=message):
        partition(mesh=mesh, loss=untouched)


# The batch


@pytest.mark.parametrize(
    ("rows", "mesh", "count", "message"),
    [
        (
            10,
            mesh_of(2),
            4,
            r"A batch of 10 examples cannot be cut into num_microbatches=4 .* each of 1 replica\(s\)\. "
            r"Use num_microbatches=2 or 5, or a batch of 8 or 12 examples",
        ),
        (
            6,
            mesh_of(2, 2),
            2,
            r"A batch of 6 .*each of 2 replica\(s\)\. Use num_microbatches=1 or 3, or a batch of 4 or 8 examples",
        ),
        (
            3,
            mesh_of(2, 2),
            None,
            r"A batch of 3 .*each of 2 replica\(s\)\. Use a multiple of 2 examples",
        ),
        (2, mesh_of(2), 4, r"A batch of 2 .*Use num_microbatches=1 or 2, or a batch of 4 examples"),
        (8, mesh_of(2), 0, r"num_microbatches=0; it must be at least 1"),
        (8, mesh_of(2), -2, r"num_microbatches=-2; it must be at least 1"),
    ],
)
def test_micro_batches_that_do_not_divide(rows, mesh, count, message):
    with pytest.raises(BatchError, match=message):
        partition(mesh=mesh, rows=rows, num_microbatches=count, loss=untouched)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_counts_that_are_named_do_fit(count):
    assert partition(rows=10, num_microbatches=count).plan.microbatch_size == 10 // count


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": jnp.ones((8, 3)), "mode": "train"}, r"batch\['mode'\] is 'train' \(str\); a batch holds arrays only"),
        ({"x": jnp.ones((8, 3)), "rate": 0.5}, r"batch\['rate'\] is 0\.5 \(float\); .*functools\.partial"),
        ({"x": jnp.ones((8, 3)), "y": jnp.ones(6)}, r"differ in size \(batch\['x'\]: 8, batch\['y'\]: 6\)"),
        ({"x": jnp.ones(())}, r"no array has an axis"),
    ],
)
def test_what_is_no_batch(batch, message):
    with pytest.raises(BatchError, match=message):
        partition(batch=batch, loss=untouched)


@pytest.mark.parametrize("method", ["step", "value_and_grad"])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            jnp.ones((6, 3)),
            r"is float32\[6, 3\], the plan was made for float32\[8, 3\]\. Pad or drop the last examples .* has 8,",
        ),
        (
            jnp.ones((8, 3), jnp.bfloat16),
            r"is bfloat16\[8, 3\], the plan was made for float32\[8, 3\]\. Cast it, array\.astype\('float32'\), or",
        ),
        (
            np.ones((8, 3), np.int64),
            r"is int32\[8, 3\], the plan was made for float32\[8, 3\]\. Cast it, array\.astype",
        ),
        (
            jnp.ones((8, 4)),
            r"is float32\[8, 4\], .*\. The axes behind the examples are planned for as well: pad or cut",
        ),
        (jnp.ones(8), r"is float32\[8\], .*\. The axes behind the examples"),
        (np.array([["a"] * 3] * 8), r"batch is a ndarray of dtype <U1; a batch holds JAX or NumPy arrays of numbers"),
        ({"x": jnp.ones((8, 3))}, r"The batch has another structure .*it has \['x'\]; it lacks \(the array itself\)"),
        ([1.0], r"batch\[0\] is 1\.0 \(float\)"),
    ],
)
def test_another_batch_than_planned(pipeline, state, method, batch, message):
    with pytest.raises(BatchError, match=message):
        getattr(pipeline, method)(state, batch)


def test_an_evaluation_batch_that_the_replicas_cannot_share():
    pipeline = partition(mesh=mesh_of(2, 2), evaluate=untouched)
    with pytest.raises(BatchError, match=r"A batch for evaluate of 3 examples .*Use a multiple of 2 examples"):
        pipeline.evaluate(pipeline.init(KEY), jnp.ones((3, 3)))


# The loss


@pytest.mark.core
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda f, x: f(x), r"loss returned a loss of shape \(4, 2\) and dtype float32; it must be one floating-point"),
        (lambda f, x: jnp.argmax(f(x)), r"a loss of shape \(\) and dtype int32; .*take the mean, or the sum"),
        (lambda f, x: (f(x).sum(), f(x)[:, 0], {}), r"loss returned a weight of shape \(4,\) and dtype float32"),
        (lambda f, x: (f(x)[0], {}), r"a loss of shape \(2,\)"),
    ],
)
def test_losses_that_are_no_number_are_refused(loss, message):
    with pytest.raises(PartitionError, match=message):
        partition(loss=loss)


# The cut


def test_more_stages_than_operators():
    # A product, a sum, a division.
    model = jax.tree_util.Partial(lambda w, x: x @ w, jnp.ones((3, 1)))
    message = r"The plan needs 4 stages, but the model has 3 operators with 2 places .* between 1 and 3 stages"
    with pytest.raises(PartitionError, match=message):
        partition(model, mesh_of(4))
    assert len(partition(model, mesh_of(2)).plan.stages) == 2


@pytest.mark.core
def test_a_tied_parameter_is_named():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (3, 3))
            return jnp.tanh(jnp.tanh(x @ w) @ w)

    # Product, tanh, product, tanh, sum, of which no cut may part the first three.
    message = (
        r"The plan needs 4 stages, but the model has 5 operators with 2 places .*between 1 and 3 stages\. Variable w "
        r"is used from operator 0 \(Tied\) to operator 2 \(Tied\), .*Untie it, or use fewer stages"
    )
    with pytest.raises(PartitionError, match=message):
        partition(Tied(), mesh_of(4), loss=lambda f, x: (f(x).sum(), len(x), {}))
    plan = partition(Tied(), mesh_of(3), loss=lambda f, x: (f(x).sum(), len(x), {})).plan
    assert plan.stages[0].operators == (0, 3) and plan.stages[-1].operators[1] == 5
    assert len(plan.stages) < 3 and any("left out" in note for note in plan.notes)  # a sum needs no device of its own


def test_an_unknown_schedule():
    with pytest.raises(
        PartitionError, match=r"schedule='dualpipe'; it must be 'auto', 'one_f_one_b', .* or a function"
    ):
        partition(schedule="dualpipe", loss=untouched)


@pytest.mark.parametrize("profile", ["fast", 3])
def test_an_unknown_profile(profile):
    with pytest.raises(PartitionError, match=rf"profile={profile!r}; it must be 'measured', 'analytic', a"):
        partition(profile=profile, loss=untouched)


def test_a_schedule_that_is_not_valid():
    forward, backward = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
    ticks = (((forward,), (forward,)), ((), (backward,)), ((backward,), ()))
    with pytest.raises(ScheduleError, match=r"early: F of stage 1 for micro-batch 0 is in tick 0, but it needs F of"):
        partition(num_microbatches=1, schedule=lambda p, m: Schedule("early", p, m, ticks))


# Memory


@pytest.mark.parametrize("memory", ["8 apples", "many", "-3GiB", "0", 0, -1, 2.5, "1e9", ""])
def test_invalid_memory_sizes_are_refused(memory):
    with pytest.raises(MemoryBudgetError, match=rf"memory={re.escape(repr(memory))} is not a size.*'8GiB' or '500MB'"):
        partition(memory=memory, loss=untouched)


def test_an_impossible_budget_names_the_least_that_fits():
    # The second weight is by far the larger, so that the stage which has it needs most.
    model = jax.tree_util.Partial(two_layers, {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 5000))})
    with pytest.raises(MemoryBudgetError) as raised:
        partition(model, memory="2KiB", options=jaxpipe.PlanOptions(compile=False))
    text = str(raised.value)
    assert text.startswith("memory='2KiB' (2048 bytes): by default each device needs ")
    least = int(re.search(r"The smallest budget that was found .* is (\d+) bytes", text)[1])
    plan = partition(model, memory=least, options=jaxpipe.PlanOptions(compile=False)).plan
    assert plan.predicted_bytes == least
    # Weights and their gradients alone.
    assert least > 2 * 4 * 4 * 5000
    for part, size in plan.memory.items():
        assert f"{part} " in text and size >= 0
    with pytest.raises(MemoryBudgetError, match=f"is {least} bytes"):
        partition(model, memory=least - 1, options=jaxpipe.PlanOptions(compile=False))
    # With about a kilobyte more another plan may be faster.
    plan = partition(model, memory=f"{least / 1000 + 1:.0f}KB", options=jaxpipe.PlanOptions(compile=False)).plan
    assert least <= plan.predicted_bytes <= plan.budget <= least + 1500


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("1KiB", 1024), ("1.5 KiB", 1536), ("2MB", 2 * 10**6), ("3 GiB", 3 * 2**30), ("7", 7), ("9B", 9)],
        *[
            ("8G", 8 * 10**9),
            ("8gib", 8 * 2**30),
            ("8Gi", 8 * 2**30),
            ("2mb", 2 * 10**6),
            (np.int64(5), 5),
            (1e3, 1000),
        ],
    ],
)
def test_sizes_are_read_in_all_units(text, size):
    assert parse_bytes(text) == size


# States and variables


def test_a_state_of_another_plan(pipeline, state):
    other = partition(jax.tree_util.Partial(two_layers, weights(5)))
    assert other.plan.identity != pipeline.plan.identity
    message = f"belongs to the plan {pipeline.plan.identity}, this pipeline has the plan {other.plan.identity}"
    for call in (other.step, other.value_and_grad):
        with pytest.raises(
            ModelError, match=message + r".*init\(key, variables=other\.parameters\(state\), optimizer_"
        ):
            call(state, jnp.ones((8, 3)))
    with pytest.raises(ModelError, match=message):
        other.parameters(state)
    # The same model cut elsewhere is another plan too.
    fixed = [timed(times) for times in ((9, 1, 1, 1, 1), (1, 1, 1, 1, 9))]
    first, second = (partition(profile=profile) for profile in fixed)
    assert first.plan.identity != second.plan.identity
    with pytest.raises(ModelError, match=f"plan {first.plan.identity}"):
        second.step(first.init(KEY), jnp.ones((8, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: {**w, "c": jnp.ones(1)},
            r"does not fit the model's 2 variables\. Unexpected: 0/0/c \(float32\[1\]\)\.",
        ),
        (lambda w: {"a": w["a"]}, r"Missing: 0/0/b \(float32\[4, 2\]\)\. Pass a tree with these paths"),
        (lambda w: {"A": w["a"], "b": w["b"]}, r"Missing: 0/0/a \(.*\)\. Unexpected: 0/0/A \(float32\[3, 4\]\)"),
        (lambda w: {**w, "b": jnp.ones((4, 3))}, r"dtype: 0/0/b is float32\[4, 3\], the model's is float32\[4, 2\]\."),
        (lambda w: {**w, "a": w["a"].astype(jnp.bfloat16)}, r"0/0/a is bfloat16\[3, 4\], the model's is float32"),
    ],
)
def test_variables_that_do_not_fit(pipeline, change, message):
    with pytest.raises(ModelError, match=message):
        pipeline.init(KEY, variables=jax.tree_util.Partial(two_layers, change(weights())))


def test_a_function_without_variables():
    pipeline = partition(two_layers, loss=untouched)
    with pytest.raises(PartitionError, match=r"has no plan yet, .*or a function whose variables are not known"):
        _ = pipeline.plan
    with pytest.raises(ModelError, match=r"the function 'two_layers', and its variables are not known"):
        pipeline.init(KEY)


def test_a_function_is_planned_with_the_batch_that_partition_got():
    pipeline = partition(two_layers)
    state = pipeline.init(KEY, variables=weights())
    assert pipeline.plan.microbatch_size == 4
    assert jax.tree.map(np.shape, pipeline.parameters(state)) == {"a": (3, 4), "b": (4, 2)}


def test_an_abstract_nnx_module():
    abstract = nnx.eval_shape(lambda: nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(k)) for k in range(2))))
    pipeline = partition(abstract)
    with pytest.raises(
        ModelError, match=r"abstract.*Give partition its class .*or pass pipeline\.init\(key, variables"
    ):
        pipeline.init(KEY)


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_a_function_that_is_missing(pipeline, state, name):
    message = rf"partition was given no {name} function; pass {name}=lambda model, batch"
    with pytest.raises(PartitionError, match=message):
        getattr(pipeline, name)(state, jnp.ones((8, 3)))


def test_no_plan_yet(state):
    pipeline = jaxpipe.partition(MODEL, mesh_of(2), loss=untouched, optimizer=optax.sgd(0.1))
    message = r"no plan yet, because partition was given no batch.*Call pipeline\.init\(key, batch\) first"
    for call in (
        lambda: pipeline.plan,
        lambda: pipeline.init(KEY),
        lambda: pipeline.step(state, jnp.ones((8, 3))),
        lambda: pipeline.evaluate(state, jnp.ones((8, 3))),
        lambda: pipeline.parameters(state),
        lambda: pipeline.memory_report(),
    ):
        with pytest.raises(PartitionError, match=message):
            call()


def test_shapes_are_no_initial_values(pipeline, state):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pipeline.parameters(state))
    with pytest.raises(ModelError, match=r"init got ShapeDtypeStruct\(.*\) as a value, which is a shape alone"):
        pipeline.init(KEY, variables=shapes)


def test_what_is_no_model():
    with pytest.raises(ModelError, match=r"partition was given 'resnet' \(str\) as its model"):
        partition("resnet", loss=untouched)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda f, x: f(x).sum(), r"predict returned an array of shape \(\) for 4 examples"),
        (lambda f, x: f(x).T, r"predict returned an array of shape \(2, 4\) for 4 examples"),
        # As long as a micro-batch by chance; for twice the examples they would have to be longer.
        (lambda f, x: f.args[0]["a"].T, r"shape \(4, 3\) for a micro-batch, and \(4, 3\) for one of twice"),
        (lambda f, x: f(x) @ f(x).T, r"shape \(4, 4\) for a micro-batch, and \(8, 8\) for one of twice"),
    ],
)
def test_a_prediction_that_loses_the_rows(returned, message):
    pipeline = partition(predict=returned)
    with pytest.raises(PartitionError, match=message):
        pipeline.predict(pipeline.init(KEY), jnp.ones((8, 3)))


@pytest.mark.parametrize(
    ("mesh", "options"), [(mesh_of(2), {"num_microbatches": 8}), (mesh_of(1), {"num_microbatches": 1})]
)
def test_a_prediction_that_is_not_put_together_of_several_examples(mesh, options):
    """One example in each micro-batch, or the whole batch in one."""

    def similar(f, x):
        return f(x) @ f(x).T

    pipeline = partition(mesh=mesh, predict=similar, **options)
    rows = 8 // options["num_microbatches"]
    assert pipeline.predict(pipeline.init(KEY), jnp.ones((8, 3))).shape == (8, rows)


def test_an_evaluation_that_calls_layers_in_another_order():
    def backwards(f, x):
        late = (x[:, :2] @ f.args[0]["b"].T).sum()
        return two_layers(f.args[0], x + late).mean()

    # Product, tanh, product, sum, division: one weight in each stage.
    pipeline = partition(evaluate=backwards, profile=timed((5, 1, 5, 1, 1)), schedule="1f1b")
    with pytest.raises(
        PartitionError, match=r"evaluate uses .*a, which is placed in stage 0, after variables of stage 1"
    ):
        pipeline.evaluate(pipeline.init(KEY), jnp.ones((8, 3)))


# Errors of the loss itself


LOSSES = {
    "an array without axes": (
        lambda f, x: f(x["x"]).mean(),
        {"x": jnp.float32(1), "y": jnp.zeros(8)},
        ["batch['x'] float32[] (no examples: the same in all micro-batches), batch['y'] float32[4]"],
    ),
    "a float": (lambda f, x: float(f(x).mean()), jnp.ones((8, 3)), ["batch float32[4, 3]", "without float()"]),
    "numpy": (lambda f, x: np.asarray(f(x)).mean(), jnp.ones((8, 3)), ["batch float32[4, 3]", "numpy"]),
    "a condition": (lambda f, x: f(x).mean() if f(x).mean() > 0 else 0.0, jnp.ones((8, 3)), ["jnp.where"]),
}


@pytest.mark.parametrize("case", LOSSES)
def test_an_error_inside_a_loss_says_how_the_loss_was_called(case):
    loss, batch, words = LOSSES[case]
    with pytest.raises(Exception) as raised:  # of JAX or NumPy, whatever it is
        partition(batch=batch, loss=loss)
    (note,) = [note for note in raised.value.__notes__ if note.startswith("jaxpipe called <lambda>(model, batch)")]
    assert [word for word in words if word not in note] == []
