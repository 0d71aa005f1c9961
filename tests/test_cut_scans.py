"""Scans over layers are cut by default where the stage that has them all would be the longest; the plan tells."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxpipe
from examples import models as zoo
from jaxpipe.planning.cut_scans import SLACK, balanced_groups
from tests.support.compare import FUSION, arrays, assert_same_bits
from tests.support.pipeline_models import (
    Case,
    check_training,
    classifier,
    entropy,
    images,
    linen,
    nnx_case,
    pipeline_of,
)
from tests.support.texts import one_line


pytestmark = pytest.mark.optimized


# Where to cut


def shortest(seconds, num_stages):
    """The longest stage of the best of all cuts, by brute force."""
    places = itertools.combinations_with_replacement(range(len(seconds) + 1), num_stages - 1)
    stages = (itertools.pairwise((0, *cuts, len(seconds))) for cuts in places)
    return min(max(sum(seconds[a:b]) for a, b in pairs) for pairs in stages)


@pytest.mark.parametrize(
    ("seconds", "length", "num_stages", "groups"),
    [
        ([0, 64, 0], 64, 4, ((0, 16, 32, 48, 64),)),
        ([0, 48, 0], 48, 7, ((0, 7, 14, 21, 28, 35, 42, 48),)),  # no multiple
        ([0, 64, 3], 64, 4, ((0, 17, 34, 51, 64),)),  # a head as long as three layers
        ([4, 64, 0], 64, 4, ((0, 13, 30, 47, 64),)),  # an embedding as long as four
        ([0, 8, 0.4], 8, 2, ((0, 4, 8),)),
        ([0, 48, 0], 48, 1, ()),  # one stage
        ([50, 2, 48], 8, 2, ()),  # little of the work: cut before it or after it
        ([0, 1, 0.97], 8, 2, ()),  # stages of nearly equal work as it is
    ],
)
def test_scans_are_cut_where_stages_of_equal_work_begin(seconds, length, num_stages, groups):
    assert balanced_groups(seconds, {1: length}, num_stages, per_stage=1) == groups


def test_an_encoder_and_a_decoder_are_cut_apart():
    # Stages of 1 + 10, 11, 3 + 2 + 6 and 6 + 1; each part of a scan is two groups.
    encoder, decoder = (0, 5, 10, 15, 21, 22, 24), (0, 1, 3, 4, 6)
    assert balanced_groups([1, 24, 2, 12, 1], {1: 24, 3: 6}, 4, per_stage=2) == (decoder, encoder)


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_stage_is_about_that_of_single_layers(seed):
    draw = np.random.default_rng(seed)
    embed, head = draw.uniform(0, 3, 2)
    length, num_stages = int(draw.integers(4, 14)), int(draw.integers(2, 5))
    single = [embed, *[1.0] * length, head]
    groups = balanced_groups([embed, float(length), head], {1: length}, num_stages)
    if not groups:
        assert shortest([embed, length, head], num_stages) <= (1 + SLACK) * shortest(single, num_stages) + 1e-6
    else:
        ((*bounds,),) = groups
        grouped = [embed, *(float(b - a) for a, b in itertools.pairwise(bounds)), head]
        assert shortest(grouped, num_stages) == pytest.approx(shortest(single, num_stages))


@pytest.mark.parametrize("length", [48, 126, 1000])
def test_the_number_of_groups_does_not_grow_with_the_layers(length):
    ((*bounds,),) = balanced_groups([0.5, length, 1.5], {1: length}, 4)
    assert len(bounds) - 1 == 8


# Models

WIDTH = 32


class Layer(nn.Module):
    """BatchNorm, dropout, and a term of the loss, in the form that `nn.scan` takes."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
        return x + nn.Dropout(0.25, deterministic=False)(jnp.tanh(y)), jnp.square(y).mean()


class Scanned(nn.Module):
    """Layers in the middle of a larger model."""

    remat: bool = False
    length: int = 8

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer) if self.remat else Layer,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.length,
        )
        x, penalties = layers(name="layers")(nn.Dense(WIDTH)(x), None)
        return nn.Dense(10)(x), penalties


def stateful(remat: bool = False, length: int = 8) -> Case:
    def loss(model, batch):
        logits, penalties = model(batch["x"])
        return entropy(logits, batch["y"]) + 0.1 * penalties.sum()

    return linen(Scanned(remat, length), images(4, rows=32), loss)


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.linear(x)))


