"""What the shards of a ``shard_map`` gather: parts are stored, and gathered again; by all shards or by none."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpipe import Density, measure_density, memory_encoded, with_density
from jaxpipe.graph.graph import equations_in
from jaxpipe.residuals.chosen_storage import Choices, choosing
from jaxpipe.residuals.two_passes import StoredPasses
from jaxpipe.targets.building import building_for


pytestmark = pytest.mark.optimized

ROWS, WIDTH, LAYERS = 256, 64, 4
SHAPES = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def weights():
    keys = jax.random.split(jax.random.key(1), LAYERS)
    return [[jax.random.normal(key, shape) / shape[0] ** 0.5 for shape in SHAPES] for key in keys]


def batch():
    return jax.random.normal(jax.random.key(0), (ROWS, WIDTH))


def gathered(w, axis="data", along=0):
    return jax.lax.all_gather(w, axis, axis=along, tiled=True)


def mlp(x, up, down):
    return x + nn.gelu(x @ up) @ down


def fully_sharded(enc, *, typed):
    def shard(pairs, x):
        for pair in pairs:
            x = mlp(x, *map(gathered, pair))
        return jax.lax.pmean(jnp.mean(x**2), "data")

    specs = {"in_specs": (P("data"), P("data")), "out_specs": P(), "check_vma": typed}
    return enc(jax.shard_map(shard, mesh=mesh_of(data=4), **specs)), weights()


def typed(enc):
    return fully_sharded(enc, typed=True)


def unchecked(enc):
    return fully_sharded(enc, typed=False)


def in_a_scan(enc):
    def shard(stacked, x):
        x, _ = jax.lax.scan(lambda x, pair: (mlp(x, *map(gathered, pair)), None), x, stacked)
        return jax.lax.pmean(jnp.mean(x**2), "data")

    specs = {"in_specs": (P(None, "data"), P("data")), "out_specs": P()}
    stacked = [jnp.stack(layers) for layers in zip(*weights(), strict=True)]
    return enc(jax.shard_map(shard, mesh=mesh_of(data=4), **specs)), stacked


def split_by_columns(enc):
    """Rows of weights are split over the devices that split the batch, columns over those that compute together."""

    def shard(pairs, x):
        for up, down in pairs:
            x = x + jax.lax.psum(nn.gelu(x @ gathered(up)) @ gathered(down, along=1), "columns")
        return jax.lax.pmean(jnp.mean(x**2), "data")

    specs = [P("data", "columns"), P("columns", "data")]
    mesh = mesh_of(data=2, columns=2)
    return enc(jax.shard_map(shard, mesh=mesh, in_specs=([specs] * LAYERS, P("data")), out_specs=P())), weights()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(x)))


class Blocks(nn.Module):
    block: type = Block

    @nn.compact
    def __call__(self, x):
        for k in range(LAYERS):
            x = self.block(name=f"block_{k}")(x)
        return x


def module(enc):
    """A Flax module whose parameters are gathered as it asks for them, with a derivative that is written by hand."""

    @jax.custom_gradient
    def gather(w):
        return gathered(w), lambda g: jax.lax.psum_scatter(g, "data", tiled=True) / 4

    def each(variables):
        return jax.tree.map(lambda w: gather(w) if w.ndim > 1 else w, variables)

    net = enc(Blocks)(nn.map_variables(Block, trans_in_fn=each, mapped_collections="params", mutable=False))
    params = Blocks().init(jax.random.key(1), batch())
    specs = jax.tree.map(lambda w: P("data") if w.ndim > 1 else P(), params)

    def shard(params, x):
        value, gradients = jax.value_and_grad(lambda params: jnp.mean(net.apply(params, x) ** 2))(params)
        means = [g if g.ndim > 1 else jax.lax.pmean(g, "data") for g in jax.tree.leaves(gradients)]
        return jax.lax.pmean(value, "data"), jax.tree.unflatten(jax.tree.structure(gradients), means)

    options = {"in_specs": (specs, P("data")), "out_specs": (P(), specs), "check_vma": False}
    return jax.shard_map(shard, mesh=mesh_of(data=4), **options), params


def differentiated(program, enc):
    function, params = program(enc)
    return jax.jit(function if program is module else jax.value_and_grad(function)), params


def plain(target):
    return target


@pytest.mark.parametrize("program", [typed, unchecked, in_a_scan, split_by_columns, module])
def test_weights_are_gathered_again(program):
    step, params = differentiated(program, memory_encoded)
    undecorated, _ = differentiated(program, plain)
    ways = [function.lower(params, batch()).compile() for function in (step, undecorated)]
    again, once = (len(re.findall(r"= \S+ all-gather\(", way.as_text())) for way in ways)
    layers = 1 if program is in_a_scan else LAYERS
    # The last product's backward pass may read what its forward pass has.
    assert once == 2 * layers and again in (4 * layers, 4 * layers - 1)
    encoded, kept = (way.memory_analysis().temp_size_in_bytes for way in ways)
    assert encoded < 0.6 * kept
    for a, b in zip(*(jax.tree.leaves(way(params, batch())) for way in ways), strict=True):
        # XLA fuses other operators, and then rounds otherwise.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("budget", [True, False])
def test_on_a_tpu_a_budget_does_not_wait_for_gradients_of_many_rows(budget):
    """Put off, to overlap with what shards send, they would keep their operands; who has memory lets them overlap."""

    def shard(pairs, x):
        for up, down in pairs:
            rows = jax.lax.all_gather(x, "columns", tiled=True)
            x = x + jax.lax.psum_scatter(jnp.tanh(rows @ up) @ down, "columns", tiled=True)
        return jax.lax.pmean(jnp.mean(x**2), "columns")

    specs = ([[P(None, "columns"), P("columns")]] * LAYERS, P("columns"))
    loss = memory_encoded(jax.shard_map(shard, mesh=mesh_of(columns=4), in_specs=specs, out_specs=P()))
    passes = Choices(lambda program: StoredPasses(program.default, barriers=budget))
    with building_for("tpu"), choosing(passes):
        program = jax.make_jaxpr(jax.grad(loss))(weights(), jnp.tile(batch(), (64, 1)))
    bodies = [eqn.params["jaxpr"] for eqn in equations_in(program.eqns) if eqn.primitive.name == "shard_map"]
    makers = {result: eqn.primitive.name for body in bodies for eqn in body.eqns for result in eqn.outvars}
    barriers = [eqn for body in bodies for eqn in body.eqns if eqn.primitive.name == "optimization_barrier"]
    read = [[makers.get(x) in ("dot_general", "transpose") for x in eqn.invars].count(True) for eqn in barriers]
    # Of the first product one operand is the batch, which has no gradient.
    assert read.count(2) == (2 * LAYERS - 1 if budget else 0)


def test_a_map_that_overflows_in_one_shard_needs_no_other():
    """What does not fit its room is computed again by that shard alone, which must not wait for others in it."""
    mesh = mesh_of(devices=4)

    def layer(x, w, send):
        return nn.relu(send(x @ w))

    def network(weights, x, send=lambda x: x):
        for w in weights:
            x = layer(x, w, send)
        return jnp.mean(x**2)

    def around(x):
        return jax.lax.ppermute(x, "devices", [(k, (k + 1) % 4) for k in range(4)])

    def shard(weights, x):
        return jax.lax.pmean(network(weights, x, around), "devices")

    def encoded(function):
        return memory_encoded(function, codecs="smallest")

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("devices")), out_specs=P())
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (128, 128)) / 11 for key in keys[1:]]
    x = jnp.zeros((128, 128)).at[96:].set(jax.random.normal(keys[0], (32, 128)))  # nothing but zeros elsewhere
    names = [name for name in measure_density(encoded(network), weights, x).fractions if name.startswith("relu")]
    assert len(names) == 3
    with with_density(Density(dict.fromkeys(names, 0.02))):
        gradients = jax.jit(jax.grad(encoded(run)))(weights, x)
    for a, b in zip(gradients, jax.jit(jax.grad(run))(weights, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * float(jnp.abs(b).max()))  # as above
