import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxpipe import memory_encoded
from tests.support.compare import assert_same_bits


class Block(nn.Module):
    """Uses setup, a shared submodule, a static keyword and a second public method."""

    features: int = 4

    def setup(self):
        self.inner = nn.Dense(self.features)
        self.norm = nn.BatchNorm(momentum=0.5)

    def __call__(self, x, *, train=True, scale: str = "one"):
        x = nn.relu(self.inner(x)) + self.inner(jnp.cos(x))
        return self.norm(x * (2 if scale == "two" else 1), use_running_average=not train)

    def project(self, x):
        return self.inner(nn.relu(self.inner(x)))


class Outer(nn.Module):
    """Automatic names: the decorated class must keep them."""

    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = self.block()(x)
        self.sow("intermediates", "last", x)
        return nn.Dropout(0.5, deterministic=False)(x)


ENCODED = memory_encoded(Block)
X = jax.random.normal(jax.random.key(0), (3, 4))
KEYS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}


def gradients(function, variables):
    """Gradients and auxiliary output, operator by operator."""
    params = variables["params"]
    rest = {k: v for k, v in variables.items() if k != "params"}
    with jax.disable_jit():
        return jax.grad(lambda p: function({"params": p, **rest}), has_aux=True)(params)


@pytest.mark.core
def test_initialization_is_that_of_the_plain_model():
    assert_same_bits(ENCODED().init(KEYS, X), Block().init(KEYS, X))
    plain, encoded = Outer(Block).init(KEYS, X), Outer(ENCODED).init(KEYS, X)
    assert list(plain["params"]) == ["Block_0", "Block_1"]
    assert_same_bits(encoded, plain)


def test_name_fields_and_documentation_are_kept():
    assert (ENCODED.__name__, ENCODED.__qualname__, ENCODED.__doc__) == ("Block", "Block", Block.__doc__)
    assert repr(ENCODED(features=7)) == repr(Block(features=7))
    assert isinstance(ENCODED(), Block)


@pytest.mark.core
@pytest.mark.parametrize("keywords", [{}, {"train": False}, {"scale": "two"}])
def test_setup_state_and_static_keywords(keywords):
    variables = Block().init(KEYS, X)

    def run(cls):
        def loss(v):
            y, state = cls().apply(v, X, mutable=["batch_stats"], **keywords)
            return (y**3).sum(), state

        return gradients(loss, variables)

    assert_same_bits(run(ENCODED), run(Block))


@pytest.mark.core
def test_another_method():
    variables = Block().init(KEYS, X)

    def run(cls, method):
        return gradients(lambda v: ((cls().apply(v, X, method=method) ** 2).sum(), ()), variables)

    for method in ("project", Block.project):
        assert_same_bits(run(ENCODED, method), run(Block, method))
    jaxpr = str(jax.make_jaxpr(lambda v: ENCODED().apply(v, X, method="project"))(variables))
    assert jaxpr.count("custom_vjp_call") == 1


@pytest.mark.core
def test_dropout_sown_values_and_nested_decoration():
    variables = {
        "params": Outer(Block).init(KEYS, X)["params"],
        "batch_stats": Outer(Block).init(KEYS, X)["batch_stats"],
    }

    def run(outer, block):
        def loss(v):
            y, state = outer(block).apply(
                v, X, mutable=["batch_stats", "intermediates"], rngs={"dropout": KEYS["dropout"]}
            )
            return (y**2).sum(), state

        return gradients(loss, variables)

    expected = run(Outer, Block)
    assert "intermediates" in expected[1]
    assert_same_bits(run(Outer, ENCODED), expected)
    assert_same_bits(run(memory_encoded(Outer), ENCODED), expected)


def test_an_immutable_call_returns_no_state():
    variables = Block().init(KEYS, X)
    assert ENCODED().apply(variables, X, train=False).shape == (3, 4)


def test_a_decorated_method():
    class Net(nn.Module):
        @memory_encoded
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(4)(x))

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(4)(x))

    variables = Plain().init(KEYS, X)
    assert_same_bits(Net().init(KEYS, X), variables)
    runs = [gradients(lambda v, net=net: (net().apply(v, X).sum(), ()), variables) for net in (Net, Plain)]
    assert_same_bits(*runs)
    assert "custom_vjp_call" in str(jax.make_jaxpr(lambda v: Net().apply(v, X))(variables))


def test_a_scan_over_decorated_layers():
    class Layers(nn.Module):
        layer: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0, "batch_stats": 0},
                split_rngs={"params": True},
                length=3,
            )
            return scan(self.layer(), x, None)[0]

    variables = Layers(Block).init(KEYS, X)

    def run(block):
        return gradients(lambda v: ((Layers(block).apply(v, X, mutable=["batch_stats"])[0] ** 2).sum(), ()), variables)

    assert_same_bits(run(ENCODED), run(Block))
