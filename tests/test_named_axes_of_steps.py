"""Steps whose decorated models exchange over named axes, as ``BatchNorm(axis_name=)`` does, against the plain steps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxpipe


REPLICAS, ROWS = 4, 512


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.Dense(32)(x)
            x = nn.BatchNorm(use_running_average=False, axis_name="batch")(x)
            x = nn.gelu(x)
        return nn.Dense(2)(x)


def by_vmap(update):
    return lambda variables, x: first(jax.vmap(update, (None, 0), axis_name="batch")(variables, parts(x)))


def by_pmap(update):
    return lambda variables, x: first(jax.pmap(update, "batch", in_axes=(None, 0))(variables, parts(x)))


def by_shard_map(update, *, typed):
    mesh = jax.make_mesh((REPLICAS,), ("batch",), axis_types=(AxisType.Auto,))
    return jax.shard_map(update, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P(), check_vma=typed)


def parts(x):
    return x.reshape(REPLICAS, ROWS, -1)


def first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


WAYS = {
    "vmap": by_vmap,
    "pmap": by_pmap,
    "shard_map": lambda update: by_shard_map(update, typed=False),
    "typed shard_map": lambda update: by_shard_map(update, typed=True),
}
MARKS = {"pmap": pytest.mark.slow, "typed shard_map": pytest.mark.slow}


def step_of(net, way):
    """A step of data parallelism with a mean of gradients."""

    def loss(params, others, x):
        y, new = net.apply({"params": params} | others, x, mutable=["batch_stats"])
        return (y**2).mean(), new

    def update(variables, x):
        others = {"batch_stats": variables["batch_stats"]}
        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"], others, x)
        if way == "typed shard_map":  # whose gradients of what all replicas have are sums
            gradients = jax.tree.map(lambda g: g / REPLICAS, gradients)
        else:
            gradients = jax.lax.pmean(gradients, "batch")
        params = jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], gradients)
        return jax.lax.pmean(value, "batch"), {"params": params} | new

    return WAYS[way](update)


@pytest.fixture(scope="module")
def arguments():
    x = jax.random.normal(jax.random.key(0), (REPLICAS * ROWS, 16))
    variables = jax.vmap(lambda x: Net().init(jax.random.key(1), x), axis_name="batch", out_axes=None)(x[None])
    return jax.tree.map(np.asarray, (variables, x))


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, pytest.mark.core)) for way in WAYS])
def test_a_budget_is_kept_with_the_values_of_the_plain_step(arguments, way):
    expected = jax.jit(step_of(Net(), way))(*arguments)
    step = step_of(jaxpipe.memory_encoded(Net)(), way)
    with pytest.raises(jaxpipe.MemoryBudgetError) as caught:
        jaxpipe.jit(step, memory="1kB").lower(*arguments)
    budgeted = jaxpipe.jit(step, memory=caught.value.smallest)
    plan = budgeted.lower(*arguments).plan
    assert plan.needed_bytes <= caught.value.smallest < 0.6 * plan.plain_bytes
    for a, b in zip(jax.tree.leaves(budgeted(*arguments)), jax.tree.leaves(expected), strict=True):
        # XLA adds up in another order where it fuses other operators.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [pytest.param(way, marks=MARKS.get(way, ())) for way in WAYS])
def test_explain_compiles_for_the_devices_that_a_step_names(arguments, way):
    variables, x = jax.tree.map(jnp.asarray, arguments)
    explanation = jaxpipe.explain(step_of(Net(), way), variables, x)
    compiled = jax.jit(step_of(Net(), way)).lower(variables, x).compile().memory_analysis()
    # An array that several results have in common is counted once.
    assert explanation.total_bytes == pytest.approx(reserved(compiled), rel=1e-2)
    assert {measure.name for measure in explanation.measures} >= {"decorate the model", "donate the state"}


def reserved(sizes):
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes


def test_a_device_besides_those_that_a_step_names_is_refused(arguments):
    with pytest.raises(jaxpipe.PartitionError, match="the step itself says on which devices"):
        jaxpipe.explain(step_of(Net(), "shard_map"), *arguments, device="cpu")
