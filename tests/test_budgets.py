"""Budgets as users meet them: what an error offers runs, time limits hold, and long plans show how far they are."""

import functools
import itertools
import logging
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.errors import MemoryBudgetError, PartitionError
from jaxpipe.plan import Plan, StagePlan
from jaxpipe.planning import make_plan, refuse_budget
from jaxpipe.planning.budget_search import BudgetSearch, LevelSearch
from jaxpipe.planning.candidate import PlannedStep
from jaxpipe.planning.storage import integer_program, solving
from jaxpipe.planning.storage.solving import Solving
from jaxpipe.planning.storage.storage_problem import Problem
from jaxpipe.runtime.mpmd.mpmd_runtime import MpmdRuntime
from jaxpipe.targets.building import current
from jaxpipe.targets.known import target_named
from jaxpipe.text.units import bytes_text
from tests.support.budget_models import KEY, built_pipeline, mlp, transformer, unet
from tests.support.targets import planning_as_for_gpus
from tests.support.texts import one_line


make = functools.partial(built_pipeline, optimizer=optax.adam(1e-2))


def chain(m):
    """Products and tanh: small, and quickly compiled."""
    weights = list(jax.random.normal(KEY, (6, 32, 32)) / 6)
    x = jax.random.normal(KEY, (m * 128, 32))

    def apply(weights, x):
        for k, w in enumerate(weights):
            with jax.named_scope(f"layer{k}"):
                x = jnp.tanh(x @ w)
        return x

    return jax.tree_util.Partial(apply, weights), x, lambda model, x: jnp.square(model(x)).mean()