class NNXScanned(nnx.Module):
    """Layers made by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, WIDTH, rngs=rngs)
        self.layers = nnx.vmap(NNXLayer, in_axes=(0,), out_axes=0)(rngs.fork(split=6))
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(self.embed(x), self.layers))


CASES = {
    "linen": stateful,
    "remat": functools.partial(stateful, remat=True),
    "not divisible": functools.partial(stateful, length=7),
    "nnx": lambda: nnx_case(NNXScanned, images(4, rows=32)),
}


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name]()


def modules(plan: jaxpipe.Plan) -> list[tuple[str, ...]]:
    return [stage.modules for stage in plan.stages]


@pytest.mark.parametrize(
    ("name", "stages", "runtime"),
    [
        pytest.param("linen", 2, "auto", marks=pytest.mark.core),
        pytest.param("linen", 2, "spmd", marks=pytest.mark.slow),
        pytest.param("linen", 4, "auto", marks=pytest.mark.slow),
        pytest.param("remat", 2, "auto", marks=pytest.mark.slow),
        pytest.param("not divisible", 4, "auto", marks=pytest.mark.slow),
        pytest.param("nnx", 2, "auto", marks=pytest.mark.slow),
    ],
)
def test_layers_that_are_cut_by_default_train_as_the_scan_does(name, stages, runtime):
    """Groups of iterations are fused in another way than all of them."""
    case, optimizer = case_of(name), optax.sgd(0.1, momentum=0.9)
    pipeline = pipeline_of(case, stages, 4, optimizer=optimizer, schedule="1f1b", runtime=runtime)
    assert pipeline.profile.scan_groups
    check_training(case, pipeline, optimizer, FUSION)


# What a plan says


def test_the_plan_names_the_layers_of_each_stage_and_the_groups():
    plan = pipeline_of(stateful(length=24), 2, 4, schedule="1f1b").plan
    assert plan.notes == ("Scanned/layers is a scan of 24 layers, cut into 4 groups of 6",)
    assert plan.notes[0] in one_line(plan)
    assert modules(plan) == [
        ("Scanned/Dense_0", "Scanned/layers[0:12]"),
        ("Scanned/layers[12:24]", "Scanned/Dense_1"),
    ]
    first, second = (stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    assert max(first, second) < 1.1 * min(first, second)


def test_a_scan_that_stays_whole_names_its_module_and_the_reason():
    plan = pipeline_of("mlp", 2, 4).plan
    assert plan.notes == ()
    plan = pipeline_of(case_of("linen"), 2, 4, options=jaxpipe.PlanOptions(unroll_scans=False)).plan
    assert plan.notes == ("Scanned/layers is a scan of 8 layers, which are all in one stage: unroll_scans=False",)
    assert "Scanned/layers" in {module for stage in modules(plan) for module in stage}


def test_one_stage_keeps_its_scan():
    plan = pipeline_of(case_of("linen"), 1, 4).plan
    assert plan.notes == () and modules(plan) == [("Scanned/Dense_0", "Scanned/layers", "Scanned/Dense_1")]


STACK = jnp.linspace(-1, 1, 6 * 32 * 32).reshape(6, 32, 32)


def stacked(whole: bool) -> Case:
    """Layers in a dictionary; if ``whole``, their running sums over layers are used, too."""

    def apply(weights, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights["layers"]["kernel"])
        return x @ jnp.cumsum(weights["layers"]["kernel"], 0)[-1] if whole else x

    model = jax.tree_util.Partial(apply, {"layers": {"kernel": STACK}})
    return Case(model, classifier(), images(32, rows=1024), *[None] * 3)


def mixing() -> optax.GradientTransformation:
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.cumsum(g, 0), updates), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize(
    ("whole", "options", "reason"),
    [
        (True, {}, "0/0/layers/kernel is used as a whole, too (cumsum)"),
        (False, {"optimizer": mixing()}, "the optimizer's cumsum combines layers of 0/0/layers/kernel"),
        (
            False,
            {"optimizer": optax.chain(jaxpipe.gradients.per_stage(optax.clip_by_global_norm(1.0)), optax.sgd(0.1))},
            "gradients.per_stage puts each parameter into one stage",
        ),
        (
            False,
            {"replicas": 2, "gradient_exchange": jaxpipe.gradients.block_sparse(k=1), "optimizer": optax.sgd(0.1)},
            "block_sparse sends the best blocks of whole parameters",
        ),
    ],
)
def test_layers_that_cannot_be_cut_stay_in_one_stage_and_the_plan_says_why(whole, options, reason):
    plan = pipeline_of(stacked(whole), 2, 4, **options).plan
    assert f"0/0/layers is a scan of 6 layers, which are all in one stage: {reason}" in plan.notes


def test_layers_are_cut_where_there_are_too_few_operators_for_the_stages():
    plan = pipeline_of(stacked(False), 4, 4, schedule="1f1b").plan
    assert len(plan.stages) == 4 and plan.notes == ("0/0/layers is a scan of 6 layers, cut into 6 groups of 1",)


# With other parts of the library


def test_a_profile_decides_for_its_own_program():
    case = case_of("linen")
    pipeline = pipeline_of(case, 2, 4)
    profile = jaxpipe.Profile.from_json(pipeline.profile.to_json())
    assert profile.scan_groups == pipeline.profile.scan_groups
    assert pipeline_of(case, 2, 4, profile=profile).plan.stages == pipeline.plan.stages
    whole = jaxpipe.profile_model(case.model, case.batch, loss=case.loss, source="analytic", num_microbatches=4)
    assert pipeline_of(case, 2, 4, profile=whole).plan.notes[-1].endswith(": profile= has it as one operator")
    again = jaxpipe.profile_model(
        case.model,
        case.batch,
        loss=case.loss,
        source="analytic",
        num_microbatches=4,
        unroll_scans=profile.scan_groups,
    )
    assert again.names == profile.names and again.scan_groups == profile.scan_groups


@pytest.mark.parametrize(
    "stages", [(2, 1), *(pytest.param(stages, marks=pytest.mark.slow) for stages in ((1, 2), (2, 4)))]
)
def test_states_move_between_pipelines_with_other_groups(stages):
    case = case_of("linen")
    first, second = (pipeline_of(case, n, 4, optimizer=optax.adam(1e-2)) for n in stages)
    state, _ = first.step(first.init(jax.random.key(3)), case.batch)
    moved = second.adopt(state)
    assert_same_bits(arrays(second.parameters(moved)), arrays(first.parameters(state)))
    assert_same_bits(arrays(first.adopt(moved)), arrays(state))


def test_checkpoints_have_the_layout_of_the_model(tmp_path):
    case = case_of("linen")
    pipeline = pipeline_of(case, 2, 4)
    state = pipeline.init(jax.random.key(3))
    pipeline.save(state, tmp_path / "saved")
    params, variables = case.start(jax.random.key(3))
    saved = jaxpipe.checkpoint.load(tmp_path / "saved")
    assert_same_bits(arrays(saved.variables), arrays(case.variables(params, variables)))


def test_patterns_of_codecs_name_scanned_modules():
    model = zoo.ScannedMLP(num_layers=6, width=32)
    case = linen(model, images(32, rows=16), classifier())
    plan = pipeline_of(case, 2, 4, storage={"ScanResidualBlock_0": (), "*": "fast"}).plan  # warns if none fits
    assert any("ScanResidualBlock_0[" in module for stage in modules(plan) for module in stage)


def test_layers_that_share_parameters_stay_together():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            count = self.variable("state", "count", lambda: jnp.zeros(()))
            count.value += 1
            return x + nn.tanh(nn.Dense(6)(x)) / count.value, None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"variable_broadcast": "params", "variable_axes": {"state": 0}, "split_rngs": {"params": False}}
            return nn.Dense(5)(nn.scan(Layer, length=3, **axes)()(x, None)[0])

    x = jax.random.normal(jax.random.key(1), (8, 6))
    variables = Net().init(jax.random.key(0), x)
    pipeline = jaxpipe.partition(
        Net(),
        jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]),
        x,
        loss=lambda model, x: jnp.square(model(x)).mean(),
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        profile="analytic",
    )
    assert "share variables" in one_line(str(pipeline.plan))
    _, gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0), variables=variables), x)

    def plain(params, state, x):
        y, new = Net().apply({"params": params, "state": state}, x, mutable=["state"])
        return jnp.square(y).mean(), new["state"]

    first, state = jax.grad(plain, has_aux=True)(variables["params"], variables["state"], x[:4])
    second, _ = jax.grad(plain, has_aux=True)(variables["params"], state, x[4:])
    for got, a, b in zip(*map(jax.tree.leaves, (gradients, first, second)), strict=True):
        np.testing.assert_allclose(got, (a + b) / 2, rtol=1e-5, atol=1e-7)  # of sums in another order
