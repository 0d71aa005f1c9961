"""The outer loop between the replicas of a pipeline: against plain training, and between processes."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from examples import models
from jaxpipe.errors import CheckpointError, PartitionError
from jaxpipe.gradients import block_sparse, outer_loop
from tests.support import outer_loop_reference
from tests.support.compare import assert_same_bits, relative_l2
from tests.support.processes import ROOT, launch


ROWS, STAGES, REPLICAS, MICROBATCHES = 16, 2, 2, 2
SIZES = [12, 24, 24, 8]
RATE = 0.125


def mesh(replicas=REPLICAS):
    devices = np.array(jax.devices()[: STAGES * replicas]).reshape(replicas, STAGES)
    return jax.sharding.Mesh(devices, ("data", "stage"))


def data(step=0):
    keys = jax.random.split(jax.random.key(step))
    return jax.random.normal(keys[0], (ROWS, SIZES[0])), jax.random.randint(keys[1], (ROWS,), 0, SIZES[-1])


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


def parameters():
    return models.init_mlp(jax.random.key(0), SIZES)


def pipeline(gradient_exchange, replicas=REPLICAS, **options):
    options = {"num_microbatches": MICROBATCHES, "profile": "analytic", "runtime": "spmd", **options}
    options = {"optimizer": optax.sgd(RATE, momentum=0.5), **options}
    model = jax.tree_util.Partial(models.mlp, parameters())
    return jaxpipe.partition(
        model, mesh(replicas), data(), loss=loss, evaluate=loss, gradient_exchange=gradient_exchange, **options
    )


def trained(pipe, steps, state=None, first=0):
    state, told = pipe.init(jax.random.key(0)) if state is None else state, []
    for step in range(first, first + steps):
        state, metrics = pipe.step(state, data(step))
        told.append({name: float(value) for name, value in metrics.items()})
    return state, told


@jax.jit
def plain_gradient(params, batch):
    """Loss and gradient of a replica's half of the batch."""
    return jax.value_and_grad(lambda params: loss(lambda x: models.mlp(params, x), batch))(params)


def halves(step):
    return [jax.tree.map(lambda x, r=r: np.asarray(jnp.split(x, REPLICAS)[r]), data(step)) for r in range(REPLICAS)]


#: Elements of the leaves, 24, 288, 24, 576, 8 and 192 in the order of the tree, are cut in the middle of 1,112.
FRAGMENTS = {1: [range(6)], 2: [range(3), range(3, 6)]}

CASES = {
    "dense": ({"inner_steps": 3}, {}),
    "late": ({"inner_steps": 4, "fragments": 2, "delay": 1}, {}),
    "blocks": ({"inner_steps": 2}, {"k": 2, "decay": 0.75}),
}


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_replicas_train_apart_and_meet(case):
    """Plain gradients of each replica, momentum of each replica, the outer loop in NumPy."""
    options, blocks = CASES[case]
    pipe = pipeline(outer_loop(exchange=block_sparse(**blocks) if blocks else "dense", **options))
    state, told = trained(pipe, 7)
    leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, parameters()))
    average = outer_loop_reference.best_blocks(**blocks) if blocks else outer_loop_reference.mean
    fragments, delay = FRAGMENTS[options.get("fragments", 1)], options.get("delay", 0)
    reference = outer_loop_reference.Reference(
        dict(enumerate(leaves)), REPLICAS, options["inner_steps"], fragments, average, delay
    )
    velocity = [[np.zeros_like(x) for x in leaves] for _ in range(REPLICAS)]
    for step in range(7):
        given = [jax.tree.unflatten(tree, [own[k] for k in range(len(leaves))]) for own in reference.own]
        results = [plain_gradient(w, part) for w, part in zip(given, halves(step), strict=True)]
        grads = [[np.asarray(x) for x in jax.tree.leaves(gradient)] for _, gradient in results]
        squares = [sum(float((x.astype(np.float64) ** 2).sum()) for x in row) for row in grads]
        assert told[step]["loss"] == pytest.approx(np.mean([value for value, _ in results]), rel=1e-5)
        assert told[step]["gradient_norm"] == pytest.approx(np.mean(squares) ** 0.5, rel=1e-5)
        velocity = [
            [np.float32(0.5) * v + g for v, g in zip(*rows, strict=True)] for rows in zip(velocity, grads, strict=True)
        ]
        reference.step([{k: -np.float32(RATE) * v for k, v in enumerate(row)} for row in velocity])
    outer = jax.tree.leaves(pipe.parameters(state))
    assert relative_l2(outer, [reference.outer[k] for k in range(len(leaves))]) < 2e-6
    assert relative_l2(outer, leaves) > 0.01  # they have moved