class Net(nnx.Module):
    """The model of docs/tutorial.md."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.head = nnx.Linear(8 * 8 * 16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.head(x.reshape(x.shape[0], -1))


def tutorial(m):
    batch = {"image": jax.random.normal(KEY, (m * 8, 32, 32, 1)), "label": jnp.arange(m * 8) % 10}

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()

    return Net(nnx.Rngs(0)), batch, loss


@functools.cache
def refused(build, stages, **options):
    """The error for a budget that is far too small."""
    with pytest.raises(MemoryBudgetError) as error:
        make(build, stages, memory=1000, **options)
    return error.value


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("build", "stages"),
    [
        (chain, 2),
        slow(chain, 1),
        slow(mlp, 3),
        slow(tutorial, 1),
        slow(tutorial, 2),
        slow(transformer, 1),
        slow(transformer, 4),
        slow(unet, 2),
    ],
)
def test_what_an_error_offers_runs(build, stages):
    smallest = refused(build, stages).smallest
    pipeline, batch = make(build, stages, memory=smallest)
    assert max(pipeline.memory_report().compiled_bytes) <= smallest == pipeline.plan.budget
    _, metrics = pipeline.step(pipeline.init(KEY), batch)
    assert np.isfinite(metrics["loss"])


def test_a_budget_below_what_is_offered_is_refused_before_a_step(monkeypatch, tmp_path):
    """By prediction it would be kept; the offer does not depend on the budget, but for what was found for others."""
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path))
    with pytest.raises(MemoryBudgetError) as error:
        make(chain, 2, memory=1000, options=jaxpipe.PlanOptions(compile=False))
    below = error.value.smallest
    assert make(chain, 2, memory=below, options=jaxpipe.PlanOptions(compile=False))[0].plan.predicted_bytes <= below
    with pytest.raises(MemoryBudgetError) as error:
        make(chain, 2, memory=below)
    assert error.value.smallest == refused.__wrapped__(chain, 2).smallest > below


def test_one_program_has_no_budget():
    with pytest.raises(
        PartitionError, match=r"runtime='spmd' with memory=: .* the largest stage\. Pass runtime='mpmd'"
    ):
        make(chain, 2, memory="1GiB", runtime="spmd")


def test_an_error_names_the_budget_both_figures_and_the_largest_tensors():
    text, smallest = str(refused(chain, 2)), refused(chain, 2).smallest
    assert text.startswith("memory=1000 (1000 B): by default each device needs ")
    assert f"is {smallest} bytes" in text and f"Pass memory={smallest} or more" in text
    assert "which XLA reserves for its compiled step" in text
    largest = re.search(r"Largest tensors stored at that budget: (.*?)\. With", text)[1].split("), ")
    sizes = [float(re.search(r"\((\d+\.\d+) KiB", entry)[1]) for entry in largest]
    # Two [32, 32] of float32 in the first stage, which has two micro-batches in flight and the batch, their sums of
    # gradients, and two moments by Adam: 4 * 8 KiB.
    bound = re.search(r"no plan needs less than (\d+\.\d+) KiB \(parameters 8\.00 KiB, gradients 8\.00 KiB", text)
    assert float(bound[1]) >= 32 and ", which alone is over this budget. Pass" in text
    assert "the largest operator, layer" in text
    # Every activation is [128, 32] of float32: 16 KiB.
    assert sizes and all(re.match(r"layer\d/(tanh|dot_general) f32\[128,32\] \(16.00 KiB", entry) for entry in largest)


def counted_steps(monkeypatch):
    """A list that grows with each training step that is compiled."""
    count, actual = [], MpmdRuntime.build
    monkeypatch.setattr(MpmdRuntime, "build", lambda runtime: count.append(runtime) or actual(runtime))
    return count


def test_a_step_that_was_compiled_for_its_bytes_is_not_compiled_again(monkeypatch):
    count = counted_steps(monkeypatch)
    pipeline, batch = make(chain, 2, memory=10**7)
    assert len(count) == 1
    plan = pipeline.plan
    pipeline.step(pipeline.init(KEY), batch)
    assert len(count) == 1 and pipeline.plan is plan
    paper, _ = make(chain, 2, memory=10**7, options=jaxpipe.PlanOptions(compile=False))
    assert len(count) == 1 and paper.plan.predicted_bytes == plan.predicted_bytes


@pytest.mark.parametrize(
    ("wanted", "name", "compiles"), [(None, "cpu", 0), (None, "H100", 1), (True, "cpu", 1), (False, "H100", 0)]
)
def test_plans_without_a_budget_are_compiled_where_predictions_are_not_exact(monkeypatch, wanted, name, compiles):
    """On GPUs, or if the caller says so."""
    count = counted_steps(monkeypatch)
    monkeypatch.setattr(make_plan, "current", lambda: target_named(name))
    pipeline, batch = make(chain, 2, options=jaxpipe.PlanOptions(compile=wanted))
    plan = pipeline.plan
    assert len(count) == compiles and (plan.compiled_bytes is None) == (not compiles)
    pipeline.step(pipeline.init(KEY), batch)
    assert len(count) == 1 and pipeline.plan is plan


@pytest.mark.parametrize("memory", [None, 10**7])
def test_a_pipeline_is_compiled_when_it_is_told_to(monkeypatch, memory):
    count = counted_steps(monkeypatch)
    pipeline, batch = make(chain, 2, memory=memory, options=jaxpipe.PlanOptions(compile=False))
    plan = pipeline.plan
    assert not count and pipeline.compile() is pipeline.plan
    assert len(count) == 1 and pipeline.plan.identity == plan.identity
    assert plan.compiled_bytes is None and pipeline.plan.compiled_bytes == max(pipeline.memory_report().compiled_bytes)
    pipeline.step(pipeline.init(KEY), batch)
    assert len(count) == 1


def test_a_plan_on_paper_is_made_smaller_when_it_is_compiled():
    """By prediction it keeps the budget, compiled it does not."""
    usual, _ = make(chain, 2)
    compiled = max(usual.memory_report().compiled_bytes)
    memory = (usual.plan.predicted_bytes + compiled) // 2
    paper, batch = make(chain, 2, memory=memory, options=jaxpipe.PlanOptions(compile=False))
    before = paper.plan
    assert paper.memory_report().compiled_bytes[0] == compiled == paper.plan.compiled_bytes
    assert before.compiled_bytes is None
    as_predicted = {"compiled_each_device": (), "compiled_stage_memory": (), "fullest_in": before.fullest_in}
    assert replace(paper.plan, **as_predicted) == before
    assert before.predicted_bytes < memory < compiled
    state = paper.init(KEY)
    with pytest.raises(MemoryBudgetError, match=rf"^memory=.*XLA reserves {compiled} bytes .*pipeline\.compile\(\)"):
        paper.step(state, batch)
    assert paper.compile().predicted_bytes < before.predicted_bytes
    assert max(paper.memory_report().compiled_bytes) <= memory
    _, metrics = paper.step(paper.init(KEY), batch)
    assert np.isfinite(metrics["loss"])


def as_compiled(planned, reserved):
    """A planned step as if XLA reserved so many bytes for it."""
    return replace(planned, plan=replace(planned.plan, compiled_each_device=(reserved,)), compiled=object())


def test_default_storage_is_offered_where_the_smallest_plan_needs_more_once_compiled(monkeypatch):
    """Predictions of absent GPUs were wrong by so much: 143 MiB predicted for both, 185 and 136 compiled."""
    default = make(chain, 2)[0].plan.predicted_bytes

    def with_step(planned):
        is_default = all(stage.storage == "default" for stage in planned.plan.stages)
        return as_compiled(planned, default - 1 if is_default else 2 * default)

    monkeypatch.setattr(PlannedStep, "with_step", with_step)
    with pytest.raises(MemoryBudgetError) as error:
        make(chain, 2, memory=1000)
    assert error.value.smallest == default - 1
    pipeline, _ = make(chain, 2, memory=default - 1)
    assert pipeline.plan.budget == default - 1
    assert all(stage.storage == "default" for stage in pipeline.plan.stages)


@dataclass(frozen=True, eq=False)
class StubStep:
    """A planned step whose compiled bytes are known; the larger its prediction, the shorter the step."""

    plan: Plan
    reserved: int
    compiled: object = None
    program: object = None
    needed_bytes = PlannedStep.needed_bytes

    def with_bytes(self):
        return self


class Levels(LevelSearch):
    """Levels by predicted bytes, the first with default storage; XLA reserves other bytes, and keeps a list."""

    def __init__(self, reserved, estimates=None):
        self.order = []
        sizes = sorted(reserved, reverse=True)
        rooms = [(estimates or {}).get(size, size) for size in sizes]
        levels = SimpleNamespace(rooms=rooms, default_place=0, lowest_place=len(rooms) - 1)
        levels.program_at = lambda place: (sizes[place], reserved[sizes[place]])
        levels.alike = lambda place, _: range(place, place + 1)

        def compiled(planned):
            self.order.append(planned.plan.predicted_bytes)
            return as_compiled(planned, planned.reserved)

        super().__init__(SimpleNamespace(described=self.step), levels, compiled)

    def step(self, predicted, reserved):
        stage = StagePlan((0, 1), (0,), (), 0.0, 0.0, 0, 0, 1, 0)
        plan = Plan((stage,), 1, 1, 1, "", "", 1.0 / predicted, 0.0, 0.0, None, {"stash": predicted}, "")
        return StubStep(plan, reserved)

    def chosen(self, budget):
        planned = self.fastest(budget)
        return None if planned is None else planned.plan.predicted_bytes


def test_bytes_that_xla_leaves_are_used_for_a_shorter_step():
    """Predictions are 40 too high: a plan for 100 leaves 40, which a plan of 139 uses."""
    levels = Levels({60: 20, 80: 40, 100: 60, 120: 80, 139: 99, 160: 120, 200: 160})
    assert levels.chosen(100) == 139 and levels.order == [100, 139]


def test_a_budget_below_all_predictions_is_kept():
    """The smallest plan is predicted with 120 and compiled with 60; one of 159 is within 100, too, and faster."""
    levels = Levels({120: 60, 150: 90, 159: 99, 180: 120, 240: 180})
    assert levels.chosen(100) == 159 and levels.order == [120, 159]


def test_between_a_plan_that_fits_and_one_that_does_not_the_bytes_follow_a_line():
    """Each byte predicted is two of XLA's: 100 of them lead to 200, then 50 to 100, and 75 to 150."""
    levels = Levels({size: 2 * size for size in range(20, 201, 5)})
    assert levels.chosen(150) == 75 and len(levels.order) <= 4


