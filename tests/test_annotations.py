"""Sharding annotations in models: dropped in a pipeline, where results are those of plain JAX; kept outside."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import memory_encoded
from jaxpipe.errors import PartitionError
from jaxpipe.graph import sharding_annotations
from tests.support.compare import assert_same_bits, relative_l2
from tests.support.meshes import named_mesh
from tests.support.texts import one_line


# A few float32 roundings (6e-8): shards are added up in another order than by a collective.
ORDER = 1e-6
CONSTRAIN = lax.with_sharding_constraint


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


X, W, V = normal(1, 8, 4), normal(2, 4, 8), normal(3, 8, 4)


def pipeline_of(model, batch=X, **options):
    return jaxpipe.partition(
        model,
        named_mesh(stage=2),
        batch,
        loss=lambda model, x: jnp.square(model(x)).mean(),
        optimizer=optax.sgd(0.1),
        num_microbatches=2,
        schedule="one_f_one_b",
        profile="analytic",
        **options,
    )


def two_layers(constrain):
    return jax.tree_util.Partial(lambda params, x: constrain(jnp.tanh(x @ params["w"])) @ params["v"], {"w": W, "v": V})


def check_gradients(pipeline, plain, params, batch=X, tolerance=ORDER):
    """Against ``jax.grad`` of ``plain(params, x)`` on the same micro-batches."""
    (value, _), gradients = pipeline.value_and_grad(pipeline.init(jax.random.key(0)), batch)
    derivative = jax.jit(jax.value_and_grad(lambda params, x: jnp.square(plain(params, x)).mean()))
    parts = [derivative(params, x) for x in jnp.split(batch, 2)]
    expected = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    assert relative_l2((value, *jax.tree.leaves(gradients)), jax.tree.leaves(expected)) < tolerance


# In a pipeline


@pytest.mark.core
@pytest.mark.parametrize("context", [None, ("stage",), ("fsdp", "model")], ids=str)
@pytest.mark.parametrize("kind", ["spec", "sharding"])
def test_constraints_are_dropped_and_the_plan_says_so(kind, context):
    def constrain(h):
        spec = P("fsdp", ("model",))
        return CONSTRAIN(h, spec if kind == "spec" else NamedSharding(named_mesh(fsdp=2, model=2), spec))

    with contextlib.nullcontext() if context is None else jax.set_mesh(named_mesh(**dict.fromkeys(context, 2))):
        plan = pipeline_of(two_layers(constrain)).plan
    assert plan.notes == ("sharding constraints over 'fsdp', 'model' are dropped: the mesh has only stage",)
    assert plan.notes[0] in one_line(plan)
    assert jaxpipe.Plan.from_json(plan.to_json()) == plan
    assert pipeline_of(two_layers(lambda h: h)).plan.notes == ()


def test_constraints_over_axes_of_the_mesh_are_dropped_too():
    notes = pipeline_of(two_layers(lambda h: CONSTRAIN(h, NamedSharding(named_mesh(stage=2), P("stage"))))).plan.notes
    assert notes == ("sharding constraints over 'stage' are dropped: a stage has no such axis",)


@jax.custom_vjp
def constrained_both_ways(x):
    return jnp.sin(x)


def constrained_backward(x, cotangent):
    return (CONSTRAIN(jnp.cos(x), P("model")) * CONSTRAIN(cotangent, P("fsdp")),)


constrained_both_ways.defvjp(lambda x: (CONSTRAIN(jnp.sin(x), P("model")), x), constrained_backward)


@pytest.mark.versions
def test_annotations_anywhere_in_a_model_leave_its_gradients_as_they_are():
    """In rules, in loops, in conditionals, in recomputed parts and on ``jit``; steps run in the caller's mesh."""
    mesh = named_mesh(fsdp=2, model=2)

    def annotated(params, x):
        h = constrained_both_ways(x @ params["w"])
        h, _ = lax.scan(lambda c, _: (constrained_both_ways(CONSTRAIN(c, P("fsdp"))), None), h, length=2)
        h = lax.cond(h[0, 0] > 0, lambda h: CONSTRAIN(h, P("model")), jnp.negative, h)
        h = jax.checkpoint(lambda h: jnp.tanh(CONSTRAIN(h, P("fsdp"))))(h)
        return jax.jit(jnp.exp, in_shardings=NamedSharding(mesh, P("fsdp")))(h) @ params["v"]

    def plain(params, x):
        h = jnp.sin(x @ params["w"])
        h = jnp.sin(jnp.sin(h))
        h = lax.cond(h[0, 0] > 0, lambda h: h, jnp.negative, h)
        return jnp.exp(jnp.tanh(h)) @ params["v"]

    params = {"w": W, "v": V}
    with jax.set_mesh(mesh):
        pipeline = pipeline_of(jax.tree_util.Partial(annotated, params), evaluate=lambda m, x: jnp.square(m(x)).mean())
        _, metrics = pipeline.step(pipeline.init(jax.random.key(0)), X)
        loss = pipeline.evaluate(pipeline.init(jax.random.key(0)), X)["loss"]
    expected = sum(jnp.square(plain(params, x)).mean() for x in jnp.split(X, 2)) / 2
    assert relative_l2([metrics["loss"], loss], [expected] * 2) < ORDER
    check_gradients(pipeline, plain, params)


