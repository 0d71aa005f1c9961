"""Pipelines under a memory budget: what is stored differs, gradients do not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe.errors import MemoryBudgetError, ModelError, PartitionError
from jaxpipe.graph.graph import trace
from jaxpipe.planning import plan_storage
from jaxpipe.planning.cuts.shortest_step import cut_within
from jaxpipe.residuals.vjp_program import assemble, backward, build, forward
from jaxpipe.runtime.mpmd.device_bytes import Peak
from tests.support.budget_models import KEY, built_pipeline, mlp, resnet, transformer, unet
from tests.support.compare import FUSION, relative_l2
from tests.support.texts import one_line


make = functools.partial(built_pipeline, runtime="mpmd", options=jaxpipe.PlanOptions(compile=False))


@functools.cache
def unlimited(build, stages, m):
    """The pipeline without a budget, a state, a batch and the gradients: initializers take long to compile."""
    pipeline, batch = make(build, stages, m)
    state = pipeline.init(KEY)
    return pipeline, state, batch, gradients(pipeline, state, batch)


def gradients(pipeline, state, batch):
    """Loss and gradients; a state fits every pipeline with the same cuts, whatever it stores."""
    (loss, _), gradient = pipeline.value_and_grad(state, batch)
    return loss, gradient


def moved(usual, state, pipeline):
    """The state for another pipeline, which may have other cuts."""
    same = pipeline.plan.identity == usual.plan.identity
    return state if same else pipeline.init(KEY, variables=usual.parameters(state))


def smallest_budget(build, stages, m):
    with pytest.raises(MemoryBudgetError, match="The smallest budget that was found to be met") as error:
        make(build, stages, m, memory=_fixed(build, stages, m) + 1)
    return int(re.search(r"is (\d+) bytes", str(error.value))[1])


def _fixed(build, stages, m):
    memory = make(build, stages, m)[0].plan.memory
    return sum(n for name, n in memory.items() if name not in ("stash", "temporaries"))


@pytest.mark.parametrize(
    ("build", "stages", "m", "off"),
    [
        pytest.param(unet, 2, 4, 0.0, marks=pytest.mark.slow),
        pytest.param(mlp, 1, 2, 0.0, marks=pytest.mark.core),
        pytest.param(mlp, 3, 4, FUSION, marks=pytest.mark.slow),  # computes the exponentials of its softmax again
        pytest.param(unet, 1, 2, 0.0, marks=pytest.mark.slow),
        pytest.param(transformer, 2, 4, FUSION, marks=pytest.mark.slow),
        pytest.param(resnet, 2, 4, FUSION, marks=pytest.mark.slow),  # no bit differs with --xla_cpu_max_isa=AVX
        pytest.param(unet, 4, 8, 0.0, marks=pytest.mark.slow),
    ],
)
def test_gradients_within_a_budget(build, stages, m, off):
    """The smallest budget, and one half way to what is needed by default."""
    usual, state, batch, expected = unlimited(build, stages, m)
    needed = usual.plan.predicted_bytes
    least = smallest_budget(build, stages, m)
    assert least < needed
    added, steps = [], []
    for budget in (least, (least + needed) // 2, needed):
        pipeline, _ = make(build, stages, m, memory=budget)
        assert pipeline.plan.predicted_bytes <= budget == pipeline.plan.budget
        added.append(sum(stage.added_seconds for stage in pipeline.plan.stages))
        steps.append(pipeline.plan.step_seconds)
        if budget < needed:
            stored = any(stage.storage != "default" for stage in pipeline.plan.stages)
            assert stored or pipeline.plan.schedule != usual.plan.schedule  # with fewer micro-batches in flight
            # Other cuts: XLA fuses other operators.
            bound = off if pipeline.plan.identity == usual.plan.identity else FUSION
            assert relative_l2(gradients(pipeline, moved(usual, state, pipeline), batch), expected) <= bound
    assert steps == sorted(steps, reverse=True)
    assert added[0] != 0 and added[-1] == 0  # below 0 where devices with room run less again


def test_compiled_bytes_keep_the_budget():
    usual, state, batch, _ = unlimited(mlp, 2, 4)
    budget = int(0.85 * usual.memory_report().compiled_bytes[0])
    pipeline, _ = make(mlp, 2, 4, memory=budget, options=None)
    report = pipeline.memory_report()
    assert max(report.compiled_bytes) <= budget
    assert report.predicted_bytes[0] == pipeline.plan.predicted_bytes
    copied = jax.tree.map(jnp.copy, moved(usual, state, pipeline))  # a step donates
    _, metrics = pipeline.step(copied, batch)
    assert np.isfinite(metrics["loss"])


def test_nothing_is_encoded_without_codecs():
    """``storage=()`` keeps what plain differentiation keeps; a budget may still compute again."""
    plain, _ = make(mlp, 2, 4, storage=())
    usual, state, batch, expected = unlimited(mlp, 2, 4)
    kinds = {kind for stage in plain.plan.stages for kind in stage.stored}
    assert kinds == {"keep"}
    assert sum(s.stash_bytes for s in plain.plan.stages) > sum(s.stash_bytes for s in usual.plan.stages)
    assert relative_l2(gradients(plain, state, batch), expected) <= FUSION


@pytest.mark.core
def test_a_plan_for_one_function():
    """A chain of products and tanh: the plan runs, and gives what ``jax.grad`` gives."""

    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.sum()

    w, x = 0.1 * jax.random.normal(KEY, (16, 16)), jax.random.normal(KEY, (64, 16))
    graph = trace(loss, w, x)
    whole = plan_storage(graph, "1GiB")
    assert whole.status == "optimal" and whole.added_seconds == 0 and whole.raised_from is None
    expected = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    built = build(graph, graph.inputs, held=graph.inputs)
    previous = whole
    for budget in range(whole.peak_bytes, 0, -4096):
        try:
            plan = plan_storage(graph, budget)
        except MemoryBudgetError as error:
            smallest = int(re.search(r"plan is (\d+) bytes", str(error))[1])
            assert budget < smallest <= previous.peak_bytes
            raised = plan_storage(graph, budget, allow_over_budget=True)
            assert raised.raised_from == budget and smallest <= raised.budget_bytes < smallest + 0.1 * budget + 1
            assert raised.peak_bytes <= raised.budget_bytes
            break
        assert plan.peak_bytes <= budget and plan.added_seconds >= previous.added_seconds
        stage = assemble(built.backward_graph, plan.choices)

        @jax.jit
        def both(w, x, stage=stage):
            (y,), stash = forward(stage, [w, x])
            return backward(stage, [], stash, [jnp.ones_like(y)])

        for got, wanted in zip(both(w, x), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        previous = plan
    assert previous.added_seconds > 0
    assert "recompute" in str(previous)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"options": jaxpipe.PlanOptions(solver="NONE")},
            PartitionError,
            "solver='NONE' is none of the mixed-integer solvers .*HIGHS",
        ),
        (
            {"options": jaxpipe.PlanOptions(solver="OSQP")},
            PartitionError,
            "solver='OSQP' is none of the mixed-integer solvers .*HIGHS",
        ),
        ({"storage": "smalest"}, ModelError, "unknown codec 'smalest'"),
        ({"memory": 1000}, MemoryBudgetError, "by default each device needs .* The smallest budget"),
    ],
)
def test_invalid_budgets_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        make(mlp, 2, 4, **options)


@pytest.mark.slow
def test_a_budget_that_nothing_keeps_may_be_raised():
    """By tenths of it, no further than needed; the compiled step keeps the raised one."""
    smallest = smallest_budget(mlp, 2, 4)
    asked = smallest // 2
    pipeline, batch = make(mlp, 2, 4, memory=asked, options=jaxpipe.PlanOptions(allow_over_budget=True, compile=False))
    plan = pipeline.plan
    assert plan.raised_from == asked and smallest <= plan.budget < smallest + 0.1 * asked + 2
    assert "raised from" in one_line(plan) and jaxpipe.Plan.from_json(plan.to_json()) == plan
    pipeline.compile()
    assert max(pipeline.memory_report().compiled_bytes) <= pipeline.plan.budget
    usual, state, batch, expected = unlimited(mlp, 2, 4)
    assert relative_l2(gradients(pipeline, moved(usual, state, pipeline), batch), expected) <= FUSION
    unchanged, _ = make(
        mlp, 2, 4, memory=2 * smallest, options=jaxpipe.PlanOptions(allow_over_budget=True, compile=False)
    )
    assert unchanged.plan.raised_from is None and unchanged.plan.budget == 2 * smallest


@pytest.mark.slow
def test_a_budget_that_xla_exceeds_may_be_raised(monkeypatch):
    """Also if the plan was made smaller in between, because XLA reserves more than was predicted."""
    budget = unlimited(mlp, 2, 4)[0].plan.predicted_bytes
    reserved = iter([budget + 1, budget + 2, budget + 3])
    peaks = lambda _, devices: dict.fromkeys(devices.every, Peak(next(reserved, budget + 1), 0, ""))  # noqa: E731
    monkeypatch.setattr("jaxpipe.planning.candidate.device_peaks", peaks)
    pipeline, _ = make(mlp, 2, 4, memory=budget, options=jaxpipe.PlanOptions(allow_over_budget=True, compile=False))
    before = pipeline.plan
    pipeline.compile()
    assert before.raised_from is None and pipeline.plan.raised_from == budget < pipeline.plan.budget
    reserved = iter([budget + 1, budget + 2, budget + 3])
    refused, _ = make(mlp, 2, 4, memory=budget)
    with pytest.raises(MemoryBudgetError, match="XLA reserves"):
        refused.compile()


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "m", "levels"), [(2, 4, range(14, 19)), (4, 8, range(12, 21, 4))])
def test_more_memory_is_used_for_shorter_steps(stages, m, levels):
    """Predicted bytes never fall with a larger budget, compiled ones by 2 % at most, and no step is longer."""
    usual, *_ = unlimited(mlp, stages, m)
    fixed = _fixed(mlp, stages, m)
    rest = usual.plan.predicted_bytes - fixed
    predicted, compiled, steps = [], [], []
    for k in levels:
        pipeline, _ = make(mlp, stages, m, memory=fixed + rest * k // 20)
        predicted.append(pipeline.plan.predicted_bytes)
        steps.append(pipeline.plan.step_seconds)
        compiled.append(max(pipeline.memory_report().compiled_bytes))
    assert predicted == sorted(predicted) and predicted[0] < predicted[-1]
    assert steps == sorted(steps, reverse=True)
    assert all(later >= 0.98 * max(compiled[:k]) for k, later in enumerate(compiled) if k)


def test_the_plan_is_greedy_when_the_solver_times_out():
    """Then the greedy choice is there."""
    usual, state, batch, expected = unlimited(mlp, 2, 4)
    budget = (smallest_budget(mlp, 2, 4) + usual.plan.predicted_bytes) // 2
    pipeline, _ = make(mlp, 2, 4, memory=budget, options=jaxpipe.PlanOptions(time_limit=1e-9, compile=False))
    assert pipeline.plan.predicted_bytes <= budget
    assert relative_l2(gradients(pipeline, moved(usual, state, pipeline), batch), expected) <= FUSION


def deep(m):
    """Forty equal layers: a stage that computes again can hand layers on."""
    weights = jax.random.normal(KEY, (40, 32, 32)) / 6
    x = jax.random.normal(KEY, (m * 256, 32))

    def apply(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    return jax.tree_util.Partial(apply, list(weights)), x, lambda model, x: (model(x).sum(), 1.0, {})


def test_cuts_follow_what_storage_adds():
    """A stage that computes all again gets fewer layers; no stage is a layer longer than the mean."""
    profile, before = (planned := make(deep, 4, 8)[0]._planned).profile, planned.partition
    work = np.array(profile.seconds)
    work[: before.cuts[0]] *= 2

    def loads(partition):
        return np.array([work[stage.operators.start : stage.operators.stop].sum() for stage in partition.stages])

    again = (0.0, work[: before.cuts[0]].sum() / 2)
    after = cut_within(before, [1] * 4, 1, [[again, *[(0.0, 0.0)] * 3]], 1.0)[0]
    assert after.cuts[0] < before.cuts[0]
    assert loads(after).max() <= work.sum() / 4 + 2 * work.sum() / 50 < loads(before).max()


def test_a_budget_logs_its_rounds():
    """The record of the plan's own cuts is the plan's; those of others are about right."""
    options = {"schedule": "1f1b", "options": jaxpipe.PlanOptions(compile=False)}
    usual, _ = make(mlp, 2, 4, **options)
    with pytest.raises(MemoryBudgetError) as refused:
        make(mlp, 2, 4, memory=1000, **options)
    smallest, needed = refused.value.smallest, usual.plan.predicted_bytes
    cut_again, cut_once = (
        make(mlp, 2, 4, memory=(share * smallest + (30 - share) * needed) // 30, **options)[0].plan for share in (20, 2)
    )
    for plan, again in ((cut_again, True), (cut_once, False)):
        steps = {x.cuts: x.step_seconds for x in plan.rounds}
        assert (len(steps) > 1) == again
        assert steps[plan.stages[0].operators[1:]] == plan.step_seconds == min(steps.values())
        assert "fastest over slowest stage, round by round" in one_line(plan)
        assert type(plan).from_json(plan.to_json()) == plan
    assert usual.plan.rounds == ()
