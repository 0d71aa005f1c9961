"""Budgets with room to spare: on a GPU a stage runs fewer products again than with default storage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpipe
from tests.support.targets import planning_as_for_gpus


LAYERS, WIDTH, ROWS = 4, 64, 256


def net(weights, x):
    """Products by wide weights, whose results a GPU makes again by default, and by narrow ones."""
    for up, down in weights:
        x = x + jnp.tanh(jnp.tanh(x @ up) @ down)
    return x


@pytest.fixture
def plan():
    """``memory -> plan`` as it is made for a GPU."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [(jax.random.normal(k, (WIDTH, 4 * WIDTH)), jax.random.normal(k, (4 * WIDTH, WIDTH))) for k in keys]

    def make(memory, **options):
        return jaxpipe.partition(
            jax.tree_util.Partial(net, weights),
            Mesh(np.array(jax.devices()[:1]), ("stage",)),
            jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
            loss=lambda f, x: jnp.square(f(x)).mean(),
            optimizer=optax.sgd(0.1),
            num_microbatches=1,
            profile="analytic",
            memory=memory,
            options=jaxpipe.PlanOptions(compile=False),
            **options,
        ).plan

    with planning_as_for_gpus():
        yield make


def products_again(plan):
    return sum("dot_general" in name for stage in plan.stages for name in stage.recomputed)


def test_an_ample_budget_runs_no_product_again(plan):
    default, ample = plan(None), plan("1GiB")
    assert products_again(default) > 0
    assert products_again(ample) == 0
    assert ample.predicted_bytes > default.predicted_bytes
    assert ample.step_seconds < default.step_seconds


def test_a_budget_between_runs_some_products_again(plan):
    default, ample = plan(None), plan("1GiB")
    between = plan((default.predicted_bytes + ample.predicted_bytes) // 2)
    assert between.predicted_bytes <= (default.predicted_bytes + ample.predicted_bytes) // 2
    assert 0 <= products_again(ample) < products_again(between) <= products_again(default)


def test_what_default_storage_needs_is_a_budget_that_it_keeps(plan):
    default = plan(None)
    assert plan(default.predicted_bytes).predicted_bytes <= default.predicted_bytes


def test_the_plan_says_how_its_storage_was_chosen(plan):
    assert "% time (default, but fewer products again)" in str(plan("1GiB"))


def test_less_memory_never_means_fewer_products_again(plan):
    default, ample = (plan(memory).predicted_bytes for memory in (None, "1GiB"))
    budgets = np.linspace(default, ample, 7).astype(int).tolist()
    plans = [plan(budget) for budget in budgets]
    assert all(p.predicted_bytes <= budget for p, budget in zip(plans, budgets, strict=True))
    again = [products_again(p) for p in plans]
    assert again == sorted(again, reverse=True) and len(set(again)) > 2
    seconds = [p.step_seconds for p in plans]
    assert seconds == sorted(seconds, reverse=True)


def test_storing_values_that_take_longer_to_store_is_not_chosen(plan):
    """With sparse codecs, storing more may be slower than running products again."""
    default, ample = plan(None, storage="smallest"), plan("1GiB", storage="smallest")
    assert ample.step_seconds <= default.step_seconds