# Models with shard_map: what plain JAX computes on simulated devices.


def gather_and_scatter(x, w):
    whole = lax.all_gather(x, "model", axis=1, tiled=True)
    return lax.psum_scatter(whole @ w[: whole.shape[1]], "model", scatter_dimension=1, tiled=True)


def round_trip(x, w):
    turned = lax.ppermute(x, "fsdp", [(0, 1), (1, 0)])
    swapped = lax.all_to_all(turned, "model", split_axis=0, concat_axis=1, tiled=True)
    return lax.pmean(jnp.sin(swapped), ("fsdp", "model")).sum() * x + lax.axis_index("model") + w.sum()


def in_a_scan(x, w):
    return (
        lax.scan(lambda c, _: (c + lax.psum(jnp.sin(c), "model"), None), lax.pcast(x, "model", to="varying"), length=2)[
            0
        ]
        * w[0, 0]
    )


@jax.custom_vjp
def averaged(x):
    return lax.pmean(x, "model")


averaged.defvjp(lambda x: (averaged(x), x), lambda x, ct: (lax.pmean(ct * jnp.cos(x), "model"),))


SHARDED = {
    "map": (lambda x, w: jnp.sin(x), (P("fsdp", "model"), P()), P("fsdp", "model")),
    "sum": (lambda x, w: lax.psum(x @ w, "model"), (P("fsdp", "model"), P("model")), P("fsdp")),
    "two axes on one dimension": (lambda x, w: jnp.sin(x) @ w, (P(("model", "fsdp")), P()), P(("model", "fsdp"))),
    "gather and scatter": (gather_and_scatter, (P("fsdp", "model"), P(None, "model")), P("fsdp", "model")),
    "round trip": (round_trip, (P("fsdp", "model"), P()), P("fsdp", "model")),
    "scan": (in_a_scan, (P("fsdp"), P()), P("fsdp", "model")),
    "largest": (lambda x, w: x * lax.pmax(lax.stop_gradient(x).max(), "fsdp"), (P("fsdp"), P()), P("fsdp")),
}


@pytest.mark.versions
@pytest.mark.parametrize("check", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_on_one_device_compute_what_they_compute_on_several(name, check):
    body, inputs, output = SHARDED[name]
    x, w = normal(4, 8, 8), normal(5, 8, 8)

    def loss(mapped, x, w):
        return jnp.cos(mapped(x, w)).sum()

    mapped = jax.shard_map(body, mesh=named_mesh(fsdp=2, model=2), in_specs=inputs, out_specs=output, check_vma=check)
    closed, mentioned = sharding_annotations.trace(mapped, x, w)
    assert "shard_map" not in str(closed) and mentioned.mapped == (("fsdp", 2), ("model", 2))

    def local(x, w):
        return jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, x, w)[0]

    expected = jax.jit(jax.value_and_grad(functools.partial(loss, mapped), (0, 1)))(x, w)
    actual = jax.jit(jax.value_and_grad(functools.partial(loss, local), (0, 1)))(x, w)
    assert relative_l2(actual, expected) < ORDER


