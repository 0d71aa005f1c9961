"""Checkpoints as people place them, as points of a front."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxpipe
from jaxpipe.costs.count_products import count_products
from jaxpipe.step.step_arguments import Call
from jaxpipe.step.step_variants import StepVariants


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(nn.LayerNorm()(x))))


class Net(nn.Module):
    block: type = Block
    every: int = 1

    @nn.compact
    def __call__(self, x):
        for k in range(6):
            x = (self.block if k % self.every == 0 else Block)(name=f"Block_{k}")(x)
        return nn.Dense(4, name="head")(x)


X = jnp.ones((256, 16))
VARIABLES = jax.jit(Net().init)(jax.random.key(0), X)


def step_of(net, wrap=lambda loss: loss):
    loss = wrap(lambda variables, x: (net.apply(variables, x) ** 2).mean())
    return lambda variables, x: jax.grad(loss)(variables, x)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("saved", [False, True])
def test_levels_run_the_products_that_flax_s_remat_runs(every, saved):
    step = step_of(Net(), jaxpipe.memory_encoded)
    variants = StepVariants(Call(step, {}, (VARIABLES, X), {}, jax.devices()[0]))
    which = {1: "every", 2: "every second"}[every]
    level = f"nn.remat of {which} Net/Block_*{', products saved' if saved else ''}"
    assert level in variants.front.hand_placed
    policy = jax.checkpoint_policies.dots_saveable if saved else None
    remat = step_of(Net(block=nn.remat(Block, policy=policy), every=every))
    assert count_products(variants.variant(level).jaxpr) == count_products(jax.make_jaxpr(remat)(VARIABLES, X).jaxpr)


def test_blocks_with_sums_over_a_named_axis_have_levels_too():
    class Synced(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(16)(nn.BatchNorm(False, axis_name="batch")(jnp.tanh(nn.Dense(32)(x))))

    def synced_step(net):
        def loss(variables, x):
            rows = jax.vmap(lambda row: net.apply(variables, row, mutable=["batch_stats"])[0], axis_name="batch")(x)
            return (rows**2).mean()

        return jax.grad(loss)

    variables, x = Net(Synced).init(jax.random.key(0), X), jnp.ones((4, *X.shape))
    step = synced_step(jaxpipe.memory_encoded(Net)(Synced))
    variants = StepVariants(Call(step, {}, (variables, x), {}, jax.devices()[0]))
    remat = jax.make_jaxpr(synced_step(Net(nn.remat(Synced))))(variables, x)
    level = "nn.remat of every Net/Block_*"
    assert level in variants.front.hand_placed
    assert count_products(variants.variant(level).jaxpr) == count_products(remat.jaxpr)


def test_a_program_without_blocks_has_none():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(jnp.tanh(nn.Dense(32, name="inner")(x)))

    variables = Plain().init(jax.random.key(0), X)
    step = step_of(Plain(), jaxpipe.memory_encoded)
    assert StepVariants(Call(step, {}, (variables, X), {}, jax.devices()[0])).front.hand_placed == ()


@pytest.mark.parametrize("level", ["default", "room 12 of 16", "smallest"])
def test_the_products_that_run_again_are_counted_before_a_level_is_traced(level):
    step = step_of(Net(), jaxpipe.memory_encoded)
    variants = StepVariants(Call(step, {}, (VARIABLES, X), {}, jax.devices()[0]))
    plain = count_products(jax.make_jaxpr(step_of(Net()))(VARIABLES, X).jaxpr)[0]
    assert count_products(variants.variant(level).jaxpr)[0] == plain + variants.front.reruns(level)
