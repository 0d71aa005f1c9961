"""The bench of late and sparse gradients: what it emulates on one device is what a pipeline computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe.gradients import block_sparse
from jaxpipe.schedules import double_buffered
from scripts import bench_learning
from tests.support.compare import arrays, relative_l2


SIZE = bench_learning.Size(layers=2, width=16, heads=2, context=8, rows=8, steps=4)
#: A large epsilon: gradients that are zero but for rounding do not become whole steps.
ARGUMENTS = {"adamw": {"eps": 1e-3}, "muon": {"eps": 1e-3}}


def variant_of(name):
    variant = bench_learning.VARIANTS[name]
    return dataclasses.replace(variant, arguments={**variant.arguments, **ARGUMENTS[variant.optimizer]})


def emulated(variant, optimizer, params, batches):
    def value(params, text):
        return bench_learning.loss(lambda tokens: bench_learning.GPT(SIZE).apply(params, tokens), text)

    advance = functools.partial(bench_learning.advance, variant, optimizer, jax.value_and_grad(value))
    carry = bench_learning.start(variant, optimizer, params)
    for batch in batches:
        carry, _ = jax.jit(advance)(carry, batch)
    return carry[0]


def moved(tree, params):
    return [np.asarray(x) - np.asarray(p) for x, p in zip(*map(arrays, (tree, params)), strict=True)]


def batches_of(count):
    text = np.random.default_rng(0).integers(0, 256, (count, SIZE.rows, SIZE.context + 1))
    return text.astype(np.int32)


def start():
    model = bench_learning.GPT(SIZE)
    return model, model.init(jax.random.key(0), jnp.zeros((1, SIZE.context), jnp.int32))


@pytest.mark.parametrize("name", [pytest.param("adamw 2bw corrected", marks=pytest.mark.slow), "muon 2bw"])
def test_late_gradients_are_those_of_a_pipeline_with_double_buffers(name):
    """Four batches are four groups of two micro-batches of one step."""
    variant, (model, params), batches = variant_of(name), start(), batches_of(4)
    optimizer = bench_learning.make_optimizer(variant, 1e-2, SIZE.steps)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    pipeline = jaxpipe.partition(
        model,
        mesh,
        batches.reshape(-1, SIZE.context + 1),
        loss=bench_learning.loss,
        optimizer=optimizer,
        num_microbatches=8,
        schedule=functools.partial(double_buffered, group=2),
        profile="analytic",
    )
    state = pipeline.init(jax.random.key(0), variables=params)
    state, _ = pipeline.step(state, batches.reshape(-1, SIZE.context + 1))
    expected = emulated(variant, optimizer, params, batches)
    assert relative_l2(moved(pipeline.parameters(state), params), moved(expected, params)) < 1e-3


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="all_gather(to='invarying') fails in vmap on jax 0.10")
@pytest.mark.parametrize("runtime", ["mpmd", pytest.param("spmd", marks=pytest.mark.slow)])
def test_sparse_gradients_are_those_of_a_pipeline_with_replicas(runtime):
    variant, (model, params), batches = variant_of("adamw blocks"), start(), batches_of(3)
    optimizer = bench_learning.make_optimizer(variant, 1e-2, SIZE.steps)
    replicas = variant.replicas
    mesh = jax.make_mesh((replicas, 2), ("data", "stage"), devices=jax.devices()[: 2 * replicas])
    pipeline = jaxpipe.partition(
        model,
        mesh,
        batches[0],
        loss=bench_learning.loss,
        optimizer=optimizer,
        num_microbatches=2,
        gradient_exchange=block_sparse(blocks=bench_learning.BLOCKS, **variant.exchange),
        runtime=runtime,
        profile="analytic",
    )
    state = pipeline.init(jax.random.key(0), variables=params)
    for batch in batches:
        state, _ = pipeline.step(state, batch)
    expected = emulated(variant, optimizer, params, batches)
    assert relative_l2(moved(pipeline.parameters(state), params), moved(expected, params)) < 1e-3


@pytest.mark.slow
def test_local_accumulation_in_one_stage_is_synchronous():
    """Forward and backward work of a micro-batch are then next to each other, and no update is between them."""
    size, text = dataclasses.replace(SIZE, steps=4), np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    variants = (variant_of("adamw"), dataclasses.replace(variant_of("adamw paci"), stages=1))
    plain, staged = (bench_learning.train(variant, 1e-2, 0, size, (text, text)) for variant in variants)
    # Programs of other shapes round otherwise.
    assert staged["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-5)
    assert np.mean(staged["curve"]) == pytest.approx(np.mean(plain["curve"]), rel=1e-4)
    late = bench_learning.train(dataclasses.replace(variants[1], stages=2), 1e-2, 0, size, (text, text))
    assert late["test_loss"] != staged["test_loss"]


def test_an_interrupted_bench_goes_on(tmp_path):
    """Runs are found again by variant, seed and rate; a file of another size is refused."""
    results = bench_learning.Results(tmp_path / "some.json", SIZE)
    results.add({"variant": "adamw", "seed": 0, "rate": 1e-3, "test_loss": 2.5})
    again = bench_learning.Results(tmp_path / "some.json", SIZE)
    assert again.find("adamw", 0, 1e-3)["test_loss"] == 2.5
    assert again.find("adamw", 1, 1e-3) is again.find("muon", 0, 1e-3) is None
    with pytest.raises(SystemExit, match="pass another --out"):
        bench_learning.Results(tmp_path / "some.json", dataclasses.replace(SIZE, steps=5))
