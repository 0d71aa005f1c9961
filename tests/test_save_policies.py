"""Save policies as ``jax.checkpoint`` takes them: what they save is stored, all else may be computed again.

JAX's own ``jax.checkpoint`` of the same function is the oracle for bytes and products.
"""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import Offloadable, Recompute, Saveable, checkpoint_name

import jaxpipe
from jaxpipe import CodecWarning, MemoryBudgetError, ModelError, memory_encoded, residual_report
from jaxpipe.costs.count_products import count_products
from tests.support.compare import FUSION, assert_same_bits, relative_l2
from tests.support.meshes import mesh_of


pytestmark = pytest.mark.optimized


POLICIES = jax.checkpoint_policies
NAMED = {
    "everything": POLICIES.everything_saveable,
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_saveable,
    "dots without batch": POLICIES.dots_with_no_batch_dims_saveable,
    "only these names": POLICIES.save_only_these_names("first", "up"),
    "any names but these": POLICIES.save_any_names_but_these("first"),
    "anything except these names": POLICIES.save_anything_except_these_names("first"),
    "both": POLICIES.save_from_both_policies(POLICIES.save_only_these_names("up"), POLICIES.dots_saveable),
    "marks": lambda prim, *_, **__: Saveable if prim.name in ("tanh", "dot_general") else Recompute,
}
KEY = jax.random.key(0)


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("first", "up", "third"):
            x = jnp.tanh(checkpoint_name(nn.Dense(32)(x), name))
        return (nn.Dense(4)(nn.relu(x)) ** 2).mean()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + checkpoint_name(nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x)), "first")
        return x + nn.Dense(32)(checkpoint_name(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))), "up"))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return (Block()(Block()(x)) ** 2).mean()


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = checkpoint_name(nn.Conv(8, (3, 3))(x), "first")
        x = nn.max_pool(nn.relu(nn.BatchNorm(use_running_average=False)(x)), (2, 2), (2, 2))
        x = checkpoint_name(nn.relu(nn.Conv(16, (3, 3))(x)), "up")
        return (nn.Dense(5)(x.mean((1, 2))) ** 2).mean()


MODELS = {
    "perceptron": (Perceptron, (64, 32)),
    "transformer": (Transformer, (4, 16, 32)),
    "cnn": (CNN, (8, 16, 16, 3)),
}


def loss_of(cls, x):
    """``loss(params, x)`` of a model, and its arguments."""
    variables = cls().init(KEY, x)
    params = variables.pop("params")

    def loss(params, x):
        return cls().apply({"params": params, **variables}, x, mutable=list(variables))[0]

    return loss, (params, x)


def products(function, *args):
    return count_products(jax.make_jaxpr(jax.grad(function, range(len(args))))(*args).jaxpr)[0]


def bytes_by_jax(function, *args):
    """Bytes of what JAX keeps of a function beside its arguments."""
    kept = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(function, *args)[1]))(*args).jaxpr
    computed = {v for v in kept.outvars if v not in kept.invars and not hasattr(v, "val")}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in computed)


#: What is compiled before each change beside a perceptron with every policy: policies that differ in other models.
OTHERS = [("dots without batch", "transformer"), ("marks", "cnn")]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=[pytest.mark.slow] * (model != "perceptron" and (name, model) not in OTHERS))
        for name, model in itertools.product(NAMED, MODELS)
    ],
)
def test_gradients_bytes_and_products(model, name):
    cls, shape = MODELS[model]
    loss, args = loss_of(cls, jax.random.normal(jax.random.key(1), shape))
    ours, by_jax = memory_encoded(loss, policy=NAMED[name]), jax.checkpoint(loss, policy=NAMED[name])
    with jax.disable_jit():  # operator by operator: XLA fuses neither
        assert_same_bits(jax.grad(ours)(*args), jax.grad(loss)(*args))
    assert residual_report(ours, *args).total_bytes <= bytes_by_jax(by_jax, *args)
    assert products(ours, *args) <= products(by_jax, *args)


