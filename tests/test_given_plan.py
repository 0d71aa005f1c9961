"""``plan=``: a plan is run as it is, with the same bits and without any search, or refused by name."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpipe
from examples import models as zoo
from jaxpipe import Density, Network, Plan, PlanOptions, measure_density, memory_encoded, with_density
from jaxpipe.errors import JaxpipeError, MemoryBudgetError, PartitionError
from jaxpipe.gradients import block_sparse
from jaxpipe.planning import cut_scans, given_plan, list_candidates, make_plan, trace_request
from jaxpipe.planning.storage import integer_program
from jaxpipe.schedules import gpipe
from tests.support.codecs import Halves
from tests.support.compare import arrays, assert_same_bits
from tests.support.meshes import mesh_of, named_mesh
from tests.support.pipeline_models import case_of, pipeline_of
from tests.support.processes import ROOT, launch


WEIGHTS = [jax.random.normal(jax.random.key(k), (64, 64)) / 8 for k in range(16)]
ROWS = jax.random.normal(jax.random.key(99), (16 * 64, 64))


def of_case(name, stages, m, replicas=None, **options):
    return lambda **more: (pipeline_of(name, stages, m, replicas, **{**options, **more}), case_of(name).batch)


def chain(**options):
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), WEIGHTS)
    options = {"num_microbatches": 16, "profile": "analytic", "schedule": "1f1b", **options}
    loss = lambda f, x: jnp.square(f(x)).mean()  # noqa: E731
    return jaxpipe.partition(model, mesh_of(4), ROWS, loss=loss, optimizer=optax.sgd(0.1), **options), ROWS


@functools.cache
def fewer_stashes():
    """Return a budget of three and three quarters of the four stashes of the first stage of a chain."""
    plan = chain()[0].plan
    return plan.predicted_bytes - plan.stages[0].stash_bytes // 4


def swapping(options, **more):
    """Return a chain with the budget and its batch, compiled where no plan is given."""
    more["options"] = PlanOptions(compile=False, time_limit=60, host_memory=more.pop("host_memory", None))
    pipeline, rows = chain(**{"memory": fewer_stashes(), **more, **options})
    if "plan" not in options:
        pipeline.compile()
    return pipeline, rows


def swaps_to_host(**options):
    return swapping(options, host_memory="1GiB")


def swaps_to_peers(**options):
    rates = np.full((4, 4), 1e12)
    rates[0, 3] = rates[3, 0] = 2e12
    return swapping(options, network=Network(tuple(map(tuple, rates.tolist()))))


def sliced(**options):
    """Return a language model whose budget is below its logits."""
    words, width, shape = 2048, 16, (8, 32)
    keys = jax.random.split(jax.random.key(0), 3)
    variables = {
        "embedding": jax.random.normal(keys[0], (words, width)),
        "head": jax.random.normal(keys[1], (width, words)) / width,
    }
    tokens = jax.random.randint(keys[2], shape, 0, words)
    model = jax.tree_util.Partial(lambda v, x: jnp.tanh(v["embedding"][x]) @ v["head"], variables)
    options = {"memory": int(4 * (4 * words * width + 0.75 * 256 * words)), **options}

    def loss(f, x):
        return optax.softmax_cross_entropy_with_integer_labels(f(x), x).mean()

    options = {"num_microbatches": 1, "profile": "analytic", **options}
    return jaxpipe.partition(model, mesh_of(1), tokens, loss=loss, optimizer=optax.sgd(0.5), **options), tokens


def scanned(**options):
    batch = {"x": jax.random.normal(jax.random.key(0), (8, 16)), "y": jnp.arange(8) % 10}

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    model = zoo.ScannedMLP(num_layers=8, width=16)
    options = {"num_microbatches": 4, "profile": "analytic", **options}
    return jaxpipe.partition(model, mesh_of(2), batch, loss=loss, optimizer=optax.adam(1e-2), **options), batch


def fewer_devices(**options):
    """Return a model of one layer, for which most devices are left out."""
    model = jax.tree_util.Partial(lambda w, x: x @ w, WEIGHTS[0])
    options = {"num_microbatches": 4, "profile": "analytic", "schedule": gpipe, **options}
    loss = lambda f, x: jnp.square(f(x)).mean()  # noqa: E731
    return jaxpipe.partition(model, mesh_of(3), ROWS, loss=loss, optimizer=optax.sgd(0.1), **options), ROWS


def fast_links(**options):
    """Return a pipeline whose stages follow the fast links of a network, with replicas."""
    rates = np.where(np.arange(8)[:, None] % 3 == np.arange(8) % 3, 1e12, 1e9)
    make = of_case("mlp", 4, 2, 2, network=Network(tuple(map(tuple, rates.tolist()))))
    return make(**options)


def uneven_links(count):
    """Return a network in which no two links are as fast."""
    rates = np.random.default_rng(1).uniform(1e8, 1e10, (count, count))
    return Network(tuple(map(tuple, ((rates + rates.T) / 2).tolist())))


def links_of_few_devices(**options):
    """Return a small chain on two of the devices of a network, not the first ones."""
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), WEIGHTS[:2])
    options = {"num_microbatches": 4, "profile": "analytic", "network": uneven_links(4), **options}
    loss = lambda f, x: jnp.square(f(x)).mean()  # noqa: E731
    return jaxpipe.partition(model, mesh_of(4), ROWS, loss=loss, optimizer=optax.sgd(0.1), **options), ROWS


def links_of_shards(**options):
    """Return a chain on a network of eight devices, of which two share a part of a stage."""
    options = {"num_microbatches": 4, "profile": "analytic", "network": uneven_links(8), **options}
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), WEIGHTS[:4])
    loss = lambda f, x: jnp.square(f(x)).mean()  # noqa: E731
    mesh, options["options"] = named_mesh(stage=2, data=2, model=2), PlanOptions(batch_axes=("model",))
    return jaxpipe.partition(model, mesh, ROWS, loss=loss, optimizer=optax.sgd(0.1), **options), ROWS


@memory_encoded(codecs="smallest")
def rectified(weights, x):
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x


def sparse(**options):
    """Return layers with sparse results, which is known while the plan is made."""
    fractions = measure_density(rectified, WEIGHTS[:4], ROWS[:64]).fractions
    model = jax.tree_util.Partial(lambda ws, x: rectified(ws, x), WEIGHTS[:4])
    loss = lambda f, x: f(x).mean()  # noqa: E731
    options = {"num_microbatches": 4, "profile": "analytic", **options}
    with with_density(Density({} if "plan" in options else dict.fromkeys(fractions, 0.1))):
        return jaxpipe.partition(model, mesh_of(2), ROWS, loss=loss, optimizer=optax.sgd(0.1), **options), ROWS


@dataclasses.dataclass(frozen=True)
class OfTanh(Halves):
    name = "halves"
    moves = 1.0

    def allows(self, tensor):
        return tensor.dtype == jnp.float32 and tensor.operator == "tanh"

    def nbytes(self, shape_and_type):
        return 4 * shape_and_type.size - 1  # so that it is chosen before the tensor as it is


CASES = {
    "mlp": of_case("mlp", 2, 4),
    "zero bubble, BatchNorm": of_case("cnn-nnx", 2, 4, schedule="zero_bubble"),
    "interleaved, tied": of_case("transformer", 2, 4, schedule="interleaved"),
    "stages in a V": functools.partial(chain, schedule="zbv"),
    "a codec of one's own": functools.partial(chain, storage=["fast", OfTanh()]),
    "searched schedule": functools.partial(chain, schedule="auto"),
    "replicas": of_case("cnn-linen", 2, 2, 2),
    "one program": of_case("mlp", 2, 4, runtime="spmd"),
    "asynchronous": of_case("mlp", 2, 4, schedule="pipedream"),
    "several devices in a stage": of_case("mlp", 3, 4, options=PlanOptions(devices_per_stage=(2, 1))),
    "sparse codecs": sparse,
    "budget": of_case("mlp", 2, 4, memory=9300),
    "swaps to the host": swaps_to_host,
    "swaps to peers": swaps_to_peers,
    "logits in slices": sliced,
    "a scan in groups": scanned,
    "devices left out": fewer_devices,
    "network": fast_links,
    "network, devices left out": links_of_few_devices,
    "network of shards": links_of_shards,
}


@pytest.fixture
def no_search(monkeypatch):
    """Nothing may list candidates, cut, profile or solve, but the plans that are given."""
    made("mlp"), made("budget")

    def refused(*_, **__):
        raise AssertionError("a given plan was searched for")

    monkeypatch.setattr(make_plan, "search_plan", refused)
    monkeypatch.setattr(make_plan, "list_candidates", refused)
    monkeypatch.setattr(list_candidates, "partition_layers", refused)
    monkeypatch.setattr(trace_request, "profile_objective", refused)
    monkeypatch.setattr(cut_scans, "profile_objective", refused)
    monkeypatch.setattr(integer_program, "solve", refused)


@functools.cache
def made(name):
    return CASES[name]()


LONG = {"interleaved, tied", "replicas", "a scan in groups"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONG)) for x in CASES])
def test_a_given_plan_is_run_as_it_is(name, key, request):
    pipeline, batch = made(name)
    text = pipeline.plan.to_json()
    request.getfixturevalue("no_search")
    again, _ = CASES[name](plan=text)
    assert again.plan == pipeline.plan
    assert again.plan.to_json() == text
    assert [d.id for d in again.mesh.devices.flat] == [d.id for d in pipeline.mesh.devices.flat]
    assert again.schedule == pipeline.schedule
    results = []
    for each in (pipeline, again):
        state = each.init(key)
        state, metrics = each.step(state, batch)
        results.append([arrays(metrics), arrays(each.parameters(state))])
    assert_same_bits(*results)


def test_what_the_cases_are_for():
    """Each case has what it is named for, or it would show nothing."""
    assert len(made("swaps to the host")[0].plan.stages[0].pieces) == 1
    assert len(made("swaps to peers")[0].plan.stages[0].pieces) > 1
    assert made("logits in slices")[0].plan.stages[-1].slices > 1
    assert made("a scan in groups")[0].plan.recipe.scan_groups
    assert len(made("devices left out")[0].plan.recipe.devices) < 3
    assert made("network")[0].plan.recipe.devices != tuple(range(8))
    assert any("bitmap" in s.formats or "csr" in s.formats for s in made("sparse codecs")[0].plan.recipe.stages)
    assert any(stage.storage != "default" for stage in made("budget")[0].plan.stages)


def test_any_form_of_a_plan_will_do(no_search):
    plan = made("mlp")[0].plan
    for form in (plan, plan.to_json(), json.loads(plan.to_json())):
        assert CASES["mlp"](plan=form)[0].plan == plan


def test_a_plan_made_at_init(key, no_search):
    pipeline, batch = made("mlp")
    case = case_of("mlp")
    options = {"loss": case.loss, "optimizer": optax.sgd(0.05, momentum=0.9), "plan": pipeline.plan}
    late = jaxpipe.partition(case.model, mesh_of(2), **options)
    late.init(key, batch)
    assert late.plan == pipeline.plan
    with pytest.raises(
        PartitionError, match=r"batch\['x'\] differ: the plan says float32\[16, .*, given is float32\[8"
    ):
        jaxpipe.partition(case.model, mesh_of(2), **options).init(key, jax.tree.map(lambda x: x[:8], batch))


def test_nothing_is_profiled(no_search):
    with pytest.raises(PartitionError, match="nothing is profiled"):
        _ = CASES["mlp"](plan=made("mlp")[0].plan)[0].profile
    print(CASES["mlp"](plan=made("mlp")[0].plan)[0].partition)


def test_a_plan_names_the_codecs_and_stages_that_it_has():
    codec, v = (CASES[name]()[0].plan for name in ("a codec of one's own", "stages in a V"))
    assert all("halves" in stage.formats for stage in codec.recipe.stages)
    assert v.recipe.stage_of == ((0, 7), (1, 6), (2, 5), (3, 4))


@dataclasses.dataclass(frozen=True)
class Keyed(OfTanh):
    """Keeps values with a key that is chosen for each tensor."""

    name = "keyed"
    key: int = 0

    def for_tensor(self, tensor):
        return dataclasses.replace(self, key=0x5A5A) if self.allows(tensor) else None

    def encode(self, x):
        high, low = super().encode(x)
        return high ^ self.key, low ^ self.key

    def decode(self, arrays, shape_and_type):
        return super().decode([part ^ 0x5A5A for part in arrays], shape_and_type)


def test_a_codec_is_set_for_each_tensor_again():
    storage = ["fast", Keyed()]
    first, rows = chain(storage=storage)
    again, _ = chain(storage=storage, plan=first.plan.to_json())
    gradients = [jax.tree.leaves(p.value_and_grad(p.init(jax.random.key(0)), rows)[1]) for p in (first, again)]
    assert_same_bits(*gradients)
    assert '"keyed"' in first.plan.to_json()


def test_two_codecs_of_one_name_are_refused():
    named = memory_encoded(lambda x: jnp.tanh(x), codecs=["fast", Keyed(key=3)])
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: named(x @ w), ws, x), WEIGHTS)
    loss = lambda f, x: jnp.square(f(x)).mean()  # noqa: E731
    options = {"loss": loss, "optimizer": optax.sgd(0.1), "storage": ["fast", Keyed()]}
    plan = jaxpipe.partition(model, mesh_of(2), ROWS, num_microbatches=4, profile="analytic", **options).plan
    with pytest.raises(PartitionError, match="several that differ are called 'keyed'"):
        jaxpipe.partition(model, mesh_of(2), ROWS, plan=plan, **options)


def changed(**fields):
    return dataclasses.replace(made("mlp")[0].plan, **fields)


def with_recipe(**fields):
    plan = made("mlp")[0].plan
    assert plan.recipe is not None
    return dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, **fields))


def edited(name, edit):
    """Return the JSON of a plan as somebody has changed it by hand."""
    data = json.loads(made(name)[0].plan.to_json())
    edit(data)
    return json.dumps(data)


def swap_to(target):
    def edit(data):
        stage = data["recipe"]["stages"][0]
        stage.update(swapped=stage["formats"]["keep"], targets=[[target, 1.0]])

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("stages in a V", lambda data: data.update(runtime="spmd"), "runtime='spmd' with schedule="),
        ("asynchronous", lambda data: data.update(runtime="spmd"), "runtime='spmd' with schedule=pipedream"),
        ("asynchronous", lambda data: data["recipe"].update(versions=None), r"staleness differ: .* \(1, 0\), .* \(\)"),
        ("mlp", lambda data: data.update(microbatch_size=9), "microbatch_size differ: the plan says 9, given is 4"),
        ("mlp", lambda data: data["stages"][0].update(in_flight=7), r"stages\[0\].in_flight differ: the plan says 7"),
        ("mlp", lambda data: data["stages"][0].update(devices=[1]), r"stages"),
        ("mlp", lambda data: data["recipe"].update(devices=[1, 0]), r"stages\[0\].devices differ: .* \[0\], .* \[1\]"),
        ("mlp", lambda data: data["recipe"]["stages"].pop(), "number of recipe.stages differ: the plan says 1"),
        ("mlp", swap_to(7), r"recipe.stages\[0\] swaps '.*' to \(\(7, 1.0\),\), of 2"),
        ("mlp", swap_to(-1), r"stages\[0\].pieces differ"),
    ],
)
def test_an_edited_plan_is_what_runs_or_is_refused(name, edit, said):
    with pytest.raises(PartitionError, match=f"(?s){said}"):
        CASES[name](plan=edited(name, edit))


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (lambda: 3, {}, "plan= is int; pass a jaxpipe.Plan"),
        (lambda: "{", {}, "The plan cannot be read"),
        (lambda: changed(recipe=None), {}, "no recipe: it was written by an earlier version"),
        (lambda: made("mlp")[0].plan, {"num_microbatches": 2}, "num_microbatches differ: the plan says 4, given is 2"),
        (lambda: made("mlp")[0].plan, {"schedule": "gpipe"}, "schedule differ: the plan says .*, given is gpipe"),
        (lambda: made("mlp")[0].plan, {"runtime": "spmd"}, "runtime differ: the plan says mpmd, given is spmd"),
        (lambda: made("mlp")[0].plan, {"storage": "smallest"}, "storage differ"),
        (lambda: made("mlp")[0].plan, {"options": PlanOptions(zero=1)}, "zero differ: the plan says 0, given is 1"),
        (lambda: made("mlp")[0].plan, {"options": PlanOptions(on_nonfinite="skip")}, "on_nonfinite differ"),
        (
            lambda: made("mlp")[0].plan,
            {"gradient_exchange": block_sparse(k=2)},
            "gradient_exchange differ.* dense",
        ),
        (lambda: made("mlp")[0].plan, {"cuts": ["a"]}, "cuts= and plan= are both given"),
        (lambda: made("mlp")[0].plan, {"optimizer": optax.adam(1e-3)}, "optimizer's state differ"),
        (lambda: made("mlp")[0].plan, {"mesh": mesh_of(3)}, "mesh differ: the plan says {'stage': 2}, given is"),
        (lambda: made("mlp")[0].plan, {"mesh": named_mesh(data=2, stage=2)}, "mesh differ"),
        (lambda: with_recipe(table=("F0", "F0 F1")), {}, "as many ticks"),
        (lambda: with_recipe(table=("F0 F1", "X0 F1")), {}, "recipe.table has 'X0'"),
        (lambda: with_recipe(table=("F0 F1", "F0 F1")), {}, "1f1b|list"),
        (lambda: with_recipe(devices=(0, 0)), {}, "recipe.devices"),
        (lambda: with_recipe(devices=(0, 9)), {}, "recipe.devices"),
        (
            lambda: with_recipe(stages=(dataclasses.replace(made("mlp")[0].plan.recipe.stages[0], formats={}),) * 2),
            {},
            "does not fit the programs of its stages",
        ),
        (
            lambda: with_recipe(
                stages=(dataclasses.replace(made("mlp")[0].plan.recipe.stages[0], formats={"keep": "0-99999999"}),) * 2
            ),
            {},
            "no numbers",
        ),
    ],
)
def test_what_differs_is_named(plan, options, said):
    case = case_of("mlp")
    mesh = options.pop("mesh", mesh_of(2))
    options = {"optimizer": optax.sgd(0.05, momentum=0.9), **options}
    with pytest.raises(JaxpipeError, match=f"(?s){said}"):
        jaxpipe.partition(case.model, mesh, case.batch, loss=case.loss, plan=plan(), **options)


def test_another_model_is_refused_with_the_module():
    pipeline, tokens = made("interleaved, tied")
    case = case_of("transformer")

    def loss(model, batch):
        return 2 * case.loss(model, batch)

    options = {"optimizer": optax.sgd(0.05, momentum=0.9), "plan": pipeline.plan}
    with pytest.raises(PartitionError, match="program of model and loss in the loss differ"):
        jaxpipe.partition(case.model, mesh_of(2), tokens, loss=loss, **options)
    other = case_of("mlp")
    with pytest.raises(PartitionError, match=r"batch.* differ: the plan says .*, given is"):
        jaxpipe.partition(other.model, mesh_of(2), other.batch, loss=other.loss, **options)


def test_a_budget_that_is_smaller_than_the_plan_is_refused():
    plan = made("budget")[0].plan
    assert plan.compiled_bytes is not None
    with pytest.raises(MemoryBudgetError, match="plan= and memory differ: the plan needs") as caught:
        CASES["budget"](plan=plan, memory=plan.compiled_bytes - 1)
    assert caught.value.smallest == plan.compiled_bytes
    assert CASES["budget"](plan=plan, memory="1GiB")[0].plan.budget == 2**30


def test_other_versions_compile_and_check_the_budget(no_search):
    plan = made("budget")[0].plan
    recipe = dataclasses.replace(plan.recipe, made_with="jax 0.9.0, jaxlib 0.9.0, jaxpipe 0.1.0, for cpu")
    older = dataclasses.replace(plan, recipe=recipe, compiled_each_device=(10, 10))
    again = CASES["budget"](plan=older, memory=plan.compiled_bytes)[0]
    assert again.plan.compiled_each_device == plan.compiled_each_device
    with pytest.raises(MemoryBudgetError, match=r"for plan= here, and 10 B where that was made"):
        CASES["budget"](plan=dataclasses.replace(older, budget=5000), memory=5000)


def test_plans_of_before_are_refused_as_json():
    data = json.loads(made("mlp")[0].plan.to_json())
    del data["recipe"]
    assert Plan.from_json(json.dumps(data)).recipe is None
    with pytest.raises(PartitionError, match="no recipe"):
        given_plan.read_plan(data)


def test_a_mesh_of_other_devices_of_the_kind(key, no_search):
    pipeline, batch = made("mlp")
    case = case_of("mlp")
    mesh = Mesh(np.array(jax.devices()[4:6]), ("stage",))
    again = jaxpipe.partition(
        case.model, mesh, batch, loss=case.loss, optimizer=optax.sgd(0.05, momentum=0.9), plan=pipeline.plan
    )
    assert [stage.device_ids for stage in again.plan.stages] == [(4,), (5,)]
    answers = [arrays(p.value_and_grad(p.init(key), batch)) for p in (pipeline, again)]
    assert_same_bits(*answers)


@pytest.mark.slow
def test_processes_pass_the_same_plan():
    printed = launch(2, run=str(ROOT / "tests" / "support" / "given_plan_run.py"))
    assert printed.count("the 2 processes of this run differ in") == 2
    assert printed.count("plan=: not the same in process 1 as in process 0") == 2