@pytest.mark.core
def test_a_model_with_shard_map_trains_in_a_pipeline():
    mesh = named_mesh(fsdp=2, model=2)
    mapped = jax.shard_map(
        lambda h, v: lax.psum(jnp.sin(h) @ v, "model"),
        mesh=mesh,
        in_specs=(P("fsdp", "model"), P("model")),
        out_specs=P("fsdp"),
        check_vma=False,
    )

    def model(params, x):
        return mapped(jnp.tanh(x @ params["w"]), params["v"]) @ params["w"]

    params = {"w": W, "v": V}
    pipeline = pipeline_of(jax.tree_util.Partial(model, params))
    assert pipeline.plan.notes == (
        "shard_map over 'fsdp' (2), 'model' (2) runs on each stage's own device, its shards as one vmap",
    )
    check_gradients(pipeline, model, params)


def test_a_shard_map_over_one_device_leaves_every_bit_as_it_is():
    mapped = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "model"), mesh=named_mesh(model=1), in_specs=(P("model"), P()), out_specs=P()
    )
    closed, _ = sharding_annotations.trace(mapped, X, W)
    actual = jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, X, W)
    assert_same_bits(actual, [X @ W])


def test_a_shard_map_that_one_device_cannot_run_is_named():
    groups = [[0], [1]]
    mapped = jax.shard_map(
        lambda h: lax.psum(h, "model", axis_index_groups=groups),
        mesh=named_mesh(model=2),
        in_specs=P("model"),
        out_specs=P("model"),
        check_vma=False,
    )
    with pytest.raises(
        PartitionError, match=r"jax.shard_map over the mesh axes 'model' \(2\).*vmap.*without shard_map"
    ):
        pipeline_of(two_layers(mapped))


def test_a_shard_map_takes_the_mesh_of_its_caller():
    def mapped(h):
        return jax.shard_map(jnp.sin, in_specs=P("fsdp", "model"), out_specs=P("fsdp", "model"))(h)

    with pytest.raises(PartitionError, match=r"shard_map without a mesh.*with jax.set_mesh\(mesh\)"):
        pipeline_of(two_layers(mapped))
    with jax.set_mesh(named_mesh(fsdp=2, model=2)):
        assert pipeline_of(two_layers(mapped)).plan.notes[0].startswith("shard_map over 'fsdp' (2), 'model' (2)")


def explicit_layers(explicit):
    """A model with explicit shardings, or the same without: looked up rows, scanned layers, rules, recomputed parts."""

    def asked(*spec):
        return {"out_sharding": P(*spec)} if explicit else {}

    def resharded(h, *spec):
        return jax.sharding.reshard(h, P(*spec)) if explicit else h

    def layer(h, w):
        h = jax.nn.relu(jnp.matmul(h, w, **asked("dp", "tp")))
        h = jax.checkpoint(lambda h: jnp.tanh(resharded(h, None, "tp")))(h)
        return resharded(h, "dp", None), None

    def model(params, numbers):
        h = params["rows"].at[numbers].get(**asked(None, "tp"))
        h, _ = lax.scan(layer, h, params["w"][:2])
        h, _ = layer(h, params["w"][2])
        return lax.reshape(h, (h.shape[0], 4, 2), **asked("dp", None, "tp"))

    return model


