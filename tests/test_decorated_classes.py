"""A decorated class is the class that it was: its ``__init__``, fields, hooks, pickles, names and relatives."""

import copy
import dataclasses
import functools
import inspect
import pickle
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpipe import memory_encoded
from tests.support.compare import assert_same_bits


X = jax.random.normal(jax.random.key(0), (3, 4))
KEY = jax.random.key(1)

#: Every class whose base has seen it, by tag.
REGISTRY: dict[str, list[type]] = {}


class Configured:
    """Keeps the arguments of its ``__init__``, as diffusers' models do."""

    config_name = "config.json"

    @property
    def config(self):
        return dict(self._config)


def register_to_config(cls):
    """Records what a Linen module was made with before its own ``__init__`` runs, and marks the class."""
    original = cls.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        fields = [f for f in dataclasses.fields(self) if f.name not in ("parent", "name")]
        given = {**{f.name: getattr(self, f.name, None) for f in fields}, **kwargs}
        given.update((f.name, value) for f, value in zip(fields, args, strict=False))
        self._config = given
        original(self, *args, **kwargs)

    cls.__init__ = init
    cls.is_registered = True
    return cls


class Base(nn.Module):
    """Registers its subclasses, under a name that each has to give."""

    width: int = 4

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.setdefault(tag, []).append(cls)

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)

    def describe(self):
        return "base"


class Methods:
    """Methods of other kinds, for both networks below."""

    @classmethod
    def small(cls):
        return cls(width=2)

    @staticmethod
    def three():
        return 3

    @property
    def area(self):
        return self.width * self.depth

    @nn.nowrap
    def helper(self):
        return {"anything": object}


class Plain(Base, Configured, Methods, tag="plain"):
    """A network."""

    depth: int = 2
    kind: typing.ClassVar[str] = "network"

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return super().__call__(x)

    describe = staticmethod(lambda: "plain")


# The same class statement again, decorated: pickle needs the name.
@memory_encoded
@register_to_config
class Network(Base, Configured, Methods, tag="network"):
    """A network."""

    depth: int = 2
    kind: typing.ClassVar[str] = "network"

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return super().__call__(x)

    describe = staticmethod(lambda: "plain")


@register_to_config
@memory_encoded
class Outside(Base, Configured, tag="outside"):
    """Decorated the other way round."""

    depth: int = 2

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(self.width)(x))


def encodings(model, *args):
    """Return the number of encoded parts of a program."""
    return str(jax.make_jaxpr(model)(*args)).count("custom_vjp_call")


@pytest.mark.parametrize("cls", [Network, Outside])
def test_a_registered_config_is_recorded_whichever_decorator_is_outside(cls):
    model = cls(8, depth=3)
    assert model.config == {"width": 8, "depth": 3}
    assert cls().config == {"width": 4, "depth": 2}
    assert model.clone(depth=1).config["depth"] == 1
    assert cls.is_registered and cls.config_name == "config.json"
    variables = model.init(KEY, X)
    assert encodings(lambda v: model.apply(v, X), variables) == 1


def test_gradients_of_a_class_with_an_init_of_its_own_are_those_of_the_plain_one():
    variables = Plain(4).init(KEY, X)
    assert_same_bits(Network(4).init(KEY, X), variables)

    def gradient(cls):
        with jax.disable_jit():
            return jax.grad(lambda v: (cls(4).apply(v, X) ** 2).sum())(variables)

    assert_same_bits(gradient(Network), gradient(Plain))


def test_names_fields_annotations_and_signature_are_kept():
    assert (Network.__name__, Network.__qualname__, Network.__module__) == ("Network", "Network", __name__)
    assert Network.__doc__ == "A network." and Network.kind == "network"
    assert [f.name for f in dataclasses.fields(Network)] == ["width", "depth", "parent", "name"]
    assert Network.__annotations__ == Plain.__annotations__
    assert typing.get_type_hints(Network) == typing.get_type_hints(Plain)
    names = list(inspect.signature(Network).parameters)
    assert names == list(inspect.signature(Plain).parameters) == ["width", "depth", "parent", "name"]
    assert repr(Network(8)) == repr(Plain(8)).replace("Plain", "Network")
    assert Network(8) == Network(8) != Network(9) and hash(Network(8)) == hash(Network(8))


