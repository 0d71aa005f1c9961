"""What calls collect and keep: values belong to a call, state to the next one, an FP8 scale to its gradient."""

import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpipe
from tests.support.compare import FUSION, relative_l2
from tests.support.meshes import mesh_of
from tests.support.plain_training import gradient_of_batch, mean_of, microbatch, train


KEY = jax.random.key(0)
M = 4
BATCH = {
    "x": jax.random.normal(jax.random.key(1), (16, 8)),
    "y": jax.random.randint(jax.random.key(2), (16,), 0, 5),
}
SGD = optax.sgd(0.1)


def entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def partition(model, loss, stages, batch=None, **kwargs):
    batch = BATCH if batch is None else batch
    settings = {"loss": loss, "optimizer": SGD, "num_microbatches": M, "profile": "analytic"} | kwargs
    return jaxpipe.partition(model, mesh_of(stages), batch, **settings)


class Sowing(nn.Module):
    """Sows tuples, sums with ``init_fn`` and ``reduce_fn``, and intermediates, beside batch statistics."""

    layers: int = 3

    @nn.compact
    def __call__(self, x):
        for k in range(self.layers):
            x = x + nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(8)(nn.gelu(x)))
            self.sow("aux", "balance", jnp.square(x.mean(0)).sum())
            self.sow("aux", "total", jnp.abs(x).mean(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
            self.sow("intermediates", f"layer{k}", x)
        return nn.Dense(5)(x)


def penalties(sown):
    tuples = sum(sown["aux"]["balance"])
    return (
        0.1 * tuples
        + 0.2 * sown["aux"]["total"]
        + sum(jnp.square(x).mean() for x in jax.tree.leaves(sown["intermediates"]))
    )


def sowing_loss(model, batch):
    value = entropy(model(batch["x"]), batch["y"])
    return value + penalties(model.variables)


def plain_sowing(params, state, batch, _):
    mutable = ["batch_stats", "aux", "intermediates"]
    logits, new = Sowing().apply({"params": params, "batch_stats": state}, batch["x"], mutable=mutable)
    return entropy(logits, batch["y"]) + penalties(new), new["batch_stats"]


@pytest.mark.parametrize(
    ("stages", "runtime"),
    [
        pytest.param(1, "mpmd", marks=pytest.mark.slow),
        pytest.param(2, "mpmd", marks=pytest.mark.core),
        pytest.param(4, "mpmd", marks=pytest.mark.slow),
        pytest.param(2, "spmd", marks=pytest.mark.slow),
    ],
)
def test_what_a_call_sows_begins_empty_and_is_gone_after_it(stages, runtime):
    variables = Sowing().init(KEY, BATCH["x"])
    assert set(variables) == {"params", "batch_stats", "aux"}
    pipeline = partition(Sowing(), sowing_loss, stages, runtime=runtime)
    state, losses = pipeline.init(KEY, variables=variables), []
    for _ in range(3):
        state, metrics = pipeline.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    expected, params, stats = train(plain_sowing, variables["params"], variables["batch_stats"], SGD, BATCH, M, 3)
    after = pipeline.parameters(state)
    assert set(after) == {"params", "batch_stats"}
    np.testing.assert_allclose(losses, expected, rtol=FUSION)
    assert relative_l2(after, {"params": params, "batch_stats": stats}) < 3 * FUSION


def test_initial_values_are_those_of_a_module_that_sows():
    pipeline = partition(Sowing(), sowing_loss, 2)
    variables = Sowing().init(KEY, BATCH["x"])
    del variables["aux"]
    made = pipeline.parameters(pipeline.init(KEY))
    assert jax.tree.all(jax.tree.map(np.array_equal, made, jax.tree.map(np.asarray, variables)))


def test_values_belong_to_the_last_call():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(5)(x)
            self.sow("aux", "size", jnp.square(x).mean())
            return x

    def loss(model, batch):
        first = entropy(model(batch["x"]), batch["y"]) + model.variables["aux"]["size"][0]
        second = entropy(model(2 * batch["x"]), batch["y"])
        (size,) = model.variables["aux"]["size"]
        return first + second + 3 * size

    def plain(params, state, batch, _):
        a, first = Twice().apply({"params": params}, batch["x"], mutable=["aux"])
        b, second = Twice().apply({"params": params}, 2 * batch["x"], mutable=["aux"])
        sizes = first["aux"]["size"][0] + 3 * second["aux"]["size"][0]
        return entropy(a, batch["y"]) + entropy(b, batch["y"]) + sizes, state

    params = Twice().init(KEY, BATCH["x"])["params"]
    pipeline = partition(Twice(), loss, 1)
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(KEY, variables={"params": params}), BATCH)
    expected, gradient, _ = gradient_of_batch(plain, params, None, BATCH, M)
    np.testing.assert_allclose(value, expected, rtol=FUSION)
    assert relative_l2(gradients, gradient) < FUSION


class SowingBlock(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        x = x + self.norm(self.linear(nnx.gelu(x)))
        self.sow(nnx.Intermediate, "size", jnp.square(x).mean())
        self.sow(Balance, "balance", jnp.abs(x).mean(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        return x


class Balance(nnx.Variable):
    """A type of its own for sown values."""


class SowingNNX(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([SowingBlock(rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_loss(model, batch):
    value = entropy(model(batch["x"]), batch["y"])
    sown = nnx.state(model, nnx.Intermediate), nnx.state(model, Balance)
    return value + 0.1 * sum(jax.tree.leaves(sown))


@pytest.mark.filterwarnings("ignore:.*sow.*:DeprecationWarning")
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
@pytest.mark.parametrize("called", [False, True])
def test_what_an_nnx_module_sows_begins_empty(stages, called):
    model = SowingNNX(nnx.Rngs(0))
    reference = nnx.clone(model)
    if called:  # to look at shapes, say: it now has what it has sown
        model(BATCH["x"])
        assert nnx.to_flat_state(nnx.state(model, Balance))
        nnx.update(model, nnx.state(reference, nnx.BatchStat))
    pipeline = partition(model, nnx_loss, stages)
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(KEY), BATCH)
    losses, expected = [], []
    for j in range(M):
        loss, gradient = nnx.jit(nnx.value_and_grad(nnx_loss))(reference, microbatch(BATCH, M, j))
        nnx.pop(reference, nnx.Any(nnx.Intermediate, Balance))
        losses.append(loss)
        expected.append(gradient)
    np.testing.assert_allclose(value, mean_of(losses), rtol=FUSION)
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(mean_of(expected))) < 3 * FUSION


@pytest.mark.parametrize("stages", [1, 2])
def test_nnx_capture_and_variables_made_in_a_call(stages):
    class Captured(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.a(x))
            self.sow(nnx.Intermediate, "hidden", x)
            self.size = nnx.Variable(jnp.square(x).mean())
            return self.b(x)

    def loss(model, batch):
        logits, sown = nnx.capture(model, nnx.Intermediate)(batch["x"])
        return entropy(logits, batch["y"]) + model.size[...] + sum(jnp.abs(x).mean() for x in jax.tree.leaves(sown))

    model = Captured(nnx.Rngs(0))
    structure, params, rest = nnx.split(model, nnx.Param, ...)
    pipeline = partition(model, loss, stages)
    _, gradients = pipeline.value_and_grad(pipeline.init(KEY), BATCH)

    def plain(params, state, batch, _):
        return loss(nnx.merge(structure, params, rest, copy=True), batch), state

    _, expected, _ = gradient_of_batch(plain, params, None, BATCH, M)
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(expected)) < FUSION


class Fp8(nn.Module):
    layers: int = 4

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.gelu(nn.Dense(8, dot_general_cls=nn.Fp8DotGeneralOp)(x))
        return nn.Dense(5)(x)


OVERWRITTEN = "_overwrite_with_gradient"


def plain_fp8(variables, optimizer, batch, m, steps):
    """As ``flax.training.train_state`` has it, with the maximum over micro-batches."""

    def loss(params, scales, batch):
        return entropy(Fp8().apply({"params": params, OVERWRITTEN: scales}, batch["x"]), batch["y"])

    params, scales = variables["params"], variables[OVERWRITTEN]
    state, norms = optimizer.init(params), []
    for _ in range(steps):
        pairs = [jax.jit(jax.grad(loss, argnums=(0, 1)))(params, scales, microbatch(batch, m, j)) for j in range(m)]
        gradient = mean_of([g for g, _ in pairs])
        norms.append(float(optax.global_norm(gradient)))
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        scales = jax.tree.map(lambda *xs: jnp.stack(xs).max(0), *[s for _, s in pairs])
    return params, scales, norms


@pytest.mark.parametrize(
    ("stages", "replicas", "m"),
    [
        pytest.param(1, None, 4, marks=pytest.mark.slow),
        pytest.param(2, None, 4, marks=pytest.mark.slow),
        pytest.param(4, None, 4, marks=pytest.mark.slow),
        (2, 2, 2),
        (2, None, 1),
    ],
)
def test_variables_that_become_their_gradient(stages, replicas, m):
    batch = {**BATCH, "x": 40 * BATCH["x"]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    variables = Fp8().init(KEY, batch["x"])
    pipeline = jaxpipe.partition(
        Fp8(),
        mesh_of(stages, replicas),
        batch,
        loss=lambda model, batch: entropy(model(batch["x"]), batch["y"]),
        optimizer=optimizer,
        num_microbatches=m,
        profile="analytic",
    )
    state, norms = pipeline.init(KEY), []
    for _ in range(2):
        state, metrics = pipeline.step(state, batch)
        norms.append(float(metrics["gradient_norm"]))
    params, scales, expected = plain_fp8(variables, optimizer, batch, m * (replicas or 1), 2)
    after = pipeline.parameters(state)
    assert set(after) == {"params", OVERWRITTEN}
    # Products are rounded to 3 or 2 bits: one that falls to the other side of a half moves single gradients by 1 %.
    np.testing.assert_allclose(norms, expected, rtol=1e-3)
    assert relative_l2(after[OVERWRITTEN], scales) < 1e-3
    assert relative_l2(after[OVERWRITTEN], variables[OVERWRITTEN]) > 0.1
    assert relative_l2(after["params"], params) < 1e-2


def test_variables_that_become_their_gradient_in_one_program_are_refused():
    with pytest.raises(
        jaxpipe.PartitionError, match=r"runtime='spmd' with the variable _overwrite_with_gradient/.*becomes"
    ):
        partition(Fp8(), lambda model, batch: entropy(model(batch["x"]), batch["y"]), 2, runtime="spmd")


def test_the_largest_of_negative_gradients():
    """A maximum with zero in it would hide that they are all negative."""

    class Negative(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.variable(OVERWRITTEN, "scale", lambda: jnp.ones(())).value
            return nn.Dense(1)(x) * 0 - scale * jnp.square(x).sum(-1, keepdims=True)

    pipeline = partition(Negative(), lambda model, batch: model(batch["x"]).mean(), 1)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    means = [-jnp.square(microbatch(BATCH, M, j)["x"]).sum(-1).mean() for j in range(M)]
    np.testing.assert_allclose(pipeline.parameters(state)[OVERWRITTEN]["scale"], max(means), rtol=FUSION)


def test_state_that_changes_form_is_refused_by_name():
    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("memory", "seen", lambda: jnp.zeros((2,)))
            if not self.is_initializing():
                seen.value = jnp.concatenate([seen.value, seen.value])
            return nn.Dense(5)(x)

    with pytest.raises(jaxpipe.ModelError, match=r"memory/seen from float32\[2\] to float32\[4\]"):
        partition(Growing(), lambda model, batch: model(batch["x"]).mean(), 1)

    class Typed(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("memory", "seen", lambda: jnp.zeros((2,), jnp.bfloat16))
            if not self.is_initializing():
                seen.value = seen.value + jnp.float32(1)
            return nn.Dense(5)(x)

    with pytest.raises(jaxpipe.ModelError, match=r"memory/seen from bfloat16\[2\] to float32\[2\]"):
        partition(Typed(), lambda model, batch: model(batch["x"]).mean(), 1)

    class Late(nn.Module):
        @nn.compact
        def __call__(self, x):
            if not self.is_initializing():
                count = self.variable("memory", "count", lambda: jnp.zeros(()))
                count.value += 1
                x = x * count.value
            return nn.Dense(5)(x)

    with pytest.raises(jaxpipe.ModelError, match=r"makes the state variable memory/count.*next call reads it"):
        partition(Late(), lambda model, batch: model(batch["x"]).mean(), 1)

    class LateNNX(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 5, rngs=rngs)

        def __call__(self, x):
            if not hasattr(self, "count"):
                self.count = nnx.Variable(jnp.zeros(()))
            self.count[...] += 1
            return self.linear(x) * self.count

    with pytest.raises(jaxpipe.ModelError, match=r"makes the state variable count.*next call reads it"):
        partition(LateNNX(nnx.Rngs(0)), lambda model, batch: model(batch["x"]).mean(), 1)


def test_values_that_a_call_puts_and_no_other_reads_are_as_sown():
    class Put(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(5)(x)
            if not self.is_initializing():
                self.put_variable("sizes", "last", jnp.square(x).mean())
            return x

    def loss(model, batch):
        return entropy(model(batch["x"]), batch["y"]) + model.variables["sizes"]["last"]

    params = Put().init(KEY, BATCH["x"])["params"]
    pipeline = partition(Put(), loss, 2)
    state = pipeline.init(KEY)
    _, gradients = pipeline.value_and_grad(state, BATCH)

    def plain(params, state, batch, _):
        logits, new = Put().apply({"params": params}, batch["x"], mutable=["sizes"])
        return entropy(logits, batch["y"]) + new["sizes"]["last"], state

    assert relative_l2(gradients, gradient_of_batch(plain, params, None, BATCH, M)[1]) < FUSION
    assert set(pipeline.parameters(state)) == {"params"}


def test_state_that_nobody_writes_stays():
    class Constant(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.variable("constants", "scale", lambda: jnp.arange(8.0))
            return nn.Dense(5)(x * scale.value)

    def loss(model, batch):
        return entropy(model(batch["x"]), batch["y"]) + model.variables["constants"]["scale"].sum()

    variables = Constant().init(KEY, BATCH["x"])
    pipeline = partition(Constant(), loss, 2)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    np.testing.assert_array_equal(pipeline.parameters(state)["constants"]["scale"], variables["constants"]["scale"])


@pytest.mark.parametrize("kind", ["Fp8DirectDotGeneralOp", "Fp8Einsum"])
def test_scales_whose_rule_gets_no_cotangent(kind):
    """These quantize apart from the product, whose rule has no cotangent for what was quantized."""

    class Direct(nn.Module):
        @nn.compact
        def __call__(self, x):
            for k in range(2):
                if kind == "Fp8Einsum":
                    kernel = self.param(f"kernel{k}", nn.initializers.lecun_normal(), (8, 8))
                    x = nn.gelu(nn.Fp8Einsum()("bi,io->bo", x, kernel))
                else:
                    x = nn.gelu(nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))
            return nn.Dense(5)(x)

    variables = Direct().init(KEY, BATCH["x"])

    def loss(scales, batch):
        return entropy(Direct().apply({"params": variables["params"], OVERWRITTEN: scales}, batch["x"]), batch["y"])

    scales = variables[OVERWRITTEN]
    encoded = jax.jit(jax.grad(jaxpipe.memory_encoded(loss)))(scales, BATCH)
    plain = jax.jit(jax.grad(loss))
    assert relative_l2(encoded, plain(scales, BATCH)) < 1e-3  # as in the test of steps above
    pipeline = partition(Direct(), lambda model, batch: entropy(model(batch["x"]), batch["y"]), 2, num_microbatches=2)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    expected = jax.tree.map(jnp.maximum, *(plain(scales, microbatch(BATCH, 2, j)) for j in range(2)))
    assert relative_l2(pipeline.parameters(state)[OVERWRITTEN], expected) < 1e-3


@pytest.mark.slow  # 3 s a cut
def test_scales_wherever_a_program_is_cut():
    """A stage between what is quantized and the product that reads it sends a cotangent of zeros back."""

    class Direct(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.gelu(nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x))
            return nn.Dense(5)(x)

    def loss(model, batch):
        return entropy(model(batch["x"]), batch["y"])

    def plain(scales, batch):
        return entropy(Direct().apply({"params": variables["params"], OVERWRITTEN: scales}, batch["x"]), batch["y"])

    variables = Direct().init(KEY, BATCH["x"])
    gradient = jax.jit(jax.grad(plain))
    parts = [gradient(variables[OVERWRITTEN], microbatch(BATCH, 2, j)) for j in range(2)]
    expected = jax.tree.map(jnp.maximum, *parts)
    usual = partition(Direct(), loss, 2, num_microbatches=2).profile
    cuts = set()
    for k in [k for k, name in enumerate(usual.names) if "Fp8DirectDotGeneralOp" in name]:
        seconds = tuple(float(j in (k, k + 1)) for j in range(len(usual.names)))
        profile = dataclasses.replace(usual, forward_seconds=seconds, backward_seconds=seconds)
        pipeline = partition(Direct(), loss, 2, num_microbatches=2, profile=profile)
        cuts.update(stage.operators[1] for stage in pipeline.plan.stages)
        state, _ = pipeline.step(pipeline.init(KEY), BATCH)
        assert relative_l2(pipeline.parameters(state)[OVERWRITTEN], expected) < 1e-3  # as in the test of steps above
    assert 15 in cuts  # between what quantizes the input and the kernel of the second layer


def test_scales_of_a_layer_without_an_effect():
    class Unused(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(8, dot_general_cls=nn.Fp8DotGeneralOp)(x)
            return nn.Dense(5)(x)

    pipeline = partition(Unused(), lambda model, batch: entropy(model(batch["x"]), batch["y"]), 1)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    assert not any(np.any(x) for x in jax.tree.leaves(pipeline.parameters(state)[OVERWRITTEN]))  # as jax.grad


def test_state_with_the_name_of_a_sown_value_stays_state():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            self.sow("batch_stats", "mean", x.mean())
            return nn.Dense(5)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))

    def plain(params, stats, batch, _):
        out, new = Linen().apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
        return entropy(out, batch["y"]), {"BatchNorm_0": new["batch_stats"]["BatchNorm_0"]}

    variables = Linen().init(KEY, BATCH["x"])
    pipeline = partition(Linen(), lambda model, batch: entropy(model(batch["x"]), batch["y"]), 2)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    stats = {"BatchNorm_0": variables["batch_stats"]["BatchNorm_0"]}
    _, _, after = train(plain, variables["params"], stats, SGD, BATCH, M, 1)
    assert relative_l2(pipeline.parameters(state)["batch_stats"], after) < FUSION

    class NNX(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
            self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "mean", x.mean())
            return self.head(self.norm(x))

    model = NNX(nnx.Rngs(0))
    reference = nnx.clone(model)
    pipeline = partition(model, lambda model, batch: entropy(model(batch["x"]), batch["y"]), 2)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for j in range(M):
            reference(microbatch(BATCH, M, j)["x"])
    got = nnx.filter_state(pipeline.parameters(state), nnx.BatchStat)
    assert relative_l2(jax.tree.leaves(got), jax.tree.leaves(nnx.state(reference, nnx.BatchStat))) < FUSION


@pytest.mark.filterwarnings("ignore:.*sow.*:DeprecationWarning")
@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_a_shared_nnx_module_sows_twice_inside_a_transformation(transform):
    class Shared(nnx.Module):
        def __init__(self, rngs):
            self.block, self.head = SowingBlock(rngs), nnx.Linear(8, 5, rngs=rngs)

        def __call__(self, x):
            call = transform(lambda block, x: block(x))
            return self.head(call(self.block, call(self.block, x)))

    model = Shared(nnx.Rngs(0))
    reference = nnx.clone(model)
    pipeline = partition(model, nnx_loss, 1)
    (value, _), _ = pipeline.value_and_grad(pipeline.init(KEY), BATCH)
    losses = []
    for j in range(M):
        losses.append(nnx_loss(reference, microbatch(BATCH, M, j)))
        nnx.pop(reference, nnx.Any(nnx.Intermediate, Balance))
    np.testing.assert_allclose(value, mean_of(losses), rtol=2 * FUSION)


class Attributes(nnx.Module):
    """Changes attributes that are no arrays, and makes a variable, in every call; one parameter is a tree."""

    def __init__(self, rngs, scales):
        self.linear, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 5, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, momentum=0.5, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)
        self.tree = nnx.Param({"scale": jnp.ones(8), "shifts": [jnp.zeros(8)]})
        self.calls, self.scales = 0, scales
        self.sizes, self.shifts = ([8], 5), nnx.data([jnp.zeros(5)])

    def __call__(self, x):
        x = self.dropout(self.norm(self.linear(x))) * (self.calls + 1 if self.scales else 1)
        self.calls, self.shape = self.calls + 1, x.shape
        self.last = nnx.Variable(x.mean())
        return self.head(x * self.tree["scale"] + self.tree["shifts"][0]) + self.shifts[0]


def in_both_modes(model, batch):
    model.train()
    trained = entropy(model(batch["x"]), batch["y"])
    model.eval()
    return trained + entropy(model(batch["x"]), batch["y"])


def left_in_evaluation_mode(model, batch):
    value = entropy(model(batch["x"]), batch["y"])
    model.eval()
    return value


def test_attributes_that_a_call_changes_may_not_change_the_next_one():
    with pytest.raises(
        jaxpipe.ModelError, match=r"changes the attributes calls, shape of .* keep .* in an nnx\.Variable"
    ):
        partition(Attributes(nnx.Rngs(0), scales=True), nnx_loss, 2)
    with pytest.raises(
        jaxpipe.ModelError, match=r"changes the attributes .*norm/use_running_average.*model\.train\(\)"
    ):
        partition(Attributes(nnx.Rngs(0), scales=False), left_in_evaluation_mode, 2)


def test_a_parameter_that_is_a_tree_trains_where_attributes_change_nothing():
    model = Attributes(nnx.Rngs(0), scales=False)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def plain(params, rest, batch, _):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = in_both_modes(model, batch)
        del model.last
        return loss, nnx.state(model, nnx.Not(nnx.Param))

    pipeline = partition(model, in_both_modes, 2)
    state, _ = pipeline.step(pipeline.init(KEY), BATCH)
    _, params, rest = train(plain, params, rest, SGD, BATCH, M, 1)
    got = pipeline.parameters(state)
    assert relative_l2(jax.tree.leaves(nnx.filter_state(got, nnx.Param)), jax.tree.leaves(params)) < FUSION
    statistics = [jax.tree.leaves(nnx.filter_state(tree, nnx.BatchStat)) for tree in (got, rest)]
    assert relative_l2(*statistics) < FUSION