@pytest.mark.core
@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("context", [None, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "kept"])
def test_explicit_shardings_are_of_axes_of_the_stage_or_dropped(kept, context, runtime):
    if kept and runtime == "spmd":
        pytest.skip("one program has no axes within a stage")
    params, numbers = {"rows": normal(6, 20, 8), "w": 0.5 * normal(7, 3, 8, 8)}, jnp.arange(8)
    mesh = named_mesh(AxisType.Explicit, stage=2, **({"tp": 2} if kept else {}))
    inside = contextlib.nullcontext() if context is None else jax.set_mesh(named_mesh(context, dp=2, tp=2))
    with inside:
        pipeline = jaxpipe.partition(
            jax.tree_util.Partial(explicit_layers(True), params),
            mesh,
            numbers,
            loss=lambda model, x: jnp.square(model(x)).mean(),
            optimizer=optax.sgd(0.1),
            num_microbatches=2,
            profile="analytic",
            runtime=runtime,
        )
        dropped = ("sharding constraints over 'dp' are dropped: the mesh has only stage, tp",)
        if not kept:
            dropped = ("sharding constraints over 'dp', 'tp' are dropped: the mesh has only stage",)
        assert pipeline.plan.notes == dropped
        check_gradients(pipeline, explicit_layers(False), params, numbers)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_a_linen_module_may_have_explicit_shardings(runtime):
    class Net(nn.Module):
        explicit: bool = True

        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8)(x)
            h = jax.sharding.reshard(h, P(None, None)) if self.explicit else h
            asked = {"out_sharding": P(None, None)} if self.explicit else {}
            w = self.param("w", nn.initializers.lecun_normal(), (8, 8))
            return jnp.einsum("bi,ij->bj", jax.nn.relu(h), w, **asked)

    def loss(model, x):
        return jnp.square(model(x)).mean()

    x, plain = normal(9, 8, 8), Net(explicit=False)
    variables = plain.init(jax.random.key(0), x)
    options = {"loss": loss, "optimizer": optax.sgd(0.1), "num_microbatches": 2, "profile": "analytic"}
    pipeline = jaxpipe.partition(Net(), named_mesh(stage=2), x, runtime=runtime, **options)
    state = pipeline.init(jax.random.key(0))
    assert_same_bits(*map(jax.tree.leaves, (pipeline.parameters(state), variables["params"])))
    _, gradients = pipeline.value_and_grad(state, x)
    expected = jax.grad(lambda params: loss(lambda x: plain.apply({"params": params}, x), x))(variables["params"])
    assert relative_l2(gradients, expected) < ORDER


@pytest.mark.versions
@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_arrays_on_another_mesh_are_constants(kind, runtime):
    """A table that a model has captured, and a constraint on it that JAX applies at once."""
    mesh = named_mesh(kind, fsdp=2, model=2)
    table = jax.device_put(normal(8, 8), NamedSharding(mesh, P("model")))
    numbers = np.asarray(table)

    def annotated(params, x):
        h = jax.nn.relu(x @ params["w"]) * table
        return jax.device_put(h, NamedSharding(mesh, P("fsdp"))) @ params["v"]

    def plain(params, x):
        return (jax.nn.relu(x @ params["w"]) * numbers) @ params["v"]

    params = {"w": W, "v": V}
    pipeline = pipeline_of(jax.tree_util.Partial(annotated, params), runtime=runtime)
    assert pipeline.plan.notes[0].startswith("sharding constraints over 'fsdp'")
    check_gradients(pipeline, plain, params)


@pytest.mark.parametrize("runtime", ["mpmd", "spmd"])
def test_constraints_to_another_mesh_are_dropped_in_every_runtime(runtime):
    def annotated(params, x):
        sharding = NamedSharding(named_mesh(fsdp=2, model=2), P("fsdp", "model"))
        return jax.nn.relu(CONSTRAIN(jax.nn.relu(x @ params["w"]), sharding)) @ params["v"]

    params = {"w": W, "v": V}
    pipeline = pipeline_of(jax.tree_util.Partial(annotated, params), runtime=runtime)
    assert pipeline.plan.notes == ("sharding constraints over 'fsdp', 'model' are dropped: the mesh has only stage",)
    check_gradients(pipeline, lambda params, x: jax.nn.relu(x @ params["w"]) @ params["v"], params)


def test_a_rule_that_exchanges_between_shards_is_named():
    """JAX has no derivative of such a rule under ``vmap`` either."""
    mapped = jax.shard_map(
        lambda h: averaged(h), mesh=named_mesh(model=2), in_specs=P("model"), out_specs=P("model"), check_vma=False
    )
    with pytest.raises(PartitionError, match=r"rule of .* is called in a jax.shard_map.*Call shard_map in the"):
        pipeline_of(two_layers(mapped))


# Variables with names of axes


class Boxed(nn.Module):
    """Parameters in boxes, and constraints by logical names."""

    partitioned: bool = True

    @nn.compact
    def __call__(self, x):
        start = nn.initializers.lecun_normal()
        first = nn.with_partitioning(start, ("fsdp", "model")) if self.partitioned else start
        second = nn.with_logical_partitioning(start, ("embed", "mlp")) if self.partitioned else start
        h = nn.Dense(8, kernel_init=first)(x)
        h = nn.with_logical_constraint(h, ("batch", "embed")) if self.partitioned else h
        return nn.Dense(4, kernel_init=second)(jnp.tanh(h))


