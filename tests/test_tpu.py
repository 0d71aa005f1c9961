"""Programs for TPUs that are not here, compiled ahead of time: bytes against plain JAX's, budgets, explanations."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpipe
from jaxpipe.costs.device_memory import memory_of, pool_bytes
from jaxpipe.costs.reserved_bytes import reserved_bytes
from jaxpipe.targets.absent import absent_devices
from jaxpipe.targets.known import known_targets, target_named, target_of


pytest.importorskip("libtpu", reason="needs pip install '.[tpu]'")
pytestmark = pytest.mark.compiles  # for absent devices JAX writes programs into its cache, and can't read them

TPUS = [target for target in known_targets() if target.platform == "tpu"]


@pytest.fixture(scope="module")
def v5e():
    return absent_devices(target_named("v5e"), 1)[0]


def shapes(tree, device):
    here = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), tree)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = Block()(x)
        return x


def step(loss):
    return jax.value_and_grad(loss)


def arguments(dtype, device):
    """A network's, whose residuals are many times what a TPU keeps on its chip."""
    x = jax.ShapeDtypeStruct((2**17, 256), dtype)
    variables = jax.eval_shape(Net().init, jax.random.key(0), x)
    variables = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, dtype), variables)
    return shapes((variables, x), device)


def loss(variables, x):
    return jnp.square(Net().apply(variables, x).astype(jnp.float32)).mean()


@pytest.mark.parametrize("target", TPUS, ids=lambda target: target.name)
def test_a_version_is_known_by_its_kind_and_has_the_memory_that_the_compiler_has(target):
    device = absent_devices(target, 1)[0]
    assert target_of(device) is target and memory_of(device) == pool_bytes(device) == target.memory
    gib = target.memory / 2**30
    x = shapes(jax.ShapeDtypeStruct((2**16, 2**19), jnp.float32), device)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"exceeds available HBM \({gib:.2f}G\)"):
        jax.jit(lambda x: x @ x.T[:, :128]).lower(x).compile()


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_decorated_programs_need_less_and_budgets_are_kept(dtype, v5e):
    args = arguments(dtype, v5e)
    plain = reserved_bytes(jax.jit(step(loss)).lower(*args).compile())
    decorated = reserved_bytes(jax.jit(step(jaxpipe.memory_encoded(loss))).lower(*args).compile())
    assert decorated < 0.8 * plain
    budget = (decorated + plain) // 2
    lowered = jaxpipe.jit(step(jaxpipe.memory_encoded(loss)), memory=budget).lower(*args)
    assert reserved_bytes(lowered.compile()) == lowered.plan.needed_bytes <= budget


def test_the_gradient_of_logits_is_not_written(v5e):
    rows, words = 2**16, 2**13

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(words, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(Block()(x))

    def loss(model, variables, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(variables, x), y).mean()

    x, y = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16), jax.ShapeDtypeStruct((rows,), jnp.int32)
    variables = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, jnp.bfloat16), jax.eval_shape(Head().init, jax.random.key(0), x)
    )
    plain, decorated = (
        reserved_bytes(jax.jit(step(functools.partial(loss, model))).lower(*shapes((variables, x, y), v5e)).compile())
        for model in (Head(), jaxpipe.memory_encoded(Head)())
    )
    logits = 2 * rows * words
    assert decorated <= plain < 2 * logits, (decorated / logits, plain / logits)


def test_a_program_whose_residuals_stay_on_the_chip_is_left_as_it_is(v5e):
    small = shapes((jnp.ones((64, 64)), jnp.ones((256, 64))), v5e)

    def loss(w, x):
        return jnp.square(jax.nn.relu(x @ w) @ w).mean()

    plain, decorated = (
        jax.jit(step(f)).lower(*small).compile().memory_analysis().temp_size_in_bytes
        for f in (loss, jaxpipe.memory_encoded(loss))
    )
    assert decorated <= plain


@pytest.mark.slow
def test_a_step_is_explained_by_the_name_of_a_version(v5e):
    explanation = jaxpipe.explain(step(loss), *arguments(jnp.float32, v5e), device="v5e")
    assert "TPU v5 lite" in explanation.device and explanation.memory == target_named("v5e").memory
    assert explanation.measures


def test_a_pipeline_is_planned_and_compiled_for_several(v5e):
    devices = absent_devices(target_named("v5e"), 4)[:2]
    width, rows, microbatches = 1024, 2**16, 8
    pipeline = jaxpipe.partition(
        Net(),
        Mesh(np.array(devices), ("stage",)),
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
        loss=lambda model, x: jnp.square(model(x)).mean(),
        optimizer=optax.adam(1e-3),
        num_microbatches=microbatches,
        profile="analytic",
        options=jaxpipe.PlanOptions(compile=False),
    )
    # Three products of each of four matrices, divided over two chips, at 197 TFLOP/s: a step takes one to four times
    # that, with a bubble of 1 of 9 ticks, products at 0.7 of the peak, and the optimizer.
    arithmetic = 4 * 3 * 2 * rows * width * 4 * width / len(devices) / 197e12
    assert arithmetic < pipeline.plan.step_seconds < 4 * arithmetic
    report = pipeline.memory_report()
    # XLA decides by gains that it estimates which temporaries to keep on the chip; an array of 32 MiB differs.
    for predicted, compiled in zip(report.predicted_bytes, report.compiled_bytes, strict=True):
        assert abs(predicted - compiled) <= 0.02 * compiled + 2**25


def test_weights_that_shards_gather_are_gathered_again():
    """As with a checkpoint around each block, which runs products again besides."""
    layers, width, rows = 4, 1024, 4096
    mesh = Mesh(np.array(absent_devices(target_named("v5e"), 4)), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))

    def block(pair, x):
        up, down = (jax.lax.all_gather(w, "data", tiled=True).astype(x.dtype) for w in pair)
        return x + nn.gelu(x @ up) @ down

    def temporaries(block, enc):
        def shard(pairs, x):
            for pair in pairs:
                x = block(pair, x)
            return jax.lax.pmean(jnp.mean(jnp.square(x.astype(jnp.float32))), "data")

        specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec()}
        whole = jax.jit(step(enc(jax.shard_map(shard, mesh=mesh, **specs)))).lower(pairs, x)
        return whole.compile().memory_analysis().temp_size_in_bytes

    shapes = (width, 4 * width), (4 * width, width)
    pairs = [[jax.ShapeDtypeStruct(shape, jnp.float32, sharding=split) for shape in shapes] for _ in range(layers)]
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=split)
    decorated = temporaries(block, jaxpipe.memory_encoded)
    assert decorated < 0.2 * temporaries(block, lambda loss: loss)
    assert decorated <= 1.01 * temporaries(jax.checkpoint(block), lambda loss: loss)


def test_a_step_is_planned_for_each_kind_of_device_by_itself(v5e):
    """What it needs on a CPU says nothing of a TPU, where it keeps the budget as it is."""

    @jaxpipe.memory_encoded
    def loss(weights, x):
        for w in weights:
            x = jax.nn.gelu(x @ w)
        return jnp.square(x).mean()

    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    arguments = [jnp.zeros((64, 64))] * 8, jnp.zeros((4096, 64))
    budgeted = jaxpipe.jit(step, memory="16MiB")
    on_cpu, on_tpu = (budgeted.lower(*shapes(arguments, device)).plan for device in (jax.devices("cpu")[0], v5e))
    assert on_cpu.plain_bytes > on_cpu.budget_bytes >= on_tpu.plain_bytes == on_tpu.needed_bytes
