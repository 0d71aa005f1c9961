"""``outer_loop`` by itself: step by step against NumPy, what it sends, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import PartitionError
from jaxpipe.gradients import block_sparse, outer_loop
from tests.support import outer_loop_reference
from tests.support.compare import assert_same_bits, relative_l2


pytestmark = pytest.mark.optimized


REPLICAS, RATE = 4, 0.125
SHAPES = {"a": (6, 4), "b": (4,), "c": (4, 8)}

#: By number of fragments: 24, 4 and 32 elements, of which the middles are at 12, 26 and 44 of 60.
FRAGMENTS = {1: [["a", "b", "c"]], 2: [["a", "b"], ["c"]], 3: [["a"], ["b"], ["c"]]}


def drawn(step, shape=None):
    """Arrays by name; of each replica, if it is one of a step."""
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=(*(shape or ()), *x)).astype(np.float32) for name, x in SHAPES.items()}


def gradients(params, step):
    """Each replica has goals of its own."""
    return jax.tree.map(lambda w, goal: w - goal, params, drawn(step, (REPLICAS,)))


def stacked(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)


def trained(loop, steps, inner=None):
    """The parameters of all replicas after each step, and the state at last."""
    optimizer = optax.chain(optax.sgd(RATE) if inner is None else inner, loop)
    params = stacked(drawn(0))
    state, rows = jax.vmap(optimizer.init)(params), []
    update = jax.jit(jax.vmap(optimizer.update, axis_name="data"))
    for step in range(1, steps + 1):
        updates, state = update(gradients(params, step), state, params)
        params = optax.apply_updates(params, updates)
        rows.append(params)
    return rows, state[-1]


CASES = {
    "dense": ({"inner_steps": 3}, {}),
    "every step": ({"inner_steps": 1}, {}),
    "fragments": ({"inner_steps": 4, "fragments": 2}, {}),
    "late": ({"inner_steps": 6, "fragments": 3, "delay": 1}, {}),
    "later than the next fragment": ({"inner_steps": 4, "fragments": 2, "delay": 3}, {}),
    "blocks, late": ({"inner_steps": 4, "fragments": 2, "delay": 1}, {"k": 1}),
    "blocks": ({"inner_steps": 2}, {"k": 1}),
    "blocks that decay": ({"inner_steps": 2, "fragments": 2}, {"k": 2, "decay": 0.75, "norm": "l1"}),
    "consensus": ({"inner_steps": 3, "delay": 2}, {"k": 1, "mode": "consensus"}),
    "two bits": ({"inner_steps": 2}, {"k": 1, "bits": 2}),
    "half a bit": ({"inner_steps": 2}, {"k": 100, "bits": 0.5}),
}


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_the_method_step_by_step(case):
    options, blocks = CASES[case]
    if blocks and blocks.get("mode") != "consensus" and jax.__version_info__ < (0, 11):
        pytest.skip("all_gather(to='invarying') fails in vmap on jax 0.10")
    exchange = block_sparse(**blocks) if blocks else "dense"
    rows, state = trained(outer_loop("data", exchange=exchange, **options), 14)
    average = outer_loop_reference.best_blocks(**blocks) if blocks else outer_loop_reference.mean
    fragments, delay = FRAGMENTS[options.get("fragments", 1)], options.get("delay", 0)
    reference = outer_loop_reference.Reference(drawn(0), REPLICAS, options["inner_steps"], fragments, average, delay)
    for step, params in enumerate(rows, 1):
        goals = drawn(step, (REPLICAS,))
        own = reference.own
        reference.step([{n: -np.float32(RATE) * (own[r][n] - goals[n][r]) for n in SHAPES} for r in range(REPLICAS)])
        for r in range(REPLICAS):
            assert relative_l2({n: params[n][r] for n in SHAPES}, reference.own[r]) < 2e-6, (case, step, r)
    assert relative_l2({n: x[0] for n, x in state.outer.items()}, reference.outer) < 2e-6
    assert all(x[0].size == (state.outer[n][0].size if options.get("delay") else 0) for n, x in state.pending.items())


@pytest.mark.core
def test_an_outer_rate_of_one_in_every_step_is_the_mean_of_the_parameters():
    rows, _ = trained(outer_loop("data", inner_steps=1, optimizer=optax.sgd(1.0)), 4)
    expected = drawn(0)
    for step, params in enumerate(rows, 1):
        goals = drawn(step, (REPLICAS,))
        expected = {n: (w - np.float32(RATE) * (w - goals[n])).mean(0) for n, w in expected.items()}
        assert relative_l2(params, jax.tree.map(np.asarray, stacked(expected))) < 1e-6


def test_an_exchange_in_no_step_is_training_apart():
    rows, state = trained(outer_loop("data", inner_steps=8), 7)
    plain = stacked(drawn(0))
    for step, params in enumerate(rows, 1):
        plain = jax.tree.map(lambda w, g: w - RATE * g, plain, gradients(plain, step))
        assert relative_l2(params, plain) < 1e-6
    assert_same_bits({n: x[0] for n, x in state.outer.items()}, drawn(0))


def test_fragments_do_not_change_what_the_outer_optimizer_does():
    """Late by the same steps: the whole by none, and a state of the optimizer beside the momentum."""
    adam = optax.adam(0.1)
    whole, _ = trained(outer_loop("data", inner_steps=2, optimizer=adam), 2)
    parts, _ = trained(outer_loop("data", inner_steps=2, optimizer=adam, fragments=2), 2)
    assert_same_bits(whole[-1]["c"], parts[-1]["c"])


def test_narrow_parameters_have_wide_outer_ones():
    loop = outer_loop(inner_steps=1, optimizer=optax.sgd(2.0**-10))
    w = jnp.ones(1, jnp.bfloat16)
    state = loop.init(w)
    for _ in range(8):
        updates, state = loop.update(jnp.full(1, -1, jnp.bfloat16), state, w)
        w = optax.apply_updates(w, updates)
    assert state.outer.dtype == jnp.float32 and w.dtype == jnp.bfloat16
    expected = np.float32(1)
    own = np.float32(1)
    for _ in range(8):
        expected -= np.float32(2.0**-10) * (expected - (own - 1))
        own = np.asarray(jnp.bfloat16(expected), np.float32)
    assert state.outer.item() == expected and w.item() == own


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="all_gather(to='invarying') fails in vmap on jax 0.10")
@pytest.mark.parametrize("checks", [True, False])
def test_it_runs_inside_shard_map(checks):
    """All steps in one program over devices, as under ``vmap``."""
    loop = outer_loop("data", inner_steps=2, fragments=2, exchange=block_sparse(k=2))
    optimizer, mesh = optax.chain(optax.sgd(RATE), loop), Mesh(np.array(jax.devices()[:REPLICAS]), ("data",))
    goals = [drawn(step, (REPLICAS,)) for step in range(1, 6)]

    def run(params, goals):
        params, goals = jax.tree.map(lambda x: x[0], (params, goals))
        state = optimizer.init(params)
        for goal in goals:
            updates, state = optimizer.update(jax.tree.map(jnp.subtract, params, goal), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], params)

    specs = P("data"), [P("data")] * len(goals)
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=checks))
    rows, _ = trained(loop, 5)
    assert relative_l2(mapped(jax.tree.map(np.asarray, stacked(drawn(0))), goals), rows[-1]) < 1e-6


@pytest.mark.core
def test_bytes_that_are_sent():
    """By hand: 240 bytes; two columns of 6 and two of 4 elements, a map of bits for each, and the bias."""
    params = drawn(0)
    assert [part.bytes for part in outer_loop(inner_steps=16).traffic(params)] == [240]
    assert outer_loop(inner_steps=16).bytes_per_step(params) == 15
    assert [part.bytes for part in outer_loop(inner_steps=4, fragments=2).traffic(params)] == [112, 128]
    loop = outer_loop(inner_steps=4, fragments=2, exchange=block_sparse(k=2))
    assert [part.bytes for part in loop.traffic(params)] == [2 * 24 + 1 + 16, 2 * 16 + 1]
    assert loop.bytes_per_step(params) == 24.5


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner_steps": 0}, "inner_steps=0 with fragments=1; both must be 1 or more"),
        ({"inner_steps": 16, "fragments": 3}, "inner_steps=16 with fragments=3; .* must divide the steps"),
        ({"inner_steps": 2.5}, "inner_steps=2.5"),
        ({"inner_steps": 4, "delay": 4}, "delay=4 with inner_steps=4; it must be from 0 to 3"),
        ({"axis_name": 3}, "axis_name=3; it must be the name of one mesh axis"),
        ({"optimizer": 0.7}, "optimizer=0.7; it must be an optax optimizer"),
        ({"exchange": "sparse"}, "exchange='sparse'; it must be 'dense' or"),
        ({"exchange": block_sparse("data")}, "axis_name='data' and 0 phases of a warm-up; .* Leave both out"),
        ({"exchange": block_sparse(warmup=[(2, 1.0)])}, "axis_name=None and 1 phases of a warm-up"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(PartitionError, match=message):
        outer_loop(**options)


def test_more_fragments_than_parameters():
    loop = outer_loop(inner_steps=8, fragments=4)
    message = "fragments=4 of 3 parameters, the largest with 32 of 60 elements: only 3 would have one"
    with pytest.raises(PartitionError, match=message):
        loop.traffic(drawn(0))
    state = loop.init(drawn(0))
    with pytest.raises(PartitionError, match=message):
        loop.update(drawn(1), state, drawn(0))
    with pytest.raises(ValueError, match="needs the parameters, and got none"):
        loop.update(drawn(1), state)