def test_estimates_that_are_off_are_corrected_by_predictions():
    """Estimates are 50 too low, predictions right: one level is compiled."""
    sizes = range(60, 201, 10)
    levels = Levels({size: size for size in sizes}, {size: size - 50 for size in sizes})
    assert levels.chosen(121) == 120 and levels.order == [120]


def test_a_refusal_offers_the_smallest_of_what_was_compiled():
    """The smallest by prediction needs 90 once compiled; one between it and default storage needs 40."""
    levels = Levels({20: 90, 24: 40, 30: 60, 60: 95, 100: 130})
    assert levels.small(10).needed_bytes == 40
    assert levels.order == [20, 24, 30]  # 60 and 100 are predicted to need over a tenth more than 40


def test_a_plan_whose_prediction_is_a_little_too_high_is_compiled_before_a_budget_is_refused():
    """Default storage is predicted to need 108 and takes 95, less than the smallest by prediction."""
    levels = Levels({90: 100, 108: 95})
    assert levels.small(97).plan.predicted_bytes == 108
    assert levels.order == [90, 108]


def test_levels_whose_rooms_hold_the_same_points_have_the_same_program():
    candidate = make(chain, 2)[0]._planned.candidate
    levels = BudgetSearch([candidate], [])._search(candidate).levels
    programs = [levels.program_at(place)[0] for place in range(len(levels.rooms))]
    alike = [levels.alike(place, program) for place, program in enumerate(programs)]
    for places, program in zip(alike, programs, strict=True):
        assert set(programs[places.start : places.stop]) == {program}
    assert [places.start for places in alike] == [*range(len(programs))] and max(map(len, alike)) > 5


