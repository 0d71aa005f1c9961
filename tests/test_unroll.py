"""Layers that are one scan, cut into stages: gradients, state, optimizer and checkpoints are those of the scan."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax

import jaxpipe
from examples import models as zoo
from jaxpipe.errors import PartitionError
from jaxpipe.graph.graph import is_differentiable, trace
from jaxpipe.graph.split_scan import MixedRowsError, split_rows
from jaxpipe.graph.stacked_layers import Stacks, groups_of_rows
from jaxpipe.residuals import vjp_program
from jaxpipe.schedules import interleaved, one_f_one_b
from tests.support.compare import FUSION, arrays, assert_same_bits, relative_l2
from tests.support.heavy_profile import heavy
from tests.support.pipeline_models import (
    Case,
    check_training,
    classifier,
    entropy,
    images,
    linen,
    nnx_case,
    pipeline_of,
    plain_gradients,
)


WIDTH, LAYERS = 6, 4


class Block(nn.Module):
    """Dense, BatchNorm, dropout, in the carry form that `nn.scan` takes."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(WIDTH)(x))
        return x + nn.Dropout(0.25, deterministic=False)(jnp.tanh(y)), jnp.square(y).mean()


class Scanned(nn.Module):
    """Layers with state and random numbers of their own, one scan."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block) if self.remat else Block,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        x, penalties = layers()(nn.Dense(WIDTH)(x), None)
        return nn.Dense(10)(x), penalties


def stateful(remat: bool = False) -> Case:
    """With a term in the loss for what each layer returns."""

    def loss(model, batch):
        logits, penalties = model(batch["x"])
        return entropy(logits, batch["y"]) + 0.1 * penalties.sum()

    return linen(Scanned(remat), images(4, rows=32), loss)


def residual() -> Case:
    return linen(zoo.ScannedMLP(num_layers=LAYERS, width=WIDTH), images(4, rows=8), classifier())


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class NNXScanned(nnx.Module):
    """Layers made by `nnx.vmap`, run by `nnx.scan`."""

    def __init__(self, rngs):
        make = nnx.vmap(NNXBlock, in_axes=(0,), out_axes=0)
        self.layers = make(rngs.fork(split=LAYERS) if hasattr(rngs, "fork") else rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.layers))


def nnx_scanned() -> Case:
    return nnx_case(NNXScanned, images(WIDTH, rows=8))


CASES = {
    "stateful": stateful,
    "rematted": functools.partial(stateful, remat=True),
    "residual": residual,
    "nnx": nnx_scanned,
}


@functools.cache
def case_of(name: str) -> Case:
    return CASES[name]()


def unrolled_pipeline(case: Case, stages: int, **options) -> jaxpipe.Pipeline:
    defaults = {"schedule": one_f_one_b, "optimizer": optax.sgd(0.1)}
    options = {**defaults, "options": jaxpipe.PlanOptions(unroll_scans=True), **options}
    return pipeline_of(case, stages, options.pop("num_microbatches", 4), **options)


def heavy_pipeline(case: Case, stages: int, **options) -> jaxpipe.Pipeline:
    """A pipeline whose work takes long beside calls; of work that does not, all layers may be in one stage."""
    short = unrolled_pipeline(case, stages, **options).profile
    return unrolled_pipeline(case, stages, profile=heavy(short), **options)


def check(name: str, stages: int, optimizer, **options) -> None:
    """Two steps, against plain training of the model with its scan."""
    case = case_of(name)
    check_training(case, unrolled_pipeline(case, stages, optimizer=optimizer, **options), optimizer, FUSION)


@pytest.mark.slow
def test_a_scan_with_state_and_random_numbers_trains_in_stages():
    check("stateful", 2, optax.sgd(0.1, momentum=0.9))


@pytest.mark.slow
def test_nnx_layers_in_a_scan_train_in_stages_in_groups():
    check("nnx", 2, optax.adam(1e-2), options=jaxpipe.PlanOptions(unroll_scans=2))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [interleaved, jaxpipe.schedules.zero_bubble])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_scans_train_in_stages(name, rows, schedule):
    check(name, 2, optax.sgd(0.1, momentum=0.9), options=jaxpipe.PlanOptions(unroll_scans=rows), schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "widths"), [("residual", (2, 1)), ("stateful", (3, 1)), ("nnx", (1, 3))])
def test_scans_train_in_stages_on_several_devices(name, widths):
    check(
        name,
        sum(widths),
        optax.sgd(0.1, momentum=0.9),
        options=jaxpipe.PlanOptions(unroll_scans=True, devices_per_stage=widths),
    )


def test_inner_stages_are_alike():
    """Where layers take the time: a cut within a layer for the work of the head makes no step shorter then."""
    case = linen(zoo.ScannedMLP(num_layers=8, width=32), images(32, rows=64), classifier())
    profile = unrolled_pipeline(case, 4).profile
    seconds = tuple(float("Block" in name and "dot_general" in name) for name in profile.names)
    profile = dataclasses.replace(profile, forward_seconds=seconds, backward_seconds=seconds)
    _, second, third, _ = unrolled_pipeline(case, 4, profile=profile)._planned.program.stages
    assert [op.label for op in second.graph.operators] == [op.label for op in third.graph.operators]


@functools.cache
def wide(width: int = 32) -> Case:
    return linen(zoo.ScannedMLP(num_layers=LAYERS, width=width), images(width, rows=64), classifier())


@pytest.mark.parametrize(("replicate", "widths"), [((2, 1), (2, 1)), (True, None)])
def test_stages_on_several_devices_have_their_own_layers(replicate, widths):
    # With layers as narrow as 32, one stage on all three devices is the fastest.
    pipeline = heavy_pipeline(wide(64), 3, options=jaxpipe.PlanOptions(unroll_scans=True, devices_per_stage=replicate))
    assert widths in (None, pipeline.plan.stage_replicas.per_stage)
    names, stages = (v.name for v in pipeline._planned.model.parameters), pipeline._planned.program.placement.parameters
    home = {name: stage for name, stage in zip(names, stages, strict=True) if "Dense_0/kernel[" in name}
    assert len(home) == LAYERS and len(set(home.values())) > 1
    assert sum(len(stage.devices) for stage in pipeline.plan.stages) == 3


def within_a_budget(share: float, **options) -> tuple[jaxpipe.Pipeline, int]:
    """A pipeline that has so much of the bytes that it would take; and these."""
    options["runtime"] = "mpmd"
    budget = int(share * unrolled_pipeline(wide(), 3, **options).plan.predicted_bytes)
    return unrolled_pipeline(wide(), 3, memory=budget, **options), budget


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"devices_per_stage": (2, 1)}])
def test_unrolled_scans_are_planned_within_a_budget(options):
    small, budget = within_a_budget(0.9, options=jaxpipe.PlanOptions(unroll_scans=True, compile=False, **options))
    assert small.plan.predicted_bytes <= budget and any(stage.added_seconds > 0 for stage in small.plan.stages)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"options": jaxpipe.PlanOptions(unroll_scans=True, devices_per_stage=(2, 1))}])
def test_unrolled_scans_train_within_a_budget(options):
    """Recomputed operators may be fused in another way."""
    small, budget = within_a_budget(0.95, **options)
    assert max(small.memory_report().compiled_bytes) <= budget
    state = small.init(jax.random.key(3))
    keys = jnp.stack([small.microbatch_key(state, j) for j in range(4)])
    loss, gradient, _ = plain_gradients(wide(), *wide().start(jax.random.key(3)), keys, 1, 4)
    (value, _), ours = small.value_and_grad(state, wide().batch)
    assert float(value) == pytest.approx(float(loss), rel=FUSION)
    assert relative_l2(arrays(ours), arrays(gradient)) < FUSION


# Operator by operator

STACK = {"w": jnp.linspace(-1, 1, 5 * 9).reshape(5, 3, 3), "b": jnp.linspace(-0.2, 0.3, 15).reshape(5, 3)}


def layers(stacked, shared, x, reverse):
    def body(carry, layer):
        y = jnp.sin(carry @ layer["w"] + layer["b"]) * shared
        return carry + y, (y.sum(), layer["b"] * 2)

    return lax.scan(body, x, stacked, reverse=reverse)


def program(reverse):
    """Uses of a stacked parameter: in a scan, cast, in a norm; results of the scan: carried, stacked, as new state."""

    def run(w, b, shared, x):
        half = (w.astype(jnp.bfloat16) * jnp.bfloat16(0.5)).astype(jnp.float32)
        last, (sums, doubled) = layers({"w": half, "b": b}, shared, x, reverse)
        return last.sum() + jnp.cumsum(sums)[2] + 0.01 * jnp.square(b).max() + jnp.sqrt(b.sum(1)).max(), doubled

    return run


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.core), 5])
def test_unrolled_programs_compute_and_differentiate_as_the_scan_does(rows, reverse):
    """Compared operator by operator (``disable_jit``): the scan is then the same operators in a loop."""
    run = program(reverse)
    operands = STACK["w"], jnp.abs(STACK["b"]), jnp.float32(0.7), jnp.ones((2, 3))
    cuts = groups_of_rows(5, rows)
    inputs, outputs = Stacks((cuts, cuts, None, None)), Stacks((None, cuts))
    graph = split_rows(trace(lambda *xs: list(run(*xs)), *operands), inputs, outputs)
    built = vjp_program.build(graph, [t for t in graph.inputs if is_differentiable(graph.tensors[t].aval)])
    with jax.disable_jit():
        expected, pullback = jax.vjp(run, *operands)
        seeds = jnp.float32(1), jnp.ones((5, 3))
        gradients = pullback(seeds)
        pieces, stash = vjp_program.forward(built, inputs.split(operands))
        known = [dict(zip(graph.inputs, inputs.split(operands), strict=True))[t] for t in built.parameters]
        ours = vjp_program.backward(built, known, stash, outputs.split(seeds))
    results = outputs.join(pieces), inputs.join(ours)
    if rows == 1:
        assert_same_bits(results, (list(expected), list(gradients)))
    # Several iterations stay a scan, which is compiled as one program: XLA fuses its operators.
    assert relative_l2(results, (list(expected), list(gradients))) < FUSION


def test_what_needs_several_layers_at_once_is_named():
    def mixed(w):
        return jnp.cumsum(w, 0).sum() + lax.scan(lambda c, x: (c + x.sum(), None), 0.0, w)[0]

    graph = trace(lambda w: [mixed(w)], STACK["w"])
    with pytest.raises(MixedRowsError, match="cumsum") as caught:
        split_rows(graph, Stacks(((0, 2, 5),)), Stacks((None,)))
    assert caught.value.sources == {0}
    graph = trace(lambda w: [2 * w, jnp.float32(1) + lax.scan(lambda c, x: (c + x.sum(), None), 0.0, w)[0]], STACK["w"])
    with pytest.raises(MixedRowsError, match="a result"):
        split_rows(graph, Stacks(((0, 2, 5),)), Stacks((None, None)))


# Optimizers

OPTIMIZERS = {
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),  # kernels, not biases over layers
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "blocks": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
    "masked": optax.chain(
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p)), optax.sgd(0.1)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_pieces_are_those_of_whole_parameters(name):
    """Norms by layer would be others; sums over layers may be added in another order, so to a few units."""
    optimizer = OPTIMIZERS[name]
    gradients = jax.tree.map(lambda x: jnp.cos(3 * x), STACK)
    state = optimizer.init(STACK)
    leaves, treedef = jax.tree.flatten((STACK, gradients, state))

    def update(*leaves):
        params, gradients, state = jax.tree.unflatten(treedef, leaves)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), state))

    cuts = Stacks(tuple(groups_of_rows(5, 2) if x.shape[:1] == (5,) else None for x in leaves))
    after = Stacks(cuts.bounds[: len(STACK)] + cuts.bounds[2 * len(STACK) :])
    graph = split_rows(trace(update, *leaves), cuts, after)
    joined = after.join(graph.evaluate(cuts.split(leaves)))
    expected = update(*leaves)
    assert [x.shape for x in joined] == [x.shape for x in expected]
    assert relative_l2(joined, expected) < FUSION
    made_of_inputs = set(graph.inputs)
    sizes = []
    for op in graph.operators:
        if any(t in made_of_inputs and graph.tensors[t].shape for t in op.inputs):
            made_of_inputs.update(op.outputs)
            sizes += [graph.tensors[t].size for t in op.outputs]
    # Nothing that is made of parameters or gradients is larger than two layers.
    assert sizes and max(sizes) <= 2 * 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_stacks(name):
    check("residual", 3, OPTIMIZERS[name], options=jaxpipe.PlanOptions(unroll_scans=2))


def test_a_norm_that_is_kept_of_layers_in_several_stages_is_in_all_of_them():
    parameters = {
        "layers": {"w": 0.5 * jax.random.normal(jax.random.key(0), (8, 8, 8)), "b": jnp.ones((8, 8)) / 8},
        "head": jax.random.normal(jax.random.key(1), (8, 4)),
    }

    def apply(variables, x):
        def layer(x, w):
            return x + 0.1 * jnp.tanh(x @ w["w"] + w["b"]), None

        return lax.scan(layer, x, variables["layers"])[0] @ variables["head"]

    def loss(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()

    batch = {"x": jax.random.normal(jax.random.key(2), (8, 8)), "y": jnp.arange(8) % 4}
    optimizer, state = optax.novograd(1e-2), optax.novograd(1e-2).init(parameters)
    pipeline = jaxpipe.partition(
        apply, jax.make_mesh((2,), ("stage",)), batch, loss=loss, optimizer=optimizer, profile="analytic"
    )
    trained = pipeline.init(jax.random.key(0), variables=parameters)
    for _ in range(3):
        gradients = jax.grad(lambda p: loss(functools.partial(apply, p), batch))(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        trained, _ = pipeline.step(trained, batch)
    assert relative_l2(jax.tree.leaves(pipeline.parameters(trained)), jax.tree.leaves(parameters)) < FUSION
    assert relative_l2(jax.tree.leaves(pipeline.optimizer_state(trained)), jax.tree.leaves(state)) < FUSION


def test_an_optimizer_that_mixes_layers_is_refused():
    def update(updates, state, params=None):
        return jax.tree.map(lambda g: jnp.cumsum(g, 0), updates), state

    mixing = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    with pytest.raises(PartitionError, match=r"optimizer: cumsum combines layers of .*ScanResidualBlock_0"):
        unrolled_pipeline(case_of("residual"), 2, optimizer=mixing)


# What a user sees


def test_stages_hold_their_own_layers_only():
    case = linen(zoo.ScannedMLP(num_layers=8, width=16), images(16, rows=8), classifier())
    whole, cut = (
        heavy_pipeline(case, 4, options=jaxpipe.PlanOptions(unroll_scans=rows), optimizer=optax.adam(1e-2))
        for rows in (False, 2)
    )
    layer = 4 * (16 * 16 + 3 * 16)
    assert whole.plan.memory["parameters"] >= 8 * layer
    assert cut.plan.memory["parameters"] < 4 * layer
    names = [v.name for v in cut._planned.model.parameters]
    assert "ScanResidualBlock_0/Dense_0/kernel[2:4]" in names


@pytest.mark.slow
def test_checkpoints_go_from_unrolled_stages_to_whole_scans_and_back(tmp_path):
    case = case_of("residual")
    options = {"optimizer": optax.adam(1e-2), "num_microbatches": 2}
    cut, whole = (
        unrolled_pipeline(case, 3, **options),
        unrolled_pipeline(case, 1, options=jaxpipe.PlanOptions(unroll_scans=False), **options),
    )
    state, _ = cut.step(cut.init(jax.random.key(3)), case.batch)
    expected = cut.parameters(state)
    cut.save(state, tmp_path / "cut")
    plain = jaxpipe.checkpoint.load(tmp_path / "cut")
    assert_same_bits(jax.tree.leaves(plain.variables), jax.tree.leaves(expected))
    restored = whole.restore(tmp_path / "cut")
    assert_same_bits(whole.parameters(restored), expected)
    whole.save(restored, tmp_path / "whole")
    back = cut.restore(tmp_path / "whole")
    assert_same_bits(arrays([back.parameters, back.optimizer]), arrays([state.parameters, state.optimizer]))


def test_a_profile_of_the_unrolled_model_fits_it():
    case = case_of("residual")
    profile = jaxpipe.profile_model(
        case.model, case.batch, loss=case.loss, source="analytic", num_microbatches=4, unroll_scans=2
    )
    assert unrolled_pipeline(case, 2, options=jaxpipe.PlanOptions(unroll_scans=2), profile=profile).plan.stages[
        1
    ].operators[1] == len(profile.names)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": jaxpipe.PlanOptions(unroll_scans=-1)}, r"unroll_scans=-1; it must be .*True"),
        ({"gradient_exchange": jaxpipe.gradients.block_sparse(k=1)}, r"unroll_scans: gradient_exchange"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(PartitionError, match=message):
        unrolled_pipeline(case_of("residual"), 2, **options)


def test_too_many_stages_for_a_scan_that_is_not_unrolled():
    apply = jax.tree_util.Partial(lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], STACK["w"])
    batch = images(3, rows=8)
    case = Case(apply, lambda model, batch: model(batch["x"]).mean(), batch, *[None] * 3)
    with pytest.raises(PartitionError, match=r"a scan of 5 layers, which are all in one stage: unroll_scans=False\."):
        unrolled_pipeline(case, 8, options=jaxpipe.PlanOptions(unroll_scans=False))


def test_without_a_scan_there_is_nothing_to_unroll():
    params = zoo.init_mlp(jax.random.key(0), [4, 4, 10])
    model = jax.tree_util.Partial(zoo.mlp, params)
    with pytest.raises(PartitionError, match="no scan over stacked parameters"):
        unrolled_pipeline(Case(model, classifier(), images(4, rows=8), *[None] * 3), 2)


def test_a_stacked_parameter_that_is_used_as_a_whole_stays_whole():
    weights = {"w": STACK["w"], "v": STACK["w"] + 1}

    def apply(weights, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x, (weights["w"], weights["v"]))
        return x @ jnp.cumsum(weights["v"], 0)[-1]

    batch = images(3, rows=8, classes=3)
    case = Case(jax.tree_util.Partial(apply, weights), classifier(), batch, *[None] * 3)
    names = [v.name for v in unrolled_pipeline(case, 1)._planned.model.parameters]
    assert sum("w[" in name for name in names) == 5
    assert sum("v" in name for name in names) == 1