def test_class_methods_properties_static_and_unwrapped_methods_are_kept():
    model = Network.small()
    assert type(model) is Network and model.area == 4 and Network.three() == 3
    assert model.describe() == "plain"  # which hides a method of the base
    assert model.helper() == {"anything": object}
    bound = model.bind(model.init(KEY, X))
    assert bound.helper() == {"anything": object}


def test_hooks_run_once_and_with_what_the_class_statement_gave_them():
    assert [cls.__name__ for cls in REGISTRY["network"]] == ["Network"]
    before = len(REGISTRY["plain"])
    encoded = memory_encoded(Plain)
    assert len(REGISTRY["plain"]) == before

    class Later(encoded, tag="later"):
        extra: int = 5

    assert REGISTRY["later"] == [Later]
    assert list(inspect.signature(Later).parameters) == ["width", "depth", "extra", "parent", "name"]
    assert Later(3, 2, 1).extra == 1


def test_relatives_are_kept():
    encoded = memory_encoded(Plain)
    assert encoded is not Plain and issubclass(encoded, Plain) and encoded.__bases__ == (Plain,)
    assert isinstance(encoded(), Plain) and isinstance(encoded(), Configured)
    twice = memory_encoded(encoded)
    assert issubclass(twice, encoded)
    variables = Plain().init(KEY, X)
    assert_same_bits(twice().apply(variables, X), Plain().apply(variables, X))


def test_instances_and_classes_are_pickled_by_name():
    model = Network(8, depth=1)
    assert pickle.loads(pickle.dumps(Network)) is Network
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is Network and loaded == model and loaded.config == model.config
    assert copy.deepcopy(model) == model


def test_a_compact_name_scope_is_kept():
    class Scoped(nn.Module):
        @nn.compact_name_scope
        def up(self, x):
            return nn.relu(nn.Dense(4)(x))

        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(self.up(x))

    encoded = memory_encoded(Scoped)
    variables = Scoped().init(KEY, X)
    assert "up" in variables["params"]
    assert_same_bits(encoded().init(KEY, X), variables)
    assert_same_bits(encoded().apply(variables, X), Scoped().apply(variables, X))


def test_a_linen_class_with_an_abstract_base_and_type_parameters():
    T = typing.TypeVar("T")

    class Generic(nn.Module, typing.Generic[T]):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(4)(x))

    encoded = memory_encoded(Generic)
    assert encoded.__parameters__ == (T,) and encoded[int]().init(KEY, X)


class Registered(nnx.Module):
    """Registers its subclasses, under a name that each has to give."""

    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTRY.setdefault(tag, []).append(cls)


@memory_encoded
class Linear(Registered, tag="linear"):
    """A layer."""

    size: int

    def __init__(self, size, *, rngs):
        super().__init__()
        self.size = size
        self.layer = nnx.Linear(size, size, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.layer(x))


def gradient_of(module):
    return nnx.grad(lambda m: (m(X) ** 2).sum())(module)


def test_an_nnx_class_keeps_its_hooks_names_and_pickles():
    assert [cls.__name__ for cls in REGISTRY["linear"]] == ["Linear"]
    module = Linear(4, rngs=nnx.Rngs(0))
    assert (Linear.__doc__, Linear.__annotations__) == ("A layer.", {"size": int})
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded) is Linear
    assert_same_bits(gradient_of(loaded), gradient_of(module))
    graph, state = nnx.split(module)
    assert encodings(lambda s: nnx.merge(graph, s)(X), state) == 1


def test_an_nnx_class_that_is_no_pytree_stays_none():
    @memory_encoded
    class Opaque(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.layer(x))

    module = Opaque(nnx.Rngs(0))
    assert jax.tree.leaves(module) == [module]
    assert gradient_of(module)


@pytest.mark.parametrize("outside", [False, True])
def test_an_nnx_dataclass_is_one_whichever_decorator_is_outside(outside):
    class Affine(nnx.Module):
        w: nnx.Param
        times: int = nnx.static(default=3)

        def __call__(self, x):
            return nnx.relu(x @ self.w[...]) * self.times

    cls = nnx.dataclass(memory_encoded(Affine)) if outside else memory_encoded(nnx.dataclass(Affine))
    assert [f.name for f in dataclasses.fields(cls)] == ["w", "times"]
    module = cls(nnx.Param(jnp.eye(4)))
    assert_same_bits(module(X), 3 * jax.nn.relu(X))
    graph, state = nnx.split(module)
    assert encodings(lambda s: nnx.merge(graph, s)(X), state) == 1
