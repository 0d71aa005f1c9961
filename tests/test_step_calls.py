"""A call of a step within a budget: its plan is looked up by the arguments."""

import copy
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxpipe
from tests.support.compare import assert_same_bits
from tests.support.plain_steps import plainly, reserved


pytestmark = pytest.mark.optimized


@pytest.mark.core
@pytest.mark.parametrize("pytree", [True, False])
def test_modules_that_share_variables_and_those_that_do_not_are_different_arguments(pytree):
    class Net(nnx.Module, pytree=pytree):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.gelu(layer(x))
            return x

    @jaxpipe.memory_encoded
    def loss(net, first, second, third, x):
        return jnp.sum((net(x) + first(x)) * second(x) * (1 + third(x)))

    a, b, net = map(Net, range(3))
    x = jax.random.normal(jax.random.key(0), (1024, 16))
    expected = nnx.jit(nnx.grad(loss))
    with jaxpipe.without_encoding():
        plain = reserved(expected.lower(net, a, a, b, x).compile())
    budgeted = jaxpipe.jit(nnx.grad(loss), memory=int(0.8 * plain))
    for others in (a, a, b), (a, b, b), (a, a, a):  # the first two have equal leaves
        assert_same_bits(budgeted(net, *others, x), expected(net, *others, x))


def test_states_of_nnx_modules_are_trees_as_under_jax_jit():
    """A state that has a variable twice has two values of it there, and so it has within a budget."""
    graphdef, state = nnx.split(
        nnx.Sequential(nnx.Linear(32, 128, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(128, 32, rngs=nnx.Rngs(1)))
    )

    @jaxpipe.memory_encoded
    def loss(states, graphdef, x):
        for state in states:
            x = x + nnx.merge(graphdef, state)(x)
        return jnp.mean(x**2)

    def step(states, graphdef, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, states, jax.grad(loss)(states, graphdef, x))

    x = jax.random.normal(jax.random.key(0), (4096, 32))
    for states in ([state, state], [state, jax.tree.map(jnp.copy, state)]):
        expected, plain = plainly(step, states, graphdef, x)
        budgeted = jaxpipe.jit(step, memory=int(0.7 * plain))
        assert_same_bits(budgeted(states, graphdef, x), expected)
        assert reserved(budgeted.lower(states, graphdef, x).compile()) <= 0.7 * plain


def test_the_host_does_little_for_a_call():
    """Of each array it asks six things, as its shape and its type, each a function of Python."""

    @jaxpipe.memory_encoded
    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return x.sum()

    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    params = {f"layer {k}": jnp.eye(4) for k in range(50)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    step, x, calls = jaxpipe.jit(step, memory="1GiB"), jnp.ones((4, 4)), []
    state = step(step(state, x), x)  # the first step of an initial state has numbers without a device
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        jax.block_until_ready(step(state, x))
    finally:
        sys.setprofile(before)
    leaves = len(jax.tree.leaves(state))
    assert leaves == 152
    assert len(calls) < 7 * leaves, Counter(calls)


def test_other_options_of_xla_compile_the_step_anew_within_its_budget():
    @jaxpipe.memory_encoded
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    params, x = [jnp.ones((64, 64)) / 64 for _ in range(8)], jnp.ones((4096, 64))
    budgeted = jaxpipe.jit(jax.grad(loss), memory="8MiB")
    lowered = budgeted.lower(params, x)
    same, unfused = {"xla_cpu_copy_insertion_use_region_analysis": True}, {"xla_disable_hlo_passes": "fusion"}
    assert_same_bits(lowered.compile(same)(params, x), jax.jit(jax.grad(loss))(params, x))
    with pytest.raises(jaxpipe.MemoryBudgetError, match=r"jaxpipe.jit\(..., compiler_options="):
        lowered.compile(compiler_options=unfused)
    planned = jaxpipe.jit(jax.grad(loss), memory="16MiB", compiler_options=unfused).lower(params, x)
    assert planned.plan.needed_bytes == reserved(planned.compile()) <= 16 * 2**20
    assert budgeted._cache_size() == 1
    assert copy.deepcopy(budgeted).lower(params, x).plan.needed_bytes == lowered.plan.needed_bytes


@pytest.mark.parametrize("closed_over", ["params", "x", "positions", "positions of a jitted loss"])
def test_constants_leave_room_for_a_budget(closed_over):
    """What XLA knows does not keep the operators of a backward pass in order."""
    keys = jax.random.split(jax.random.key(0), 8)
    params, x = [jax.random.normal(k, (32, 32)) / 6 for k in keys[:6]], jax.random.normal(keys[6], (256, 32))
    positions = jax.random.normal(keys[7], (256, 32))

    @jaxpipe.memory_encoded
    def loss(params, x):
        x = (x @ params[0]) * positions if closed_over.startswith("positions") else x
        for w in params:
            x = jnp.tanh(x @ w) * jax.nn.relu(x) + x
        return jnp.mean(x**2)

    def update(params, x):
        used = jax.jit(loss) if closed_over.endswith("jitted loss") else loss
        value, gradients = jax.value_and_grad(used)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    steps = {"params": (lambda x: update(params, x), x), "x": (lambda w: update(w, x), params)}
    step, *args = steps.get(closed_over, (update, params, x))
    expected, plain = plainly(step, *args)
    budgeted = jaxpipe.jit(step, memory=int(0.66 * plain))
    assert budgeted.lower(*args).plan.needed_bytes <= 0.66 * plain
    assert_same_bits(budgeted(*args), expected)