@pytest.fixture(scope="module")
def dense():
    return pipeline(outer_loop(inner_steps=3))


def copies(state, field="parameters", replicas=REPLICAS):
    """By buffer and stage, what each replica has."""
    for buffer in getattr(state, field):
        yield from np.asarray(buffer).reshape(STAGES, replicas, -1)


def test_parameters_differ_between_exchanges_and_are_the_outer_ones_after(dense):
    state, _ = trained(dense, 2)
    assert any((first != second).any() for first, second in copies(state))
    assert_same_bits(jax.tree.leaves(dense.parameters(state)), jax.tree.leaves(jax.tree.map(np.asarray, parameters())))
    state, _ = trained(dense, 1, state, 2)
    for first, second in copies(state):
        assert_same_bits(first, second)


def test_evaluation_and_gradients_are_those_of_the_outer_parameters(dense):
    state, _ = trained(dense, 4)
    assert any((first != second).any() for first, second in copies(state))
    outer, batch = jax.tree.leaves(dense.parameters(state)), data(9)
    tree = jax.tree.structure(parameters())
    value, gradient = plain_gradient(jax.tree.unflatten(tree, outer), batch)
    assert float(dense.evaluate(state, batch)["loss"]) == pytest.approx(float(value), rel=1e-6)
    (told, _), actual = dense.value_and_grad(state, batch)
    assert float(told) == pytest.approx(float(value), rel=1e-6)
    assert relative_l2(jax.tree.leaves(actual), jax.tree.leaves(gradient)) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_restored_run_has_the_bits_of_one_that_was_not_interrupted(case, tmp_path):
    """Between exchanges, with momentum inside and outside, residuals, and a restart that is still to come."""
    options, blocks = CASES[case]
    pipe = pipeline(outer_loop(exchange=block_sparse(**blocks) if blocks else "dense", **options))
    state, _ = trained(pipe, 3)
    pipe.save(state, tmp_path)
    expected, _ = trained(pipe, 4, state, 3)
    assert_same_bits(trained(pipe, 4, pipe.restore(tmp_path), 3)[0], expected)


def test_other_replicas_begin_at_the_outer_parameters_of_a_checkpoint(dense, tmp_path):
    state, _ = trained(dense, 5)
    outer, momentum = dense.parameters(state), [np.asarray(x) for x in copies(state, "optimizer")]
    dense.save(state, tmp_path)
    more = pipeline(outer_loop(inner_steps=3), replicas=4)
    restored = more.restore(tmp_path)
    assert_same_bits(more.parameters(restored), outer)
    for first, *others in copies(restored, "parameters", 4):
        assert all((x == first).all() for x in others)
    for rows, before in zip(copies(restored, "optimizer", 4), momentum, strict=True):
        assert_same_bits(rows, np.stack([(before[0] + before[1]) / 2] * 4))
    # Without an outer loop training goes on from there, too; and a loop begins at what had none.
    plain = pipeline("dense", runtime="mpmd")
    restored = plain.restore(tmp_path)
    assert_same_bits(plain.parameters(restored), outer)
    plain.save(restored, tmp_path / "plain")
    assert_same_bits(dense.parameters(dense.restore(tmp_path / "plain")), outer)
    other = pipeline(outer_loop(inner_steps=3, optimizer=optax.sgd(1.0)))
    with pytest.raises(CheckpointError, match=r"does not fit the outer optimizer: .* is only in the checkpoint"):
        other.restore(tmp_path)