@pytest.mark.core
@pytest.mark.parametrize("name", ["nothing", "dots", "only these names"])
def test_a_decorated_class_in_a_compiled_step(name):
    loss, args = loss_of(Perceptron, jax.random.normal(jax.random.key(1), (64, 32)))
    encoded, _ = loss_of(memory_encoded(Perceptron, policy=NAMED[name]), args[1])
    assert relative_l2(jax.jit(jax.grad(encoded))(*args), jax.jit(jax.grad(loss))(*args)) <= FUSION
    assert products(encoded, *args) == products(jax.checkpoint(loss, policy=NAMED[name]), *args)


def test_what_is_saved_is_told_by_its_name():
    loss, args = loss_of(Perceptron, jnp.ones((64, 32)))
    report = residual_report(memory_encoded(loss, policy=POLICIES.save_only_these_names("first", "third")), *args)
    # tanh of a name follows from it; where it takes as many bytes it may be stored in its place
    assert [row.bytes for row in report.tensors] == [64 * 32 * 4] * 2

    def squares(w, x):
        y = checkpoint_name(x @ w, "mine")
        return (jnp.sin(y) * jnp.exp(y)).sum()

    report = residual_report(
        memory_encoded(squares, policy=POLICIES.save_only_these_names("mine")), *2 * [args[1][:32]]
    )
    assert [row.producer for row in report.tensors] == ["mine"]


def test_a_function_of_one_s_own_decides_by_operands_and_parameters():
    def wide(primitive, *operands, **parameters):
        assert {"dimension_numbers", "preferred_element_type"} <= set(parameters) or primitive.name != "dot_general"
        return primitive.name == "dot_general" and operands[0].shape[1] == 16

    def function(v, w, x):
        return jnp.sin(jnp.sin(x @ v) @ w).sum()

    args = jnp.ones((8, 16)), jnp.ones((16, 8)), jnp.ones((4, 8))
    encoded, by_jax = memory_encoded(function, policy=wide), jax.checkpoint(function, policy=wide)
    assert products(encoded, *args) == products(by_jax, *args) == products(function, *args) + 1
    assert residual_report(encoded, *args).total_bytes == bytes_by_jax(by_jax, *args) == 4 * 8 * 4


def test_a_decoration_inside_keeps_its_own_policy():
    w, x = jnp.ones((16, 16)), jnp.ones((4, 16))
    inner = memory_encoded(lambda w, x: jnp.sin(x @ w), policy=POLICIES.everything_saveable)
    outer = memory_encoded(lambda w, x: jnp.sin(inner(w, jnp.sin(x @ w)) @ w).sum(), policy=POLICIES.nothing_saveable)
    plain = lambda w, x: jnp.sin(jnp.sin(jnp.sin(x @ w) @ w) @ w).sum()  # noqa: E731
    assert_same_bits(jax.grad(outer)(w, x), jax.grad(plain)(w, x))
    assert products(outer, w, x) == products(plain, w, x) + 2  # the first and the last one


def test_codecs_say_how_what_is_saved_is_stored():
    function = memory_encoded(lambda w, x: (jax.nn.relu(x @ w) ** 3).sum(), policy=POLICIES.everything_saveable)
    assert {"keep", "mask"} == {t.storage for t in residual_report(function, *2 * [jnp.ones((32, 32))]).tensors}
    unpacked = memory_encoded(function.__wrapped__, codecs=(), policy=POLICIES.everything_saveable)
    assert {t.storage for t in residual_report(unpacked, *2 * [jnp.ones((32, 32))]).tensors} == {"keep"}


def layer(w, x):
    return jnp.tanh(checkpoint_name(x @ w, "first"))


