"""Modules of published programs: imported from a folder, with lines written into them in memory alone."""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpipe.costs.count_products import count_products
from scripts.bench_published import edits_of, verdicts
from scripts.published_sources import ABOVE, BELOW, CALL, Edit, Sources, edited, linen_remat, nnx_remat


LINEN = """
from __future__ import annotations

from clu import metric_writers
import flax.linen as nn


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(self.width)(x))


class Net(nn.Module):

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = Block(16)(x)
        return x
"""


class Tanh(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, *, train):
        return jnp.tanh(self.linear(x)) if train else x


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "published_net.py").write_text(LINEN)
    yield tmp_path
    (tmp_path / "empty").mkdir()
    Sources(tmp_path / "empty")


def products_of(net):
    x = jnp.ones((2, 16))
    params = net.init(jax.random.key(0), x)
    return count_products(jax.make_jaxpr(jax.grad(lambda p: net.apply(p, x).sum()))(params).jaxpr)[0]


def test_a_module_is_imported_as_it_is_and_forgotten_with_the_next_folder(folder):
    net = Sources(folder)("published_net")
    assert products_of(net.Net()) == 4 + 4 + 3  # forward, by weights, by activations but the first
    assert (folder / "published_net.py").read_text() == LINEN and not list(folder.glob("__pycache__"))
    assert Sources(folder)("published_net") is not net
    assert "clu" not in sys.modules or sys.modules["clu"].__name__ == "clu"


def test_lines_are_written_into_a_module(folder):
    every = Sources(folder, [Edit("Block", BELOW, "Block = nn.remat(Block)")])("published_net")
    second = Sources(folder, [Edit("Block", BELOW, "Block = linen_remat(Block, None, 2)")])("published_net")
    decorated = Sources(folder, [Edit("Net", ABOVE, "@jaxpipe.memory_encoded")])("published_net")
    assert products_of(every.Net()) - products_of(second.Net()) == products_of(second.Net()) - 11 == 2
    assert products_of(decorated.Net()) == 11 and (folder / "published_net.py").read_text() == LINEN


def test_a_line_goes_above_the_call():
    text = edited(LINEN, Edit("Block", CALL, "@f"))
    assert "    width: int\n\n    @f\n    @nn.compact\n    def __call__" in text
    assert edited(LINEN, Edit("Other", CALL, "@f")) == LINEN


def test_modules_of_nnx_take_keywords_under_remat():
    x = jnp.ones((2, 8))
    jaxprs = []
    for cls in (Tanh, nnx_remat(Tanh)):
        model = cls(nnx.Rngs(0))
        jaxprs.append(jax.make_jaxpr(nnx.grad(lambda m: m(x, train=True).sum()))(model))
    assert "remat" not in str(jaxprs[0]) and "remat" in str(jaxprs[1])


def test_parameters_keep_their_names():
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    assert linen_remat(Dense).__name__ == "Dense"


def test_lines_of_measures_say_where_they_go():
    assert edits_of("@jaxpipe.memory_encoded  # above class A, class B") == [
        Edit("A", ABOVE, "@jaxpipe.memory_encoded"),
        Edit("B", ABOVE, "@jaxpipe.memory_encoded"),
    ]
    assert [edit.place for edit in edits_of("@nnx.remat  # above A.__call__")] == [CALL]
    assert edits_of("step = jaxpipe.jit(step, memory=3)  # with the model decorated") == []


def test_a_checkpoint_that_runs_fewer_products_within_a_budget_is_named():
    plan = {"share": 0.6, "budget_bytes": 60, "products": 12, "kept": True, "as_stated": True}
    more = {"share": 0.8, "budget_bytes": 80, "products": 13, "kept": True, "as_stated": True}
    variants = [{"variant": "a", "bytes": 60, "products": 11}, {"variant": "b", "bytes": 61, "products": 11}]
    found = verdicts([plan, more], variants)
    assert found["beaten_by"] == {"60%": ["a"], "80%": ["a", "b"]} and not found["monotone"]
