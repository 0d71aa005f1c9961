"""``cuts=``: stages begin at the modules that the caller names, and other cuts are searched for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpipe
from jaxpipe import Network, PlanOptions, Profile
from jaxpipe.errors import PartitionError
from jaxpipe.planning import partition_layers
from tests.support.compare import assert_same_bits
from tests.support.meshes import mesh_of


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        inner = nn.gelu(nn.Dense(16)(x))
        return x + nn.Dense(8)(inner)


class Net(nn.Module):
    """Three blocks, a block that is called twice with a layer in between, and a layer that is called twice in a row."""

    @nn.compact
    def __call__(self, x):
        x, shared, twice = nn.Dense(8, name="stem")(x), Block(name="shared"), nn.Dense(8, name="twice")
        for _ in range(3):
            x = Block()(x)
        x = nn.Dense(8, name="mid")(shared(x))
        return nn.Dense(4, name="head")(twice(nn.relu(twice(shared(x)))))


class Attributes(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List(nnx.Linear(8, 8, rngs=rngs) for _ in range(5))
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.head(x)


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda module, carry, _: (module(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=8,
        )
        x, _ = scan(Block(name="layers"), nn.Dense(8, name="stem")(x), None)
        return nn.Dense(4, name="head")(x)


BATCH = {"x": jax.random.normal(jax.random.key(1), (16, 8))}


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def made(model, stages, cuts, **options):
    options = {"num_microbatches": 4, "profile": "analytic", **options}
    optimizer = optax.sgd(0.1)
    return jaxpipe.partition(model, mesh_of(stages), BATCH, loss=loss, optimizer=optimizer, cuts=cuts, **options)


def begins(pipeline):
    """Return the first module of each stage but the first."""
    return [stage.modules[0] for stage in pipeline.plan.stages[1:]]


def test_as_many_cuts_as_can_be_are_all_of_them():
    pipeline = made(Net(), 4, ["Block_1", "Block_2", "head"])
    assert begins(pipeline) == ["Net/Block_1/Dense_0", "Net/Block_2/Dense_0", "Net/head"]
    assert "cuts= was given: stages begin at 'Block_1', 'Block_2', 'head'" in pipeline.plan.notes


@pytest.mark.slow
def test_the_numbers_are_those_of_plain_training(key):
    pipeline = made(Net(), 4, ["Block_2/Dense_1", "mid"])
    state = pipeline.init(key, BATCH)
    parameters = pipeline.parameters(state)

    def plain(parameters, rows):
        return jnp.square(jnp.asarray(Net().apply(parameters, rows))).mean()

    parts = [jax.jit(jax.value_and_grad(plain))(parameters, BATCH["x"][k : k + 4]) for k in range(0, 16, 4)]
    (value, _), gradients = pipeline.value_and_grad(state, BATCH)
    np.testing.assert_allclose(value, np.mean([v for v, _ in parts]), rtol=1e-6)
    means = jax.tree.map(lambda *gs: sum(gs) / 4, *(g["params"] for _, g in parts))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(means), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)  # sums of products in other fusions
    searched = made(Net(), 4, None)
    (other, _), others = searched.value_and_grad(searched.init(key, BATCH), BATCH)
    np.testing.assert_allclose(value, other, rtol=1e-6)
    assert jax.tree.structure(gradients) == jax.tree.structure(others)


def test_cuts_that_are_not_given_are_searched_for():
    pipeline = made(Net(), 4, ["Block_1/Dense_1"])
    assert "Net/Block_1/Dense_1" in begins(pipeline)
    assert len(pipeline.plan.stages) == 4
    assert pipeline.plan.notes[0].endswith("; 2 other cut(s) were searched for")


@pytest.mark.parametrize("names", [["blocks.1", "blocks.4"], ["blocks/1", "Attributes/blocks/4"]])
def test_attributes_of_nnx_are_names(names):
    assert {"Attributes/blocks/1", "Attributes/blocks/4"} <= set(begins(made(Attributes(nnx.Rngs(0)), 4, names)))


def test_a_call_of_several_is_named_with_its_number():
    first, second = (made(Net(), 2, [("shared", call)]).plan.stages[1] for call in (0, 1))
    assert first.modules[0] == second.modules[0] == "Net/shared/Dense_0"
    assert "Net/mid" in first.modules
    assert "Net/mid" not in second.modules


def test_several_stages_on_a_device_take_as_many_cuts():
    pipeline = made(Net(), 2, ["Block_1", "Block_2", "mid"])
    assert pipeline.schedule.num_chunks == 2
    assert [stage.devices for stage in pipeline.plan.stages] == [(0,), (1,), (0,), (1,)]
    assert begins(pipeline)[::2] == ["Net/Block_1/Dense_0", "Net/mid"]


def test_several_devices_in_a_stage_and_a_budget():
    options = PlanOptions(devices_per_stage=(3, 1))
    pipeline = made(Net(), 4, ["head"], options=options, num_microbatches=None)
    assert [len(stage.devices) for stage in pipeline.plan.stages] == [3, 1]
    assert begins(pipeline) == ["Net/head"]
    assert "Net/mid" in begins(made(Net(), 2, ["mid"], memory="1MiB"))
    chosen = made(Net(), 4, ["Block_2", "mid"], options=PlanOptions(devices_per_stage=True))
    assert {"Net/Block_2/Dense_0", "Net/mid"} <= set(begins(chosen))


def test_layers_of_a_scan_are_named_as_the_plan_prints_them():
    pipeline = made(Layers(), 2, ["layers[3]"])
    assert pipeline.plan.stages[0].modules[-1].startswith("Layers/layers[0:3]")
    assert begins(made(Layers(), 2, ["layers[5:8]"], options=PlanOptions(unroll_scans=5)))[0] == "Layers/layers[5:8]"


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        ("head", "must be a sequence of names"),
        ([3], r"cuts\[0\]=3; it must be the name of a module"),
        ([("shared", -1)], r"cuts\[0\]"),
        (["head", "head"], "twice"),
        (["Blok_1"], "no module 'Blok_1'. Did you mean 'Block_1'.* Modules in Net: stem, .*Block_0.*, head"),
        (["Block_1/Dense_9"], "Modules in Block_1: Block_1/Dense_0, Block_1/Dense_1"),
        (["stem"], "first of the program"),
        (["shared"], r"2 times.*\('shared', 0\) at operator \d+, \('shared', 1\)"),
        ([("shared", 2)], "2 time"),
        ([("twice", 1)], "variable twice/kernel is used from operator .* Modules at which one can: .*Block_1"),
        (["Block_1", "Block_1/Dense_0"], "begin with the same operator"),
        (["Block_0", "Block_1", "Block_2", "mid", "head"], "5 names, .* at least 6 stages, and there are 2: .*'interl"),
    ],
)
def test_what_cannot_be_a_cut_is_refused(cuts, said):
    with pytest.raises(PartitionError, match=f"(?s){said}"):
        made(Net(), 2, cuts)


def test_a_scan_that_is_one_operator_is_refused():
    with pytest.raises(PartitionError, match=r"one operator: no stage begins inside it.*unroll_scans"):
        made(Layers(), 2, ["layers[3]"], options=PlanOptions(unroll_scans=False))
    assert begins(made(Layers(), 2, ["layers"], options=PlanOptions(unroll_scans=False))) == ["Layers/layers"]


class Checkpointed(nn.Module):
    @nn.compact
    def __call__(self, x):
        for k in range(4):
            x = nn.remat(Block)(name=f"block_{k}")(x)
        return nn.Dense(4, name="head")(jax.checkpoint(jnp.tanh)(x))


class AttributesCheckpointed(Attributes):
    def __call__(self, x):
        for block in self.blocks:
            x = nnx.relu(jax.checkpoint(lambda x, block=block: block(x))(x))
        return self.head(x)


@pytest.mark.parametrize("model", [Checkpointed(), AttributesCheckpointed(nnx.Rngs(0))])
def test_a_checkpoint_has_the_name_of_the_module_that_it_runs(model):
    names = {Checkpointed: ["block_1", "block_3"], AttributesCheckpointed: ["blocks/2", "blocks/4"]}[type(model)]
    pipeline = made(model, 3, names)
    assert begins(pipeline) == [f"{type(model).__name__}/{name}" for name in names]
    with pytest.raises(PartitionError, match="no module 'blok"):
        made(model, 3, ["blok", "head"])


def test_a_module_inside_a_checkpoint_is_refused():
    with pytest.raises(PartitionError, match=r"'block_1/Dense_0' is inside a checkpoint.*Name a module around it"):
        made(Checkpointed(), 2, ["block_1/Dense_0"])


def test_a_function_has_names_of_its_scopes():
    def function(w, batch):
        with jax.named_scope("second"):
            return jnp.tanh(batch["x"] @ w[0]) @ w[1]

    model = jax.tree_util.Partial(function, [jnp.ones((8, 8))] * 2)
    with pytest.raises(PartitionError, match=r"no module .third.|in no modules"):
        jaxpipe.partition(
            model, mesh_of(2), BATCH, loss=lambda f, b: f(b).mean(), optimizer=optax.sgd(0.1), cuts=["third"]
        )


@pytest.mark.parametrize("seed", range(6))
def test_the_rest_is_searched_exactly_where_plans_are_few(seed):
    draw = np.random.default_rng(seed)
    count, stages = 9, 4
    seconds, sent = draw.uniform(1, 5, count).tolist(), draw.uniform(0, 6, count).tolist()
    starts = sorted(draw.choice(np.arange(1, count), size=int(draw.integers(1, stages)), replace=False).tolist())
    profile = Profile.chain([*map(str, range(count))], seconds, seconds, [0] * count, [0] * count, sent)
    partition = partition_layers(
        profile,
        Network.uniform(stages, 2.0),
        cost_model="min_max",
        replicate=False,
        num_stages=stages,
        reorder=False,
        starts=starts,
    )
    assert set(starts) <= {stage.operators.start for stage in partition.stages}
    costs = [
        max(
            max(2 * sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, count))),
            max(2 * sent[c - 1] / 2.0 for c in cuts),
        )
        for cuts in itertools.combinations(range(1, count), stages - 1)
        if set(starts) <= set(cuts)
    ]
    np.testing.assert_allclose(partition.bottleneck_seconds, min(costs))


@pytest.mark.parametrize("replicate", [False, True])
def test_long_chains_keep_given_cuts(replicate):
    draw = np.random.default_rng(0)
    count, stages, starts = 400, 12, (3, 77, 250, 399)
    seconds = draw.uniform(1, 2, count).tolist()
    profile = Profile.chain([*map(str, range(count))], seconds, seconds, [0] * count, [0] * count, [0] * count)
    partition = partition_layers(
        profile,
        Network.uniform(stages, 1e12),
        replicate=replicate,
        num_stages=None if replicate else stages,
        reorder=False,
        starts=starts,
        num_microbatches=1000,
    )
    assert set(starts) <= {stage.operators.start for stage in partition.stages}
    if not replicate:
        # Stages of the parts between given cuts, dealt so that the longest is the shortest; whole operators round it.
        parts = [2 * sum(seconds[a:b]) for a, b in itertools.pairwise((0, *starts, count))]
        dealt = [1] * len(parts)
        for _ in range(stages - len(parts)):
            dealt[int(np.argmax([p / n for p, n in zip(parts, dealt, strict=True)]))] += 1
        least = max(p / n for p, n in zip(parts, dealt, strict=True))
        assert max(stage.compute_seconds for stage in partition.stages) < 1.05 * least


def test_starts_need_the_order():
    profile = Profile.chain("ab", [1, 1], [1, 1], [0, 0], [0, 0], [0, 0])
    with pytest.raises(PartitionError, match="reorder=False"):
        partition_layers(profile, Network.uniform(2, 1.0), starts=(1,))


def test_the_same_cuts_give_the_same_bits(key):
    searched = made(Net(), 3, None, schedule="1f1b")
    names = [stage.modules[0] for stage in searched.plan.stages[1:]]
    given = made(Net(), 3, ["Block_1", "Block_2"])
    again = made(Net(), 3, ["Block_2", "Block_1"])
    assert len(names) == 2
    results = [p.step(p.init(key, BATCH), BATCH)[1] for p in (given, again)]
    assert_same_bits(*results)