@pytest.mark.parametrize("name", ["nothing", "dots", "only these names"])
def test_under_other_transformations(name):
    weights, x = jax.random.normal(KEY, (3, 16, 16)), jax.random.normal(KEY, (8, 16))
    encoded = memory_encoded(layer, policy=NAMED[name])

    def scanned(layer):
        return lambda ws, x: jnp.sin(jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0]).sum()

    def mapped(layer):
        return lambda ws, x: jax.vmap(layer, (0, None))(ws, x).sum()

    for transformed in (scanned, mapped):
        assert_same_bits(jax.grad(transformed(encoded))(weights, x), jax.grad(transformed(layer))(weights, x))
    # A loop inside: its iterations store what the policy saves.
    whole, by_jax = (
        memory_encoded(scanned(layer), policy=NAMED[name]),
        jax.checkpoint(scanned(layer), policy=NAMED[name]),
    )
    assert_same_bits(jax.grad(whole)(weights, x), jax.grad(scanned(layer))(weights, x))
    assert products(whole, weights, x) <= products(by_jax, weights, x)
    # The result of a loop that saves something is stored besides.
    assert residual_report(whole, weights, x).total_bytes <= bytes_by_jax(by_jax, weights, x) + x.nbytes


def test_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(checkpoint_name(self.first(x), "first")))

    def loss(model, x):
        return model(x).sum()

    x = jnp.ones((8, 16))
    net, encoded = (cls(nnx.Rngs(0)) for cls in (Net, memory_encoded(Net, policy=NAMED["nothing"])))
    assert_same_bits(*(nnx.to_pure_dict(nnx.grad(loss)(model, x)) for model in (encoded, net)))
    counts = [products(lambda x, model=model: loss(model, x), x) for model in (encoded, net)]
    assert counts[0] == counts[1] + 1


def deep(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x.sum()


DEEP = [jnp.eye(16)] * 12, jnp.ones((4096, 16))


def test_a_budget_runs_nothing_again_that_a_policy_saves():
    least = {}
    for name in ("nothing", "dots"):
        step = jax.grad(memory_encoded(deep, policy=NAMED[name]))
        with pytest.raises(MemoryBudgetError) as refused:
            jaxpipe.jit(step, memory=1000)(*DEEP)
        assert ("a save policy (policy=) saves is never computed again" in str(refused.value)) == (name == "dots")
        least[name] = refused.value.smallest
        plan = jaxpipe.jit(step, memory=least[name]).lower(*DEEP).plan
        assert (plan.products == plan.plain_products) == (name == "dots")
    assert least["nothing"] < least["dots"]


def test_a_stage_of_a_pipeline_keeps_the_policy_of_a_module_in_it():
    x = jnp.ones((64, 32))

    def refusal(policy):
        options = {"loss": lambda model, x: model(x), "optimizer": optax.sgd(0.1), "profile": "analytic"}
        net = memory_encoded(Perceptron, policy=policy)()
        with pytest.raises(MemoryBudgetError) as refused:
            jaxpipe.partition(net, mesh_of(1), x, memory=1000, **options)
        return refused.value

    assert "save policy" not in str(refusal(POLICIES.nothing_saveable))
    assert "save policy" in str(refusal(POLICIES.dots_saveable))


def test_what_is_offloaded_stays_on_the_device():
    def offload(primitive, *_, **__):
        return Offloadable("device", "pinned_host") if primitive.name == "dot_general" else Recompute

    w, x = jnp.ones((16, 16)), jnp.ones((4, 16))
    with pytest.warns(CodecWarning, match="offloads what dot_general computes to pinned_host; .* on the device"):
        report = residual_report(memory_encoded(lambda w, x: jnp.sin(x @ w).sum(), policy=offload), w, x)
    assert report.total_bytes == 4 * 16 * 4


@pytest.mark.parametrize("policy", ["dots_saveable", True, {"first"}])
def test_a_policy_is_a_function(policy):
    with pytest.raises(ModelError, match=r"policy=.*a function of a primitive.*jax\.checkpoint_policies"):
        memory_encoded(Perceptron, policy=policy)


@pytest.mark.parametrize("policy", [POLICIES.save_only_these_names, lambda *_, **__: None, lambda *_, **__: "save"])
def test_a_policy_returns_a_boolean_or_a_mark(policy):
    encoded = memory_encoded(lambda x: jnp.sin(x).sum(), policy=policy)
    with pytest.raises(ModelError, match=r"policy= returned .* for sin: .* True or False, or Saveable"):
        jax.grad(encoded)(jnp.ones(3))