class Normalized(nn.Module):
    """A model with running statistics."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(16)(x))
        return nn.Dense(8)(nn.relu(x))


def test_running_statistics_are_of_a_replica_until_an_exchange():
    model, batch = Normalized(), data()
    pipe = jaxpipe.partition(
        model,
        mesh(),
        batch,
        loss=loss,
        optimizer=optax.sgd(RATE),
        gradient_exchange=outer_loop(inner_steps=2),
        num_microbatches=1,
        profile="analytic",
        runtime="spmd",
    )
    state = pipe.init(jax.random.key(0))
    own = [pipe.parameters(state) for _ in range(REPLICAS)]

    def step(variables, part):
        def value(params):
            y, new = model.apply({**variables, "params": params}, part[0], mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(y, part[1]).mean(), new

        gradient, new = jax.grad(value, has_aux=True)(variables["params"])
        return {"params": jax.tree.map(lambda w, g: w - RATE * g, variables["params"], gradient), **new}

    for k in range(2):
        own = [jax.jit(step)(variables, part) for variables, part in zip(own, halves(k), strict=True)]
        state, _ = pipe.step(state, data(k))
        rows = [np.asarray(x).reshape(STAGES, REPLICAS, -1) for x in state.variables]
        alike = all((x[:, 0] == x[:, 1]).all() for x in rows)
        assert alike == (k == 1)
        mean = jax.tree.map(lambda *xs: sum(xs) / REPLICAS, *(variables["batch_stats"] for variables in own))
        assert relative_l2(pipe.parameters(state)["batch_stats"], mean) < 1e-6


@pytest.mark.core
def test_the_plan_says_what_is_sent_and_what_it_costs_on_a_network():
    """On links of 1 MB/s and 1 ms: the larger stage sends half of its bytes twice to the other replica."""
    blocks = outer_loop(inner_steps=4, exchange=block_sparse(k=1, blocks={"*": -1}))
    network = jaxpipe.Network.uniform(STAGES * REPLICAS, 1e6, 1e-3)
    plan = pipeline(blocks, network=network).plan
    dense, loop, chosen = plan.exchanges
    larger = max(stage.parameter_bytes for stage in plan.stages)
    assert (dense.name, dense.bytes, loop.name, loop.bytes) == ("dense", larger, "outer_loop(4)", larger / 4)
    assert dense.seconds == pytest.approx(larger / 1e6 + 2e-3) and loop.seconds == pytest.approx(dense.seconds / 4)
    assert chosen.name == "outer_loop(4), blocks" and plan.exchange_bytes == -(-chosen.bytes // 1)
    text = str(plan)
    assert "outer_loop(4), blocks" in text and "outer loop of 4 steps:" in text
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan
    assert not pipeline(blocks).plan.exchanges


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "mpmd"}, "runtime='mpmd', the default: .* Pass runtime='spmd'"),
        ({"replicas": 1}, "on a mesh without replicas; there must be 2 or more along 'data'"),
        ({"options": jaxpipe.PlanOptions(on_nonfinite="skip")}, "no replica knows whether a step of another one"),
        ({"gradient_exchange": outer_loop("model")}, "axis_name='model', but replicas are along the mesh axis 'data'"),
        ({"gradient_exchange": outer_loop(fragments=16)}, "fragments=16 of 6 parameters"),
        ({"gradient_exchange": outer_loop(exchange=block_sparse(k={"conv": 2}))}, "'conv' fits no parameter"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(PartitionError, match=message):
        pipeline(**{"gradient_exchange": outer_loop(), **options})


def test_a_state_of_gradients_that_all_stages_share_is_refused():
    with pytest.raises(PartitionError, match="all stages share and which depends on gradients"):
        pipeline(outer_loop(), optimizer=optax.chain(optax.apply_if_finite(optax.sgd(0.1), 3)))


RUN = str(ROOT / "tests" / "support" / "outer_loop_run.py")


@pytest.mark.slow
def test_two_processes_send_the_bytes_that_the_plan_says(tmp_path):
    """As the kernel counts them; besides, Gloo sends the sizes of its messages."""
    launch(2, tmp_path, 10**9, "dense", "outer", "fragments", "blocks", run=RUN)
    first, second = (json.loads((tmp_path / f"{k}.json").read_text()) for k in range(2))
    for case, row in (("dense", "dense"), ("outer", "outer_loop(8)"), ("blocks", "outer_loop(8), blocks")):
        said, _ = first[case]["exchanges"][row]
        for result in (first[case], second[case]):
            assert said <= result["bytes"] <= 1.001 * said + 128, case
    assert first["fragments"]["bytes"] == pytest.approx(first["outer"]["bytes"], rel=1e-3)
    for case in first:
        assert first[case]["parameters"] == second[case]["parameters"]
        assert (first[case]["losses"] == second[case]["losses"]) == (case == "dense")  # metrics are of a site


@pytest.mark.slow
def test_on_a_link_of_a_gigabit_a_step_is_shorter_by_what_the_plan_says(tmp_path):
    launch(2, tmp_path, 125_000_000, "dense", "outer", "fragments", "blocks", run=RUN)
    result = json.loads((tmp_path / "0.json").read_text())
    for case, row in (("outer", "outer_loop(8)"), ("fragments", "outer_loop(8)"), ("blocks", "outer_loop(8), blocks")):
        exchanges = result[case]["exchanges"]
        saved = exchanges["dense"][1] - exchanges[row][1]
        assert result["dense"]["seconds"] - result[case]["seconds"] == pytest.approx(saved, rel=0.1)