@pytest.fixture
def gpu_order():
    with planning_as_for_gpus():
        yield


@pytest.mark.parametrize(("outputs", "copies"), [(8, 1), (4, 0)], ids=["largest", "another as large"])
@pytest.mark.usefixtures("gpu_order")
def test_a_bound_for_gpus_has_the_largest_kernel_twice_more(outputs, copies):
    """Its gradient and what the convolution writes, unless that may lie in the place of another gradient."""
    kernel, dense = jnp.ones((3, 3, 4, outputs)), jnp.ones((outputs, 36 * 4 // outputs))

    def net(weights, x):
        y = jax.lax.conv_general_dilated(x, weights[0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y).mean((1, 2)) @ weights[1]

    with pytest.raises(MemoryBudgetError) as error:
        jaxpipe.partition(
            jax.tree_util.Partial(net, [kernel, dense]),
            jax.make_mesh((1,), ("stage",)),
            jnp.ones((4, 1, 1, 4)),
            loss=lambda model, x: model(x).sum(),
            optimizer=optax.sgd(0.1),
            num_microbatches=1,
            profile="analytic",
            memory="100B",
            options=jaxpipe.PlanOptions(compile=False),
        )
    assert error.value.smallest >= 2 * (kernel.nbytes + dense.nbytes)
    size = float(re.search(r"no plan needs less than (\d+\.\d+) KiB", str(error.value))[1]) * 1024
    # Parameters, gradients, the batch [4, 1, 1, 4], the step number and keys: less than 100 bytes, and three digits.
    held = 2 * (kernel.nbytes + dense.nbytes) + 64
    assert held + copies * kernel.nbytes <= size < held + copies * kernel.nbytes + 100
    assert ("for the kernel's gradient as conv_general_dilated" in str(error.value)) == bool(copies)


@pytest.mark.usefixtures("gpu_order")
def test_a_bound_for_gpus_counts_kernels_of_interleaved_stages_once():
    """The backward pass of a device's later stage may be over before the other stage has gradients."""

    def net(weights, x):
        for kernel in weights:
            y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.pad(jnp.tanh(y), ((0, 0), (0, 0), (0, 0), (0, 64 - y.shape[-1])))
        return x

    with pytest.raises(MemoryBudgetError) as error:
        jaxpipe.partition(
            jax.tree_util.Partial(net, [jnp.ones((3, 3, 64, outputs)) for outputs in (40, 40, 64, 40)]),
            jax.make_mesh((2,), ("stage",)),
            jnp.ones((2, 1, 1, 64)),
            loss=lambda model, x: jnp.square(model(x)).mean(),
            optimizer=optax.sgd(0.1),
            num_microbatches=2,
            profile="analytic",
            schedule="interleaved",
            memory="100B",
            options=jaxpipe.PlanOptions(compile=False),
        )
    bound = float(re.search(r"no plan needs less than (\d+\.\d+) KiB", str(error.value))[1]) * 1024
    assert 2 * 9 * 64 * (40 + 64) * 4 <= bound <= error.value.smallest  # parameters and gradients of the fuller device


def test_smaller_plans_are_built_for_the_platform_of_the_mesh(monkeypatch):
    """A plan for absent GPUs: what comes after the first plan is not built for the CPU that it is made on."""
    platforms = []

    def with_step(planned):
        platforms.append(current().platform)
        return as_compiled(planned, 2 * planned.plan.budget)

    def search_plan(traced):
        platforms.append(current().platform)
        assert traced.request.options.compile
        return planned

    paper, _ = make(chain, 2, memory=10**7, options=jaxpipe.PlanOptions(compile=False))
    devices = np.array([SimpleNamespace(platform="gpu", device_kind="H100")] * 2)
    planned = replace(paper._planned, mesh=SimpleNamespace(devices=devices))
    monkeypatch.setattr(PlannedStep, "with_step", with_step)
    monkeypatch.setattr(make_plan, "search_plan", search_plan)
    assert make_plan.compiled_plan(planned) is planned
    assert platforms == ["gpu"] * 2


def test_a_first_step_that_is_refused_offers_what_runs(monkeypatch):
    """Planned by prediction alone; XLA then reserves more than was predicted."""
    offered = refused(chain, 2).smallest
    with pytest.raises(MemoryBudgetError) as error:
        make(chain, 2, memory=1000, options=jaxpipe.PlanOptions(compile=False))
    predicted = error.value.smallest
    assert predicted < offered and "as predicted; XLA may reserve more" in str(error.value)
    pipeline, batch = make(chain, 2, memory=predicted, options=jaxpipe.PlanOptions(compile=False))
    assert pipeline.plan.predicted_bytes <= predicted
    state = pipeline.init(KEY)
    with pytest.raises(MemoryBudgetError, match=rf"^memory=.*XLA reserves {offered} bytes") as error:
        pipeline.step(state, batch)
    assert error.value.smallest == offered
    with pytest.raises(MemoryBudgetError, match=rf"^memory=.*is {offered} bytes .*Pass memory={offered} or") as error:
        pipeline.compile()
    assert error.value.smallest == offered


def test_a_budget_that_is_raised_is_kept_by_the_compiled_step():
    pipeline, _ = make(
        chain, 2, memory=refused(chain, 2).smallest // 2, options=jaxpipe.PlanOptions(allow_over_budget=True)
    )
    plan = pipeline.plan
    assert plan.raised_from == refused(chain, 2).smallest // 2 < plan.budget
    assert max(pipeline.memory_report().compiled_bytes) <= plan.budget


# Time


def test_all_solutions_together_keep_the_time_limit(monkeypatch):
    """Each takes all that it is given: half of what is left."""
    clock = [0.0]
    monkeypatch.setattr(solving.time, "perf_counter", lambda: clock[0])
    given = []

    def slow_choice(problem, options):
        given.append(options.time_limit)
        clock[0] += options.time_limit

    monkeypatch.setattr(solving, "choose", slow_choice)
    shared = Solving("HIGHS", 40.0)
    for _ in range(60):
        shared.fastest(Problem((), (0,), 100.0), 0.0)
    assert given[:3] == [20.0, 10.0, 5.0]
    assert sum(given) == clock[0] == shared.spent <= 40.0
    assert given[-1] == 0.0 and shared.left == 0.0  # too little is left to start a solver


def test_a_plan_without_time_is_greedy_and_says_so(monkeypatch):
    def never(*args, **options):
        raise AssertionError("a solver was called")

    usual, _ = make(chain, 2, runtime="mpmd", schedule="gpipe")
    budget = int(0.97 * usual.plan.predicted_bytes)
    monkeypatch.setattr(integer_program, "solve", never)
    plan = make(chain, 2, memory=budget, options=jaxpipe.PlanOptions(time_limit=0.0, compile=False), schedule="gpipe")[
        0
    ].plan
    assert plan.predicted_bytes <= budget
    storage = {stage.storage for stage in plan.stages}
    assert storage - {"default"} and storage <= {"default", "greedy", "checkpoints", "optimal", "lowest peak"}
    said = ("chosen by a greedy rule", "nn.remat of blocks", "as little memory as was found")
    assert any(text in one_line(plan) for text in said)
    assert "gap" not in one_line(plan)


# Progress


def test_a_plan_logs_its_levels(caplog, capfd):
    caplog.set_level(logging.INFO, logger="jaxpipe")
    smallest = refused(chain, 2).smallest
    caplog.clear()
    make(chain, 2, memory=smallest)
    texts = [record.getMessage() for record in caplog.records if record.name == "jaxpipe"]
    assert texts[0] == "Tracing the model"
    levels = [text for text in texts if re.search(r": choosing what [12] stage\(s\) store within ", text)]
    assert levels and all(re.search(r"; solvers took \d+\.\d of \d+\.\d s$", text) for text in levels)
    steps = [k for k, text in enumerate(texts) if text.startswith("Compiling the training step, ")]
    told = [[re.match(r"XLA reserves .* on the fullest device$", text) for text in texts[k + 1 :]] for k in steps]
    assert told and all(map(any, told))


def test_a_plan_keeps_what_its_search_compared():
    """Schedules with their cuts, seconds and bytes; within a budget what was predicted, and what XLA reserves."""
    plan = make(chain, 2, schedule="gpipe")[0].plan
    assert len(plan.search) == 2 and plan.search[1].startswith("chosen: gpipe, 2 stages on 2 devices, cut at ")
    assert plan.search[0].endswith(", by default storage") and str(plan.stages[0].operators[1]) in plan.search[0]
    assert Plan.from_json(plan.to_json()).search == plan.search
    smaller = make(chain, 2, schedule="gpipe", memory=int(0.99 * plan.predicted_bytes))[0].plan
    last, reserved = smaller.search[-2], bytes_text(smaller.compiled_bytes)
    assert f"{bytes_text(smaller.predicted_bytes)} predicted, {reserved} compiled" in last
    compared = make(chain, 2)[0].plan
    assert {text.split(",")[0] for text in compared.search[:-1]} > {"gpipe"} and compared.schedule in compared.search[
        -1
    ]


@pytest.mark.slow
def test_names_of_tensors_tell_module_operator_type_and_shape():
    pipeline, _ = make(tutorial, 2)
    names = refuse_budget.largest_stored(pipeline._planned)
    assert len(names) == 3
    assert all(re.match(r"(Net/\S.*|batch\['\w+'\]) \w+\[[\d,]*\] \([\d.]+ [KM]?i?B\)$", name) for name in names)
    sizes = [float(re.search(r"\(([\d.]+) KiB", name)[1]) for name in names]
    assert all(larger >= smaller for larger, smaller in itertools.pairwise(sizes))