@pytest.mark.parametrize("context", [pytest.param(None, marks=pytest.mark.slow), ("fsdp", "model")], ids=str)
def test_boxed_parameters_are_trained_saved_and_given_back_in_their_boxes(context, tmp_path):
    rules = nn.logical_axis_rules([("batch", "fsdp"), ("embed", "model"), ("mlp", None)])
    inside = contextlib.nullcontext() if context is None else jax.set_mesh(named_mesh(**dict.fromkeys(context, 2)))
    start = Boxed().init(jax.random.key(0), X)
    assert isinstance(start["params"]["Dense_0"]["kernel"], nn.Partitioned)
    with inside, rules:
        pipeline = pipeline_of(Boxed())
        state = pipeline.init(jax.random.key(0))
        assert_same_bits(pipeline.parameters(state), start)
        (_, _), gradients = pipeline.value_and_grad(state, X)
        state, _ = pipeline.step(state, X)
        pipeline.save(state, tmp_path / "checkpoint")
        restored = pipeline.restore(tmp_path / "checkpoint")
        assert_same_bits(pipeline.parameters(restored), pipeline.parameters(state))
    if context is not None:
        assert pipeline.plan.notes == (
            "sharding constraints over 'fsdp', 'model' are dropped: the mesh has only stage",
        )

    @jax.jit
    @jax.grad
    def plain(variables, x):
        return jnp.square(Boxed(partitioned=False).apply(variables, x)).mean()

    parts = [plain(nn.meta.unbox(start), x) for x in jnp.split(X, 2)]
    expected = jax.tree.map(lambda a, b: (a + b) / 2, *parts)["params"]
    assert relative_l2(jax.tree.leaves(gradients), jax.tree.leaves(expected)) < ORDER
    after = optax.apply_updates(nn.meta.unbox(start)["params"], jax.tree.map(lambda g: -0.1 * g, expected))
    assert relative_l2(jax.tree.leaves(pipeline.parameters(state)), jax.tree.leaves(after)) < ORDER


class Sharded(nnx.Module):
    def __init__(self, rngs, annotated=True):
        start = nnx.initializers.lecun_normal()
        init = nnx.with_partitioning(start, ("fsdp", "model")) if annotated else start
        self.first = nnx.Linear(4, 8, kernel_init=init, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.versions
@pytest.mark.parametrize("form", ["class", "module"])
def test_nnx_variables_with_axes_are_trained(form):
    """Flax makes annotated variables in the context of a mesh only; a pipeline makes them from the class without."""
    model = Sharded
    if form == "module":
        with jax.set_mesh(named_mesh(fsdp=2, model=2)):
            model = Sharded(nnx.Rngs(0))
    pipeline = pipeline_of(model)
    state = pipeline.init(jax.random.key(0))
    plain = Sharded(nnx.Rngs(jax.random.key(0) if form == "class" else 0), annotated=False)
    graphdef, params = nnx.split(plain)
    assert_same_bits(*(jax.tree.leaves(tree) for tree in (pipeline.parameters(state), params)))
    check_gradients(pipeline, lambda params, x: nnx.merge(graphdef, params)(x), params)


# Outside pipelines


@pytest.mark.core
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_encoded_modules_keep_their_constraints(kind):
    mesh = named_mesh(kind, data=2, model=2)

    def layer(w, x):
        h = jnp.tanh(x @ w)
        if kind == AxisType.Auto:
            h = CONSTRAIN(h, P("data", "model"))
        else:
            h = jax.sharding.reshard(h, P("data", "model"))
        return jax.nn.relu(h)

    def run(function):
        with jax.set_mesh(mesh):
            placed = jax.device_put((W, X), (NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))))
            step = jax.jit(jax.value_and_grad(lambda w, x: (result := function(w, x)).sum() + 0 * result.size))
            return (
                jax.jit(function)(*placed).sharding,
                step(*placed),
                str(jax.make_jaxpr(jax.grad(lambda w, x: function(w, x).sum()))(*placed)),
            )

    (where, expected, _), (encoded_where, actual, text) = run(layer), run(memory_encoded(layer))
    assert encoded_where == where
    assert relative_l2(actual, expected) < ORDER
    assert "sharding_constraint" in text or "reshard" in text
