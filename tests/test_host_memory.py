"""Host memory for stashes: the argument, refusals, and devices and links without it."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import MemoryBudgetError, Network, PartitionError, Plan
from jaxpipe.plan import HostPlan
from jaxpipe.planning.check_request import Request
from jaxpipe.planning.storage.choose_swaps import Links, SwapLink
from jaxpipe.schedules.swap_points import HOST
from tests.support.texts import one_line


def fake_mesh(*kinds):
    device = SimpleNamespace(
        device_kind="abacus", addressable_memories=lambda: [SimpleNamespace(kind=k) for k in kinds]
    )
    return SimpleNamespace(devices=np.array([device]))


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ("64GiB", {}, PartitionError, r"host_memory='64GiB' without memory=.*Pass memory= too"),
        (
            "1KiB",
            {"devices_per_stage": 2},
            PartitionError,
            r"host_memory='1KiB' with devices_per_stage=\(2, 2\): .*Leave out one",
        ),
        (
            "1KiB",
            {"devices_per_stage": (3, 1)},
            PartitionError,
            r"host_memory='1KiB' with devices_per_stage=\(3, 1\): .*Leave out one",
        ),
        ("much", {}, MemoryBudgetError, "host_memory='much' is not a size"),
        (0, {}, MemoryBudgetError, "host_memory=0 is not a size"),
    ],
)
def test_misuse_is_refused_before_anything_is_traced(given, options, error, message):
    def loss(f, x):
        raise AssertionError("traced")

    mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4])
    arguments = {"memory": None if given == "64GiB" else 2**30, "loss": loss, "optimizer": optax.sgd(1)}
    arguments["options"] = jaxpipe.PlanOptions(host_memory=given, **options)
    with pytest.raises(error, match=message):
        jaxpipe.partition(lambda v, x: x, mesh, np.ones((4, 3)), **arguments)


def host_of(given, *kinds, devices_per_stage=False):
    options = jaxpipe.PlanOptions(host_memory=given)
    arguments = {"model": None, "loss": None, "optimizer": None, "memory": "8B", "devices_per_stage": devices_per_stage}
    return Request(mesh=fake_mesh(*kinds), options=options, **arguments).host


def test_devices_need_memory_of_a_kind():
    assert host_of(None, "device") is None
    for kinds in (("device", "pinned_host"), ()):  # those of devices that are not here are not known
        assert host_of("1KiB", *kinds) == HostPlan(1024, 0)
    reason = "abacus has memory of the kinds device, unpinned_host, and none is pinned_host"
    assert host_of("5B", "device", "unpinned_host") == HostPlan(5, 0, reason)
    assert host_of("5B", "pinned_host", devices_per_stage=True) == HostPlan(5, 0)  # stages may have one device each


def test_a_link_is_that_of_the_slowest_replica():
    rates, delays = (8e9, 2e9, 4e9, 4e9), (1e-6, 2e-6, 0, 5e-6)
    between = np.full((4, 4), 4096.0)
    between[0, 3] = between[3, 0] = 512.0
    network = Network(between, host_bandwidth_bytes_per_second=rates, host_latency_seconds=delays)
    links = Links(network, ((0, 1), (2, 3)), host_bytes=4097)
    assert links.reach(0, {1: 10}) == {1: SwapLink(512.0, 0.0, 10), HOST: SwapLink(2e9, 2e-6, 4097)}
    assert links.reach(1, {0: 10}) == {0: SwapLink(512.0, 0.0, 10), HOST: SwapLink(4e9, 5e-6, 4097)}
    assert Links(network, ((0, 1), (2, 3)), has_peers=False).reach(0, {1: 10}) == {}


def plan_with(memory, host_memory, network=None) -> Plan:
    """Eight equal layers in two stages."""
    weights = list(np.ones((8, 64, 64), np.float32))
    model = jax.tree_util.Partial(lambda ws, x: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x), weights)
    mesh = jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2])
    options = {"optimizer": optax.sgd(0.1), "num_microbatches": 8, "profile": "analytic", "schedule": "gpipe"}
    options |= {
        "memory": memory,
        "options": jaxpipe.PlanOptions(host_memory=host_memory, compile=False),
        "network": network,
    }
    x = jax.ShapeDtypeStruct((512, 64), np.float32)
    return jaxpipe.partition(model, mesh, x, loss=lambda f, x: (f(x).sum(), 1.0, {}), runtime="mpmd", **options).plan


@functools.cache
def budget() -> int:
    """Six of eight stashes."""
    plan = plan_with(None, None)
    assert plan.host is None
    return plan.predicted_bytes - 2 * plan.stages[0].stash_bytes


@pytest.mark.parametrize(("size", "rate"), [("16B", 1e15), (2**20, 1e6)])
def test_a_host_without_room_or_with_a_slow_link_is_left_alone(size, rate):
    """Tensors that exceed the budget are recomputed instead."""
    slow = Network(np.full((2, 2), 1e6), host_bandwidth_bytes_per_second=(rate,) * 2)
    plan = plan_with(budget(), size, slow)
    assert plan.host == HostPlan(16 if size == "16B" else size, 0) and any(stage.added_seconds for stage in plan.stages)
    assert f"0 B of {'16 B' if size == '16B' else '1.00 MiB'} in the host's memory" in one_line(plan)


def test_devices_without_such_memory_do_without_and_the_plan_says_why(monkeypatch):
    refused = HostPlan(2**20, 0, "they say no")
    monkeypatch.setattr(Request, "host", refused)
    plan = plan_with(budget(), "1MiB")
    assert plan.host == refused and not any(stage.away for stage in plan.stages)
    assert "the host's memory is not used: they say no" in one_line(plan)
    assert Plan.from_json(plan.to_json()) == plan
    monkeypatch.undo()
    usual = plan_with(budget(), None)
    assert [stage.recomputed for stage in plan.stages] == [stage.recomputed for stage in usual.stages]
    assert replace(plan, host=None).predicted_bytes == usual.predicted_bytes
    away = plan_with(budget(), "1MiB")
    assert any(stage.away for stage in away.stages) and away.host.bytes > 0
