"""``jax.checkpoint`` around blocks of a decorated program, as ``nn.remat`` of its modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.costs.count_products import count_products
from jaxpipe.residuals.two_passes import CheckpointedPasses, checkpointed_blocks
from jaxpipe.step.step_arguments import Call, without_values
from jaxpipe.step.step_template import step_template


POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
X = jax.random.normal(jax.random.key(0), (8, 16, 16))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.SelfAttention(2)(nn.LayerNorm()(x))
        y = nn.Dropout(0.1, deterministic=False)(y)
        return x + nn.Dense(16)(nn.relu(nn.Dense(32)(y)))


class Net(nn.Module):
    block: type = Block
    every: int = 1

    @nn.compact
    def __call__(self, x):
        for k in range(4):
            x = (self.block if k % self.every == 0 else Block)(name=f"Block_{k}")(x)
        return nn.Dense(4, name="head")(nn.BatchNorm(use_running_average=False)(x))


VARIABLES = jax.jit(Net().init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
KEY = jax.random.key(2)


def step_of(net, wrap=lambda loss: loss):
    def loss(params, variables, x, key):
        y, new = net.apply({**variables, "params": params}, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return (y**2).mean(), new

    return lambda variables, x, key: jax.grad(wrap(loss), has_aux=True)(variables["params"], variables, x, key)


def checkpointed(step, args, family, every, policy):
    """A step whose decorated programs run with checkpoints."""
    template = step_template(Call(step, {}, without_values(args), {}, jax.devices()[0]), {})

    def passes(program):
        blocks = checkpointed_blocks(program, family, every)
        assert blocks is not None
        return CheckpointedPasses(program, blocks, getattr(jax.checkpoint_policies, policy))

    return template.with_storage(passes)


@pytest.mark.parametrize(
    ("policy", "every"),
    [
        (POLICIES[-1], 2),
        *(pytest.param(policy, 2, marks=pytest.mark.slow) for policy in POLICIES[:-1]),
        *(pytest.param(policy, 1, marks=pytest.mark.slow) for policy in POLICIES),
    ],
)
def test_blocks_run_what_nn_remat_runs_with_the_same_values(policy, every):
    remat = nn.remat(Block, policy=getattr(jax.checkpoint_policies, policy))
    args = VARIABLES, X, KEY
    step = checkpointed(step_of(Net(), jaxpipe.memory_encoded), args, "Net/Block_*", every, policy)
    expected = step_of(Net(block=remat, every=every))
    assert count_products(jax.make_jaxpr(step)(*args)) == count_products(jax.make_jaxpr(expected)(*args))
    given, values = jax.jit(step)(*args), jax.jit(step_of(Net()))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), given, values)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_whole_program(policy):
    args = VARIABLES, X, KEY
    step = checkpointed(step_of(Net(), jaxpipe.memory_encoded), args, None, 1, policy)
    chosen = getattr(jax.checkpoint_policies, policy)
    expected = step_of(Net(), lambda loss: jax.checkpoint(loss, policy=chosen))
    assert count_products(jax.make_jaxpr(step)(*args)) == count_products(jax.make_jaxpr(expected)(*args))


def test_modules_of_nnx():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return x + self.dropout(self.down(nnx.relu(self.up(x))))

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Layer(rngs) for _ in range(3)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def step(net, x):
        return nnx.value_and_grad(jaxpipe.memory_encoded(lambda net, x: (net(x) ** 2).mean()))(net, x)

    def noted(program):
        paths = {op.path for op in program.graph.operators}
        family = next(path.split("0")[0] + "*" for path in sorted(paths) if "blocks/0" in path)
        blocks = checkpointed_blocks(program, family, 1)
        assert blocks is not None and len(blocks) == 3, paths
        return CheckpointedPasses(program, blocks, jax.checkpoint_policies.nothing_saveable)

    net, same = Layers(nnx.Rngs(0)), Layers(nnx.Rngs(0))
    template = step_template(Call(step, {}, without_values((net, X)), {}, jax.devices()[0]), {})
    given = nnx.jit(template.with_storage(noted))(net, X)
    with jaxpipe.without_encoding():
        expected = nnx.jit(step)(same, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), given, expected)
    count = jax.tree.leaves(nnx.state(net, nnx.RngCount))
    assert count == jax.tree.leaves(nnx.state(same, nnx.RngCount)) and any(map(int, count))


def test_bits_are_those_of_the_plain_step_where_every_operator_runs_alone():
    @nn.remat
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.relu(nn.Dense(16)(x))

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for k in range(2):
                x = Layer(name=f"Layer_{k}")(x)
            return x

    def step(variables, x):
        return jax.grad(jaxpipe.memory_encoded(lambda variables: (Layers().apply(variables, x) ** 2).sum()))(variables)

    args = Layers().init(jax.random.key(0), X), X
    given = checkpointed(step, args, None, 1, "dots_saveable")
    with jax.disable_jit(), jaxpipe.without_encoding():
        jax.tree.map(np.testing.assert_array_equal, given(*args), step(*args))


def test_programs_without_such_blocks():
    def step(params, x):
        return jax.grad(jaxpipe.memory_encoded(lambda params: (jnp.tanh(x @ params) ** 2).sum()))(params)

    met = {}
    step_template(Call(step, {}, without_values((jnp.ones((16, 16)), X)), {}, jax.devices()[0]), met)
    (program,) = met.values()
    assert checkpointed_blocks(program, "Net/Block_*", 1) is None
